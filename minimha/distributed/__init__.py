"""Attention over dask arrays, for more keys than one machine can hold.

``minimha.attention`` computes each chunk of queries with each chunk of keys, and a tree of
``minimha.merge`` merges the results. The table shows the work and the largest network traffic per
head of width D, for numbers of b bytes and queries in C chunks::

                                 FLOPs                 bytes
    one chunk of queries         4 · Lq · Lk · D       about 2 · Lq · D · b for each chunk of keys
    prefill, C chunks            4 · Lq · Lk · D       2 · C · Lk · D · b

Decoding moves queries and results, never keys. A prefill has 2 · Lq / (C · b) FLOPs per byte, so
longer chunks of queries need less of the network. A causal mask halves both numbers of a prefill,
and the last chunk of queries has the most work. If tokens are reordered in stripes by ``striped``,
all chunks have equal work.
"""

try:
    import dask.array  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"dask is not installed, or not all that it needs: pip install 'minimha[dask]' ({error})"
    ) from None

from minimha.distributed.attending import attention
from minimha.distributed.stripes import striped, unstriped

__all__ = ["attention", "striped", "unstriped"]

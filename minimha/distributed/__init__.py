"""Attention over more keys than one machine can hold, as chunks of dask arrays.

``minimha.attention`` computes each chunk of queries with each chunk of keys, and a tree of
``minimha.merge`` merges the results. The table has work and largest traffic per head of width D,
for numbers of b bytes and queries in C chunks::

                                 FLOPs                 bytes
    one chunk of queries         4 · Lq · Lk · D       about 2 · Lq · D · b for each chunk of keys
    prefill, C chunks            4 · Lq · Lk · D       2 · C · Lk · D · b (half of each if causal)

Decoding moves queries and results, never keys. A prefill has 2 · Lq / (C · b) FLOPs per byte: the
network matters less for longer chunks of queries. With a causal mask the last chunk of queries has
the most work; in stripes (``striped``) all chunks have equal work.
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

"""Open a problem in a zarr store that may exceed memory, and compute its output on a cluster."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from minimha.cli.inputs import LARGEST_INPUT, check_keys
from minimha.equations.parts import read
from minimha.explain import render

STORED = ("k", "v")  # read by blocks; all other arrays are read at once
PATIENCE = 10  # seconds to wait for a cluster
MOST_CHUNKS = 1 << 20
RETRIES = 3  # of a task that fails
# Codecs that only decode numbers: a store may name others, which unpickle or import.
CODECS = {
    "bytes", "blosc", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd",
    "zlib", "lz4", "bz2", "lzma",
}  # fmt: skip


def open_problem(name: str) -> dict[str, Any]:
    """Return the arguments of ``attention`` that a zarr store holds; k and v stay on disk.

    The store is a group of the arrays q, k, v and other options; scalar options are attributes.
    Raises ValueError if it cannot be read.
    """
    try:
        import zarr
    except ImportError:
        raise ValueError(
            "zarr, which reads such stores, is not installed: pip install 'minimha[zarr]'"
        ) from None
    path = Path(name).resolve()  # workers of a cluster are elsewhere
    if not path.is_dir():
        raise ValueError(f"{name} cannot be read: no such folder")
    # zarr raises the first error of the tasks that read; asyncio would print those of the others.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts that zarr does not know
            group = zarr.open_group(path, mode="r")
            arrays, attributes = dict(sorted(group.arrays())), dict(group.attrs)
    except MemoryError:
        raise
    except Exception as error:  # zarr passes on any error of its parsers
        raise ValueError(f"{name} is refused: expected a group of zarr ({error})") from None
    check_keys(Path(name), [*arrays, *attributes])
    for key, array in arrays.items():
        _check(f"{name}, {key}", array, key in STORED)
    others = {key: read(f"{name}, {key}", x) for key, x in arrays.items() if key not in STORED}
    scalars = {key: x.item() for key, x in others.items() if x.ndim == 0}
    return attributes | arrays | others | scalars


def on_cluster(address: str, problem: dict[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return output and log-sum-exp, computed on the dask cluster at ``address``.

    The cluster's workers must be able to read the store. Raise ValueError if dask is not installed,
    or if the cluster cannot be reached or has no workers.
    """
    try:
        from distributed import Client

        from minimha import distributed
    except ImportError as error:
        raise ValueError(f"--cluster needs dask: pip install 'minimha[dask]' ({error})") from None
    lazy = distributed.attention(**{**problem, "return_lse": True})
    try:
        client = Client(address, timeout=PATIENCE, set_as_default=False)
    except Exception as error:  # from the transport, or for an invalid address
        raise ValueError(f"the cluster {address} cannot be reached: {error}") from None
    with client:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise ValueError(f"the cluster {address} has no workers: start some with dask worker")
        doing = f"{workers} workers compute; {client.dashboard_link} shows how far they are"
        with render.busy(sys.stderr, doing):
            output, lse = client.gather(client.compute(list(lazy), retries=RETRIES))
    return output, lse


def _check(title: str, array: Any, is_stored: bool) -> None:
    """Raise ValueError for an array that is too large, incomplete or not of plain numbers."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{title} has dtype {array.dtype}: expected numbers")
    for codec in _codecs(array):
        if codec not in CODECS:
            raise ValueError(
                f"{title} is encoded by {codec!r}: expected one of {', '.join(sorted(CODECS))}"
            )
    at_once = math.prod(array.chunks if is_stored else array.shape)
    if at_once > LARGEST_INPUT:
        where = " in each chunk" if is_stored else ""
        raise ValueError(
            f"{title} has {at_once:,} numbers{where}: expected at most {LARGEST_INPUT:,}, because "
            f"they are read at once"
        )
    if array.nchunks > MOST_CHUNKS:
        raise ValueError(
            f"{title} has {array.nchunks:,} chunks: expected at most {MOST_CHUNKS:,}; larger ones "
            f"are also read faster"
        )
    if array.nchunks_initialized < array.nchunks:
        raise ValueError(
            f"{title} has {array.nchunks_initialized:,} of its {array.nchunks:,} chunks: the store "
            f"was not written to its end; chunks of zeros are written with write_empty_chunks"
        )


def _codecs(array: Any) -> list[str]:
    """Return the names of an array's codecs."""
    metadata = array.metadata.to_dict()
    if metadata["zarr_format"] == 2:
        found = [metadata.get("compressor"), *(metadata.get("filters") or ())]
        return [codec["id"] for codec in found if codec]
    return [name for codec in metadata["codecs"] for name in _nested(codec)]


def _nested(codec: dict[str, Any]) -> list[str]:
    """Return the name of a codec, and the names of its shards' codecs."""
    settings = codec.get("configuration") or {}
    inner = [*settings.get("codecs", ()), *settings.get("index_codecs", ())]
    return [codec["name"], *(name for c in inner for name in _nested(c))]

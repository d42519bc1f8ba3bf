"""Compile the kernels of common calls for the current GPU, before the first call needs them."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path

from minimha.equations.problem import Problem, stand_in
from minimha.kernels.cuda import backend, cubins
from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda.launch import Launch, launches_of

HEAD_DIMS = (64, 128)
GROUPS = (1, 4, 8)  # query heads per key/value head, for kernels with few queries
MANY = 4096
CompilationFailed = cubins.NO_TOOLKIT


def compile_ahead(
    dtypes: Sequence[str], progress: Callable[[str], None] = lambda doing: None
) -> dict[str, Path | None]:
    """Compile and store the kernels for arrays of ``dtypes``, and return their paths by name.

    ``progress`` is called with the name of each kernel before it is compiled. A path is None if no
    folder could store the kernel. Raises one of the errors ``CompilationFailed`` if a library of
    the toolkit is missing or the driver fails.
    """
    device, kept = gpu.current(), {}
    for name, launch in _kernels(dtypes, device):
        progress(name)
        cubins.cubin(launch, device.cc)
        kept[name] = cubins.file(launch, device.cc).path()
    return kept


def _kernels(dtypes: Sequence[str], device: gpu.Device) -> Iterator[tuple[str, Launch]]:
    """Yield each kernel once, with a name from its rung and the first sizes that use it."""
    known = set()
    for dtype, D, (H, Lq) in product(dtypes, HEAD_DIMS, ((1, MANY), *((H, 1) for H in GROUPS))):
        numbers = getattr(import_module("ml_dtypes"), dtype, dtype)
        q, k = (stand_in((1, *shape, D), numbers) for shape in ((H, Lq), (1, MANY)))
        rung, problem = backend.rung_for(Problem.of(q, k, k), device)
        for launch in launches_of(rung, problem):
            file = cubins.file(launch, device.cc).file
            if file not in known:
                known.add(file)
                sizes = f"{dtype} D={D}" + (f" H/Hkv={H}" if Lq == 1 else "")
                yield f"{rung} {launch.function.__name__} {sizes}", launch

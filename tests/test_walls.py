"""The walls of the house: who may import whom, and who may print."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minimha"
MODULES = sorted(PACKAGE.rglob("*.py"))
# A room may import from its own floor and from the floors below it.
FLOORS = {
    "equations": 0, "kernels": 0, "api": 1, "layers": 2, "explain": 2, "documents": 3, "files": 3,
    "dialects": 3, "peers": 2, "bench": 3, "bench_cuda": 3, "__init__": 1, "cli": 4,
}  # fmt: skip
SIDE_BY_SIDE = [("layers", "explain"), ("explain", "layers"), ("equations", "kernels")]


def imports(module):
    """Absolute names of what a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(dotted):
    """The room of ``minimha.room.module`` or of ``minimha.module``."""
    parts = dotted.split(".")[1:]
    return parts[0] if parts and parts[0] in FLOORS else "__init__"


def dotted(module):
    return ".".join(("minimha", *module.relative_to(PACKAGE).with_suffix("").parts))


@pytest.mark.parametrize("module", MODULES, ids=dotted)
def test_arrows_point_down(module):
    own = room(dotted(module))
    for name in imports(module):
        if name.split(".")[0] != "minimha":
            continue
        other = room(name)
        assert FLOORS[other] <= FLOORS[own], f"{dotted(module)} imports {name}, which is above it"
        assert (own, other) not in SIDE_BY_SIDE, f"{dotted(module)} imports {name}, beside it"


@pytest.mark.parametrize("module", MODULES, ids=dotted)
def test_heavy_libraries_have_rooms_of_their_own(module):
    libraries = {name.split(".")[0] for name in imports(module)}
    if "numba" in libraries:
        assert room(dotted(module)) == "kernels"
    if "rich" in libraries:
        assert dotted(module) == "minimha.explain.render"


@pytest.mark.parametrize("module", MODULES, ids=dotted)
def test_only_the_command_line_prints(module):
    calls = [
        n
        for n in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(n, ast.Call)
    ]
    prints = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
    assert not prints or dotted(module) == "minimha.cli"


def loaded_after(code):
    """Names of the modules that a fresh interpreter holds after ``code``."""
    run = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_importing_the_library_loads_neither_numba_nor_rich():
    assert not {"numba", "rich"} & loaded_after("import minimha")


def test_an_example_on_the_terminal_does_not_load_numba():
    loaded = loaded_after("from minimha.cli import main; main(['example', '--tokens', '3'])")
    assert "minimha.explain.render" in loaded
    assert not {"numba", "json", "csv", "zipfile"} & loaded

"""The walls of the house: who may import whom, where heavy libraries live, and who may print."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minimha"
MODULES = {
    ".".join(("minimha", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# Every room with the rooms that it may import from, beside itself. The core never imports an annex.
CORE = {
    "equations": set(),
    "kernels": {"equations"},
    "api": {"kernels", "equations"},
    "delta_rule": {"api", "kernels", "equations"},
    "explain": {"equations"},
    "layers": {"delta_rule", "api", "kernels", "equations"},
    "examples": {"explain", "layers", "api", "equations"},
    "bench": {"api", "kernels", "equations"},
}
ANNEXES = {
    "dialects": {"layers", "api", "equations"},
    "distributed": {"api", "equations"},
    "models": {"layers", "api", "equations"},
    "labs": {"models", "explain", "layers", "api", "equations"},
    "check": {"dialects", "explain", "layers", "api", "equations"},
}
ABOVE = {
    "minimha": {
        "check", "delta_rule", "dialects", "distributed", "explain", "layers", "models", "api",
        "equations",
    },
    "cli": {*CORE, *ANNEXES, "minimha"},
    "__main__": {"cli"},
}  # fmt: skip
BELOW = CORE | ANNEXES | ABOVE
FOR_TRACES = "minimha.equations.tap"  # all that explain/ knows of the equations
HOMES = {
    "numba": "minimha.kernels",
    "dask": "minimha.distributed",
    "rich": "minimha.explain.render",
    "xlsxwriter": "minimha.explain.spreadsheet",
}


def module_of(name):
    """The module in which a dotted name stands: itself, or the one that it is imported from."""
    return name if name in MODULES else name.rpartition(".")[0]


def imports(module):
    """Names of what a module imports: anywhere in the file, for its types alone, and by name.

    A string that is the name of a module counts, since ``import_module`` may get it. Of an f-string
    the beginning does: ``f"minimha.examples.{name}"`` is an import of the room.
    """
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            found |= {node.values[0].value.rstrip(".")} & set(MODULES)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & set(MODULES) - {"minimha"}
    return found


GRAPH = {
    module: {module_of(n) for n in imports(module) if n.partition(".")[0] == "minimha"} - {module}
    for module in MODULES
}


def room(module):
    return module.split(".")[1] if "." in module else "minimha"


def reached(module):
    """All modules that ``module`` imports, directly or through others."""
    found, waiting = set(), list(GRAPH[module])
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += GRAPH[other]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down(module):
    for other in GRAPH[module]:
        rooms = {room(module)} | BELOW[room(module)]
        assert room(other) in rooms, f"{module} imports {other}, which is not below it"


@pytest.mark.parametrize("room", CORE)
def test_the_core_stands_without_the_annexes(room):
    assert not BELOW[room] & set(ANNEXES)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_itself_through_others(module):
    assert module not in reached(module)


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("minimha.kernels")])
def test_kernels_know_no_equation_but_visibility_and_gpu_kernels_no_cpu_kernel(module):
    foreign = {"minimha.equations.dense", "minimha.equations.tiled"}
    for family, other in (("cpu", "cuda"), ("cuda", "cpu")):
        if module.startswith(f"minimha.kernels.{family}"):
            foreign |= {m for m in MODULES if m.startswith(f"minimha.kernels.{other}")}
    assert not reached(module) & foreign


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) == "explain"])
def test_explain_knows_traces_and_no_mathematics(module):
    assert {m for m in reached(module) if room(m) != "explain"} <= {FOR_TRACES}


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_have_homes(module):
    for library in {name.split(".")[0] for name in imports(module)} & set(HOMES):
        assert module.startswith(HOMES[library]), f"{module} imports {library}"


@pytest.mark.parametrize("module", MODULES)
def test_only_the_command_line_prints(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    prints = [func for func in calls if isinstance(func, ast.Name) and func.id == "print"]
    assert not prints or room(module) == "cli"


def loaded_after(code):
    """Names of the modules that a fresh interpreter holds after ``code``."""
    run = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_no_document_holds_both_sides_of_a_merge():
    root = PACKAGE.parent
    documents = [*root.glob("*.md"), *root.glob("walkthroughs/*.md")]
    marks = re.compile("^(<{7}|>{7}) ", re.MULTILINE)
    torn = [path.name for path in documents if marks.search(path.read_text("utf-8"))]
    assert not torn


def test_importing_the_library_loads_no_other_library_but_numpy():
    heavy = {"numba", "rich", "ml_dtypes", "torch", "jax", "tokenizers", "gguf"}
    assert not heavy & loaded_after(
        "import minimha; minimha.layers, minimha.dialects, minimha.models.load"
    )


def test_packages_are_loaded_when_they_are_first_used():
    packages = {f"minimha.{name}" for name in ("dialects", "explain", "layers", "models")}
    assert not packages & loaded_after("import minimha; dir(minimha)")
    assert packages <= loaded_after(
        "import minimha; minimha.dialects.torch, minimha.explain.Trace, minimha.models"
    )
    assert "minimha.layers.rope" not in loaded_after("from minimha.layers import attention_weights")


def test_an_example_on_the_terminal_does_not_load_numba():
    loaded = loaded_after("from minimha.cli import main; main(['example', '--tokens', '3'])")
    assert "minimha.explain.render" in loaded
    assert not {"numba", "json", "csv", "zipfile"} & loaded


def test_what_tests_import_exists():
    """pytest collects nothing, in silence, from a file whose imports fail beside doctests.

    A fresh interpreter imports: pytest leaves modules half loaded that miss an extra's package.
    """
    statements = {
        ast.unparse(node)
        for path in Path(__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minimha")
    }
    run = f"""for statement in {sorted(statements)}:
    try:
        exec(statement)
    except ImportError as error:
        if (error.name or "").startswith("minimha"):
            print(statement, error, sep=": ")
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert not done.stdout

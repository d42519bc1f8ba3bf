"""The public names of a module, each with its docstring."""

import inspect
import re
from importlib import import_module
from typing import ClassVar

from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from minimha.kernels.ladder import CUDA_LADDER, LADDER


def public(module):
    """The names of a module's functions and classes: its ``__all__``, or what it defines."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    values = {name: getattr(module, name) for name in names}
    return {n: v for n, v in values.items() if inspect.isroutine(v) or inspect.isclass(v)}


class Public(Directive):
    """``.. public:: minimha.layers``: a table of its names, then each; some may be first."""

    required_arguments = 1
    option_spec: ClassVar = {"first": str.split}

    def run(self):
        name = self.arguments[0]
        found = public(import_module(name))
        values = {each: found[each] for each in [*self.options.get("first", []), *found]}
        lines = [f".. automodule:: {name}", "   :no-members:", ""]
        lines += [f".. currentmodule:: {name}", ""]
        lines += [
            ".. autosummary::",
            "   :nosignatures:",
            "",
            *(f"   {each}" for each in values),
            "",
        ]
        for each, value in values.items():
            kind = "class" if inspect.isclass(value) else "function"
            lines += [f".. auto{kind}:: {each}"]
            lines += ["   :members:", ""] if kind == "class" else [""]
        where = self.state_machine.get_source_and_line(self.lineno)[0]
        self.state_machine.insert_input(StringList(lines, where), where)
        return []


class Rungs(Directive):
    """``.. rungs::``: both ladders, each rung with its idea and the problems it takes."""

    def run(self):
        lines = [".. list-table::", "   :header-rows: 1", ""]
        lines += ["   * - rung", "     - idea", "     - takes"]
        for name, rung in (LADDER | CUDA_LADDER).items():
            lines += [f"   * - ``{name}``", f"     - {rung.idea}", f"     - {rung.takes}"]
        where = self.state_machine.get_source_and_line(self.lineno)[0]
        self.state_machine.insert_input(StringList([*lines, ""], where), where)
        return []


def skipped(app, what, name, value, skip, options):
    """Leave out the fields of named tuples, which their class describes."""
    return skip or str(value.__doc__).startswith("Alias for field number")


def mended(app, what, name, value, options, lines):
    """Escape the bars of absolute values, and do not guess whose attribute a name is."""
    for n, line in enumerate(lines):
        line = re.sub(r":obj:`(\w+) <[^>]*>`", r"\1", line)
        parts = line.split("``")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[n] = "``".join(parts)


def setup(app):
    """Register the directive."""
    app.connect("autodoc-process-docstring", mended, priority=600)  # after numpydoc
    app.connect("autodoc-skip-member", skipped)
    app.add_directive("public", Public)
    app.add_directive("rungs", Rungs)

"""Compile a CPU kernel and all functions that it calls as one unit, optimized once.

numba compiles each function into a separate library. It optimizes the library, generates machine
code, and links the library into every caller's library, to be optimized again. But only whole
kernels are called. So a kernel's functions are *parts*, kept as unoptimized LLVM code. The kernel,
a *whole*, links all parts and is optimized once. That takes two thirds of numba's time, and the
kernel is equally fast.

The libraries are subclasses of numba's with steps left out; see ``numba.core.codegen``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import numba
from llvmlite.binding.ffi import ObjectRef
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager
from numba.core.registry import CPUDispatcher

# Without nnan and ninf: NaN and infinity are legal values here.
FASTMATH = {"nsz", "arcp", "contract", "afn", "reassoc"}
# Callers allocate all arrays, so references are not counted. Views have no length, so bounds are
# not checked. Division by zero follows IEEE 754: an exception could not be caught.
OPTIONS = {"fastmath": FASTMATH, "nogil": True, "error_model": "numpy", "_nrt": False,
           "boundscheck": False}  # fmt: skip
# Passes of numba without effect on kernels, which have no closures, context managers, functions
# that numba inlines, expressions of whole arrays, or branches on None or on types.
UNNEEDED = {
    "WithLifting", "InlineClosureLikes", "RewriteSemanticConstants", "DeadBranchPrune",
    "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables", "FindLiterallyCalls",
    "LiteralUnroll", "LiteralPropagationSubPipelinePass", "NoPythonSupportedFeatureValidation",
    "InlineOverloads", "NopythonRewrites", "DumpParforDiagnostics",
}  # fmt: skip
with suppress(ImportError):
    # Some versions of llvmlite never free the passes that ran, 200 KB per function: pass managers
    # inherit ``_dispose`` from two classes, and the first one's does nothing.
    from llvmlite.binding import newpassmanagers

    for _kind in (newpassmanagers.ModulePassManager, newpassmanagers.FunctionPassManager):
        if _kind._dispose is ObjectRef._dispose:
            _kind._dispose = newpassmanagers.NewPassManager._dispose
PART = OPTIONS | {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class _WholeLibrary(JITCodeLibrary):
    """A library that is optimized once, while numba would also optimize each function."""

    def _optimize_functions(self, module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        """Optimize once; numba would optimize twice, to remove reference counts in between."""
        made = self._codegen._module_pass_manager()
        manager, *builder = made if isinstance(made, tuple) else (made,)  # numba 0.60: alone
        manager.run(self._final_module, *builder)


class _PartLibrary(_WholeLibrary):
    """A library of one function, neither optimized nor linked until a whole links it."""

    def finalize(self) -> None:
        self._finalized = True


class WholeCompiler(Compiler):
    """A numba compiler for whole kernels, which are called by their addresses."""

    library = _WholeLibrary

    def define_pipelines(self) -> list[PassManager]:
        every = DefaultPassBuilder.define_nopython_pipeline(self.state)
        needed = PassManager("kernels")
        needed.passes = [step for step in every.passes if step[0].__name__ not in UNNEEDED]
        needed.finalize()
        return [needed]

    def compile_extra(self, function: Callable[..., Any]) -> Any:
        state = self.state
        state.library = self.library(state.targetctx.codegen(), function.__qualname__)
        state.library.enable_object_caching()
        state.flags.no_compile = True  # yet
        return super().compile_extra(function)


class _PartCompiler(WholeCompiler):
    library = _PartLibrary


class Part(CPUDispatcher):
    """A jitted function that is compiled into its callers; Python can call it too."""

    def __init__(self, function: Callable[..., Any], is_inlined: bool = False) -> None:
        options = PART | {"forceinline": is_inlined}
        super().__init__(function, targetoptions=options, pipeline_class=_PartCompiler)

    def add_overload(self, result: Any) -> None:
        """Store ``result``, numba's code for one signature, so that callers find its library."""
        library = result.library
        libraries = [library, *dict.fromkeys(library._linking_libraries)]
        self.targetctx.insert_user_function(library, result.fndesc, libraries)
        self.overloads[tuple(result.signature.args)] = result

    def get_call_template(self, arguments: Any, keywords: Any) -> Any:
        """Return numba's template of a call, with constants replaced by their types."""
        keywords = {name: types.unliteral(kind) for name, kind in keywords.items()}
        return super().get_call_template([types.unliteral(kind) for kind in arguments], keywords)

    def get_overload(self, arguments: Any) -> Any:
        """Return the library that callers with these argument types link."""
        return self.overloads[tuple(arguments)].library

    @cached_property
    def _whole(self) -> Any:
        return numba.njit(**OPTIONS)(self.py_func)

    def __call__(self, *arguments: Any) -> Any:
        return self._whole(*arguments)


def jit(function: Callable[..., Any]) -> Part:
    """Turn ``function`` into a ``Part``, which is compiled into every kernel that calls it."""
    return Part(function)


def jit_inline(function: Callable[..., Any]) -> Part:
    """Turn ``function`` into a ``Part`` that LLVM inlines at every call."""
    return Part(function, is_inlined=True)


def jit_too(function: Any) -> Any:
    """Make ``function`` callable in kernels as well as in Python, and return it."""
    function.part = Part(function)  # its type does not keep it alive
    function._numba_type_ = function.part._numba_type_
    return function

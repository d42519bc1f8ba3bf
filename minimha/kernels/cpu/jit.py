"""How every function of the CPU kernels is compiled: together with what calls it, and once.

numba compiles each function as a library of its own. It optimizes that, makes machine code of it,
and links it into the library of every caller, where it is optimized again. Of a kernel only the
whole is called. So its functions are parts, of which LLVM's code is kept as numba generates it; a
whole links all of its parts and is optimized. That takes two thirds of the time, and the kernel is
as fast.

The libraries are numba's own, with less done in them; ``numba.core.codegen`` has what is left out.
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
# The arrays of a kernel are its caller's: nothing is allocated, no references are counted. A view
# knows no length, so no bound is checked. A division by zero gives what IEEE 754 says instead of
# raising where nobody could catch it.
OPTIONS = {"fastmath": FASTMATH, "nogil": True, "error_model": "numpy", "_nrt": False,
           "boundscheck": False}  # fmt: skip
# Passes of numba that find nothing to do in kernels: no closures, no context managers, nothing that
# numba inlines, no expressions of whole arrays, no branches on None or on types.
UNNEEDED = {
    "WithLifting", "InlineClosureLikes", "RewriteSemanticConstants", "DeadBranchPrune",
    "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables", "FindLiterallyCalls",
    "LiteralUnroll", "LiteralPropagationSubPipelinePass", "NoPythonSupportedFeatureValidation",
    "InlineOverloads", "NopythonRewrites", "DumpParforDiagnostics",
}  # fmt: skip
with suppress(ImportError):
    # Some versions of llvmlite never free the passes that ran, 200 KB for each function: of the two
    # classes that a manager of passes inherits from, the first one's method does nothing.
    from llvmlite.binding import newpassmanagers

    for _kind in (newpassmanagers.ModulePassManager, newpassmanagers.FunctionPassManager):
        if _kind._dispose is ObjectRef._dispose:
            _kind._dispose = newpassmanagers.NewPassManager._dispose
PART = OPTIONS | {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class _WholeLibrary(JITCodeLibrary):
    """Optimized as a whole only: its functions, one by one, would be optimized twice."""

    def _optimize_functions(self, module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        """Once; numba does it twice, to remove reference counts in between: there are none."""
        made = self._codegen._module_pass_manager()
        manager, *builder = made if isinstance(made, tuple) else (made,)  # numba 0.60: alone
        manager.run(self._final_module, *builder)


class _PartLibrary(_WholeLibrary):
    """One function, neither optimized nor linked; its whole does that."""

    def finalize(self) -> None:
        self._finalized = True


class WholeCompiler(Compiler):
    """numba's compiler for a function that is called by its address."""

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
    """A function that is compiled as a part of what calls it; for Python, as a whole of its own."""

    def __init__(self, function: Callable[..., Any], is_inlined: bool = False) -> None:
        options = PART | {"forceinline": is_inlined}
        super().__init__(function, targetoptions=options, pipeline_class=_PartCompiler)

    def add_overload(self, result: Any) -> None:
        """Keep it for callers, who find it by its library, as there is no address yet."""
        library = result.library
        libraries = [library, *dict.fromkeys(library._linking_libraries)]
        self.targetctx.insert_user_function(library, result.fndesc, libraries)
        self.overloads[tuple(result.signature.args)] = result

    def get_call_template(self, arguments: Any, keywords: Any) -> Any:
        """One version for all integers: numba would compile one for each constant."""
        keywords = {name: types.unliteral(kind) for name, kind in keywords.items()}
        return super().get_call_template([types.unliteral(kind) for kind in arguments], keywords)

    def get_overload(self, arguments: Any) -> Any:
        """What a caller finds the function for these types by."""
        return self.overloads[tuple(arguments)].library

    @cached_property
    def _whole(self) -> Any:
        return numba.njit(**OPTIONS)(self.py_func)

    def __call__(self, *arguments: Any) -> Any:
        return self._whole(*arguments)


def jit(function: Callable[..., Any]) -> Part:
    """A part of kernels."""
    return Part(function)


def jit_inline(function: Callable[..., Any]) -> Part:
    """A part that LLVM inlines however large it is: options are a hundred arguments, not one."""
    return Part(function, is_inlined=True)


def jit_too(function: Any) -> Any:
    """A part of kernels that Python calls as it is."""
    function.part = Part(function)  # of which its type has no reference that keeps it
    function._numba_type_ = function.part._numba_type_
    return function

"""One run of `torch.export` over a model: its operations, and the structure of its result."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as symbolic_shapes_config
from torch import Tensor, fx, nn
from torch._library.utils import MutationChecker
from torch._subclasses import fake_utils, meta_utils
from torch.export import Dim, ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from bevquant_sparse import open_shapes

from ._arrays import numpy_traced
from ._closing import TraceEnds
from ._conditions import Condition, places_noted
from ._constants import INTEGERS, Constants, Truncations
from ._faults import is_authors
from ._functional import functional, inline_regions
from ._normal import normalise
from ._opaque import Opaque
from ._operators import op_spec
from ._own_inputs import own_inputs
from ._quiet import by_thread
from ._signature import Leaf, Tree, entries, flatten, rebuild, traced_value
from ._tidy import NUMBERS

tracing_config: Any = functorch_config


class _Shell(nn.Module):
    """The model as a function from tensors to tensors."""

    def __init__(
        self, model: nn.Module, inputs: Tree, note: Callable[[Tree], None], constants: Constants
    ) -> None:
        super().__init__()
        self.model = model
        self.__dict__["constants"] = constants
        self.__dict__["inputs"] = inputs
        # torch.export restores attributes; records outside of the model stay.
        self.__dict__["note"] = note

    def forward(self, *leaves: Any) -> tuple[Any, ...]:
        constants: Constants = self.__dict__["constants"]
        given = rebuild(self.__dict__["inputs"], constants.inputs(leaves), array=traced_value)
        args, kwargs = own_inputs(given, None)
        with constants.begin(self.model), numpy_traced():
            returned = self.model(*args, **kwargs)
            made, result = flatten(returned)
        self.__dict__["note"](result)
        return tuple(made)


def nothing(*_: Any) -> None:
    """Replaces torch's record of strides for every value, which is not read here."""


def exported(
    model: nn.Module,
    inputs: Tree,
    leaves: list[Any],
    shares: Truncations,
    constants: Constants,
    *,
    values: bool,
    open_axes: float,
    closed: Mapping[str, Opaque],
) -> tuple[ExportedProgram, Tree, list[Condition] | None, bool]:
    """Export the model once; return the program, the tree of its result, conditions, and truths.

    Conditions are those that values of the example answered; None if, with `values` (numbers may be
    taken from tensors), the forward takes a float out of a tensor. Truths: whether it takes a truth
    value, as `if score > 0.5` does. `shares` are those of `open_lengths`, `closed` the modules
    that become one node each in this trace. Of each input, the first `open_axes` axes are open.
    """
    # Imported here: torch's compiler and sympy take as long as torch itself.
    import sympy
    from torch._dynamo import config as dynamo_config
    from torch.fx.experimental import proxy_tensor, symbolic_shapes

    from ._open_sizes import batch_norm_of_rows, bit_length, elementwise_shapes, open_lengths

    results: list[Tree] = []

    def note(result: Tree) -> None:
        # The trace went on behind modules that failed, so its graph is not used (`_closing`).
        if closed:
            raise TraceEnds
        results.append(result)

    shell = _Shell(model, inputs, note, constants)
    shell.training = model.training
    # A tensor with a gradient's history cannot be deep-copied.
    detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    given = tuple(map(copy.deepcopy, detached))
    # The shape of an array, as 4 × 4 of a matrix, is the example's.
    kinds = [entry.kind for _, entry in entries(inputs) if isinstance(entry, Leaf)]
    pairs = zip(kinds, given, strict=True)
    sizes = [None if kind else _open(leaf, open_axes) for kind, leaf in pairs]
    dims = (tuple(sizes),) if open_axes else None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(open_shapes())
        stack.enter_context(open_lengths(model, shares, constants.has))
        stack.enter_context(mock.patch.object(torch, "batch_norm", batch_norm_of_rows))
        stack.enter_context(mock.patch.object(proxy_tensor, "_extract_tensor_metadata", nothing))
        stack.enter_context(elementwise_shapes())
        stack.enter_context(mock.patch.object(torch.SymInt, "bit_length", bit_length))
        # Composite operators of tensors made in inference mode reach torch's fake tensors whole.
        for name in ("__enter__", "__exit__"):
            held = by_thread(nothing, getattr(torch.inference_mode, name))
            stack.enter_context(mock.patch.object(torch.inference_mode, name, held))
        outermost = _Shell.forward.__code__, exported.__code__
        answered = stack.enter_context(places_noted(outermost))
        if open_axes:
            for holder, name, longest in (
                (sympy, "simplify", 64),
                (symbolic_shapes, "bound_sympy", 1024),
            ):
                limited = _limited(getattr(holder, name), longest)
                stack.enter_context(mock.patch.object(holder, name, limited))
            # Called at every sum and product of sizes, for all of their terms.
            known = property(lru_cache(maxsize=1 << 14)(vars(sympy.Expr)["is_number"].fget))
            stack.enter_context(mock.patch.object(sympy.Expr, "is_number", known))
            # Few results for symbols are needed twice, and the key takes longer than the result.
            stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
        # Each pass of torch.export compiles the graph again, and the compiled code never runs.
        stack.enter_context(_use_lazy_graph_module(True))
        # A size of 1 in the example stays open as any other.
        config: Any = symbolic_shapes_config
        stack.enter_context(config.patch(backed_size_oblivious=True))
        if values:
            # The example's numbers run along; decisions by them become requirements.
            stack.enter_context(tracing_config.patch(fake_tensor_propagate_real_tensors=True))
            stack.enter_context(mock.patch.object(meta_utils, "_safe_copy", _copied))
            # torch's check for changed operands takes an absent operand for changed.
            stack.enter_context(mock.patch.object(MutationChecker, "check"))
            # torch compares offsets of the real values with the symbolic ones, which fixes sizes,
            # and takes the real result of a conversion to its own type for a copy.
            for check in ("_check_fake_real_tensors", "_check_alias_info"):
                stack.enter_context(mock.patch.object(fake_utils, check, _passed_over))
        stack.enter_context(mock.patch.object(fx.proxy, "CapturedTraceback", _Calls, create=True))
        program = torch.export.export(shell, given, dynamic_shapes=dims, strict=False)
        result = results[-1]
        inline_regions(program)
        normalise(program.graph)
        # `functional` may drop numbers without consumers.
        floats, truths = _takes(program) if values else (False, False)
        program = functional(program)
    return program, result, None if floats else answered, truths


def _takes(program: ExportedProgram) -> tuple[bool, bool]:
    """Whether floats are taken out of tensors, and whether truth values are."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type  # and sympy

    taken = [n.args[0] for n in program.graph.nodes if str(n.target) in NUMBERS]
    kinds = [n.meta["val"].dtype for n in taken if not _counts(n)]
    of_floats = (SymT.FLOAT, SymT.UNBACKED_FLOAT)
    # A number that only computes a size may be gone from the graph; its symbol stays.
    symbols = (symbol for term in program.range_constraints for symbol in term.free_symbols)
    floats = any(symbol_is_type(symbol, of_floats) for symbol in symbols)
    return floats or any(k.is_floating_point for k in kinds), torch.bool in kinds


def _counts(node: fx.Node) -> bool:
    """Whether a value is ``a != b`` of two integers or ``mask.any()``, a question about a count."""
    if getattr(node.target, "overloadpacket", None) in (torch.ops.aten.any, torch.ops.aten.all):
        return True
    read = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
    if not op_spec(node.target).compares or any(n.meta["val"].dim() for n in read):
        return False
    others = (n for n in read if n.meta["val"].dtype not in INTEGERS)
    return all(map(_counts, others))  # torch asks a truth value whether it is not 0


class Grown(RuntimeError):
    """A size is a longer term than can be computed with in seconds."""


def _limited(compute: Callable[..., Any], longest: int) -> Callable[..., Any]:
    """As sympy or torch computes, but no terms that take minutes: they nest with every stage."""

    def made(term: Any, *args: Any, **kwargs: Any) -> Any:
        # Convolutions, pools and pads make about ten operations; TensorFlow's "same" padding makes
        # the term three times as long at every stage.
        if term.count_ops() > longest:
            raise Grown(f"a size is a term of {term.count_ops()} operations")
        return compute(term, *args, **kwargs)

    return made


class _Calls:
    """The calls between the model and an operation, as torch records them for every node."""

    @classmethod
    def extract(cls, **_: Any) -> _Calls:
        """Of where it is called."""
        return cls()

    def summary(self) -> traceback.StackSummary:
        """Calls, outermost first, without those that torch would drop."""
        from torch.fx.experimental.symbolic_shapes import uninteresting_files  # and sympy

        passed_over = uninteresting_files() | {Constants.__torch_function__.__code__.co_filename}
        frame: FrameType | None = sys._getframe(1)
        calls: list[traceback.FrameSummary] = []
        # torch looks up the source line of every call of the process, down to its first, and then
        # drops what lies outside the forward: a fifth of the time that a capture takes.
        while frame is not None:
            code = frame.f_code
            if code.co_filename not in passed_over:  # the line is most of torch's time
                # torch keeps no other functions than "forward", as mmdet's `forward_single`.
                name = "forward" if is_authors(code.co_filename) else code.co_name
                calls.append(_place(code.co_filename, frame.f_lineno, name))
            if code is _Shell.forward.__code__:
                break
            frame = frame.f_back
        return traceback.StackSummary(calls[::-1])


@lru_cache(maxsize=1 << 12)  # the frames outside are those of every operation
def _place(file: str, line: int, name: str) -> traceback.FrameSummary:
    return traceback.FrameSummary(file, line, name, lookup_line=False)


def _passed_over(*_: Any, **__: Any) -> None:
    """In place of a check whose questions about sizes would become guards."""


def _copied(value: Tensor, source: Any) -> None:
    """Torch's copy of real values, extended to parameters and to axes that `expand` made."""
    # torch skips parameters, whose copies then hold uninitialised memory.
    if type(source) in (Tensor, nn.Parameter):
        once = tuple(slice(1 if step == 0 else None) for step in value.stride())
        value[once].copy_(source[once])


def _open(value: Any, axes: float) -> Any:
    if not isinstance(value, Tensor):
        return Dim.AUTO
    return {axis: Dim.AUTO for axis in range(value.dim()) if axis < axes}

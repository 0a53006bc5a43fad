"""From a model and example inputs to its `Graph`.

The forward runs once under `torch.export` (not strict: Python itself runs it, so a forward may use
all of Python). Functionalization then resolves its in-place writes. Before the graph is returned,
it is replayed on the example and compared with the model.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from ._arrays import TracedArray, needed
from ._batch_arguments import batch_arguments
from ._closing import Closing, TraceEnds
from ._conditions import Condition, conditions_of, keep_answers
from ._constants import Constants, ReshapesInput, Truncations
from ._export import Grown, exported, nothing
from ._faults import CaptureError, forward_line, refuse_unusable, running, spconv_call, where
from ._frames import VARYING, is_input
from ._graph import Graph, OneRow
from ._kinds import check_kind
from ._opaque import Opaque, opaque_modules
from ._own_inputs import twin
from ._quiet import evaluation, quiet
from ._read_members import ReadMembers, read_members
from ._recall import State, recalled, remember, state_of
from ._signature import Arguments, Constant, Leaf, Place, Tree, entries, flatten, place_name
from ._state import called, ordinary_tensors, state_kept
from ._switches import switch_of
from ._tidy import fixed_number, tidy

_LOG = logging.getLogger(__name__)


@ordinary_tensors()
def capture(
    model: nn.Module, example_inputs: Any, *, check: bool = True, open_sizes: bool = True
) -> Graph:
    """Capture `model` on example inputs and return its graph.

    - Sizes of the inputs stay open where the forward allows it (batch, height, voxels), so one
      graph serves frames of any size. Sizes that the forward fixes are constants (`Graph.fixed`).
      Where torch cannot compute with open ones (concatenated maps of several strides, quotients of
      coordinate slices, windows of maps that every stage pads) the first axes alone stay open: the
      numbers of frames, points or voxels.
    - A module that cannot be captured is one opaque node (`Graph.opaque`) with reason, file and
      line.
    - A number that the forward takes from a tensor and counts with, such as the largest batch
      index, is the example's; later frames must agree with it. Numbers taken from the model's own
      parameters and buffers are constants.
    - Numpy arrays of floats (a camera's matrix, ``can_bus``) are inputs; other arrays, floats,
      flags and texts are constants (`Graph.constant_members`), and calls with others are refused.
      Of an example of several frames, all numbers and arrays that differ are inputs.
    - Only the members of dictionaries and dataclasses that the forward reads are inputs
      (`Graph.members`).

    The model is not changed; it runs in evaluation mode without gradients. For an unchanged model
    and inputs of the same sizes, a graph that is still in use is returned again. A capture also
    serves other models of the same structure, with their bits.

    Args:
        model: Any module. Sparse convolutions must run on bevquant's kernels
            (`bevquant_sparse.use_bevquant_kernels`, or a quantized model).
        example_inputs: A tuple of positional inputs, a dict of named inputs, or one input: tensors,
            sparse tensors, dicts, numpy arrays, numbers, nested as the forward takes them. A list
            of such tuples or dicts is several frames.
        check: Replay the graph on the example and require the model's bits; a graph of another
            capture is always checked. False also makes all members of the arguments inputs.
        open_sizes: False fixes every size to the example's, for readers of the structure alone: a
            third of the time or less, as torch then computes no symbolic sizes.

    Raises:
        TypeError: `model` is not a module.
        ValueError: A module is scripted.
        CaptureError: The forward of the model itself cannot be captured, or the graph returns other
            values than the model; the message names module, file, line and remedy.

    Example:
        >>> import torch
        >>> from torch import Tensor, nn
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> graph = capture(net, torch.ones(1, 3, 8, 8))
        >>> [(graph.path(n), str(n.target)) for n in graph.operations]
        [('0', 'aten.conv2d.default'), ('1', 'aten.relu.default')]
        >>> graph.replay(torch.ones(2, 3, 5, 5)).shape
        torch.Size([2, 8, 3, 3])
    """
    check_kind(model, nn.Module, "a torch module")
    if any(isinstance(module, ScriptModule) for module in model.modules()):
        refuse_unusable(model, "capture", finite=False)
    given = batch_arguments(model, example_inputs, example=True)
    if not flatten(given)[0]:
        raise CaptureError(
            "example_inputs hold no tensor; give the arguments of one call of the model"
        )
    state = state_of(model, given, open_sizes, check)
    return recalled(model, given, state) or _captured(model, given, state, check, open_sizes, check)


def _captured(
    model: nn.Module,
    given: Arguments,
    state: State | None,
    check: bool,
    open_sizes: bool,
    unread: bool,
    squeezes_row: bool = False,
) -> Graph:
    """A new graph; with `unread`, without members of the arguments that the forward ignores."""
    start = perf_counter()
    # Tensors that are attributes are written to by a trace too.
    with state_kept(model), quiet():
        made = _Traces(model, given, open_sizes=open_sizes, unread=unread)
        made.constants.squeezes_row = squeezes_row
        program, result = made.followed()
    members, opaque = made.members, made.opaque
    tidy(program.graph_module, model)
    graph = Graph(
        model, program, made.inputs, result, opaque,
        made.fixed + conditions_of(program.graph.nodes), made.constants.taken,
        decided=made.values is not None, members=members,
    )  # fmt: skip
    returned = [v.meta.get("val") if isinstance(v, fx.Node) else v for v in graph.outputs]
    if not any(isinstance(value, Tensor) for value in returned):
        line = forward_line(model)
        reason = "it returns no tensor" + (f" ({line})" if line else "")
        raise CaptureError(
            f"{type(model).__name__} cannot be followed: {reason}. Return tensors, alone "
            "or in tuples, lists, dicts or dataclasses",
            reason,
        )
    took = perf_counter() - start
    if check:
        try:
            graph.check(given[1] or given[0])
        except OneRow:
            if squeezes_row:
                raise
            return _captured(model, given, state, check, open_sizes, unread, squeezes_row=True)
        except CaptureError:
            # A member that the forward read unnoticed may be missing: again with all of them.
            if members.required(given) is not given:
                return _captured(model, given, state, check, open_sizes, unread=False)
            if not open_sizes:
                raise
            # It may read sizes unseen by torch, such as the text of one.
            return capture(model, given[1] or given[0], open_sizes=False)
    # Numbers of this example or of these weights serve no other model.
    by_values = made.values is not None or bool(made.constants.taken)
    remember(model, state, graph, took, by_values=by_values)
    return graph


class _Traces:
    """Traces of a model, each without the obstacles that the previous trace showed.

    Attributes:
        opaque: Modules that are one node.
        values: Source of the numbers taken out of tensors, if they are the example's.
        constants: Numbers that the forward takes out of constant tensors.
        members: The members of the arguments that are inputs.
        fixed: The line that fixes sizes.
        inputs: Structure of the arguments.
    """

    def __init__(
        self, model: nn.Module, given: Arguments, *, open_sizes: bool, unread: bool
    ) -> None:
        self.model, self.given = model, given
        self.unread = unread
        self.open_axes = inf if open_sizes else 0  # of each input, the first ones
        self.opaque: dict[str, Opaque] = {}
        self.values: Exception | None = None
        self.constants = Constants(model)
        self.members = read_members(model, given) if unread else ReadMembers()
        self.fixed: tuple[Condition, ...] = ()
        self.inputs: Tree
        self._read: dict[Place, str] = {}  # arrays that are constants, and why
        self._numbers = (
            open_sizes  # such as a batch size: open, unless the forward counts with them
        )
        self._asked: nn.Module = model  # the twin that `values` comes from
        self._shares = Truncations()
        self._closing = Closing(model, given)
        self._leaves: list[Any] = []
        self._met = 0

    def followed(self) -> tuple[ExportedProgram, Tree]:
        """The program of the first trace that nothing is in the way of, and its result."""
        while True:
            # A trace writes to attributes: of the twin, not of the model.
            made = self._trace(twin(self.model))
            if made is not None:
                self._report_constants()
                return made

    def _report_constants(self) -> None:
        """Refuse constants that vary between the example's frames; log other arrays and why."""
        known = {p: e for p, e in entries(self.inputs) if isinstance(e, Constant)}
        frozen = {
            p: self._read.get(p, "") for p, e in known.items() if isinstance(e.value, VARYING)
        }
        if frozen:
            named = "; ".join(
                f"{place_name(self.model, place)}: {why or 'the forward computes with the number'}"
                for place, why in frozen.items()
            )
            raise CaptureError(
                f"capture: {type(self.model).__name__} takes members as constants that differ "
                f"between the example frames: {named}. Compute with them in torch or numpy, or "
                "outside of the forward",
                named,
            )
        for place, why in self._read.items():
            _LOG.warning(
                "capture: %s is a constant of the graph, and frames with another one are refused: "
                "%s", place_name(self.model, place), why,
            )  # fmt: skip

    def _trace(self, traced: nn.Module) -> tuple[ExportedProgram, Tree] | None:
        """One trace; None where another one is needed."""
        self._leaves, self.inputs = flatten(
            self.members.required(self.given), numbers=self._numbers, arrays=self._is_input
        )
        self._met = len(self._shares.scopes)
        closed: dict[str, Opaque] = {}
        try:
            with ExitStack() as stack:
                stack.enter_context(evaluation(traced))
                if self.opaque:  # more will follow
                    reason = partial(self._reason_to_close, traced)
                    closing = self._closing.on_errors(traced, self.opaque, reason)
                    closed = stack.enter_context(closing)
                stack.enter_context(opaque_modules(traced, self.opaque))
                program, result, answered, truths = exported(
                    traced, self.inputs, self._leaves, self._shares, self.constants,
                    values=self.values is not None, open_axes=self.open_axes, closed=closed,
                )  # fmt: skip
            if self.constants.taken and self.constants.written:  # a counter: no constant
                self.constants.withdraw()
                return None
            # Numbers that the forward fixes are constants: a call with another one is refused.
            if self._numbers and _fixes_numbers(program, self._leaves):
                self._numbers = False
                return None
            # The example's answers stand only if the graph asserts each of them.
            if self.values is not None and (
                answered is None
                or (truths and self._reason(self._asked, self.values)[0])  # a part: one node
                or not keep_answers(program.graph.nodes, answered)
            ):
                raise self.values
            return program, result
        except Exception as error:
            remedy = None if isinstance(error, TraceEnds) else self._remedy(error, traced)
            if remedy is not None:
                remedy()
            elif not closed:
                if self.values is not None:
                    error, traced = self.values, self._asked
                closed = self._closed(traced, error)
                self.values = None
            if closed:
                self._close(closed)
            return None

    def _is_input(self, value: Any, place: Place) -> bool:
        return place not in self._read and is_input(value)

    def _remedy(self, error: Exception, traced: nn.Module) -> Callable[[], None] | None:
        """Change to make before the next trace; None: a module cannot be followed."""
        if len(self._shares.scopes) > self._met or isinstance(error, ReshapesInput):
            return nothing  # such an int(…) leaves it open now; inputs are aliases
        if self._shares.met_frames:
            # Python's number may be needed, as by a dictionary.
            return partial(setattr, self, "_shares", Truncations(frames=False))
        if self.open_axes and _by_sizes(error):
            return partial(self._fix_sizes, where(error, traced, self.opaque)[1])
        numbers = needed(error) or self._arrays_in(error)
        if numbers:
            return partial(self._keep_constant, numbers, error, traced)
        of_sizes = self.constants.of_sizes and not self.constants.fix_sizes and _counts(error)
        if of_sizes and self.constants.asks_sizes:
            return partial(setattr, self.constants, "fix_sizes", True)
        if any(isinstance(leaf, int) for leaf in self._leaves):
            return partial(setattr, self, "_numbers", False)
        if of_sizes:
            return partial(setattr, self.constants, "fix_sizes", True)
        if self.values is None and not self.opaque and _counts(error):
            return partial(self._take_values, error, traced)
        if _counts(error) and any(entry.has_own_sizes() for entry in self.opaque.values()):
            return self._fix_opaque_sizes
        if self.members.required(self.given) is not self.given and isinstance(error, _OF_MEMBERS):
            return self._read_all_members  # it reads them unnoticed
        return None

    def _arrays_in(self, error: Exception) -> frozenset[int]:
        """All arrays, where code that takes none but numpy's own names one."""
        if TracedArray.__name__ not in str(error):
            return frozenset()
        found = (e for _, e in entries(self.inputs) if isinstance(e, Leaf) and e.kind)
        return frozenset(entry.index for entry in found)

    def _keep_constant(self, numbers: frozenset[int], error: Exception, traced: nn.Module) -> None:
        """Arrays whose numbers the forward needs are constants from now on."""
        place = where(error, traced, self.opaque)[1]
        found = [
            p
            for p, entry in entries(self.inputs)
            if isinstance(entry, Leaf) and entry.index in numbers
        ]
        self._read |= dict.fromkeys(found, f"{error}" + (f" ({place})" if place else ""))

    def _fix_sizes(self, place: str) -> None:
        # The number of frames or points stays open where sizes of maps cannot.
        self.open_axes = 1 if self.open_axes > 1 else 0
        self._numbers = False
        file, _, line = place.rpartition(":")
        self.fixed = (Condition(None, file, int(line or 0)),)

    def _take_values(self, error: Exception, traced: nn.Module) -> None:
        self.values, self._asked = error, traced

    def _fix_opaque_sizes(self) -> None:
        for entry in self.opaque.values():
            entry.fix_sizes()

    def _read_all_members(self) -> None:
        self.members, self.unread = ReadMembers(), False

    def _reason(self, traced: nn.Module, error: Exception) -> tuple[str, str]:
        """Path of the module that an error comes from, and the cause with its line."""
        found, place = where(error, traced, self.opaque)
        file, _, line = place.rpartition(":")
        switch = switch_of(file, int(line)) if file else ""
        only = f", only with {switch}" if switch else ""
        return found, f"{_met(error)}" + (f" ({place}{only})" if place else "")

    def _reason_to_close(self, traced: nn.Module, path: str, error: Exception) -> str:
        """Why the module that an error ends is to be closed at once; "" where it is not."""
        if self._remedy(error, traced) is not None:
            return ""
        found, reason = self._reason(traced, error)
        return reason if found == path else ""

    def _closed(self, traced: nn.Module, error: Exception) -> dict[str, Opaque]:
        """The module that the error comes from as one node."""
        self._refuse_inference_tensors()
        found, reason = self._reason(traced, error)
        with running(self.model, "capture", "Give inputs that it takes"):
            if found:
                return {found: self._closing.opaque(found, reason)}
            with evaluation(self.model):
                called(self.model, *self.given)  # no failure of the trace
        raise CaptureError(
            f"{type(self.model).__name__} cannot be followed: {reason}. Capture the parts "
            "of it that can, each with its own example inputs, or keep decisions on the values of "
            "tensors out of its forward",
            reason,
        ) from error

    def _refuse_inference_tensors(self) -> None:
        """Refuse weights that torch allows in inference mode alone."""
        own = (*self.model.named_parameters(), *self.model.named_buffers())
        name = next((n for n, v in own if not is_lazy(v) and v.is_inference()), "")
        if name:
            raise CaptureError(
                f"capture: {name} of {type(self.model).__name__} was created under "
                "torch.inference_mode(), which torch cannot trace. Give copy.deepcopy(model), made "
                "outside of inference mode, or load the model under torch.no_grad()",
                name,
            )

    def _close(self, closed: Mapping[str, Opaque]) -> None:
        self.opaque |= closed
        # A module that is one node holds these.
        inside = [p for p in self.opaque if any(p.startswith(f"{other}.") for other in closed)]
        for path in inside:
            del self.opaque[path]
        if self.unread:
            self.members = read_members(self.model, self.given, self.opaque)


def _fixes_numbers(program: ExportedProgram, leaves: list[Any]) -> bool:
    """Whether the forward depends on the value of a number among the inputs."""
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"][-len(leaves) :]
    given = zip(nodes, leaves, strict=True)
    values = [n.meta["val"] for n, leaf in given if isinstance(leaf, int)]
    return any(fixed_number(value) is not None for value in values)


def _counts(error: BaseException) -> bool:
    """Whether the forward needs a tensor's value as a number."""
    name = type(error).__name__
    return "DataDependent" in name or "UserError" in name


def _by_sizes(error: BaseException | None) -> bool:
    """Whether open sizes are in the way: they have no solution, or a message names one."""
    # As in ``points[..., :2] / points[..., 2:3]``, whose last size may be any where it is open, and
    # for tensors whose memory a reversible block gives back.
    if error is not None and not _counts(error) and _SIZES.search(str(error)):
        return True
    while error is not None:
        if isinstance(error, Grown):
            return True
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("sympy.solvers"):
                return True
        error = error.__cause__
    return False


_OF_MEMBERS = (LookupError, AttributeError, TypeError)  # by one that is left out


_SIZES = re.compile(r"\bs\d+\b|\bsymbolic shape\b|\bSymInt\b")


def _met(error: Exception) -> str:
    """The failure in one line."""
    name = type(error).__name__
    if _counts(error):
        return "it branches on the values of a tensor, or needs them as a number"
    if spconv_call(error):
        return f"it calls {spconv_call(error)}"
    for sign, met in _OUTSIDE.items():
        if sign in str(error):
            return met
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{name}: {first[:200]}"


_OUTSIDE = {
    ".numpy() is not supported": "it hands a tensor to numpy, which no graph can follow: compute "
    "that with torch",
    "Cannot access data pointer": "it hands a tensor's memory to code that torch does not know: "
    "make an operator of that with torch.library.custom_op",
}

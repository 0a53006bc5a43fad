"""Following a model on examples: its captured graph, and joins in its forwards."""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from bevquant_graph import (
    CaptureError,
    Graph,
    arguments,
    called_name,
    capture,
    flatten,
    op_spec,
    own_inputs,
)
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._functional_calls import FunctionalCall, Recorder, functional_class, plan_of
from bevquant_qnn._functional_ops import Followed, FunctionalOp, may_hold_functional_ops
from bevquant_qnn._holders import activation_quantizers
from bevquant_qnn._matmul import equation_and_operands
from bevquant_qnn._replay import evaluation, run
from bevquant_qnn._steps import Call, Steps, is_quantized, is_table
from bevquant_quantizers import TensorQuantizer


def observe(
    model: nn.Module, config: QuantConfig, example_inputs: Any, graph: Graph | None = None
) -> Followed:
    """Follow the model on example inputs, in evaluation mode and with its quantizers bypassed.

    Its layers are replaced already; excluded modules are not searched for functional operations.
    What cannot be captured is followed child by child, on what its children get in a run of the
    model; a tensor that one child hands to another is known by its memory.
    """
    found = Followed()
    paths = {module: path for path, module in model.named_modules()}
    with evaluation(model):
        _Observer(paths, config, found).part(model, arguments(example_inputs), graph)
    return found


_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})


class _Observer:
    def __init__(self, paths: dict[nn.Module, str], config: QuantConfig, found: Followed) -> None:
        self.paths, self.config, self.found = paths, config, found

    def part(self, root: nn.Module, given: Any, graph: Graph | None = None) -> Steps | None:
        """Follow one module on its inputs; None if it cannot be captured as a whole."""
        watched = [
            m
            for m in root.modules()
            if may_hold_functional_ops(m, ahead=True)
            and self.config.excluded_by(self.paths[m]) is None
        ]
        recorder, outputs = _recorded(root, watched, given, Recorder())
        opaque: dict[nn.Module, str] = {}
        steps = None
        try:
            graph = _captured(root, given) if graph is None else graph
        except CaptureError as error:
            opaque[root] = error.reason or str(error)
        else:
            reasons = {path: entry.reason for path, entry in graph.opaque.items()}
            opaque |= {root.get_submodule(path): reason for path, reason in reasons.items()}
            steps = Steps(self.paths, graph.graph, root, graph)
            self.found.parts.append(steps)
            # What a module that is one node computes is followed below, child by child.
            within = {m for module in opaque for m in module.modules()}
            recorder.seen = [event for event in recorder.seen if event.module not in within]
            self.note_ops(steps, recorder, watched, given, outputs)
        for module, reason in opaque.items():
            self.found.unfollowed[self.paths[module]] = f"{type(module).__name__}.forward: {reason}"
        inside = {m: list(_children(m)) for m in opaque}
        if any(inside.values()):
            self.inside(root, given, inside, steps)
        return steps

    def note_ops(
        self, steps: Steps, recorder: Recorder, watched: list[nn.Module], given: Any, outputs: Any
    ) -> None:
        ops = _matched(steps, recorder)
        suspects = {
            (op.call.module, op.site)
            for op, event in ops
            if event.inplace and op.node is not None and not op.planned
        }  # fmt: skip
        hidden = _hidden(steps.root, watched, given, outputs, suspects)
        self.found.ops += [replace(op, hidden=(op.call.module, op.site) in hidden) for op, _ in ops]

    def inside(
        self,
        root: nn.Module,
        given: Any,
        inside: dict[nn.Module, list[nn.Module]],
        around: Steps | None,
    ) -> None:
        """Follow the children of opaque modules, each on its inputs in a run of the model."""
        watch = _Boundaries()
        hooked = {*inside, *(child for children in inside.values() for child in children)}
        with ExitStack() as hooks:
            for m in hooked:
                hooks.callback(m.register_forward_pre_hook(watch.enter, with_kwargs=True).remove)
                hooks.callback(m.register_forward_hook(watch, with_kwargs=True).remove)
            run(root, *given)
        known: dict[object, object] = {}
        for module in inside:
            nodes = [] if around is None else around.opaque_calls(module)
            for node, (_, taken, made) in zip(nodes, watch.calls[module], strict=False):
                values: Any = node.args[0]
                for value, key in zip(values, taken, strict=False):
                    if around is not None and key is not None:
                        known.setdefault(key, (around, around.origin(value)))
                for user in node.users:
                    key = made[user.args[1]] if user.target is operator.getitem else None
                    if around is not None and key is not None:
                        self.found.same[around, user] = known.get(key, key)
        for child in dict.fromkeys(child for children in inside.values() for child in children):
            for inputs, taken, made in watch.calls[child]:
                steps = self.part(child, inputs)
                if steps is None or steps.source is None:
                    continue
                ends = (*zip(steps.inputs, taken, strict=False),
                        *zip(steps.source.outputs, made, strict=False))  # fmt: skip
                for node, key in ends:
                    if key is not None and isinstance(node, fx.Node):
                        origin = (steps, steps.origin(node))
                        self.found.same.setdefault(origin, known.get(key, key))


class _Boundaries:
    """Forward hooks: inputs and outputs of modules, identified by their memory."""

    def __init__(self) -> None:
        self.calls: dict[nn.Module, list[Any]] = defaultdict(list)
        self._alive: list[Any] = []  # freed memory would be used again
        self._entered: list[Any] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a module's inputs before it writes to the containers."""
        given = own_inputs((list(args), dict(kwargs)), None)
        self._entered.append((given, self._keys(given)))

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.calls[module].append((*self._entered.pop(), self._keys(output)))

    def _keys(self, value: Any) -> list[Any]:
        leaves = flatten(value)[0]
        self._alive += leaves
        return [_memory_key(leaf) for leaf in leaves]


def _memory_key(tensor: Any) -> tuple[Any, ...] | None:
    """Equal for tensors over the same elements of one memory, at one version of it."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return None
    # Without elements there is no memory to compare.
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    extent = tuple(sorted((st, s) for st, s in zip(tensor.stride(), tensor.shape, strict=True)))
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.numel(),
        0 if tensor.is_inference() else tensor._version,
        # A view is known by its strides too; axes of size 1 may have any.
        () if whole else tuple(pair for pair in extent if pair[1] != 1),
    )


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Children that a forward calls: those with quantizers, tables; members of lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child)
        elif is_table(child) or any(isinstance(m, TensorQuantizer) for m in child.modules()):
            yield child


def _captured(root: nn.Module, given: Any) -> Graph:
    """The graph of a module; of a copy where its tensors are inference tensors."""
    args, kwargs = given
    # A capture takes positional or named inputs.
    if kwargs and args:
        bound = inspect.signature(root.forward).bind(*args, **kwargs)
        args, kwargs = [], dict(bound.arguments)
    model = root
    if any(t.is_inference() for t in (*root.parameters(), *root.buffers())):
        model = copy.deepcopy(root)
    with _visible(model):
        return capture(model, kwargs or tuple(args), check=False, open_sizes=False)


def _recorded(
    model: nn.Module, watched: Iterable[nn.Module], given: Any, recorder: Recorder
) -> tuple[Recorder, list[Any]]:
    """Run the model once and note the functional operations in the forwards of some modules."""
    # A forward on the instance hides that of its class.
    own = [(module, type(module)) for module in watched if "forward" not in vars(module)]
    try:
        for module, cls in own:
            module.__class__ = functional_class(cls, plan_of(module), recorder)
        result = run(model, *given)
    finally:
        for module, cls in own:
            module.__class__ = cls
    return recorder, [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]


@contextmanager
def _visible(model: nn.Module) -> Iterator[None]:
    """Switch on quantizers that belong to no layer, so that the graph shows their inputs."""
    free = [h.quantizer for h in activation_quantizers(model) if not is_quantized(h.owner)]
    before = [(q, q._disabled, q._if_quant, q._if_calib) for q in free]
    try:
        for quantizer in free:
            quantizer._disabled, quantizer._if_quant, quantizer._if_calib = False, True, False
        yield
    finally:
        for quantizer, *flags in before:
            quantizer._disabled, quantizer._if_quant, quantizer._if_calib = flags


def _hidden(
    root: nn.Module, watched: list[nn.Module], given: Any, outputs: list[Any], suspects: set[Any]
) -> set[Any]:
    """In-place additions that cannot make a new tensor: the old one is read under another name."""

    def same(apart: set[Any]) -> bool:
        made = _recorded(root, watched, given, Recorder(apart=apart))[1]
        return len(made) == len(outputs) and all(map(_equal, made, outputs))

    if not suspects or same(suspects):
        return set()
    return {suspect for suspect in suspects if not same({suspect})}


def _equal(one: Tensor, other: Tensor) -> bool:
    # NaN equals itself here.
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


def _matched(steps: Steps, recorder: Recorder) -> list[tuple[FunctionalOp, FunctionalCall]]:
    """Which step of the graph each operation is: by call, kind and line, in the same order."""
    nodes: dict[Any, list[fx.Node]] = defaultdict(list)
    all_nodes: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in steps.nodes:
        kind = _functional_kind(steps, node)
        calls = steps.calls(node)
        line = _line(node)
        if kind is not None:
            nodes[calls[-1], kind, line].append(node)
            all_nodes[calls[-1], kind].append(node)
    events: dict[Any, list[FunctionalCall]] = defaultdict(list)
    whole: dict[Any, list[FunctionalCall]] = defaultdict(list)
    for event in recorder.seen:
        call = Call(event.module, event.call)
        keys = [(call, event.kind, line) for line in event.lines]
        events[next((k for k in keys if k in nodes), keys[0])].append(event)
        whole[call, event.kind].append(event)
    where: dict[int, fx.Node] = {}
    for key, every in events.items():
        for seen in (every, [e for e in every if e.again is None]):
            if len(seen) == len(nodes[key]):
                where |= {id(e): n for e, n in zip(seen, nodes[key], strict=True)}
                break
    # A forward under another name has no line in the graph.
    for of_call, seen in whole.items():
        if len(seen) == len(all_nodes[of_call]) and not all(id(e) in where for e in seen):
            where |= {id(e): n for e, n in zip(seen, all_nodes[of_call], strict=True)}
    return [
        (
            FunctionalOp(
                Call(e.module, e.call), e.kind, e.site, e.occurrence, steps, where.get(id(e)),
                e.planned, product=e.product, masks=e.masks,
                again=None if id(e) in where else e.again,
            ),
            e,
        )
        for e in recorder.seen
    ]  # fmt: skip


def _functional_kind(steps: Steps, node: fx.Node) -> str | None:
    spec = steps.spec(node)
    if spec.kind == "add":
        two = len(node.args) == 2 and not node.kwargs
        return "add" if two and all(_is_tensor(a) for a in node.args) else None
    if spec.name in _PRODUCTS:
        return "product"
    if spec.kind == "matmul":
        return "matmul" if len(equation_and_operands(node.args)[1]) == 2 else None
    if spec.product == "attention":
        return "attention"
    called = op_spec(called_name(node)).name  # not of `hstack`, which takes no axis
    return spec.kind if spec.kind == "sample" else "cat" if called == "cat" else None


def _is_tensor(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def _line(node: fx.Node) -> tuple[str, int] | None:
    """The line of the forward that makes a step, as it is noted while a model is captured."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return (places[-1][0], int(places[-1][1])) if places else None

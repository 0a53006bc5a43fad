"""Who reads what in a whole model: the calls of its modules and functions, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import fx, nn

from ._errors import UntraceableError
from ._flow_tracer import SCOPE, FlowTracer, is_leaf
from ._flow_values import ValueReader
from ._tracer import Inputs


@dataclass(frozen=True, eq=False)
class Call:
    """One step of the model: a call of a module that is not entered, a function or a method.

    Attributes:
        kind: ``"module"``, ``"function"`` or ``"method"``.
        name: Class of the module (``"Conv2d"``), or name of the function or method (``"add"``,
            ``"iadd"``, ``"cat"``, ``"relu"``, ``"dense"``, ``"getitem"``, ``"hook"``).
        path: Path of the module in the model; ``""`` for functions and methods.
        scope: Path of the module whose own forward makes the call: the one to rewrite with
            ``trace_forward`` and ``rebuild_forward``. ``""`` for the model itself.
        inputs: Values read, each once, in the order of the arguments.
        outputs: Values made. In-place steps make a new value like any other.
        same: The output is the input (``nn.Identity``).
        node: The step in the region's graph, for its arguments. Its targets are relative to the
            region's root, not to the model.
    """

    kind: str
    name: str
    path: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    same: bool
    node: fx.Node = field(repr=False)


@dataclass(frozen=True, eq=False)
class DataFlow:
    """The calls of a model in order of execution, and the values between them.

    A value is the content of one tensor, dense or the features of a sparse one, under whatever
    names. Where a module cannot be followed, its traceable descendants are regions of their own:
    their inputs come from nowhere and their outputs leave the model.

    Attributes:
        calls: Every step of every region.
        regions: Paths of the roots of the traced regions; ``("",)`` where all of it was traced.
        untraced: Path to the reason, for every module whose forward could not be followed.
        inputs: Values that enter a region.
        outputs: Values that leave a region, the model's outputs among them.
        parameters_read: Parameters and buffers that a forward reads itself, by path.
        inplace_seen: Modules that write in place where the old name is read afterwards, so that
            ``inplace=False`` would change the result.
        called_with_options: Modules called with another value than a parameter's default, which
            a forward rebuilt from ``trace_forward`` would refuse.
    """

    calls: tuple[Call, ...]
    regions: tuple[str, ...]
    untraced: Mapping[str, str]
    inputs: frozenset[int]
    outputs: frozenset[int]
    parameters_read: frozenset[str]
    inplace_seen: frozenset[str]
    called_with_options: frozenset[str]
    _readers: Mapping[int, tuple[Call, ...]] = field(repr=False)
    _producers: Mapping[int, Call] = field(repr=False)
    _of_path: Mapping[str, tuple[Call, ...]] = field(repr=False)

    def readers(self, value: int) -> tuple[Call, ...]:
        """Steps that read ``value``, in order. ``nn.Identity`` is not a reader."""
        return self._readers.get(value, ())

    def producer(self, value: int) -> Call | None:
        """The step that made ``value``; None for an input of a region."""
        return self._producers.get(value)

    def calls_of(self, path: str) -> tuple[Call, ...]:
        """Calls of the module at ``path``; several where it is shared, none where never reached."""
        return self._of_path.get(path, ())


def trace_dataflow(model: nn.Module, example_inputs: Any = None) -> DataFlow:
    """Find which module reads which tensor, over the whole model.

    Modules are entered down to torch's layers, sparse convolutions and whatever else has no
    traceable forward; ``nn.Sequential`` and ``SparseSequential`` are known chains. ``x``,
    ``x.features`` and ``y.replace_feature(x.features)`` are one value. Sizes, coordinates and
    other metadata are not values. A module registered under several paths goes by the first.
    The model runs on symbols only and is not changed.

    Args:
        model: The model; what ``self.training`` decides is followed as it is now.
        example_inputs: Tuple of arguments, dict of keyword arguments, or one argument. Only
            their structure is used (which are tensors, how many are in a list); it lets forwards
            be followed that count or unpack their inputs.

    Returns:
        The data flow. A model that cannot be followed at the top is given as several regions; no
        error is raised.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> flow = trace_dataflow(net)
        >>> bn = flow.calls_of("1")[0]
        >>> flow.producer(bn.inputs[0]).path, len(flow.readers(bn.inputs[0]))
        ('0', 1)
    """
    return build_dataflow(model, as_inputs(example_inputs))


def build_dataflow(model: nn.Module, inputs: Inputs | None) -> DataFlow:
    """``trace_dataflow`` with the example inputs as arguments and keyword arguments."""
    builder = _Builder(model)
    builder.region(model, inputs)
    return builder.finish()


def as_inputs(example_inputs: Any) -> Inputs | None:
    """Positional and keyword arguments of a call with ``example_inputs``."""
    if example_inputs is None:
        return None
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    return (example_inputs,), {}


class _Builder:
    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in model.named_modules()}
        self.reached: set[nn.Module] = set()
        self.calls: list[Call] = []
        self.regions: list[str] = []
        self.untraced: dict[str, str] = {}
        self.inputs: set[int] = set()
        self.outputs: set[int] = set()
        self.parameters_read: set[str] = set()
        self.inplace_seen: set[str] = set()
        self.called_with_options: set[str] = set()
        self._numbers = count()

    def region(self, root: nn.Module, inputs: Inputs | None = None) -> None:
        """Trace ``root`` as a region; where that fails, or leaves modules out, its children."""
        path = self.paths[root]
        tracer = FlowTracer(inputs)
        try:
            graph = tracer.run(root)
        except UntraceableError as error:
            if not _is_container(root):
                self.untraced.setdefault(path, str(error))
            self._descend(root)
            return
        self.untraced.pop(path, None)
        self.regions.append(path)
        self.reached.add(root)
        self._add(root, graph, tracer.opaque)
        for name, reason in tracer.opaque.items():
            self.untraced.setdefault(self.paths[root.get_submodule(name)], reason)
        for name in tracer.optioned:
            self.called_with_options.add(self.paths[root.get_submodule(name)])
        self.reached |= {root.get_submodule(name) for name in tracer.entered}
        self._descend(root)

    def _descend(self, root: nn.Module) -> None:
        """Regions below ``root`` for what no region has reached yet."""
        for child in root.children():
            if any(m in self.reached for m in child.modules()):
                # Also where only members were called, as in a loop over an nn.Sequential.
                self._descend(child)
            elif not is_leaf(child) and any(True for _ in child.children()):
                self.region(child)

    def _add(self, root: nn.Module, graph: fx.Graph, opaque: Mapping[str, str]) -> None:
        reader = ValueReader(root, lambda: next(self._numbers))
        reader.run(graph)
        self.inputs.update(reader.inputs)
        self.outputs |= reader.outputs
        prefix = self.paths[root]
        for name in reader.parameters_read:
            self.parameters_read.add(f"{prefix}.{name}" if prefix else name)
        for node in reader.inplace_seen:
            if node.op == "call_module":
                self.inplace_seen.add(self.paths[root.get_submodule(str(node.target))])
        for step in reader.steps:
            node = step.node
            module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
            if module is not None and str(node.target) not in opaque:
                self.reached.add(module)
            name = getattr(node.target, "__name__", str(node.target))
            scope = self.paths[root.get_submodule(node.meta[SCOPE])]
            self.calls.append(
                Call(
                    kind=node.op.removeprefix("call_"),
                    name=name if module is None else type(module).__name__,
                    path="" if module is None else self.paths[module],
                    scope=scope,
                    inputs=step.reads,
                    outputs=step.makes,
                    same=step.same,
                    node=node,
                )
            )

    def finish(self) -> DataFlow:
        readers: dict[int, list[Call]] = {}
        producers: dict[int, Call] = {}
        of_path: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.kind == "module":
                of_path.setdefault(call.path, []).append(call)
            if call.same:
                continue
            for value in call.inputs:
                readers.setdefault(value, []).append(call)
            for value in call.outputs:
                producers[value] = call
        return DataFlow(
            calls=tuple(self.calls),
            regions=tuple(self.regions),
            untraced=self.untraced,
            inputs=frozenset(self.inputs),
            outputs=frozenset(self.outputs),
            parameters_read=frozenset(self.parameters_read),
            inplace_seen=frozenset(self.inplace_seen),
            called_with_options=frozenset(self.called_with_options),
            _readers={value: tuple(calls) for value, calls in readers.items()},
            _producers=producers,
            _of_path={path: tuple(calls) for path, calls in of_path.items()},
        )


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)

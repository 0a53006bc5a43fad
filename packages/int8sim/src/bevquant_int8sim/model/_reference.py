"""Running a traced graph in float, node by node, on any model with the same modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from bevquant_int8sim.model._signature import arguments, leaves
from bevquant_int8sim.model._trace import Traced
from bevquant_quantizers import TensorQuantizer

__all__ = ["GraphRun", "inputs_of", "spent_nodes", "tensor_of", "with_tensor"]


class GraphRun:
    """One execution of the graph; the caller steps from node to node and may change results.

    Args:
        traced: The graph.
        model: Runs its modules: the traced model itself, or the float one that it was made from,
            where quantizers are passed over.
        inputs: Values of the graph's inputs.

    Raises:
        ValueError: `model` lacks a module of the graph.
    """

    def __init__(self, traced: Traced, model: nn.Module, inputs: Iterator[Any]) -> None:
        self.model = model
        self.inputs = inputs
        self.values: dict[fx.Node, Any] = {}
        self._modules = _modules(traced, model)

    def step(self, node: fx.Node) -> Any:
        """Compute `node` from what its inputs hold now."""
        if node.op == "placeholder":
            result = next(self.inputs)
        elif node.op == "get_attr":
            result = self.model
            for part in str(node.target).split("."):
                result = getattr(result, part)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
            result = self._call(node, args, kwargs)
        self.values[node] = result
        return result

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op == "call_module":
            module = self._modules[target]
            return args[0] if module is None else module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return args[0] if node.op == "output" else target(*args, **kwargs)


def inputs_of(traced: Traced, example_inputs: Any) -> Iterator[Any]:
    """Values of the graph's inputs, in order."""
    args, kwargs = arguments(example_inputs)
    return leaves([list(args), dict(kwargs)], numbers=traced.numbers)


def tensor_of(value: Any) -> Tensor | None:
    """The tensor, or the features of a sparse one."""
    value = getattr(value, "features", value) if not isinstance(value, Tensor) else value
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def with_tensor(value: Any, tensor: Tensor) -> Any:
    """`value` holding another tensor."""
    if isinstance(value, Tensor):
        return tensor
    return value.replace_feature(tensor)


def spent_nodes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the nodes whose values nothing behind it reads."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for read in (node, *node.all_input_nodes):
            last[read] = node
    spent: dict[fx.Node, list[fx.Node]] = {}
    for node, at in last.items():
        spent.setdefault(at, []).append(node)
    return spent


def _modules(traced: Traced, model: nn.Module) -> dict[str, nn.Module | None]:
    known = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module | None] = {}
    for node in traced.graph.nodes:
        if node.op != "call_module":
            continue
        path = str(node.target)
        quantizer = isinstance(traced.model.get_submodule(path), TensorQuantizer)
        found[path] = known.get(path)
        if path not in known and not quantizer:
            raise ValueError(
                f"compare: the float model has no module {path!r}, which the calibrated model "
                "has; give the folded float model (bevquant_fusion.fuse_model) that was quantized"
            )
    return found

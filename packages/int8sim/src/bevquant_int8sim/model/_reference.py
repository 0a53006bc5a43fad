"""Running a captured graph in float, node by node, on any model with the same parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_fusion import norm_as_convolution
from bevquant_graph import OPAQUE, REQUIRE, Graph, flatten, layer_class, op_spec, rebuild
from bevquant_qnn import QuantAdd, QuantConcat

Returned = Callable[[str, int], Tensor | None]
"""Path of a layer and which of its calls, from 0 → what it returned in a run beside this one."""

_VIEWS: Any = {
    torch.ops.aten.as_strided.default: lambda x, *place: x.contiguous().as_strided(*place),
}
_CONVOLUTIONS = (torch.ops.aten.conv2d, torch.ops.aten.conv_transpose2d)


class GraphRun:
    """One execution of the graph; the caller steps from node to node and may change results.

    Args:
        graph: The graph.
        model: Whose parameters and buffers are taken: the captured model itself, or the float one
            that it was made from, where fake quantization is passed over.
        inputs: Values of the graph's inputs.
        channels_last: Keep maps channels last in memory, as integer kernels make them: they need
            not be turned, and oneDNN's convolutions take half to nine tenths of the time. The sums
            of a convolution are then others than the model's in their last bits.
        returned: Of a run of `model` itself on the same inputs: what its layers returned is taken,
            not computed again. What it answers None for is computed here.
        alone: Nodes that are computed here in any case.

    Raises:
        ValueError: `model` lacks a parameter of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        inputs: Sequence[Any],
        *,
        channels_last: bool = False,
        returned: Returned | None = None,
        alone: Container[fx.Node] = (),
    ) -> None:
        self.graph, self.model, self.channels_last = graph, model, channels_last
        self._returned = returned
        self._calls = {} if returned is None else layer_calls(graph, model, alone)
        self.floats = model is not graph.model
        self.values: dict[fx.Node, Any] = {}
        self._inputs = dict(zip(graph.placeholders, inputs, strict=True))
        self._state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
            **(_norm_layers(model, graph.model) if self.floats else {}),
        }

    def step(self, node: fx.Node, beside: GraphRun | None = None) -> Any:
        """Compute `node` from what its inputs hold now."""
        if node.op == "placeholder":
            self.values[node] = self._given(node)
        elif node.op == "output":
            self.values[node] = None
        else:
            self.values[node] = self._computed(node, beside)
        return self.values[node]

    def computed_from(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Result of `node` where these values stand in place of the run's."""
        before = {n: self.values[n] for n in node.all_input_nodes if n in values}
        self.values |= {n: values[n] for n in before}
        made = self._computed(node, None)
        self.values |= before
        return made

    def _given(self, node: fx.Node) -> Any:
        if node in self._inputs:
            return self._inputs[node]
        path = self.graph.constant_path(node)
        if path in self._state:
            given, known = self._state[path].detach(), self.graph.constant(node)
            if known is not None and known.shape != given.shape:
                raise ValueError(
                    f"compare: {path} has shape {tuple(given.shape)} in the float model and "
                    f"{tuple(known.shape)} in the calibrated one; give the folded float model that "
                    "was quantized"
                )
            if known is not None and known.dtype != given.dtype:
                raise ValueError(
                    f"compare: {path} is {given.dtype} in the float model and {known.dtype} in the "
                    f"calibrated one; give the float model in {known.dtype} (call .to() on a copy)"
                )
            return given
        if self.floats and not node.name.startswith("c_") and "_quantizer" not in str(path):
            raise ValueError(
                f"compare: the float model has no parameter or buffer {path!r}, which the "
                "calibrated model has; give the folded float model (bevquant_fusion.fuse_model) "
                "that was quantized"
            )
        return self.graph.constant(node)

    def _computed(self, node: fx.Node, beside: GraphRun | None) -> Any:
        if self.floats and op_spec(node.target).kind == "quantize":
            return self.values[node.all_input_nodes[0]]
        if self._returned is not None and node in self._calls:
            taken = self._returned(*self._calls[node])
            if taken is not None:
                return taken
        # A module that is one node holds its weights itself, and the float model has others.
        if beside is not None and (self.floats == beside.floats or node.target is not OPAQUE):
            inputs = node.all_input_nodes
            quantizes = op_spec(node.target).kind == "quantize"
            # Computed beside from the very same inputs, as those of rulebooks are.
            if not quantizes and all(self.values[n] is beside.values.get(n) for n in inputs):
                return beside.values[node]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.target is OPAQUE:
            return self._opaque(node, args)
        if node.target is REQUIRE and not args[0]:
            self.graph.refuse(node)
        # Values may lie in another order than in the model.
        target: Any = _VIEWS.get(node.target, node.target)
        if self.channels_last and getattr(target, "overloadpacket", None) in _CONVOLUTIONS:
            args = (_channels_last(args[0]), *args[1:])
        return target(*args, **kwargs)

    def _opaque(self, node: fx.Node, args: Any) -> Any:
        entry, call = self.graph.opaque_of(node)
        module = self.model.get_submodule(entry.path)
        given, named = rebuild(call.inputs, args[0])
        with torch.no_grad():
            return flatten(module(*given, **named))[0]


def _norm_layers(model: nn.Module, quantized: nn.Module) -> dict[str, Tensor]:
    """Parameters of batch norms in the form that `quantize_model` gives what no layer takes."""
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, layer in quantized.named_modules(remove_duplicate=False):
        above = path.removesuffix(".norm")
        norm = modules.get(path, modules.get(above))
        if isinstance(layer, nn.modules.conv._ConvNd) and isinstance(norm, _BatchNorm):
            made = norm_as_convolution(norm, layer.weight.dim() - 2)
            found |= {f"{path}.{name}": tensor for name, tensor in made.named_parameters()}
    return found


def _channels_last(x: Any) -> Any:
    if x.dim() != 4 or x.dtype != torch.float32 or x.device.type != "cpu":
        return x
    return x.contiguous(memory_format=torch.channels_last)


_LAYERS = frozenset({"layer", "sparse_layer", "quantize"})
_PLAIN = nn.ReLU, nn.ReLU6, nn.MaxPool2d, QuantAdd, QuantConcat
"""Classes that return the one tensor that they compute."""
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def layer_calls(
    graph: Graph, model: nn.Module, alone: Container[fx.Node] = ()
) -> dict[fx.Node, tuple[str, int]]:
    """Nodes that are what the call of a layer or quantizer returns: its path, which of its calls.

    Layers are told by their class (`bevquant_graph.layer_class`); ReLUs, max pools and the sums and
    concatenations of `quantize_model` go with them. Left out are calls that hand on more than a
    tensor, modules with several paths, by which calls cannot be told apart, and what lies behind
    attention, for which torch has a fused form that no graph has, with other last bits.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = Counter(modules.values())
    fused = {path for path, module in modules.items() if isinstance(module, _FUSED)}
    behind: set[fx.Node] = set()
    handed: dict[tuple[str, int], list[fx.Node]] = defaultdict(list)
    for node in graph.operations:
        path, _ = call = graph.call(node)
        value = node.meta.get("val")
        outside = any(path not in graph.stack(user) for user in node.users)
        if fused.intersection(graph.stack(node)) or behind.intersection(node.all_input_nodes):
            behind.add(node)
        elif outside and isinstance(value, Tensor) and value.is_floating_point():
            handed[call].append(node)
    return {
        nodes[0]: (path, number)
        for (path, number), nodes in handed.items()
        if len(nodes) == 1
        and nodes[0] not in alone
        and path in modules
        and paths[modules[path]] == 1
        and _returns(nodes[0], modules[path])
    }


def _returns(node: fx.Node, module: nn.Module) -> bool:
    if layer_class(module, *_PLAIN) is not None:
        return True
    return op_spec(node.target).kind in _LAYERS and layer_class(module) is not None


def tensor_of(value: Any) -> Tensor | None:
    """The value, where it is a tensor of floats."""
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


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

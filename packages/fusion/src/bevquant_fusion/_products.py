"""Weight and bias that a layer's forward computes for its product.

Weight standardisation, Ŵ = (W − μ)/√(σ² + ε) per output channel (Qiao et al. 2019, section 3), and
its scaled form, γ·Ŵ/√N (Brock et al. 2021, section 4), are computed in every call. With unchanged
parameters Ŵ is a constant, and the layer is a plain convolution with that weight.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from bevquant_graph import FunctionCalls, Graph, op_spec

from ._fold import layer_problem, tensor_owners
from ._foldable import conv_problem, out_channels
from ._ranges import children_problem

_STOCK = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_NAMES = {"conv1d", "conv2d", "conv3d", "linear"}
_PRODUCTS = {F.conv1d, F.conv2d, F.conv3d, F.linear}
_PRODUCTS |= {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


def plain_layers(model: nn.Module, graph: Graph) -> tuple[str, ...]:
    """Paths of the layers that only compute a weight from parameters and apply it."""
    inside: dict[str, list[fx.Node]] = defaultdict(list)
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.operations:
        for path in graph.stack(node):
            inside[path].append(node)
        for value in node.all_input_nodes:
            constant = graph.constant_path(value)
            if constant is not None:
                readers[constant.rpartition(".")[0]].append(node)
    owners = tensor_owners(model)
    return tuple(
        path
        for path, module in model.named_modules()
        if path
        and path in inside
        and isinstance(module, _STOCK)
        and conv_problem(module) is not None
        and children_problem(module) is None
        and layer_problem(model, owners, path, out_channels(module), own_forward=True) is None
        and set(readers[path]) <= set(inside[path])
        and _applies_constants(path, inside[path], graph)
        and made_plain(module) is not None
    )


def _applies_constants(path: str, nodes: list[fx.Node], graph: Graph) -> bool:
    """Whether a layer's nodes are products of its input with constants."""
    products = [node for node in nodes if op_spec(node.target).name in _NAMES]
    own = set(nodes).difference(products)
    for node in own:
        known = all(v in own or graph.constant_path(v) for v in node.all_input_nodes)
        if not known or not set(node.users) <= {*own, *products}:
            return False
    for product in products:
        x, weight, *rest = product.args
        bias = rest[0] if rest else None
        if x in own or weight not in own or graph.constant_path(x):
            return False
        if bias is not None and graph.constant_path(bias) != f"{path}.bias".lstrip("."):
            return False
    return bool(products)


def _products(layer: nn.Module, x: torch.Tensor) -> tuple[Any, list[tuple[Any, Any]]]:
    """A layer's result; weight and bias of each of its products."""
    found: list[tuple[Any, Any]] = []

    def note(func: Any, args: Any, kwargs: Any) -> Any:
        if func in _PRODUCTS:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            found.append((given.get("weight"), given.get("bias")))
        return func(*args, **kwargs)

    with torch.no_grad(), FunctionCalls(note):
        return layer(x), found


def reads_bias(layer: nn.Module, sizes: list[int]) -> bool:
    """Whether a layer without a bias hands the one that it is given to its product."""
    module: Any = copy.deepcopy(layer)
    value = torch.zeros(out_channels(module), dtype=module.weight.dtype)
    module.bias = nn.Parameter(value.to(module.weight.device), requires_grad=False)
    x = torch.zeros(sizes, dtype=value.dtype, device=module.weight.device)
    try:
        _, products = _products(module, x)
    except Exception:  # whatever a forward of one's own says to zeros
        return False
    read = [bias is module.bias for weight, bias in products if weight is module.weight]
    return bool(read) and all(read)


def made_plain(layer: nn.Module) -> nn.Module | None:
    """The stock layer over the weight that a layer computes; None where it gives other values."""
    module: Any = layer
    kind: Any = next(cls for cls in _STOCK if isinstance(module, cls))
    inputs = module.in_features if kind is nn.Linear else module.in_channels
    kernel = [] if kind is nn.Linear else zip(module.kernel_size, module.dilation, strict=True)
    # Large enough for every kernel, and another size along each axis.
    sizes = torch.Size([1, inputs, *(3 + a + (k - 1) * d for a, (k, d) in enumerate(kernel))])
    x = torch.linspace(-1, 1, sizes.numel()).reshape(sizes).to(module.weight)
    try:
        expected, products = _products(module, x)
    except Exception:  # whatever a forward of one's own says to these sizes
        return None
    used = products[-1][0] if products else None
    if used is None or used.shape != module.weight.shape:
        return None
    # With all attributes of the layer: settings, hooks, training flag.
    made = kind.__new__(kind)
    made.__dict__.update({**vars(module), "_parameters": copy.copy(module._parameters)})
    made._buffers = {}
    for name in set(made._parameters) - {"weight", "bias"}:
        del made._parameters[name]
    weight = used.detach().clone()
    made._parameters["weight"] = nn.Parameter(weight, module.weight.requires_grad)
    with torch.no_grad():
        apart = (made(x) - expected).abs().max()
    return made if apart <= 1e-4 * expected.abs().max() else None

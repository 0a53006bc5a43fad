"""Float operations of a file: the list beside the integer operations.

First the elementwise functions, by modules of torch and by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._aten import NAMED, instances, softmax
from bevquant_export.dense.nodes._graph import Graph
from bevquant_export.dense.nodes._grid import average_pool
from bevquant_export.dense.nodes._layout_ops import reshaped
from bevquant_export.dense.nodes._numbers import ARITHMETIC
from bevquant_graph import layer_class, op_spec, zero_padding
from bevquant_int8sim.program import Ref, Step, grid_call, is_active, module_call
from bevquant_quantizers import TensorQuantizer

_LINEAR_FROM = 15.0  # where softplus is its argument to the last bit of float32


@cache
def _unary_form(what: str) -> str | None:
    """ONNX's function of one tensor with the operator's name, if operator set 11 has it."""
    from onnx import defs

    spec = op_spec(what)
    name = spec.name.capitalize()
    return name if spec.unary and defs.has(name, 11) else None


def elementwise(graph: Graph, path: str, x: str, module: Any, rank: int) -> str | None:
    """Nodes of an activation; None where it is not on the list.

    Operator set 11 has no Celu, Gelu, HardSwish and Mish that runtimes accept, so these are written
    in basic operators.

    Args:
        graph: Receives the nodes.
        path: Module.
        x: Its input.
        module: The activation.
        rank: Number of axes of the input.
    """
    cls = layer_class(module)
    make = None if cls is None else _MADE.get(cls)
    return None if make is None else make(_At(graph, path, x, rank), module)


class _At:
    """The place for new nodes, and their inputs."""

    def __init__(self, graph: Graph, path: str, x: str, rank: int) -> None:
        self.graph, self.path, self.x, self.rank = graph, path, x, rank

    def node(self, operator: str, *inputs: str | float, **attributes: Any) -> str:
        """Add a node; numbers among its inputs are constants."""
        names = [
            name if isinstance(name, str) else self.graph.constant(f"float_{name:g}", name)
            for name in inputs
        ]
        return self.graph.node(operator, self.path, names, **attributes)


def _plain(operator: str) -> Callable[[_At, Any], str]:
    return lambda at, module: at.node(operator, at.x)


def _celu(at: _At, module: Any) -> str:
    alpha = float(module.alpha)
    return at.node("Mul", at.node("Elu", at.node("Div", at.x, alpha)), alpha)


def _gelu(at: _At, module: Any) -> str:
    half = at.node("Mul", at.x, 0.5)
    if module.approximate == "none":
        return at.node(
            "Mul", half, at.node("Add", at.node("Erf", at.node("Mul", at.x, math.sqrt(0.5))), 1.0)
        )
    cube = at.node("Mul", at.node("Mul", at.node("Mul", at.x, at.x), at.x), 0.044715)
    inner = at.node("Mul", at.node("Add", at.x, cube), math.sqrt(2 / math.pi))
    return at.node("Mul", half, at.node("Add", at.node("Tanh", inner), 1.0))


def _hardsigmoid(at: _At) -> str:
    return at.node("HardSigmoid", at.x, alpha=1 / 6, beta=0.5)


def _softplus(at: _At, x: str) -> str:
    return at.node("Softplus", x)


def _general_softplus(at: _At, module: Any) -> str | None:
    if module.threshold < _LINEAR_FROM:
        return None
    if module.beta == 1:
        return _softplus(at, at.x)
    beta = float(module.beta)
    return at.node("Div", _softplus(at, at.node("Mul", at.x, beta)), beta)


def _prelu(at: _At, module: Any) -> str:
    slope: torch.Tensor = module.weight.detach().float().cpu()
    if slope.numel() > 1:  # along axis 1
        slope = slope.reshape(-1, *[1] * (at.rank - 2))
    return at.node("PRelu", at.x, at.graph.constant(f"{at.path}.weight", slope.numpy()))


_MADE: dict[type[nn.Module], Callable[[_At, Any], str | None]] = {
    nn.CELU: _celu,
    nn.ELU: lambda at, module: at.node("Elu", at.x, alpha=float(module.alpha)),
    nn.GELU: _gelu,
    nn.Hardsigmoid: lambda at, module: _hardsigmoid(at),
    nn.Hardswish: lambda at, module: at.node("Mul", at.x, _hardsigmoid(at)),
    nn.LeakyReLU: lambda at, module: at.node("LeakyRelu", at.x, alpha=float(module.negative_slope)),
    nn.LogSigmoid: lambda at, module: at.node("Neg", _softplus(at, at.node("Neg", at.x))),
    nn.Mish: lambda at, module: at.node("Mul", at.x, at.node("Tanh", _softplus(at, at.x))),
    nn.PReLU: _prelu,
    nn.SELU: _plain("Selu"),
    nn.SiLU: lambda at, module: at.node("Mul", at.x, at.node("Sigmoid", at.x)),
    nn.Sigmoid: _plain("Sigmoid"),
    nn.Softplus: _general_softplus,
    nn.Tanh: _plain("Tanh"),
}


_BINARY = ARITHMETIC.keys() - {"neg", "mod", "sym_min", "sym_max"}
_SOFTMAX = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}


def float_operation(
    graph: Graph, step: Step, read: Callable[[str], str], source: Source
) -> str | None:
    """Nodes of a float step; None where it is not on the list.

    Args:
        graph: Receives the nodes.
        step: The step.
        read: Value of the program to its float tensor in the file.
        source: The program and its sizes.
    """
    if any(source.dtype(name) == torch.float64 for name in step.inputs):
        return None  # constants of the nodes below are float32
    if isinstance(step.target, nn.Module):
        return _module(graph, step, read, source)
    if source.counts(step):
        return None
    what, path = step.called, step.path
    args, kwargs = source.constants(path, step.args), source.constants(path, dict(step.kwargs))
    name = op_spec(what).name
    if name in _BINARY and len(args) == 2 and not kwargs:
        operands = [_operand(graph, value, read) for value in args]
        if None not in operands:
            return graph.node(ARITHMETIC[name], path, [str(operand) for operand in operands])
        return None
    form = _unary_form(what)
    if form and len(args) == 1 and not kwargs and isinstance(args[0], Ref):
        return graph.node(form, path, [read(args[0].name)])
    if what in _SOFTMAX:
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if axis is None:
            return None
        x, rank = read(args[0].name), len(source.shapes[args[0].name])
        return softmax(graph, path, x, int(axis), rank, _SOFTMAX[what])
    if what in NAMED:
        return NAMED[what](graph, replace(step, args=args, kwargs=kwargs), read, source)
    call = grid_call(what, args, kwargs)
    return None if call is None else _averaged(graph, step, call, read, source)


def _module(graph: Graph, step: Step, read: Callable[[str], str], source: Source) -> str | None:
    module: Any = _plain_module(step.target)
    path = step.path
    if module is None or len(step.args) != 1 or step.kwargs or not isinstance(step.args[0], Ref):
        return None
    name = step.args[0].name
    x = read(name)
    rank = len(source.shapes[name])
    made = elementwise(graph, path, x, module, rank)
    if made is not None:
        return made
    if layer_class(module, nn.Softmax, nn.LogSoftmax) and module.dim is not None:
        operator = "Softmax" if layer_class(module, nn.Softmax) else "LogSoftmax"
        return softmax(graph, path, x, int(module.dim), rank, operator)
    if layer_class(module, _BatchNorm):
        return _batch_norm(graph, path, x, module)
    if layer_class(module, nn.GroupNorm):
        return _group_norm(graph, step, x, module, source)
    if layer_class(module, nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.padding_mode == "zeros":
        return _conv(graph, path, graph.float_operand(path, x), module)
    if layer_class(module, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        return _conv_transpose(graph, path, graph.float_operand(path, x), module)
    if layer_class(module, nn.Linear):
        return _linear(graph, path, x, module, rank)
    call = module_call(module)
    return None if call is None else _averaged(graph, step, call, read, source)


def _plain_module(module: Any) -> Any:
    """A quantized layer with a float input as torch's own layer, with its quantized weight.

    None where it quantizes its input. Other modules are returned unchanged.
    """
    if not any(isinstance(child, TensorQuantizer) for child in module.children()):
        return module
    cls = getattr(module, "float_class", None)
    if is_active(getattr(module, "_input_quantizer", None)) or cls is None:
        return None
    if layer_class(module, cls) is None:
        return None
    plain = copy.copy(module)
    plain.__class__ = cls
    plain._modules, plain._parameters = {}, dict(module._parameters)
    if hasattr(module, "_weight_quantizer"):
        plain.weight = nn.Parameter(module.quantized_weight().detach())
        bias = module.bias  # of a projection of an attention: rows of what is not its own
        plain.bias = None if bias is None else nn.Parameter(bias.detach())
    return plain


def _averaged(
    graph: Graph, step: Step, call: tuple[str, dict[str, Any]], read: Callable[[str], str],
    source: Source,
) -> str | None:  # fmt: skip
    what, given = call
    if what != "avg_pool":
        return None
    name = step.args[0].name
    shapes = source.named(name), source.named(step.outputs[0])
    return average_pool(graph, step.path, read(name), given, shapes)


def _operand(graph: Graph, value: Any, read: Callable[[str], str]) -> str | None:
    if isinstance(value, Ref):
        return read(value.name)
    if isinstance(value, int | float):
        return graph.constant(f"float_{float(value):g}", float(value))
    return None


def _tensor(graph: Graph, name: str, value: Tensor) -> str:
    return graph.constant(name, value.detach().float().cpu().numpy())


def _parameters(graph: Graph, path: str, module: Any) -> list[str]:
    return [
        _tensor(graph, f"{path}.{name}", getattr(module, name))
        for name in ("weight", "bias")
        if getattr(module, name) is not None
    ]


def _conv(graph: Graph, path: str, x: str, module: Any) -> str:
    before, after = zip(*zero_padding(module), strict=True)
    pads = [*before, *after]
    return graph.node(
        "Conv", path, [x, *_parameters(graph, path, module)], pads=pads, **_settings(module)
    )


def _conv_transpose(graph: Graph, path: str, x: str, module: Any) -> str:
    return graph.node(
        "ConvTranspose", path, [x, *_parameters(graph, path, module)],
        pads=list(module.padding) * 2, output_padding=list(module.output_padding),
        **_settings(module),
    )  # fmt: skip


def _settings(module: Any) -> dict[str, Any]:
    return {
        "strides": list(module.stride),
        "dilations": list(module.dilation),
        "group": module.groups,
        "kernel_shape": list(module.kernel_size),
    }


def _linear(graph: Graph, path: str, x: str, module: Any, rank: int) -> str:
    if rank == 2:
        x = graph.float_operand(path, x)
        return graph.node("Gemm", path, [x, *_parameters(graph, path, module)], transB=1)
    weight = _tensor(graph, f"{path}.weight", module.weight.t())
    made = graph.node("MatMul", path, [x, weight])
    if module.bias is None:
        return made
    return graph.node("Add", path, [made, _tensor(graph, f"{path}.bias", module.bias)])


def _batch_norm(graph: Graph, path: str, x: str, module: Any) -> str | None:
    if module.running_mean is None:
        return None
    count = module.num_features
    weight = torch.ones(count) if module.weight is None else module.weight
    bias = torch.zeros(count) if module.bias is None else module.bias
    tensors = {
        "weight": weight, "bias": bias,
        "running_mean": module.running_mean, "running_var": module.running_var,
    }  # fmt: skip
    inputs = [_tensor(graph, f"{path}.{name}", value) for name, value in tensors.items()]
    return graph.node("BatchNormalization", path, [x, *inputs], epsilon=float(module.eps))


def _group_norm(graph: Graph, step: Step, x: str, module: Any, source: Source) -> str | None:
    """Normalize the values of each group as one row, then apply factor and shift."""
    path, name = step.path, step.args[0].name
    shape = source.shapes[name]
    if sum(isinstance(size, str) for size in source.named(name)) > 1:
        return None
    rows = reshaped(graph, path, x, [0, module.num_groups, -1])
    made = instances(graph, path, rows, (module.num_groups, 3), float(module.eps))
    made = reshaped(graph, path, made, source.target(path, name))
    for operator, key in (("Mul", "weight"), ("Add", "bias")):
        value = getattr(module, key)
        if value is not None:
            value = value.detach().reshape(-1, *[1] * (len(shape) - 2))
            made = graph.node(operator, path, [made, _tensor(graph, f"{path}.{key}", value)])
    return made

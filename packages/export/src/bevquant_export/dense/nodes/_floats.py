"""Float operations of a file: the function of `_aten` for each module and operator of torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_export.dense.nodes._at import At, Form, written
from bevquant_export.dense.nodes._aten import LAYERS, NAMED, plain
from bevquant_export.dense.nodes._grid import average_pool
from bevquant_export.dense.nodes._numbers import ARITHMETIC
from bevquant_graph import layer_class, op_spec
from bevquant_int8sim.program import (
    FloatCall,
    Ref,
    Step,
    grid_call,
    is_active,
    module_call,
    names_in,
    replaced,
)
from bevquant_quantizers import TensorQuantizer

_BINARY = ARITHMETIC.keys() - {"neg", "mod", "sym_min", "sym_max"}
_CONV = "weight bias stride padding dilation groups"
_MODULES: dict[type[nn.Module], str] = {
    nn.CELU: "celu alpha", nn.ELU: "elu alpha", nn.GELU: "gelu approximate",
    nn.Hardsigmoid: "hardsigmoid", nn.Hardswish: "hardswish",
    nn.LeakyReLU: "leaky_relu negative_slope", nn.LogSigmoid: "log_sigmoid", nn.Mish: "mish",
    nn.PReLU: "prelu weight", nn.SELU: "selu", nn.SiLU: "silu", nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus beta threshold", nn.Tanh: "tanh", nn.Softmax: "softmax dim",
    nn.LogSoftmax: "log_softmax dim", nn.Linear: "linear weight bias",
    _BatchNorm: "batch_norm weight bias running_mean running_var eps",
    nn.GroupNorm: "group_norm num_groups weight bias eps",
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), f"conv2d {_CONV}"),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
                    f"conv_transpose2d {_CONV} output_padding"),
}  # fmt: skip
"""Modules, the names of their functions, and the attributes that are these functions' arguments."""


def as_layer(step: FloatCall, constants: Mapping[str, Tensor]) -> FloatCall:
    """The step of a layer with its weights as arguments; other steps unchanged."""
    if not isinstance(step.function, torch._ops.OpOverload):
        return step
    rest = replaced(step.args[1:], lambda ref: constants.get(ref.name, ref))
    if names_in(rest) or step.name not in (*LAYERS, "hardtanh"):
        return step
    if step.name == "hardtanh":
        bounds = dict(zip(("min", "max"), (*rest, *(-1.0, 1.0)[len(rest) :]), strict=False))
        return replace(step, args=step.args[:1], kwargs=bounds, name="clamp")
    return replace(step, args=(step.args[0], *rest))


def float_operation(at: At) -> str | None:
    """Nodes of a float step; None where it is not on the list."""
    step, source = at.step, at.source
    if any(source.dtype(name) == torch.float64 for name in step.inputs):
        return None  # constants of the nodes below are float32
    if isinstance(step.target, nn.Module):
        return _module(at, step.target)
    if source.counts(step):
        return None
    args, kwargs = source.constants(step.path, (step.args, dict(step.kwargs)))
    form = _form(step)
    if form is not None:
        made: str | None = written(form, at, args, kwargs)
        return made
    return _averaged(at, grid_call(step.called, args, kwargs))


def _form(step: Step) -> Form | None:
    what = step.called
    if what in LAYERS and isinstance(step.target, torch._ops.OpOverload):
        return None if names_in(step.args[1:]) else LAYERS[what]
    name = op_spec(what).name
    if name in _BINARY:
        return _binary(ARITHMETIC[name])
    return NAMED.get(what) or _unary(what)


def _binary(operator: str) -> Form:
    def form(at: At, x: Any, y: Any) -> str | None:
        known = all(isinstance(value, Ref | int | float) for value in (x, y))
        return at.node(operator, x, y) if known else None

    return form


@cache
def _unary(what: str) -> Form | None:
    """ONNX's function of one tensor with the operator's name, if operator set 11 has it."""
    from onnx import defs

    spec = op_spec(what)
    name = spec.name.capitalize()
    return plain(name) if spec.unary and defs.has(name, 11) else None


def _module(at: At, module: Any) -> str | None:
    step, module = at.step, _plain_module(module)
    if module is None or len(step.args) != 1 or step.kwargs or not isinstance(step.args[0], Ref):
        return None
    kind = layer_class(module, *_MODULES)
    if kind is None:
        return _averaged(at, module_call(module))
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    what, *names = _MODULES[kind].split()
    form = LAYERS.get(what) or NAMED.get(what) or plain(what.capitalize())
    made: str | None = form(at, step.args[0], **{name: getattr(module, name) for name in names})
    return made


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


def _averaged(at: At, call: tuple[str, dict[str, Any]] | None) -> str | None:
    what, given = call or ("", {})
    if what != "avg_pool":
        return None
    return average_pool(at, at.name(at.step.args[0]), given)

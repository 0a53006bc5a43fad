"""Functions and modules that a saved program may name: nothing else is looked up on load."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bevquant_graph import layer_class, op_spec
from bevquant_int8sim.model._coords import Geometry, convolved_coords, dense, pooled
from bevquant_int8sim.model._float8 import (
    FLOAT8,
    BlockLayer,
    Float8Layer,
    blocks_of,
    blocks_round,
    float8_round,
)
from bevquant_int8sim.model._float_sparse import FloatSparseConv, OpaqueCall
from bevquant_int8sim.model._grid_operations import require
from bevquant_int8sim.model._operation import METADATA
from bevquant_int8sim.model._quantizers import is_active
from bevquant_int8sim.model._step import Method, Ref, SparseRef, torch_operator
from bevquant_quantizers import format_of

# Arguments of steps as JSON, and back: containers, references and plain constants.


def to_json(value: Any) -> Any:
    """`value` in terms of JSON; what JSON has no form for becomes an object with one ``$`` key."""
    if isinstance(value, np.integer | np.floating | np.bool_):  # as of a stride by numpy
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Ref):
        return {"$ref": value.name}
    if isinstance(value, SparseRef):
        return {"$sparse": [value.features, value.coords]}
    if isinstance(value, slice):
        return {"$slice": [to_json(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, EllipsisType):
        return {"$ellipsis": True}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": value.type}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"$dict": {key: to_json(item) for key, item in value.items()}}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"$items": [[key, to_json(item)] for key, item in value.items()]}
    raise ValueError(f"a constant of type {type(value).__name__} cannot be saved")


def from_json(data: Any) -> Any:
    """Undo `to_json`."""
    if isinstance(data, list):
        return [from_json(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"expected an object with one $ key, got keys {sorted(data)}")
    ((kind, inner),) = data.items()
    if kind == "$ref":
        return Ref(_text(inner))
    if kind == "$sparse" and isinstance(inner, list) and len(inner) == 2:
        return SparseRef(_text(inner[0]), _text(inner[1]))
    if kind == "$float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind == "$slice" and isinstance(inner, list) and len(inner) == 3:
        ends = [from_json(item) for item in inner]
        if all(end is None or isinstance(end, int | Ref) for end in ends):
            return slice(*ends)
    if kind == "$ellipsis":
        return ...
    if kind == "$dtype" and isinstance(getattr(torch, _text(inner), None), torch.dtype):
        return getattr(torch, inner)
    if kind == "$device" and inner in ("cpu", "cuda"):
        return torch.device(inner)
    if kind == "$tuple" and isinstance(inner, list):
        return tuple(from_json(item) for item in inner)
    if kind == "$dict" and isinstance(inner, dict):
        return {key: from_json(item) for key, item in inner.items()}
    if kind == "$items" and isinstance(inner, list):
        return dict(_item(entry) for entry in inner)
    raise ValueError(f"unknown form {kind!r}, or other content than such has")


def _item(entry: Any) -> tuple[str | int, Any]:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str | int):
        raise ValueError(f"{entry!r} is no entry of a dictionary")
    return entry[0], from_json(entry[1])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {value!r}")
    return value


# Attributes that a saved program may read.
READABLE = METADATA | {"indices", "spatial_shape", "batch_size", "T", "mT", "dtype"}
_OPERATORS = (
    "add sub mul truediv floordiv mod pow neg matmul getitem eq ne lt le gt ge and_ or_ iadd imul"
)
_TORCH = (
    "abs add bmm cat clamp concat div exp flatten floor index_select log matmul max maximum mean "
    "min minimum movedim mul neg permute relu reshape round rsqrt sigmoid softmax split sqrt "
    "square squeeze stack sub sum sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum tanh "
    "topk transpose unsqueeze where"
)
_FUNCTIONAL = (
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "elu gelu grid_sample hardsigmoid hardswish hardtanh interpolate layer_norm leaky_relu "
    "log_softmax max_pool1d max_pool2d max_pool3d mish normalize pad relu relu6 scaled_dot_product_"
    "attention sigmoid silu softmax softplus tanh"
)
_METHODS = frozenset(
    "abs add add_ amax amin argmax bmm clamp clamp_ clone contiguous detach div div_ exp expand "
    "expand_as flatten flip float gather index_select log matmul max mean min movedim mul mul_ "
    "narrow new_zeros permute pow relu relu_ repeat reshape roll round scatter select sigmoid "
    "size softmax split sqrt squeeze stack sub sum swapaxes t tanh to topk transpose type_as "
    "unbind unflatten unsqueeze view".split()
)
_NAMED: dict[str, Callable[..., Any]] = {
    "convolved_coords": convolved_coords,
    "float8_round": float8_round,
    "blocks_round": blocks_round,
    "getattr": getattr,
    "pooled": pooled,
    "require": require,
    "to_dense": dense,
    "round": round,
    **{f"math.{function.__name__}": function for function in (math.ceil, math.floor, math.trunc)},
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"torch.{name}": getattr(torch, name) for name in _TORCH.split()},
    **{f"functional.{name}": getattr(functional, name) for name in _FUNCTIONAL.split()},
}
_NAMES = {id(function): name for name, function in reversed(_NAMED.items())}

_CONV = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"
_POOL = "kernel_size stride padding dilation ceil_mode return_indices"
_MODULES: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV + " bias"),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        _CONV + " output_padding bias",
    ),
    nn.Linear: "in_features out_features bias",
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        "num_features eps momentum affine track_running_stats",
    ),
    nn.GroupNorm: "num_groups num_channels eps affine",
    nn.LayerNorm: "normalized_shape eps elementwise_affine bias",
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), _POOL),
    nn.AvgPool1d: "kernel_size stride padding ceil_mode count_include_pad",
    **dict.fromkeys(
        (nn.AvgPool2d, nn.AvgPool3d),
        "kernel_size stride padding ceil_mode count_include_pad divisor_override",
    ),
    **dict.fromkeys(
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d),
        "output_size",
    ),
    nn.Upsample: "size scale_factor mode align_corners recompute_scale_factor",
    **dict.fromkeys(
        (nn.Hardsigmoid, nn.Hardswish, nn.Identity, nn.Mish, nn.ReLU, nn.ReLU6, nn.Sigmoid,
         nn.SiLU, nn.Tanh),
        "",
    ),
    nn.ELU: "alpha",
    nn.GELU: "approximate",
    nn.Hardtanh: "min_val max_val",
    nn.LeakyReLU: "negative_slope",
    nn.PReLU: "num_parameters",
    nn.Softmax: "dim",
    nn.Softplus: "beta threshold",
    nn.Flatten: "start_dim end_dim",
    nn.Unflatten: "dim unflattened_size",
    nn.PixelShuffle: "upscale_factor",
}  # fmt: skip
_CLASSES = {cls.__name__: cls for cls in _MODULES}


def function_name(function: Callable[..., Any]) -> str | None:
    """Name of a function for a saved program; ``None`` where it is not among those allowed."""
    if isinstance(function, Method):
        return f"method.{function.__name__}" if function.__name__ in _METHODS else None
    if isinstance(function, torch._ops.OpOverload):
        return str(function) if _computes(function) else None
    return _NAMES.get(id(function))


def _computes(operator: torch._ops.OpOverload) -> bool:
    """Whether it computes tensors from tensors or numbers, and writes nothing."""
    given = operator._schema.arguments
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in given)
    # Other operators that make tensors of nothing, as from a file, do not count.
    return not writes and (op_spec(operator).creates or any("Tensor" in str(a.type) for a in given))


def named_function(name: str, libraries: Collection[str] = ()) -> Callable[..., Any]:
    """The function of that name: torch's own, or an operator of one of the libraries."""
    kind, _, rest = name.partition(".")
    if kind == "method" and rest in _METHODS:
        return Method(rest)
    if name in _NAMED:
        return _NAMED[name]
    operator = torch_operator(name)
    if operator is None and kind in libraries:
        raise ValueError(
            f"it calls {name!r}, which is not registered here: import the library first"
        )
    if operator is None or not _computes(operator):
        raise ValueError(f"it calls {name!r}, which a saved program may not")
    if kind != "aten" and kind not in libraries:
        raise ValueError(
            f"it calls {name!r}, an operator of another library than torch; where you trust that "
            f"library with this file, load(..., operators=[{kind!r}])"
        )
    return operator


def module_config(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]] | str:
    """``({"class": …, arguments}, tensors)`` of a module, or why it cannot be saved."""
    if isinstance(module, FloatSparseConv):
        held = {name: getattr(module, name) for name in ("key", "activation", "alpha")}
        held = {"class": "FloatSparseConv", "geometry": asdict(module.geometry), **held}
        return held, dict(module.state_dict())
    if isinstance(module, Float8Layer):
        names = ("op", "input_scale", "form", "settings")
        held = {name: getattr(module, name) for name in names}
        return {"class": type(module).__name__, **held}, dict(module.state_dict())
    if isinstance(module, OpaqueCall):
        module = module.module
    known = layer_class(module)
    if known is None:
        return f"{type(module).__name__} is not among the layer types that can be saved"
    cls: type[nn.Module] = known
    state = dict(module.state_dict())
    quantizers = [m for name, m in module.named_modules() if name.endswith("_quantizer")]
    if quantizers and not any(is_active(q) for q in quantizers):
        cls = getattr(cls, "float_class", cls)
        state = {name: t for name, t in state.items() if "_quantizer." not in name}
    elif quantizers:
        return "it holds fake quantizers"
    if cls not in _MODULES or (any(True for _ in module.children()) and not quantizers):
        return f"{cls.__name__} is not among the layer types that can be saved"
    config: dict[str, Any] = {"class": cls.__name__}
    for name in _MODULES[cls].split():
        value = getattr(module, name)
        config[name] = value is not None if name == "bias" else value
    return config, state


def _float8_layer(state: dict[str, Tensor], form: str, **arguments: Any) -> Float8Layer:
    weight, scale, bias = (state.get(name) for name in ("weight", "weight_scale", "bias"))
    known = {one.dtype for one in FLOAT8.values()}
    if form not in FLOAT8 or weight is None or weight.dtype not in known or scale is None:
        raise ValueError(f"an FP8 layer has a format of {', '.join(FLOAT8)} and a weight in FP8")
    return Float8Layer(weight=weight, weight_scale=scale, bias=bias, form=form, **arguments).eval()


def _block_layer(state: dict[str, Tensor], input_scale: float, **arguments: Any) -> BlockLayer:
    weight, form = state["weight"], arguments["form"]
    if not format_of(form).block or weight.dtype != torch.float32:
        raise ValueError("a layer in blocks has a block format and a weight in float32")
    blocks = blocks_of(weight, state["block_scale"], state["tensor_scale"], form)
    return BlockLayer(weight=blocks, bias=state.get("bias"), amax=input_scale, **arguments).eval()


def rebuilt_module(config: dict[str, Any], state: dict[str, Tensor]) -> nn.Module:
    """The module that `module_config` described."""
    if not isinstance(config, dict) or not isinstance(config.get("class"), str):
        raise ValueError("its module is no class with arguments")
    name = config["class"]
    arguments = {key: value for key, value in config.items() if key != "class"}
    try:
        if name == "FloatSparseConv":
            geometry = Geometry(**arguments.pop("geometry"))
            return FloatSparseConv(state["weight"], state.get("bias"), geometry, **arguments).eval()
        if name == "Float8Layer":
            return _float8_layer(state, **arguments)
        if name == "BlockLayer":
            return _block_layer(state, **arguments)
        if name not in _CLASSES:
            raise ValueError(f"a saved program may not hold a module of class {name!r}")
        if set(arguments) != set(_MODULES[_CLASSES[name]].split()):
            raise ValueError(f"its module {name} has other arguments than {sorted(arguments)}")
        # On meta, sizes take no memory: that of the file's tensors is there already.
        with torch.device("meta"):
            module = _CLASSES[name](**arguments)
        module.load_state_dict(state, strict=True, assign=True)
        return module.float().eval()
    except (KeyError, TypeError, RuntimeError, AttributeError, OverflowError, AssertionError,
            ArithmeticError) as error:  # fmt: skip
        raise ValueError(f"its module {name} cannot be rebuilt: {error}") from error

"""Replacing float layers by their quantized forms, in place and once per module object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from bevquant_graph import own_code, replace_modules
from bevquant_qnn import _conv, _pool
from bevquant_qnn._attention import QuantMultiheadAttention
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._pool import QuantPool
from bevquant_qnn._result import QuantizedModule, SkippedModule
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_qnn._steps import is_quantized
from bevquant_quantizers import TensorQuantizer
from bevquant_sparse import is_sparse_conv

_DENSE: tuple[type[Any], ...] = (
    _conv.QuantConv1d,
    _conv.QuantConv2d,
    _conv.QuantConv3d,
    _conv.QuantConvTranspose1d,
    _conv.QuantConvTranspose2d,
    _conv.QuantConvTranspose3d,
    _conv.QuantLinear,
)
_POOLS: tuple[type[Any], ...] = tuple(
    kind
    for kind in vars(_pool).values()
    if isinstance(kind, type) and issubclass(kind, _pool.QuantPool) and kind is not _pool.QuantPool
)
# spconv's other modules that read features: class name to what keeps them float.
_SPARSE_FLOAT = {
    "SparseMaxPool": "sparse pooling stays float: it computes no products",
    "SparseAvgPool": "sparse pooling stays float: it computes no products",
    "AddTableMisaligned": "adds sparse tensors over different voxels, in float",
}


def replace_layers(
    model: nn.Module, config: QuantConfig
) -> tuple[
    nn.Module,
    dict[nn.Module, nn.Module],
    list[QuantizedModule],
    list[SkippedModule],
    set[nn.Module],
]:
    """Replace every layer that `config` does not leave float.

    Returns the model (another object only where the model itself is a layer), quantized layer to
    float one, what was replaced, what was passed over, and the layers that the settings leave.
    """
    layers = list(_layers(model))
    edge = _edges(layers, config)
    built: dict[nn.Module, nn.Module] = {}
    done: list[QuantizedModule] = []
    skipped: list[SkippedModule] = []
    kept: set[nn.Module] = set()
    for path, module, parent in layers:
        if parent in built:  # an attention's own, decided with it
            continue
        reason = edge.get(module) or _left(path, module, config)
        if reason is not None:
            kept.add(module)
        reason = reason or _refusal(module)
        if isinstance(parent, nn.MultiheadAttention):
            reason = f"read by its {_name(parent)}, which stays float, and never called"
        if reason is not None:
            skipped.append(SkippedModule(path, reason))
            continue
        if module not in built and isinstance(module, nn.MultiheadAttention):
            out = f"{path}.out_proj" if path else "out_proj"
            reason = edge.get(module.out_proj) or _left(out, module.out_proj, config)
            reason = reason or _refusal(module.out_proj)
            skipped += [] if reason is None else [SkippedModule(out, reason)]
            built[module] = QuantMultiheadAttention.from_float(
                module,
                quant_desc_input=config.input_descriptor(),
                quant_desc_weight=config.weight_descriptor(0),
                quantize_out=reason is None,
                quantize_matmul=config.quantize_matmul,
            )
            done += [
                QuantizedModule(f"{path}.{name}" if path else name, _name(child), _name(module))
                for name, child in built[module].named_children()
                if is_quantized(child) or name == "quant_attention"
            ]
        elif module not in built:
            built[module] = _quantized_form(module, config)
            done.append(QuantizedModule(path, _name(built[module]), _name(module)))
        if parent is None:
            model = built[module]
        else:
            parent._modules[path.rpartition(".")[2]] = built[module]
            if isinstance(parent, nn.TransformerEncoderLayer):
                # Its fused form, in evaluation, reads the layers' weights without calling them.
                parent.activation_relu_or_gelu = 0
    # Lists and dicts that forwards go over hold layers too; one that is excluded under another path
    # is still a child.
    children = set(model.modules())
    replace_modules(model, {m: made for m, made in built.items() if m not in children})
    for encoder in model.modules():
        # Nested tensors are for layers in their fused form.
        if isinstance(encoder, nn.TransformerEncoder) and any(
            getattr(layer, "activation_relu_or_gelu", 1) == 0 for layer in encoder.layers
        ):
            encoder.use_nested_tensor = False
    return model, {quantized: module for module, quantized in built.items()}, done, skipped, kept


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield (path, layer, parent) for all that could be quantized and is not yet, each path."""
    inside_quantized: set[str] = set()
    parents: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parents[path] = module
        if path.rpartition(".")[0] in inside_quantized and path:
            inside_quantized.add(path)
            continue
        if isinstance(module, TensorQuantizer) or is_quantized(module):
            inside_quantized.add(path)
            continue
        if has_quantized_form(module):
            yield path, module, parents[path.rpartition(".")[0]] if path else None


def has_quantized_form(module: nn.Module) -> bool:
    """Whether `replace_layers` decides on modules of this kind."""
    return _target(module) is not None or _sparse_float(module) is not None


def _target(module: nn.Module) -> type[Any] | None:
    if is_sparse_conv(module):
        return QuantSparseConvolution
    kinds: tuple[type[Any], ...] = (*_DENSE, *_POOLS, QuantMultiheadAttention)
    return next((kind for kind in kinds if isinstance(module, kind.float_class)), None)


def _sparse_float(module: nn.Module) -> str | None:
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((_SPARSE_FLOAT[name] for name in names if name in _SPARSE_FLOAT), None)


def _edges(
    layers: list[tuple[str, nn.Module, nn.Module | None]], config: QuantConfig
) -> dict[nn.Module, str]:
    """Return the first and last weighted layer, where the settings leave them float."""
    weighted = [
        module
        for _, module, _ in layers
        if is_sparse_conv(module) or isinstance(module, tuple(k.float_class for k in _DENSE))
    ]
    edges: dict[nn.Module, str] = {}
    if weighted and not config.quantize_first_layer:
        edges[weighted[0]] = "first layer, and quantize_first_layer is False"
    if weighted and not config.quantize_last_layer:
        edges[weighted[-1]] = "last layer, and quantize_last_layer is False"
    return edges


def _left(path: str, module: nn.Module, config: QuantConfig) -> str | None:
    """Why the settings leave a layer in float."""
    kind = _target(module)
    pattern = config.excluded_by(path)
    if pattern is not None:
        return f"excluded by {pattern!r}"
    if kind in _POOLS and not config.quantize_pool:
        return "quantize_pool is False"
    if isinstance(module, nn.Linear | nn.MultiheadAttention) and not config.quantize_linear:
        return "quantize_linear is False"
    return None


def _refusal(module: nn.Module) -> str | None:
    """Why the layer itself cannot be quantized."""
    kind = _target(module)
    if kind is None:
        return _sparse_float(module)
    if kind is QuantSparseConvolution:
        return _sparse_refusal(module)
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy: run the model once, then quantize it"
    float_class: type[nn.Module] = kind.float_class
    if kind in _DENSE and "weight" not in module._parameters:
        return (
            "its weight is computed (parametrization or weight norm), not a parameter; "
            "bevquant_fusion.fuse_model makes it one"
        )
    own = own_code(module, float_class)
    if own is not None:
        return f"{own}; replacing it by {kind.__name__} would change its result"
    return None


def _sparse_refusal(module: nn.Module) -> str | None:
    name = type(module).__qualname__
    if "weight" not in module._parameters or not hasattr(module, "indice_key"):
        return f"{name} is no spconv-style module (weight, indice_key, …)"
    own = own_code(module)
    return None if own is None else f"{own}; taking it over would change its result"


def _quantized_form(module: nn.Module, config: QuantConfig) -> nn.Module:
    kind: Any = _target(module)
    settings = {"quant_desc_input": config.input_descriptor()}
    if not issubclass(kind, QuantPool):
        settings["quant_desc_weight"] = config.weight_descriptor(kind.weight_axis(module))
    made: nn.Module = kind.from_float(module, **settings)
    return made

"""What leaves hold and return: parameters as they compute with them, and results."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_hybrid.nn.qat import Weighted, WithBatchNorm
from bevquant_hybrid.nn.quantized import FixedPoint
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization.fake_quantize import FakeQuantize
from bevquant_hybrid.undisturbed import moved
from bevquant_hybrid_tools.quant_profiler._calls import Call, Selection, record_calls, tensors_in

__all__ = ["fixed_weight", "get_raw_features", "scale_of"]

_FIXED = ("weight", "bias", "factor", "offset")


def parameters_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values: of QAT layers the quantized weight, of fixed-point ones the integers."""
    if isinstance(module, FixedPoint):
        for name in _FIXED:
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                yield name, _fixed(module, name)
        return
    for name, value in module.named_parameters():
        if "fake_quant" in name or "activation_post_process" in name:
            continue
        made = value.detach()
        if name == "weight" and isinstance(module, Weighted) and _is_quantized(module):
            made = module.as_quantized(made)
        yield name, made


def _is_quantized(module: Weighted) -> bool:
    """Whether the weight itself, and not what a batch norm makes of it, has the scale."""
    fake_quant = module.weight_fake_quant
    return isinstance(fake_quant, FakeQuantize) and not isinstance(module, WithBatchNorm)


def fixed_weight(module: nn.Module) -> Tensor:
    """A fixed-point layer's weight, with its scale."""
    return _fixed(module, "weight")


def _fixed(module: nn.Module, name: str) -> Tensor:
    values: Tensor = getattr(module, name).detach()
    scale: Tensor | None = getattr(module, f"{name}_scale", None)
    if scale is None:
        return values
    if scale.numel() == 1:
        return QTensor(values, scale, "qint8")
    axis = 1 if getattr(module, "transposed", False) else 0
    # The groups of a transposed convolution share the scales of axis 1.
    return QTensor(values, scale[: values.shape[axis]], "qint8", axis)


def get_raw_features(
    model: nn.Module,
    example_inputs: Any,
    prefixes: str | Iterable[str] = (),
    types: type | Iterable[type] = (),
    device: torch.device | str | None = None,
    preserve_int: bool = False,
    use_class_name: bool = False,
    skip_identity: bool = False,
) -> list[dict[str, Any]]:
    """Run a model and list inputs, outputs and parameters of its operators.

    The model runs in evaluation mode and observes nothing. Functions that are called between
    operators are not listed.

    Args:
        model: Float, calibration, QAT or converted model.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        prefixes: Starts of names: only these; the name of a module means it and what it holds.
        types: Classes: only these (and those of `prefixes`).
        device: Where a copy of the model runs; None for the model as it is.
        preserve_int: Give integers where a value has a scale.
        use_class_name: Give the class's bare name as the module's type.
        skip_identity: Leave `nn.Identity` out.

    Returns:
        One dictionary per tensor, in the order of execution: ``module_name``; ``attr``: ``input``,
        ``output``, with ``-0``, ``-1`` where there are several and again inside lists, or the name
        of a parameter; ``data``, dequantized; ``scale``, None without one; ``ch_axis``, −1 for one
        scale; ``ff_method``, of a FloatFunctional; and ``module_type``, ``dtype`` and ``repeat``:
        how often the module had been called before.

    Example:
        >>> features = get_raw_features(nn.Sequential(nn.ReLU()), torch.tensor([-1.0, 2.0]))
        >>> [(f["module_name"], f["attr"], f["data"].tolist()) for f in features]
        [('0', 'input', [-1.0, 2.0]), ('0', 'output', [0.0, 2.0])]
    """
    if device is not None:
        model = copy.deepcopy(model).to(device)
        example_inputs = moved(example_inputs, torch.device(device))
    wanted = Selection(model, prefixes, types, "get_raw_features")
    features = []
    for call in record_calls(model, example_inputs):
        if call.module is None or not wanted.takes(call.path, call.module):
            continue
        if skip_identity and layer_class(call.module, nn.Identity):
            continue
        kind = type(call.module)
        common = {
            "module_name": call.path,
            "module_type": kind.__name__ if use_class_name else str(kind),
            "repeat": call.repeat,
            "ff_method": call.method,
        }
        for attr, tensor in _tensors_of(call):
            features.append({**common, "attr": attr, **_described(tensor, preserve_int)})
    return features


def _tensors_of(call: Call) -> Iterator[tuple[str, Tensor]]:
    given: list[Any] = list(call.args)
    given += [value for value in call.kwargs.values() if next(tensors_in(value), None) is not None]
    yield from named_tensors("input", given[0] if len(given) == 1 else given)
    yield from named_tensors("output", call.output)
    yield from parameters_of(call.operator)


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor under a name; those of a list under the name and their places, and so on."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(f"{name}-{key}", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from named_tensors(f"{name}-{index}", item)


def scale_of(tensor: Any) -> Tensor | None:
    """A tensor's scale; None for a float tensor, and where values pass unrounded to be counted."""
    if not isinstance(tensor, QTensor) or not (tensor.on_grid or tensor.dtype == "qint32"):
        return None
    return tensor.scale.detach()


def _described(tensor: Tensor, preserve_int: bool) -> dict[str, Any]:
    if not isinstance(tensor, QTensor):
        return {"data": tensor, "scale": None, "ch_axis": -1, "dtype": str(tensor.dtype)}
    scale = scale_of(tensor)
    return {
        "data": tensor.int_repr() if preserve_int and scale is not None else tensor.dequantize(),
        "scale": scale,
        "ch_axis": tensor.q_per_channel_axis(),
        "dtype": str(tensor.dtype),
    }

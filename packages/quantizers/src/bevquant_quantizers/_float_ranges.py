"""Largest values of the tensors between modules, over every calibration frame.

A quantizer knows the range of its own input. What runs in float between quantized layers has no
quantizer, and a format with few bits (float16 ends at 65,504) needs its range as well.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import check_kind

from ._select import named_quantizers

_ATTRIBUTE = "_float_ranges"
_OUTPUT = "output"
_FIRST = 64  # values that are read before all of them are


@dataclass(frozen=True)
class FloatRange:
    """Range of one value over all calibration frames.

    Attributes:
        largest: Largest absolute value; infinite where a value was infinite or NaN.
        whole: Whether every value was a whole number, as ids and grid cells are.
    """

    largest: float
    whole: bool

    def joined(self, other: FloatRange | None) -> FloatRange:
        """Range of the values of both."""
        if other is None:
            return self
        return FloatRange(max(self.largest, other.largest), self.whole and other.whole)


Ranges = dict[str, dict[str, FloatRange]]


def float_ranges(model: nn.Module) -> Ranges:
    """Ranges that `calibrate` found for the inputs and outputs of modules.

    Args:
        model: A calibrated model, or a copy or a part of one.

    Returns:
        For each module path (``""`` is the model), value names and ranges. A value is ``output``, a
        parameter of the forward, or a member of one: ``images[0]``. Several outputs have one range.
        Modules that no frame ran are not listed.

    Example:
        >>> from bevquant_quantizers import QuantDescriptor, TensorQuantizer, calibrate
        >>> quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"))
        >>> model = nn.Sequential(nn.Flatten(), quantizer)
        >>> _ = calibrate(model, [torch.tensor([[0.5, -2.0]]), torch.tensor([[1.0, 3.5]])])
        >>> float_ranges(model)["0"]["output"]
        FloatRange(largest=3.5, whole=False)
    """
    check_kind(model, nn.Module, "a torch module")
    found = {path: getattr(m, _ATTRIBUTE, None) for path, m in model.named_modules()}
    return {path: dict(ranges) for path, ranges in found.items() if ranges}


def set_float_ranges(model: nn.Module, ranges: Mapping[str, Mapping[str, FloatRange]]) -> None:
    """Give modules the ranges that `float_ranges` returned; modules not named lose theirs."""
    modules = dict(model.named_modules())
    unknown = sorted(ranges.keys() - modules.keys())
    if unknown:
        raise ValueError(
            f"float ranges of {', '.join(unknown)}: expected modules of the model; calibrate it"
        )
    for path, module in modules.items():
        module.__dict__.pop(_ATTRIBUTE, None)
        if ranges.get(path):
            module.__dict__[_ATTRIBUTE] = dict(ranges[path])


def joined_ranges(several: Iterator[Ranges]) -> Ranges:
    """Union of the ranges of several processes, each with its share of the frames."""
    found: Ranges = {}
    for ranges in several:
        for path, values in ranges.items():
            held = found.setdefault(path, {})
            for name, value in values.items():
                held[name] = value.joined(held.get(name))
    return found


@contextmanager
def recording(model: nn.Module, found: Ranges) -> Iterator[None]:
    """Add inputs and outputs of modules to `found` while the model runs."""
    # Quantizers are skipped: in calibration they return their input.
    quantizers = {id(m) for entry in named_quantizers(model) for m in entry.quantizer.modules()}
    seen: dict[int, tuple[weakref.ref[Tensor], int, FloatRange]] = {}
    handles: list[Any] = []

    def take(path: str, name: str, value: Any) -> None:
        for leaf, tensor in _leaves(name, value):
            if torch._C._functorch.is_batchedtensor(tensor):
                raise ValueError(
                    f"calibrate: {path or 'the model'} is called in torch.vmap, where ranges "
                    "cannot be measured; call it on the whole batch, without vmap"
                )
            # A tensor between two modules is read once.
            known = seen.get(id(tensor))
            version = 0 if tensor.is_inference() else tensor._version
            if known is None or known[0]() is not tensor or known[1] != version:
                measured = _range_of(tensor)
                if measured is None:
                    continue
                known = (weakref.ref(tensor), version, measured)
                seen[id(tensor)] = known
            held = found.setdefault(path, {})
            # One range for all outputs: which of them a step makes is not known here.
            key = _OUTPUT if name == _OUTPUT else leaf
            held[key] = known[2].joined(held.get(key))

    def watch(path: str, module: nn.Module) -> None:
        try:
            signature = inspect.signature(module.forward)
        except (TypeError, ValueError):  # a forward that shows none
            signature = inspect.Signature()

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            for name, value in _bound(signature, args, kwargs):
                take(path, name, value)

        def after(_: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
            take(path, _OUTPUT, made)
            if not path:
                seen.clear()

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    try:
        for path, module in model.named_modules():
            if id(module) not in quantizers:
                watch(path, module)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Parameters of a forward and their values in this call."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # the call itself fails, and says why
        return
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item)
    elif isinstance(features := getattr(value, "features", None), Tensor):  # a sparse tensor
        yield name, features


def _range_of(value: Tensor) -> FloatRange | None:
    """The range of one tensor; ``None`` without values."""
    if value.is_complex() or value.is_sparse or value.dtype == torch.bool:
        return None
    if value.device.type == "meta" or not value.numel():
        return None
    low, high = value.detach().aminmax()
    largest = max(abs(float(low)), abs(float(high)))
    if not largest < float("inf") or float(low) != float(low):
        return FloatRange(float("inf"), False)
    return FloatRange(largest, _is_whole(value.detach()))


def _is_whole(value: Tensor) -> bool:
    if not value.is_floating_point():
        return True
    # Few tensors hold whole numbers: the first values say so of most.
    first = value.flatten()[:_FIRST] if value.is_contiguous() else value
    return bool((first == first.round()).all()) and bool((value == value.round()).all())

"""Run a model before and after a rewrite and measure how far the outputs are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import evaluation

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Outputs of ``model`` in evaluation mode, on copies of ``inputs``, as a flat list."""
    args, kwargs = _duplicate(inputs)
    with evaluation(model), torch.no_grad():
        return [t.detach().clone() for t in _tensors(model(*args, **kwargs))]


def relative_difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest |after − before| of any output, over the largest |before| of that output.

    Infinite where an output has another shape: a model that chooses rows has chosen others.
    """
    if len(before) != len(after):
        raise ValueError(f"the model made {len(before)} tensors, the fused one makes {len(after)}")
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() == 0 or not a.is_floating_point():
            continue
        difference = (a.double() - b.double()).abs().max().item()
        scale = a.double().abs().max().item()
        worst = max(worst, difference / scale if scale else difference)
        if difference != difference:
            return float("nan")
    return worst


@contextmanager
def float64_by_default() -> Iterator[None]:
    """What a forward makes itself, ``torch.zeros(n)`` say, is float64 too."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def tolerance(outputs: list[Tensor]) -> float:
    """Allowed relative difference for the widest tolerance among the outputs' dtypes."""
    return max((_TOLERANCE.get(t.dtype, 0.0) for t in outputs), default=0.0)


def in_float64(inputs: Inputs) -> Inputs:
    """Copies of ``inputs``, floating-point tensors as float64."""
    args, kwargs = _duplicate(inputs, lambda t: t.double() if t.is_floating_point() else t)
    return args, kwargs


def _duplicate(value: Any, convert: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    if isinstance(value, Tensor):
        return convert(value.detach())
    if hasattr(value, "replace_feature"):
        return value.replace_feature(convert(value.features.detach()))
    if isinstance(value, list | tuple):
        made = [_duplicate(v, convert) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {k: _duplicate(v, convert) for k, v in value.items()}
    return copy.deepcopy(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "features"):
        yield value.features
    elif isinstance(value, dict):
        for key in value:
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))

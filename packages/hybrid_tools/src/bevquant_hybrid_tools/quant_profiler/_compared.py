"""Two models call by call: which calls correspond, and what each makes of the same input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import layer_class, refilled
from bevquant_hybrid.dtype import qinfo
from bevquant_hybrid.nn.intrinsic import ANCHORS, Fused
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.qtensor import QTensor, along, as_float
from bevquant_hybrid.quantization.fake_quantize import fake_quantize
from bevquant_hybrid_tools.quant_profiler._calls import Call
from bevquant_hybrid_tools.quant_profiler._features import scale_of
from bevquant_hybrid_tools.quant_profiler._measures import Measure

_RELUS = (F.relu, F.relu_, F.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


@dataclass(frozen=True)
class Match:
    """A call of one model, and the calls of the other that compute the same.

    Attributes:
        one: The call, of a module that may be fused.
        like: The call of the same name in the other model.
        last: The call there whose result compares: behind what is fused into `one`.
        inputs: Tensors that those calls were given from outside, in the order of `one`'s.
    """

    one: Call
    like: Call
    last: Call
    inputs: tuple[Tensor, ...]


def silenced(model: nn.Module, other: nn.Module) -> set[str]:
    """Names that hold an Identity in one model and something else in the other."""
    modules = dict(other.named_modules(remove_duplicate=False))
    return {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if layer_class(module, nn.Identity)
        and not layer_class(modules.get(path, module), nn.Identity)
    }


def match_calls(
    ones: list[Call], others: list[Call], silent: set[str]
) -> tuple[list[Match], list[str]]:
    """Match the calls of a model with those of one that is fused less, or as much.

    By name and by how often a module was called before. A fused module stands for all that it
    took in: what lies in the data flow of the other model around the call of its name, under names
    that are silent in its own, or as functions.

    Args:
        ones: Calls of the model that is fused more.
        others: Calls of the other.
        silent: Names that hold an Identity in the first model alone.

    Returns:
        The matches in the order of `ones`, and the names without one.
    """
    places = {(call.path, call.repeat): i for i, call in enumerate(others) if call.path}
    matches, alone = [], []
    for one in ones:
        if one.module is None:
            continue
        names = (one.path, _anchor_of(one.module))
        found = (places[n, one.repeat] for n in names if (n, one.repeat) in places)
        place = next(found, None)
        if place is None:
            alone.append(one.path)
            continue
        members: list[int] | None = [place]
        if layer_class(one.module, nn.Identity) is None:
            members = _Group(one, others, silent).around(place)
        if members is None:
            alone.append(one.path)
            continue
        given = _given(others, members)
        matches.append(Match(one, others[place], others[members[-1]], given))
    return matches, alone


def _anchor_of(module: nn.Module) -> str:
    """Where the layer of a fused module was, as far as that is known."""
    anchor = module.part("conv") if isinstance(module, Fused) else module
    return str(getattr(anchor, "anchor_path", ""))


class _Group:
    """The calls that a fused module stands for."""

    def __init__(self, one: Call, others: list[Call], silent: set[str]) -> None:
        self.others, self.silent = others, silent
        module: Any = one.module
        self.name = (one.path, one.repeat)
        self.adds = bool(getattr(module, "adds", False))
        relu = module.part("relu") if isinstance(module, Fused) else None
        self.activates = bool(getattr(module, "activation", None)) or relu is not None

    def around(self, place: int) -> list[int] | None:
        """Calls in order; None where something that was fused is not to be found."""
        members = [place]
        while (before := self._before(members[0])) is not None:
            members.insert(0, before)
        if any(layer_class(self.others[i].module) in ANCHORS for i in members):
            while (behind := self._behind(members)) is not None:
                members.append(behind)
        calls = [self.others[i] for i in members]
        if self.adds and not any(self._is_sum(call) for call in calls):
            return None
        if self.activates and not any(self._is_relu(call) for call in calls):
            return None
        return members

    def _before(self, place: int) -> int | None:
        """Of a sum: the layer, or its batch norm, that went into it."""
        if not self.adds or layer_class(self.others[place].module) in ANCHORS:
            return None
        found = (s for s in self.others[place].sources if s is not None and self._is_layer(s))
        return next(found, None)

    def _is_layer(self, place: int) -> bool:
        call = self.others[place]
        if call.path not in self.silent:
            return False
        if layer_class(call.module, _BatchNorm):
            return any(s is not None and self._is_layer(s) for s in call.sources)
        return layer_class(call.module) in ANCHORS

    def _behind(self, members: list[int]) -> int | None:
        calls = [self.others[i] for i in members]
        for reader in calls[-1].readers:
            if reader < 0:
                continue
            call = self.others[reader]
            if layer_class(call.module) in ANCHORS:
                continue  # the beginning of another group
            if call.path:
                if call.path in self.silent or (call.path, call.repeat) == self.name:
                    return reader
            elif self.adds and self._is_sum(call) and not any(map(self._is_sum, calls)):
                return reader
            elif self.activates and self._is_relu(call) and not any(map(self._is_relu, calls)):
                return reader
        return None

    def _is_sum(self, call: Call) -> bool:
        if call.module is not None:
            return call.method in ("add", "add_relu") or bool(getattr(call.module, "adds", False))
        return getattr(call.function, "__name__", "").strip("_") in ("add", "iadd")

    def _is_relu(self, call: Call) -> bool:
        if call.module is None:
            return call.function in _RELUS
        fused = isinstance(call.module, Fused) and call.module.part("relu") is not None
        learned = bool(getattr(call.module, "activation", None))
        return fused or learned or layer_class(call.module, nn.ReLU, nn.ReLU6) is not None


def _given(calls: list[Call], members: list[int]) -> tuple[Tensor, ...]:
    """Tensors that come from outside of a group."""
    given = []
    for place in members:
        call = calls[place]
        tensors = tensors_in((call.args, call.kwargs))
        for tensor, source in zip(tensors, call.sources, strict=True):
            if source not in members or source == place:
                given.append(tensor)
    return tuple(given)


def replay(call: Call, inputs: tuple[Tensor, ...]) -> Any:
    """Call an operator again with other values in the form that it was given.

    Where it was given a quantized tensor it gets one: with the scale of the new value if that is
    quantized, else rounded to the scale that it was given before.

    Args:
        call: Of the operator, with its arguments.
        inputs: New values, as many as it was given and of the same shapes.

    Returns:
        The result; None where number or shapes do not fit.
    """
    given = list(tensors_in((call.args, call.kwargs)))
    if [tuple(t.shape) for t in given] != [tuple(t.shape) for t in inputs]:
        return None
    formed = (_in_form_of(old, new) for old, new in zip(given, inputs, strict=True))
    args, kwargs = _with((call.args, call.kwargs), formed)
    module: Any = call.operator
    return (getattr(module, call.method) if call.method else module)(*args, **kwargs)


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A structure with other tensors, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: _with(item, tensors) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return refilled(type(value), [_with(item, tensors) for item in value])
    return value


def _in_form_of(old: Tensor, new: Tensor) -> Tensor:
    if isinstance(new, QTensor) and isinstance(old, QTensor) and new.on_grid:
        data = new.int_repr() if old.holds_integers else new.dequantize()
        return _with_settings(old, data.to(old.device), new)
    values = as_float(new).to(old.device)
    if not isinstance(old, QTensor):
        return values.clone()  # an operator may write into it
    if old.holds_integers:
        scale = along(old.scale, values.dim(), old.q_per_channel_axis())
        info = qinfo(old.dtype)
        steps = (values / scale).round().clamp(info.min, info.max)
        return old.like(steps.to(old.dtype.storage))
    if not old.on_grid:
        return old.like(values.clone())
    info = qinfo(old.dtype)
    axis = old.q_per_channel_axis()
    return old.like(fake_quantize(values, old.scale, axis, info.min, info.max))


def _with_settings(old: QTensor, data: Tensor, new: QTensor) -> QTensor:
    """Data with the scale of one tensor and the settings of another."""
    return QTensor(
        data,
        new.scale.to(data.device),
        new.dtype,
        new.q_per_channel_axis(),
        rounding=old.rounding,
        lenient=old.lenient,
        on_grid=new.on_grid,
    )


def compare(match: Match, measure: Measure, swapped: bool) -> list[Any] | None:
    """Compare the results of matched calls.

    Args:
        match: The calls.
        measure: Of the similarity.
        swapped: Whether `match.one` is of the first model, else of the second.

    Returns:
        Name, class in the first model, similarity, scale, largest difference, the same in steps,
        and in steps where both are given the same; None where the results have other shapes.
    """
    one, like, last = match.one, match.like, match.last
    first, second = (one, last) if swapped else (last, one)
    pairs = _pairs(first.output, second.output)
    if pairs is None:
        return None
    x, y = (torch.cat([_values(pair[i]) for pair in pairs]) for i in (0, 1))
    scale = next((s for pair in pairs for t in pair[::-1] if (s := scale_of(t)) is not None), None)
    identities = [layer_class(call.module, nn.Identity) is not None for call in (one, like)]
    again = None
    if identities[0] == identities[1]:
        again = _pairs(last.output, replay(one, match.inputs))
    name = one.path + ("(I vs I)" if all(identities) else "(I)" if any(identities) else "")
    return [
        name + (f"({one.repeat})" if one.repeat else ""),
        type(one.module if swapped else like.module),
        measure(x, y),
        scale.item() if scale is not None and scale.numel() == 1 else None,
        float((x - y).abs().max()) if x.numel() else 0.0,
        _steps(pairs, one),
        None if again is None else _steps(again, one),
    ]


def _pairs(first: Any, second: Any) -> list[tuple[Tensor, Tensor]] | None:
    """Tensors of two results side by side; None where they do not fit."""
    ones, others = list(tensors_in(first)), list(tensors_in(second))
    fits = [tuple(t.shape) for t in ones] == [tuple(t.shape) for t in others]
    return list(zip(ones, others, strict=True)) if ones and fits else None


def _values(tensor: Tensor) -> Tensor:
    return as_float(tensor).detach().cpu().double().reshape(-1)


def _steps(pairs: list[tuple[Tensor, Tensor]], call: Call) -> int | None:
    """The largest difference in steps of the results' scale; of what is dequantized, its input's.

    None without a scale of 8 or 16 bits (those of accumulators say nothing), unless there is no
    difference.
    """
    largest = 0.0
    for pair in pairs:
        difference = (_values(pair[0]) - _values(pair[1])).abs()
        if difference.numel() == 0 or not bool(difference.any()):
            continue
        candidates = (*pair[::-1], *tensors_in(call.args))
        steps = next((s for t in candidates if (s := _step(t, pair[0])) is not None), None)
        if steps is None or not bool(difference.isfinite().all()):
            return None
        largest = max(largest, float((difference / steps).max()))
    return round(largest)


def _step(tensor: Tensor, like: Tensor) -> Tensor | None:
    """One step of every value of a quantized tensor of the same shape as another."""
    if not isinstance(tensor, QTensor) or tensor.dtype == "qint32":
        return None
    if scale_of(tensor) is None or tensor.shape != like.shape:
        return None
    return tensor.scale_of_each().detach().cpu().double().reshape(-1)

"""Which call of one model stands for which of another, also where one of them is fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import layer_class
from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.intrinsic._fused import ANCHORS
from bevquant_hybrid.utils.quant_profiler._calls import Call, tensors_in

__all__ = ["Match", "match_calls", "silenced"]

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

"""Layers that a model holds as children and in plain containers."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import nn

from bevquant_graph import replace_modules


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ReLU(), nn.Tanh()
        self.order = [self.first, (self.second, [self.first])]
        self.named = OrderedDict(b=self.second, a=self.first)
        self.sizes, self.other = [1, 2], SimpleNamespace(layer=self.first)
        self.inner = nn.Sequential(self.first)


def test_a_module_is_replaced_wherever_it_is_held() -> None:
    model, made = Holding(), nn.Sigmoid()
    first, second, order, sizes = model.first, model.second, model.order, model.sizes
    replace_modules(model, {first: made})
    assert model.first is made
    assert model.inner[0] is made
    assert model.order == [made, (second, [made])]
    assert model.named == OrderedDict(b=second, a=made)
    assert order == [first, (second, [first])]  # another one's list stays as it was
    assert model.sizes is sizes
    assert isinstance(model.named, OrderedDict)


def test_nothing_to_replace_changes_nothing() -> None:
    model = Holding()
    before = dict(vars(model))
    replace_modules(model, {nn.ReLU(): nn.Sigmoid()})
    assert all(vars(model)[name] is value for name, value in before.items())
    assert torch.equal(model.first(torch.ones(1)), torch.ones(1))


def test_containers_that_hold_themselves_or_are_held_twice_stay_so() -> None:
    model, made = Holding(), nn.Sigmoid()
    model.ring = [model.first]
    model.ring.append((model.ring,))
    model.again = model.ring
    model.loop = {"layer": model.second}
    model.loop["self"] = model.loop
    loop = model.loop
    replace_modules(model, {model.first: made})
    assert model.ring[0] is made
    assert model.ring[1][0] is model.ring
    assert model.again is model.ring
    assert model.loop is loop

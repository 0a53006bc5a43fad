"""A copy runs with its own modules, and what cannot be copied is named."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

from bevquant_graph import capture, copied
from bevquant_graph._own_inputs import twin


class Closures(nn.Module):
    """Its forward and hooks are closures over its own modules and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        weight = self.second.weight

        def inner(x: Any) -> Any:
            return self.second(x)

        self.apply_second = lambda x: inner(x)
        self.steps = [lambda x, layer=self.first: layer(x)]
        self.first.register_forward_hook(lambda m, args, out: out + weight.sum())

    def forward(self, x: Any) -> Any:
        return self.apply_second(self.steps[0](x))


def test_closures_run_with_the_copy() -> None:
    net, x = Closures(), torch.randn(3, 2)
    wanted, made = net(x), copied(net, "f")
    assert torch.equal(made(x), wanted)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(made(x), wanted)


def test_what_a_hook_collects_is_still_the_callers() -> None:
    net, seen = nn.Sequential(nn.ReLU()), []
    net[0].register_forward_hook(lambda m, args, out: seen.append(m))
    made: Any = copied(net, "f")
    made(torch.ones(1))
    assert seen == [made[0]]


@pytest.mark.parametrize(
    ("name", "value"), [("lock", threading.Lock()), ("rows", (i for i in range(3)))]
)
def test_what_cannot_be_copied_is_named(name: str, value: Any) -> None:
    net = nn.Sequential(nn.Sequential(nn.ReLU()))
    setattr(net[0], name, value)
    with pytest.raises(ValueError, match=rf"f: attribute '{name}' .* of 0 .*this call; or wait$"):
        copied(net, "f", remedy="; or wait")


def test_a_python_module_among_the_attributes_is_the_models() -> None:
    net: Any = nn.Sequential(nn.ReLU())
    net.maths = math
    assert copied(net, "f").maths is math


def test_a_graph_of_the_copy_reads_its_tensors() -> None:
    net, x = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), torch.randn(3, 2)
    graph, made = capture(net, x), copied(net, "f")
    wanted = net(x)
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(graph.of_copy(made).replay(x), wanted)
    assert not torch.equal(graph.replay(x), wanted)


def test_functions_of_a_twin_run_with_its_modules() -> None:
    net = Closures()
    net.kept = torch.nn.functional.relu
    net.named = lambda x, *, layer=net.first: layer(x)
    other = twin(net)
    assert other.steps[0].__defaults__ == (other.first,)
    assert other.named.__kwdefaults__ == {"layer": other.first}
    assert other.kept is net.kept


def test_results_of_autograd_are_detached() -> None:
    class Anchors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(3, 2)
            self.register_buffer("grid", self.places.weight * 2)
            self.first = self.grid[0]
            self.cache = {"cpu": [self.grid[1]]}

    model = Anchors()
    made = copied(model, "test")
    assert torch.equal(made.grid, model.grid)
    assert torch.equal(made.first, model.first)
    assert torch.equal(made.cache["cpu"][0], model.cache["cpu"][0])
    assert made.grid.is_leaf
    assert made.grid is not model.grid

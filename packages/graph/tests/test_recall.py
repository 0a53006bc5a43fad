"""A graph in use is answered again, and only for the model that it is of."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import _recall, capture


class Scaled(nn.Module):
    """Whose forward goes by what it holds, directly and further down."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.config = SimpleNamespace(limit=3.0, parts=[2, 3])
        limits = {"low": -50.0}
        self.bound = lambda x: x.clamp(min=limits["low"])
        self.limits = limits

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.shift
        return self.bound(x).clamp(max=self.config.limit + 50) * self.config.parts[0]


EXAMPLE = torch.linspace(-1, 1, 8).view(2, 4)


def limit(net: Any) -> None:
    net.config.limit = 1.0  # no value of the example reaches it: its bits are the same


def nested(net: Any) -> None:
    net.config.parts[0] = 5


def closed_over(net: Any) -> None:
    net.limits["low"] = -40.0


def other_parameter(net: Any) -> None:
    net.layer.weight = nn.Parameter(torch.zeros(4, 4))


def written(net: Any) -> None:
    net.shift.add_(1)


def other_layer(net: Any) -> None:
    net.layer = copy.deepcopy(net.layer)


def hooked(net: Any) -> None:
    net.layer.register_forward_hook(lambda module, args, made: made * 2)


def other_method(net: Any) -> None:
    net.bound = torch.neg


CHANGES = [limit, nested, closed_over, other_parameter, written, other_layer, hooked, other_method]


def test_the_same_model_is_followed_once_while_its_graph_is_held() -> None:
    net = Scaled().eval()
    graph = capture(net, EXAMPLE)
    assert capture(net, EXAMPLE + 1) is graph
    assert capture(net, EXAMPLE[:1]) is not graph  # other sizes may go another way
    assert capture(copy.deepcopy(net), EXAMPLE) is not graph


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """What torch is asked to follow from now on; nothing is known yet."""
    calls: list[nn.Module] = []
    export = torch.export.export

    def counted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(model)
        return export(model, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    monkeypatch.setattr("bevquant_graph._recall._PROGRAMS", OrderedDict())
    return calls


def test_a_structure_is_followed_once(exports: list[nn.Module]) -> None:
    nets = [Scaled().eval() for _ in range(3)]
    nets[2].config.parts[0] = 7
    for net in nets:
        with torch.no_grad():
            net.shift.normal_()
        graph = capture(net, EXAMPLE)
        assert graph.model is net
        assert torch.equal(graph.replay(EXAMPLE * 9), net(EXAMPLE * 9))
        read = {graph.constant_path(node): graph.constant(node) for node in graph.graph.nodes}
        assert read["layer.weight"] is net.layer.weight
        assert read["layer.bias"] is net.layer.bias
    assert len(exports) == 2
    for net in nets[:2]:  # a structure with its sizes fixed is another
        graph = capture(net, EXAMPLE, check=False, open_sizes=False)
        assert torch.equal(graph.replay(EXAMPLE), net(EXAMPLE))
        assert len(exports) == 3


def test_a_structure_that_takes_longer_to_prove_than_to_follow_is_followed(
    exports: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(step=3600)
    monkeypatch.setattr("bevquant_graph._recall.perf_counter", lambda: next(hours))
    for followed in 1, 1, 2:
        net = Scaled().eval()
        assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE), net(EXAMPLE))
        assert len(exports) == followed


class Switched(nn.Module):
    """Whose forward goes by something that no module holds."""

    on = True

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if self.on else x.neg()


def test_no_known_structure_is_answered_for_a_model_that_computes_something_else(
    exports: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    for on in True, False:
        monkeypatch.setattr(Switched, "on", on)
        graph = capture(Switched(), EXAMPLE, check=False, open_sizes=False)
        assert torch.equal(graph.replay(EXAMPLE), EXAMPLE.relu() if on else EXAMPLE.neg())
    assert len(exports) == 2


def test_numbers_of_hooks_and_which_strings_are_one_object_do_not_matter(
    exports: list[nn.Module],
) -> None:
    for name in ("".join(["na", "me"]), "name"):
        net: Any = Scaled().eval()
        net.config.names = ["name", name]
        hooked(net)
        assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE), net(EXAMPLE))
    assert len(exports) == 1
    hooked(net)
    assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE), net(EXAMPLE))
    assert len(exports) == 2


class Branching(nn.Module):
    """Whose forward goes by what no module holds."""

    def forward(self, x: Tensor) -> Tensor:
        return x * FACTORS[0]


FACTORS = [2.0]


def test_a_structure_that_gives_other_bits_is_followed_anew(exports: list[nn.Module]) -> None:
    nets = Branching(), Branching()
    capture(nets[0], EXAMPLE)
    FACTORS[0] = 3.0
    assert torch.equal(capture(nets[1], EXAMPLE).replay(EXAMPLE), EXAMPLE * 3)
    assert len(exports) == 2


class Anchored(nn.Module):
    """Which holds a tensor that is no buffer."""

    def __init__(self, anchor: float) -> None:
        super().__init__()
        self.anchors = [torch.full((4,), anchor)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x, self.anchors[0])


def test_tensors_that_are_no_buffers_count_by_what_they_hold(exports: list[nn.Module]) -> None:
    for anchor, followed in (50.0, 1), (60.0, 2), (50.0, 2):
        net = Anchored(anchor)
        assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE * 99), net(EXAMPLE * 99))
        assert len(exports) == followed


@pytest.mark.parametrize("change", ["large", "view"])
def test_large_tensors_and_views_of_parameters_are_read_by_their_own_graph(
    exports: list[nn.Module], change: str
) -> None:
    for followed in 1, 2:
        net = Anchored(50.0)
        if change == "large":
            net.anchors.append(torch.zeros(20_000))
        else:
            net.weight = nn.Parameter(torch.full((2, 4), 50.0))
            net.anchors[0] = net.weight.detach()[0]
        assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE * 99), net(EXAMPLE * 99))
        assert len(exports) == followed


class Counter:
    """Which a module holds and no forward reads."""

    is_read_by_forwards = False

    def __init__(self, count: int) -> None:
        self.counted = torch.full((3,), count)


class OtherCounter(Counter):
    """Of another class."""


def test_what_no_forward_reads_is_passed_over(exports: list[nn.Module]) -> None:
    for counter in (Counter(0), Counter(1), OtherCounter(1)):
        net: Any = nn.Linear(4, 4)
        net.counter = counter
        assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE), net(EXAMPLE))
    assert len(exports) == 1


def test_shared_parameters_are_another_structure(exports: list[nn.Module]) -> None:
    nets = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    nets[1][1].weight = nets[1][0].weight
    for net in nets:
        assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE), net(EXAMPLE))
    assert len(exports) == 2


def test_the_oldest_structures_are_let_go(
    exports: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_recall, "_KEPT", 32)
    for width in range(1, 35):
        capture(nn.Linear(4, width), EXAMPLE)
    capture(nn.Linear(4, 1), EXAMPLE)
    assert len(exports) == 35
    capture(nn.Linear(4, 34), EXAMPLE)
    assert len(exports) == 35


def test_a_graph_that_nobody_holds_is_let_go() -> None:
    net = Scaled().eval()
    graph = ref(capture(net, EXAMPLE))
    gc.collect()
    assert graph() is None


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_followed_anew(change: Any) -> None:
    net = Scaled().eval()
    graph = capture(net, EXAMPLE)
    with torch.no_grad():
        change(net)
    again = capture(net, EXAMPLE)
    assert again is not graph
    frame = EXAMPLE * 200
    assert torch.equal(again.replay(frame), net(frame))


def test_weights_written_past_torchs_count_are_read_by_the_graph() -> None:
    net = Scaled().eval()
    graph = capture(net, EXAMPLE)
    net.layer.weight.data.zero_()
    assert torch.equal(capture(net, EXAMPLE).replay(EXAMPLE), net(EXAMPLE))
    assert torch.equal(graph.replay(EXAMPLE), net(EXAMPLE))


def test_what_has_no_written_form_is_followed_each_time() -> None:
    net = Scaled().eval()
    net.lock = threading.Lock()
    graph = capture(net, EXAMPLE)
    assert capture(net, EXAMPLE) is not graph

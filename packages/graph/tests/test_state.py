"""Models and frames are as they were after a run or a capture, in every thread."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import (
    CaptureError,
    alone,
    called,
    capture,
    first_fault,
    flatten,
    on_batch,
    own_inputs,
    state_kept,
)
from bevquant_graph._own_inputs import twin

Pair = namedtuple("Pair", "image metas")


@dataclass
class Sample:
    image: Tensor
    boxes: list[Any]


class AnyAttribute(dict):
    """As mmcv's configs and Pointcept's Point: a dict that answers to every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name, AnyAttribute())


class EveryName(dict):
    __getattr__ = dict.get


def nested(x: Tensor) -> list[Any]:
    item = SimpleNamespace(found=[])
    return [
        {"x": x, "metas": [{"id": 1}]}, [x, [2]], Pair(x, {"id": 1}), Sample(x, [1]),
        AnyAttribute(x=x, metas=[1]), EveryName(x=x, metas=[1]), OrderedDict(x=x, metas=[1]),
        deque([x, [1]]), SimpleNamespace(x=x, metas=[1]), {"a": item, "b": item},
        {"metas": np.zeros(2)},
    ]  # fmt: skip


def scribble(value: Any) -> None:
    """Write to every container and array of a value."""
    if isinstance(value, np.ndarray):
        value += 1
    elif isinstance(value, dict):
        for item in list(dict.values(value)):
            scribble(item)
        value["made"] = 1
    elif isinstance(value, list | deque):
        for item in list(value):
            scribble(item)
        value.append(1)
    elif isinstance(value, tuple):
        for item in value:
            scribble(item)
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor):
        scribble(vars(value))


@pytest.mark.parametrize("place", range(11))
def test_a_copy_is_written_to_and_the_frame_is_not(place: int) -> None:
    frame = nested(torch.ones(2))[place]
    before = repr(frame)
    own = own_inputs(frame)
    assert type(own) is type(frame)
    assert repr(own) == before
    scribble(own)
    assert repr(own) != before
    assert repr(frame) == before


def test_tensors_are_copied_where_that_is_asked_and_stay_one_where_they_are() -> None:
    x = torch.ones(2)
    own = own_inputs({"a": x, "b": [x]})
    assert own["a"] is own["b"][0]
    assert own["a"] is not x
    assert own_inputs({"a": x}, None)["a"] is x


def test_objects_that_hold_nothing_to_write_to_stay_the_same() -> None:
    class Sentinel:
        pass

    nothing = Sentinel()
    assert own_inputs({"pad": nothing})["pad"] is nothing
    assert own_inputs((1, "a", torch.Size([2]))) == (1, "a", torch.Size([2]))


class Temporal(nn.Module):
    """Keeps state in each way that forwards do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("prev", torch.zeros(1))
        self.register_buffer("frames", torch.zeros((), dtype=torch.long))
        self.register_buffer("moved", torch.zeros(1))
        self.calls, self.last, self.memory = 0, None, {"bev": torch.zeros(1), "queue": [1]}
        self.plain = torch.zeros(1)
        self.tracker = SimpleNamespace(seen=0, tracks=[torch.zeros(1)])
        self.recent = deque([1, 2], maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + self.prev
        mean = x.mean().reshape(1)
        self.prev.copy_(mean)
        self.frames += 1
        self.moved.data = mean
        self.calls += 1
        self.last = y
        self.memory["bev"].add_(1)
        self.memory["more"] = y
        self.memory["queue"].append(2)
        self.plain.add_(1)
        self.tracker.seen += 1
        self.tracker.tracks[0].add_(1)
        self.recent.append(3)
        self.register_buffer("late", y)
        return y


def state(net: Temporal) -> Any:
    held = (net.calls, net.last, net.memory, net.plain, net.tracker, net.recent, [*vars(net)])
    return repr((dict(net.named_buffers()), held))


def image() -> Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_model_notes_is_put_back(inference: bool) -> None:
    with torch.inference_mode(inference):
        net = Temporal().eval()
        before, memory, tracks = state(net), net.memory, net.tracker.tracks
        first, second = called(net, [image()]), called(net, [image()])
        with pytest.raises(RuntimeError), state_kept(net):
            net(image()).view(7)
    assert torch.equal(first, second)
    assert state(net) == before
    assert net.memory is memory
    assert net.tracker.tracks is tracks


def test_a_refused_capture_leaves_buffers_and_attributes_as_they_were() -> None:
    net = Temporal().eval()
    before = state(net)
    with pytest.raises(CaptureError, match="is mutated in the forward"):
        capture(net, image(), check=False)
    assert state(net) == before


class Counts(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.number = where, 0
        self.register_buffer("frames", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "buffer":
            self.frames += 1
            return x * self.frames
        self.number += 1
        return x * self.number if self.where == "number" else x * 2


@pytest.mark.parametrize("where", ["buffer", "number"])
def test_a_model_whose_next_frame_depends_on_this_one_is_refused(where: str) -> None:
    net = Counts(where)
    assert len(list(capture(net, image(), check=False).operations)) > 0
    with pytest.raises(CaptureError, match=r"keeps (frames|number) from call to call"):
        capture(net, image())
    assert net.number == net.frames == 0
    assert capture(Counts("nowhere"), image()).replay(image()).equal(image() * 2)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(3))


def test_a_generator_made_in_the_forward_starts_anew_in_every_replay() -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 3, 1), Draws()).eval(), image()
    graph = capture(net, x)
    assert list(graph.opaque) == ["1"]
    assert all(torch.equal(graph.replay(x), net(x)) for _ in range(2))
    with pytest.raises(CaptureError, match="draws random numbers from a generator"):
        capture(Draws().eval(), x)


class Shuffles(nn.Module):
    """Point Transformer V3 shuffles its orders in each pooling."""

    def __init__(self, count: int, used: bool = True) -> None:
        super().__init__()
        self.count, self.used = count, used

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(self.count)
        return x[:, order] if self.used else x + 1


# The only permutation of one is the example's in every run.
@pytest.mark.parametrize("count", [1, 3])
def test_random_numbers_behind_a_result_are_refused_even_if_two_runs_agree(count: int) -> None:
    net = nn.Sequential(nn.Conv2d(3, count, 1), Shuffles(count)).eval()
    with pytest.raises(CaptureError, match=r"randperm in 1 \(.*test_state\.py:\d+\) draws random"):
        capture(net, image())
    capture(nn.Sequential(nn.Conv2d(3, 3, 1), Shuffles(3, used=False)).eval(), image())


def test_the_module_that_shuffles_is_found_not_its_consumer() -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 64, 1), Shuffles(64), nn.Conv2d(64, 1, 1)).eval(), image()
    assert first_fault(net, lambda: net(x)).startswith("1 (Shuffles")


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, frame: dict[str, Any], queue: list[Tensor]) -> Tensor:
        frame["image"].mul_(2)
        frame["features"] = self.conv(frame["image"])
        frame["image"] = frame["features"].relu()
        queue[0] = queue[0] + 1
        return frame["image"] + queue[0].sum()


def test_capture_leaves_frames_as_they_were() -> None:
    frame, queue = {"image": image()}, [torch.ones(2)]
    before = repr((frame, queue))
    graph = capture(Writes(), (frame, queue))
    assert repr((frame, queue)) == before
    wanted = called(graph.model, [frame, queue])
    assert torch.equal(graph.replay(*own_inputs((frame, queue))), wanted)


def test_a_dict_that_answers_to_every_attribute_is_a_dict() -> None:
    x = torch.ones(2)
    assert len(flatten(AnyAttribute(x=x, metas=[x]))[0]) == 2
    assert len(flatten(EveryName(x=x))[0]) == 1


def test_a_class_with_a_metaclass_may_be_held_by_a_model() -> None:
    class Made(metaclass=type("Meta", (type,), {"__module__": __name__})):
        @classmethod
        def of(cls, x: Tensor) -> Tensor:
            return x + 1

    class Holds(nn.Module):
        made = None

        def forward(self, x: Tensor) -> Tensor:
            return self.made.of(x)

    model = Holds()
    model.made = Made
    assert torch.equal(capture(model, torch.zeros(2)).replay(torch.ones(2)), torch.full((2,), 2.0))


def test_a_twin_leads_to_itself() -> None:
    class Leads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.layers = [self.layer]
            self.bound = self.run
            self.closure = lambda x: self.layer(x)
            self.behind = weakref.ref(self.layer)
            self.layer.register_forward_hook(self.hook)

        def run(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def hook(self, *_: Any) -> None:
            self.met = True

    net = Leads()
    other = twin(net)
    assert other.layers[0] is other.layer is other.behind()
    assert other.bound.__self__ is other
    other.closure(torch.ones(2))
    assert other.met
    assert not hasattr(net, "met")
    assert other.layer.weight is net.layer.weight


def chain(depth: int) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("same", [True, False])
def test_a_model_runs_while_another_thread_captures(same: bool) -> None:
    net = chain(4)
    other = net if same else chain(4)
    with torch.no_grad():
        wanted = other(image())
    found: list[Any] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    found.append(other(image()))
                int(torch.tensor(1.5))  # torch's own conversion has another meaning in a capture
            except Exception as error:
                found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    size = 8
    try:
        while size < 11 or len(found) < 4:  # a structure that is known takes no time
            capture(net, torch.ones(1, 3, size, size))
            size += 1
    finally:
        stop.set()
        thread.join()
    assert all(type(value) is Tensor and torch.equal(value, wanted) for value in found)


@pytest.mark.parametrize("same", [True, False])
def test_threads_that_capture_at_once_get_graphs(same: bool) -> None:
    nets = [chain(3)] * 3 if same else [chain(3) for _ in range(3)]
    found: list[Any] = []

    def run(net: nn.Module, size: int) -> None:
        try:
            graph = capture(net, torch.ones(1, 3, size, size))
            found.append(torch.equal(graph.replay(image()), net(image())))
        except Exception as error:
            found.append(error)

    fast = torch.backends.mha.get_fastpath_enabled()
    threads = [
        threading.Thread(target=run, args=(net, 8 + place)) for place, net in enumerate(nets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_inference_mode_of_another_thread_holds_during_a_trace() -> None:
    traced, seen = threading.Event(), threading.Event()
    found: list[bool] = []

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                traced.set()
                assert seen.wait(60)
            return x.relu()

    def serve() -> None:
        assert traced.wait(60)
        with torch.inference_mode():
            found.append(torch.is_inference_mode_enabled())
        found.append(torch.is_inference_mode_enabled())
        seen.set()

    thread = threading.Thread(target=serve)
    thread.start()
    capture(Waits(), torch.ones(2, 3))
    thread.join()
    assert found == [True, False]


def test_one_thread_at_a_time_is_alone_with_a_model_and_its_parts() -> None:
    net, order = nn.Sequential(nn.ReLU()), []

    def second() -> None:
        with alone(net[0]):
            order.append("second")

    with alone(net):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_batch_is_as_it_was_after_each_run() -> None:
    class Scales(nn.Module):
        def forward(self, frame: dict[str, Tensor]) -> Tensor:
            frame["scaled"] = frame["x"].mul_(2)
            return frame["scaled"]

    batch = [{"x": torch.ones(1)}]
    run = on_batch()
    assert run(Scales(), batch) == run(Scales(), batch) == 2
    assert batch == [{"x": torch.ones(1)}]
    assert on_batch(lambda model, given: model(given[0]))(Scales(), batch) == 2
    assert batch == [{"x": torch.ones(1)}]


def test_a_thread_that_waits_for_a_model_holds_no_part_of_it():
    """The owner puts a new module into the model, and locks the model again."""
    for _ in range(200):
        net = nn.Sequential(*(nn.ReLU() for _ in range(4)))

        def work(net=net):
            with alone(net):
                for place in range(len(net)):
                    net[place] = nn.ReLU()
                    with state_kept(net):
                        net(torch.ones(1))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)

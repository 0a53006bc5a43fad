"""Models that remember frames: their memory as inputs and outputs."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import CaptureError, capture, in_sequence, with_memory


class Queries(nn.Module):
    """Keeps its best queries, as StreamPETR's head does: nothing before the first frame."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Linear(4, 8), nn.Linear(8, 1)
        self.memory: Tensor | None = None
        self.times: Tensor | None = None
        self.last: Tensor | None = None  # for a log: written, never read
        self.seen = 0

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        self.seen += 1
        made = self.embed(x)
        if self.memory is None:
            self.memory = made.new_zeros(x.shape[0], 4, 8)
            self.times = made.new_zeros(x.shape[0], 4, 1)
        else:
            self.times += step.view(-1, 1, 1)
        made = torch.cat([made, self.memory * (-self.times).exp()], 1)
        best = self.score(made)[..., 0].topk(2, 1).indices[..., None]
        kept = made.gather(1, best.repeat(1, 1, 8))
        self.memory = torch.cat([kept, self.memory], 1)[:, :4]
        self.times = torch.cat([torch.zeros_like(kept[..., :1]), self.times], 1)[:, :4]
        self.last = made
        return made


class Sampler:
    """An object that the forward does not change: it has no equality, and leads to itself."""

    def __init__(self) -> None:
        self.counts, self.own = [1, 2], self


class Head(nn.Module):
    """Holds the part with memory, and a past map among a dict's members."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Sampler()
        self.queries, self.info = Queries(), {"past": None, "scene": None}
        self.register_buffer("drift", torch.zeros(4))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        past = self.info["past"]
        x = x if past is None else x + 0.5 * past
        self.info["past"] = x
        self.drift.mul_(0.9).add_(x.mean((0, 1)))
        return self.queries(x + self.drift, step)


def frames(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    torch.manual_seed(seed)
    return [{"x": torch.randn(2, 3, 4), "step": torch.rand(2)} for _ in range(count)]


def head() -> Head:
    torch.manual_seed(1)
    return Head().eval()


def alone(model: nn.Module, given: list[Any]) -> list[Tensor]:
    model = copy.deepcopy(model)
    with torch.no_grad():
        return [model(**frame) for frame in given]


def test_memory_is_what_later_frames_read() -> None:
    net = head()
    made = with_memory(net, frames(3))
    assert set(made.names) == {"info", "drift", "queries.memory", "queries.times"}
    assert net.queries.memory is None
    assert net.info == {"past": None, "scene": None}


def test_a_sequence_is_the_models_own() -> None:
    net, given = head(), frames(5, seed=2)
    made = with_memory(net, frames(3))
    with torch.no_grad():
        for _ in range(2):  # a second sequence begins without memory
            results = list(in_sequence(made, given))
            assert all(map(torch.equal, results, alone(net, given)))


class Moves(nn.Module):
    """Keeps the frame's own dictionary, with poses in numpy, as Sparse4D's instance bank does."""

    def __init__(self) -> None:
        super().__init__()
        self.past: Tensor | None = None
        self.meta: dict[str, Any] | None = None

    def forward(self, x: Tensor, meta: dict[str, Any]) -> Tensor:
        if self.meta is not None:
            moved = np.linalg.inv(meta["pose"]) @ self.meta["pose"]
            x = x + self.past @ x.new_tensor(moved)
        self.past, self.meta = x, meta
        return x.relu()


def test_numpy_arrays_in_memory() -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    given = [
        {"x": torch.randn(2, 3), "meta": {"pose": np.eye(3) + 0.1 * random.normal(size=(3, 3))}}
        for _ in range(4)
    ]
    made = with_memory(Moves(), given)
    assert made.names == ("past", "meta")
    memories = [made(given[0])[1]]
    memories.append(made(given[1], memories[0])[1])
    frames = zip(given[1:], memories, strict=False)
    following = capture(made, [{"frame": f, "memory": m} for f, m in frames])
    assert "memory['meta']['pose']" in following.input_names
    _, memory = following.replay(frame=given[1], memory=memories[0])
    np.testing.assert_array_equal(memory["meta"]["pose"], given[1]["meta"]["pose"])
    first = capture(made, {"frame": given[0]})
    results = list(in_sequence(following.replay, given, first=first.replay))
    assert all(map(torch.equal, results, alone(Moves(), given)))


class Holder:
    def __init__(self) -> None:
        self.past = torch.zeros(2)


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bank = Holder()

    def forward(self, x: Tensor) -> Tensor:
        self.bank.past = x + self.bank.past
        return self.bank.past * 2


def test_memory_in_an_object() -> None:
    given = [torch.full((2,), float(n)) for n in range(3)]
    made = with_memory(Held(), given)
    assert made.names == ("bank",)
    results = [float(result[0]) for result in in_sequence(made, given)]
    assert results == [0.0, 2.0, 6.0]


def test_a_call_changes_neither_its_memory_nor_the_model() -> None:
    made, (one, two) = with_memory(head(), frames(3)), frames(2)
    with torch.no_grad():
        _, memory = made(one)
        before = copy.deepcopy(memory)
        first, again = made(two, memory)[0], made(two, memory)[0]
    assert torch.equal(first, again)
    assert torch.equal(memory["queries.times"], before["queries.times"])
    assert made.model.queries.memory is None
    assert torch.equal(made.model.drift, torch.zeros(4))


def test_graphs_of_both_forms() -> None:
    net, given = head(), frames(4, seed=3)
    made = with_memory(net, frames(3))
    with torch.no_grad():
        memory = made(frames(1)[0])[1]
    first = capture(made, {"frame": given[0]})
    following = capture(made, {"frame": given[1], "memory": memory})
    assert {n for n in following.input_names if n.startswith("memory")} == {
        "memory['info']['past']", "memory['drift']", "memory['queries.memory']",
        "memory['queries.times']",
    }  # fmt: skip
    assert not following.writes
    results = list(in_sequence(following.replay, given, first=first.replay))
    assert all(map(torch.equal, results, alone(net, given)))


def test_the_model_itself_is_refused_and_a_model_without_memory_too() -> None:
    with pytest.raises(CaptureError):
        capture(head(), frames(1)[0])
    with pytest.raises(ValueError, match="remembers nothing"):
        with_memory(nn.Linear(4, 4), [torch.ones(1, 4)] * 2)
    with pytest.raises(ValueError, match="two or more frames"):
        with_memory(head(), frames(1))
    with pytest.raises(TypeError, match=r"with_memory: .*expected a torch module"):
        with_memory(torch.ones(1), frames(2))  # type: ignore[arg-type]


def test_another_memory_is_refused() -> None:
    made = with_memory(head(), frames(3))
    with pytest.raises(ValueError, match=r"expected the memory \['info', .*got \['past'\]"):
        made(frames(1)[0], {"past": torch.ones(1)})


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.past: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(x)
        return torch.stack([*self.past]).mean(0)


def test_a_deque_is_a_list_in_the_memory() -> None:
    frames = [torch.randn(3) for _ in range(4)]
    made = with_memory(Window(), frames)
    whole = Window()
    assert all(map(torch.equal, in_sequence(made, frames), map(whole, frames)))
    _, memory = made(frames[1], made(frames[0])[1])
    assert isinstance(memory["past"], list)
    graph = capture(made, {"frame": frames[2], "memory": memory})
    result, memory = graph.replay(frame=frames[2], memory=memory)
    assert torch.equal(result, (frames[1] + frames[2]) / 2)
    assert all(map(torch.equal, memory["past"], frames[1:3]))


def test_a_mean_over_frames_is_no_function_of_one() -> None:
    """Two equal frames have the mean of one, so two calls on the same inputs do not tell."""
    with pytest.raises(CaptureError, match="keeps past from call to call"):
        capture(Window(), torch.randn(3))

"""Numpy arrays and numbers of the arguments: inputs of the graph, constants, or refused."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import CaptureError, as_example, capture


class Places(nn.Module):
    """Computes as camera models do: matrices and the car's motion, in numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.bus = nn.Linear(4, 4), nn.Linear(18, 4)

    def forward(self, x: Tensor, img_metas: list) -> Tensor:
        matrices = x.new_tensor(np.asarray([meta["lidar2img"] for meta in img_metas]))
        bus = self.bus(x.new_tensor(np.array([meta["can_bus"] for meta in img_metas])))
        dx, dy = (np.array([meta["can_bus"][i] for meta in img_metas]) for i in (0, 1))
        angle = np.array([meta["can_bus"][-2] / np.pi * 180 for meta in img_metas])
        angle = angle - np.arctan2(dy, dx) / np.pi * 180
        length = np.sqrt(dx**2 + dy**2) * np.cos(angle / 180 * np.pi)
        shift = x.new_tensor([length, length]).permute(1, 0)
        inverse = torch.from_numpy(np.linalg.inv(img_metas[0]["lidar2img"][1])).float()
        turn = math.cos(img_metas[0]["can_bus"][-1])
        return self.value(x) @ matrices[0, 0].t() @ inverse + bus * turn + shift.sum()


def frame(seed: int, **more: object) -> dict:
    random = np.random.default_rng(seed)
    matrices = [random.normal(size=(4, 4)) for _ in range(2)]
    meta = {"lidar2img": matrices, "can_bus": random.normal(size=18), "name": f"frame {seed}"}
    return {"x": torch.from_numpy(random.normal(size=(3, 4))).float(), "img_metas": [meta | more]}


def test_arrays_of_floats_are_inputs() -> None:
    net = Places().eval()
    graph = capture(net, frame(0))
    assert graph.input_names == [
        "x",
        "img_metas[0]['lidar2img'][0]",
        "img_metas[0]['lidar2img'][1]",
        "img_metas[0]['can_bus']",
    ]
    assert not graph.constant_members
    for seed in (1, 2):
        assert torch.equal(graph.replay(**frame(seed)), net(**frame(seed)))


class Timed(Places):
    def forward(self, x: Tensor, img_metas: list) -> Tensor:
        meta = img_metas[0]
        return super().forward(x, img_metas) * (meta["time"] - meta["start"]) + meta["gain"]


def timed(seed: int) -> dict:
    return frame(seed, time=0.1 * seed, start=np.float64(-1.0), gain=3.0)


def test_floats_that_differ_between_frames_are_inputs_and_others_constants() -> None:
    net = Timed().eval()
    graph = capture(net, [timed(1), timed(2)])
    assert "img_metas[0]['time']" in graph.input_names
    known = {"img_metas[0]['start']": -1.0, "img_metas[0]['gain']": 3.0}
    assert graph.constant_members == known
    for seed in (2, 3):
        assert torch.equal(graph.replay(**timed(seed)), net(**timed(seed)))
    with pytest.raises(ValueError, match=r"captured with 3\.0"):
        graph.replay(**frame(1, time=0.1, start=np.float64(-1.0), gain=4.0))
    # One frame tells nothing of a float.
    assert "img_metas[0]['time']" in capture(net, timed(1)).constant_members


def test_an_example_of_frames_is_the_first_frame_to_the_model() -> None:
    net, frames = Timed().eval(), [timed(1), timed(2)]
    example = as_example(net, frames)
    assert torch.equal(net(**example), net(**timed(1)))
    assert torch.equal(capture(net, frames).replay(**example), net(**timed(1)))


class Asks(nn.Module):
    def forward(self, x: Tensor, meta: dict) -> Tensor:
        return x * float(meta["scale"][0])


def test_arrays_whose_numbers_are_needed_are_constants(caplog: pytest.LogCaptureFixture) -> None:
    net, x = Asks().eval(), torch.ones(2)
    with caplog.at_level(logging.WARNING):
        graph = capture(net, (x, {"scale": np.array([2.0])}))
    assert [*graph.constant_members] == ["meta['scale']"]
    assert "meta['scale'] is a constant" in caplog.text
    assert "test_frames.py" in caplog.text  # the line that needs the number
    with pytest.raises(ValueError, match="capture again"):
        graph.replay(x, {"scale": np.array([3.0])})


def test_numbers_that_differ_and_are_needed_are_refused_at_once() -> None:
    frames = [(torch.ones(2), {"scale": np.array([s])}) for s in (2.0, 3.0)]
    with pytest.raises(CaptureError, match=r"meta\['scale'\]: float needs .*test_frames.py:\d+"):
        capture(Asks().eval(), frames)


class Branches(nn.Module):
    def forward(self, x: Tensor, meta: dict) -> Tensor:
        return x * 2 if meta["scene"] == "a" else x


@pytest.mark.parametrize("other", ["b", None, True, 1])
def test_members_that_can_be_no_inputs_are_refused_at_once(other: object) -> None:
    frames = [(torch.ones(2), {"scene": "a", "file": 1}), (torch.ones(2), {"scene": other})]
    with pytest.raises(CaptureError, match="meta: members"):
        capture(Branches().eval(), frames)
    frames[1][1]["file"] = "unread"
    with pytest.raises(CaptureError, match=r"meta\['scene'\]: 'a' and " + repr(other)) as met:
        capture(Branches().eval(), frames)
    assert "file" not in str(met.value)  # the forward does not read it


class Counted(nn.Module):
    def forward(self, x: Tensor, size: int) -> Tensor:
        return torch.cat([x * n for n in range(size)])


def test_integers_that_differ_and_are_needed_are_refused() -> None:
    frames = [{"x": torch.ones(12), "size": n} for n in (3, 4)]
    with pytest.raises(CaptureError, match="size: the forward computes with the number"):
        capture(Counted().eval(), frames)


class Writes(nn.Module):
    """Writes to a frame's array, as it does for the motion since the last frame."""

    def forward(self, x: Tensor, meta: dict) -> Tensor:
        meta["bus"][:2] -= meta["before"]
        meta["bus"][-1] = 0.5
        turn, rest = meta["bus"][2], meta["bus"].copy()
        turn += 1.0  # a number: the array keeps its own
        rest *= 2
        return x + torch.tensor(meta["bus"], dtype=torch.float32) * turn + x.new_tensor(rest)


def test_writes_to_arrays_are_followed_and_the_frame_stays() -> None:
    net = Writes().eval()

    def given(seed: int) -> tuple:
        random = np.random.default_rng(seed)
        return torch.ones(4), {"bus": random.normal(size=4), "before": random.normal(size=2)}

    graph = capture(net, given(0))
    first = given(1)
    assert torch.equal(graph.replay(*first), net(*copy.deepcopy(first)))
    assert np.array_equal(first[1]["bus"], given(1)[1]["bus"])


class Library(nn.Module):
    """Behind an array that only numpy's own code takes, the module is one node."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, matrix: np.ndarray) -> Tensor:
        return self.inner(x, matrix * 2) + x.new_tensor(matrix)


class Inner(nn.Module):
    def forward(self, x: Tensor, matrix: np.ndarray) -> Tensor:
        return x.sum() * 2 if x.mean() > 0 else torch.from_numpy(matrix).float() + x


def test_a_module_that_is_one_node_gets_numpy_arrays() -> None:
    net = Library().eval()
    graph = capture(net, (-torch.ones(2, 2), np.ones((2, 2))))
    assert [*graph.opaque] == ["inner"]
    given = -torch.ones(2, 2), np.arange(4.0).reshape(2, 2)
    assert torch.equal(graph.replay(*given), net(*given))


class Pair(nn.Module):
    """Two tensors; or two pairs of levels, which it joins."""

    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, left: Any, right: Any) -> Tensor:
        if self.pairs:
            left, right = torch.cat(left), torch.cat(right)
        return torch.relu(left) - right


def test_tuples_of_tensors_are_frames_where_the_forward_runs_on_one() -> None:
    frames = [(torch.randn(2, 3), torch.randn(2, 3)) for _ in range(2)]
    graph = capture(Pair(pairs=False).eval(), frames)
    assert graph.input_names == ["left", "right"]
    assert torch.equal(graph.replay(*frames[1]), Pair(pairs=False)(*frames[1]))
    wrapped = capture(nn.ReLU(), [(torch.ones(2),), (torch.zeros(2),)])
    assert len(wrapped.input_names) == 1


def test_a_list_that_is_one_call_stays_one() -> None:
    level = torch.randn(2, 3)
    graph = capture(Pair(pairs=True).eval(), [(level,) * 2] * 2)
    assert len(graph.input_names) == 4


def test_a_list_with_two_readings_is_refused_with_the_remedy() -> None:
    class Joins(nn.Module):
        def forward(self, left: Any, right: Any) -> Tensor:
            left, right = (v if isinstance(v, Tensor) else torch.cat([*v]) for v in (left, right))
            return left - right

    frames = [(torch.ones(2), torch.ones(2))] * 2
    with pytest.raises(TypeError, match=r"Joins.*as 2 frames, and as one call.* as a tuple"):
        capture(Joins().eval(), frames)
    assert len(capture(Joins().eval(), tuple(frames)).input_names) == 4
    named = capture(Joins().eval(), [{"left": a, "right": b} for a, b in frames])
    assert named.input_names == ["left", "right"]

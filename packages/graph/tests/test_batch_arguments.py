"""Batches as loaders give them, by the signature of the forward."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import as_example, capture, on_batch

IMAGE, LABEL = torch.ones(2, 3), torch.tensor([1, 2])


class One(nn.Module):
    def forward(self, image: Any) -> Any:
        return image


class Optional(nn.Module):
    def forward(self, image: Any, mask: Any = None) -> Any:
        return image, mask


class Two(nn.Module):
    def forward(self, image: Any, mask: Any) -> Any:
        return image, mask


class Named(nn.Module):
    def forward(self, **frame: Any) -> Any:
        return frame


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "batch",
    [
        IMAGE,
        (IMAGE,),
        [IMAGE],
        (IMAGE, LABEL),
        [IMAGE, LABEL],
        [IMAGE, 3],
        (IMAGE, ["cat", "dog"]),
        (IMAGE, {"boxes": LABEL}),
        (IMAGE, torch.ones(2, 3).long()),
        Pair(IMAGE, LABEL),
        {"image": IMAGE, "label": LABEL},
        UserDict(image=IMAGE, label=LABEL),
    ],
)
def test_a_label_is_left_out(batch: Any) -> None:
    assert torch.equal(on_batch()(One(), batch), IMAGE)


def test_members_and_keys_go_to_the_parameters() -> None:
    for net in (Two(), Optional()):
        for batch in ((IMAGE, IMAGE + 1), {"mask": IMAGE + 1, "image": IMAGE}):
            image, mask = on_batch()(net, batch)
            assert torch.equal(mask - image, torch.ones(2, 3))
    assert on_batch()(Named(), {"a": IMAGE, "b": LABEL}).keys() == {"a", "b"}
    assert on_batch()(Optional(), {"image": IMAGE, "label": LABEL})[1] is None


def test_a_dictionary_may_be_the_argument() -> None:
    made = on_batch()(One(), {"points": IMAGE, "frame_id": 7})
    assert made.keys() == {"points", "frame_id"}
    assert on_batch()(One(), UserDict(points=IMAGE))["points"].shape == IMAGE.shape


@pytest.mark.parametrize(
    ("net", "batch"),
    [
        (Optional(), (IMAGE, LABEL)),
        (One(), (IMAGE, IMAGE)),
        (One(), (IMAGE, LABEL, LABEL)),
        (Two(), {"image": IMAGE, "label": LABEL}),
        (Two(), {"points": IMAGE}),
    ],
)
def test_several_readings_are_refused(net: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"\.forward\(image.*forward=lambda m, b: m\(b\["):
        on_batch()(net, batch)
    made = on_batch(lambda m, b: m(IMAGE, IMAGE) if isinstance(m, Two) else m(IMAGE))(net, batch)
    assert made is not None


@pytest.mark.parametrize(
    "second",
    [
        torch.ones(2, 3).long(),
        torch.ones(5, 4, dtype=torch.int32),
        torch.tensor([1, 2, 3]),
        torch.tensor([True, False]),
        torch.tensor([0.5, 1.0]),
        [IMAGE, IMAGE],
        {"shape": IMAGE},
        None,
        True,
    ],
)
def test_what_may_be_no_label_goes_to_an_optional_parameter(second: Any) -> None:
    made = on_batch()(Optional(), (IMAGE, second))[1]
    assert type(made) is type(second)
    assert str(made) == str(second)


@pytest.mark.parametrize(
    "label",
    [LABEL, torch.tensor(3), 3, "cat", ["cat", "dog"], [1, 2], [{"label": 1}], {"label": LABEL}],
)
def test_a_label_for_an_optional_parameter_is_refused(label: Any) -> None:
    with pytest.raises(TypeError, match="may take its second member"):
        on_batch()(Optional(), (IMAGE, label))
    assert as_example(Optional(), (IMAGE, label))[1] is label
    assert len(as_example(One(), (IMAGE, label))) == 1


def test_lists_as_example_inputs() -> None:
    for inputs in ([IMAGE], [IMAGE, IMAGE]):
        assert as_example(One(), inputs) == (inputs,)
    assert len(as_example(Two(), [IMAGE, IMAGE])) == 2
    assert len(as_example(One(), [IMAGE, LABEL])) == 1
    assert len(as_example(One(), (IMAGE, IMAGE))) == 2


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_a_graph_takes_batches_of_a_loader(kind: type) -> None:
    image = torch.randn(2, 3)
    batch = {"image": image, "label": LABEL} if kind is dict else kind((image, LABEL))
    net = Read() if kind is dict else nn.Linear(3, 2)
    graph = capture(net, batch)
    assert torch.equal(graph.leaves(batch)[0], image)
    if kind is not dict:
        assert torch.equal(graph.leaves([image])[0], image)


class Read(nn.Module):
    def forward(self, batch_dict: Any) -> Any:
        return batch_dict["image"] * 2


class Grid:
    def __init__(self, low: float) -> None:
        self.low, self.steps, self.self = torch.tensor(low), [1.0, 2.0], self


class OnGrid(nn.Module):
    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return x * grid.steps[1] - grid.low


def test_an_object_among_the_arguments_is_compared_by_its_attributes() -> None:
    x = torch.ones(2, 3)
    graph = capture(OnGrid(), (x, Grid(0.5)))
    assert torch.equal(graph.replay(x, Grid(0.5)), OnGrid()(x, Grid(0.5)))
    with pytest.raises(ValueError, match="captured with"):
        graph.replay(x, Grid(0.25))

"""Decisions on what parameters and buffers hold are those of the model as it stands."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import capture

Forward = Callable[[Any, Tensor], Tensor]


class Holds(nn.Module):
    flag: Tensor
    odds: Tensor
    steps: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.conv, self.then = nn.Conv2d(3, 4, 1), forward
        self.grid = nn.Parameter(torch.tensor([8.0, 6.0, 1.0]), requires_grad=False)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("odds", torch.tensor([0.0, 1.0, 0.0]))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.conv(x))


def _steps(model: Holds, x: Tensor) -> Tensor:
    for _ in range(model.steps):  # type: ignore[call-overload]
        x = x + 1
    return x


def _resized(model: Holds, x: Tensor) -> Tensor:
    height, width = (int(size) for size in model.grid[:2])
    return nn.functional.interpolate(x, (2 * height, 2 * width))


def _cached(model: Holds, x: Tensor) -> Tensor:
    if not hasattr(model, "ones"):
        model.register_buffer("ones", torch.ones(4, 1, 1))
    return x * model.get_buffer("ones") if model.flag else x


def _written(model: Holds, x: Tensor) -> Tensor:
    model.odds.narrow(0, 1, 1).sub_(5)  # a view of what was known
    return x.relu() if model.odds[1] > 0 else x


DECIDED: dict[str, tuple[Forward, list[str]]] = {
    "flag": (lambda m, x: x.relu() if m.flag else x, ["relu"]),
    "compared": (lambda m, x: x if (m.odds[1] * 2).long() == 1 else x.relu(), ["relu"]),
    "all": (lambda m, x: x.relu() if (m.grid > 0).all() else x, ["relu"]),
    "item": (lambda m, x: x * m.odds[1].item(), ["mul"]),
    "list": (lambda m, x: x + sum(m.grid.tolist()), ["add"]),
    "sizes": (lambda m, x: x + torch.ones(1, m.grid.long()[1]), ["ones", "add"]),
    "steps": (_steps, ["add"] * 3),
    "resized": (_resized, ["upsample_nearest2d"]),
    "cached": (_cached, ["ones", "mul"]),
    "open": (lambda m, x: x * (m.odds * x.shape[2]).sum(), ["sym_size", "mul", "sum", "mul"]),
}


@pytest.mark.parametrize("name", DECIDED)
def test_numbers_of_the_model_are_constants(name: str) -> None:
    forward, expected = DECIDED[name]
    graph = capture(Holds(forward).eval(), torch.randn(1, 3, 8, 6))
    names = [str(node.target).split(".")[1] for node in graph.operations]
    assert [n for n in names if n != "conv2d"] == expected
    graph.check(torch.randn(2, 3, 7, 6))


def test_a_part_that_the_models_own_number_ends_is_known() -> None:
    x = torch.randn(1, 3, 4, 4)
    for steps, decided in (1, "neg"), (3, "relu"):
        model = Holds(lambda m, x: x.relu() if m.odds[: m.steps].sum() > 0.5 else x.neg()).eval()
        model.steps.fill_(steps)
        graph = capture(model, x)
        assert str(list(graph.operations)[-1].target) == f"aten.{decided}.default"
        graph.check(torch.randn(2, 3, 5, 4))


def _relu_if_flagged(model: Holds, x: Tensor) -> Tensor:
    return x.relu() if model.flag else x


def test_a_model_of_other_numbers_has_a_graph_of_its_own() -> None:
    x = torch.randn(1, 3, 4, 4)
    model, other = (Holds(_relu_if_flagged).eval() for _ in range(2))
    other.flag.fill_(False)
    counts = [len(list(capture(m, x).operations)) for m in (model, other, model)]
    assert counts == [2, 1, 2]
    model.flag.fill_(False)
    assert len(list(capture(model, x).operations)) == 1


def _counted(model: Holds, x: Tensor) -> Tensor:
    first = model.odds[1] < 3  # another answer in a later frame
    x = x.relu() if first else x
    model.odds.add_(1)
    return x


@pytest.mark.parametrize(
    "forward",
    [_written, _counted, lambda m, x: x.relu() if m.odds[1] + x.mean() > 9 else x],
    ids=["written", "counted", "of the frame"],
)
def test_what_is_no_number_of_the_model_is_a_decision(forward: Forward) -> None:
    assert capture(Holds(forward).eval(), torch.randn(1, 3, 4, 4)).decided


class Levels(nn.Module):
    """Rows of several maps side by side, whose sizes are a tensor, as in deformable attention."""

    def __init__(self, sizes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.sizes = nn.Linear(8, 8), sizes

    def forward(self, rows: Tensor) -> Tensor:
        sizes = self.sizes(rows)
        begins = torch.cat((sizes.new_zeros((1,)), sizes.prod(1).cumsum(0)[:-1]))
        assert (sizes[:, 0] * sizes[:, 1]).sum() == rows.shape[1]
        maps = []
        for begin, (h, w), part in zip(
            begins, sizes, rows.split([h * w for h, w in sizes], 1), strict=True
        ):
            same = (
                rows[:, begin : begin + h * w].transpose(1, 2).reshape(len(rows), 8, int(h), int(w))
            )
            maps.append((part.transpose(1, 2).reshape(len(rows), 8, h, w) + same).flatten(2))
        return self.fc(torch.cat(maps, 2).transpose(1, 2))


_SIZES = [[4, 6], [2, 3]]
LEVELS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: torch.tensor(_SIZES),
    "as_tensor": lambda x: torch.as_tensor(_SIZES, dtype=torch.long, device=x.device),
    "new_tensor": lambda x: x.new_tensor(_SIZES).long(),
    "stack": lambda x: torch.stack([torch.tensor(size) for size in _SIZES]),
    "full": lambda x: torch.cat([torch.full((1, 2), 5), x.new_ones(2, 2, dtype=torch.long)]),
}


@pytest.mark.parametrize("name", LEVELS)
def test_numbers_of_tensors_that_the_forward_makes_are_constants(name: str) -> None:
    model = Levels(LEVELS[name]).eval()
    count = int(LEVELS[name](torch.ones(1)).prod(1).sum())
    graph = capture(model, torch.randn(1, count, 8))
    assert not graph.opaque
    assert not any("item" in str(node.target).split(".") for node in graph.operations)
    assert graph.fixed["rows"][1] == count  # the forward asserts it
    graph.check(torch.randn(2, count, 8))


class OfMaps(Levels):
    """Flattens maps, whose sizes are a tensor, and divides by a number of the frame."""

    def forward(self, maps: list[Tensor], width: int) -> Tensor:  # type: ignore[override]
        self.sizes = lambda x: torch.as_tensor([m.shape[2:] for m in maps], device=x.device)
        rows = torch.cat([m.flatten(2).transpose(1, 2) for m in maps], 1)
        return super().forward(rows) / width


def test_sizes_of_levels_take_two_exports_and_leave_numbers_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = mock.Mock(wraps=torch.export.export)
    monkeypatch.setattr(torch.export, "export", counted)
    model = OfMaps(LEVELS["tensor"]).eval()
    maps = [torch.randn(1, 8, *size) for size in _SIZES]
    graph = capture(model, {"maps": maps, "width": 12})
    assert counted.call_count == 2
    assert graph.fixed["maps[1]"] == {1: 8, 2: 2, 3: 3}
    maps = [torch.randn(3, 8, *size) for size in _SIZES]
    assert torch.equal(graph.replay(maps=maps, width=5), model(maps, 5))


LISTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: torch.tensor([x.sum(), 2, x.shape[0]]),
    "as_tensor": lambda x: torch.as_tensor((x.max(), x.argmax()), dtype=torch.float64),
    "new_tensor": lambda x: x.new_tensor([[x.sum().double(), 1.5], [2, x.min()]]),
    "integers": lambda x: torch.tensor([x.argmax().int(), True, x.argmin().int()]),
    "begins": lambda x: torch.as_tensor([0, *torch.tensor([x.shape, x.shape]).prod(1).cumsum(0)]),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_tensor_of_other_tensors_numbers_is_one_of_the_frame(name: str) -> None:
    made = LISTS[name]

    class Lists(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return made(x)

    graph = capture(Lists().eval(), torch.randn(3, 4))
    other = torch.randn(5, 4)
    assert graph.replay(other).dtype == made(other).dtype
    assert torch.equal(graph.replay(other), made(other))


def test_a_tensor_of_constants_is_a_constant() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("step", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            begins = torch.tensor([0, self.step, 2 * self.step])
            return torch.cat([x[a:b].mean(0) for a, b in pairwise(begins)])

    graph = capture(Lists().eval(), torch.randn(6, 4))
    assert not any("item" in str(node.target).split(".") for node in graph.operations)
    graph.check(torch.randn(6, 4))


def test_a_literal_that_the_forward_writes_to_is_no_constant() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes = torch.tensor([1.0, 2.0])  # a branch on integers would be a decision
            sizes[0] = x.max()
            return x.relu() if sizes[0] > 1 else x

    assert capture(Writes().eval(), torch.randn(4)).decided


CHECKS = {
    "assert": "assert torch.isfinite(x).all(), 'finite'",
    "not": "assert not x.isnan().any()",
    "and": "assert x.max() < 9 and not (x < -9).any()",
    "or": "assert (\n            x.shape[0] > 9\n            or not x.isnan().any()\n        )",
    "bool": "assert bool((x > -9).all()) and not x.isnan().any()",
    "item": "if x.isnan().any().item(): raise ValueError('nan')",
    "raise": "if x.max() > 9 or not (x > -9).all():\n            raise ValueError",
    "function": "torch._assert((x > -9).all(), 'small')",
    "print": "if x.isnan().any():\n            print('nan')\n            print(x.shape)",
    "log": "if x.isnan().any() or x.max() > 9: self.logger.warning('nan')",
}
DECISIONS = {
    "return": "if x.max() > 9:\n            return x",
    "returns or raises": "if x.max() > 9:\n            if x.dim() == 2: return x\n"
    "            raise ValueError",
    "else": "if x.max() > 9: raise ValueError\n        else: x = x + 1",
    "caught": "try:\n            if x.max() > 9: raise ValueError\n        except ValueError: pass",
    "print and more": "if x.max() > 9:\n            print('large')\n            x = -x",
    "size printed": "if len(x[x[:, 0] > 2]) > 1: print('large')",
    "inside": "assert (x if x.max() > 9 else -x).shape[0]",
}


def _checking(folder: Path, lines: str) -> nn.Module:
    """A model with these lines in its forward, from a file: pytest rewrites its own modules."""
    file = folder / "checking.py"
    file.write_text(
        "import torch\n\n\nclass Checking(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 4)\n\n"
        f"    def forward(self, x):\n        {lines}\n        return self.layer(x)\n"
    )
    made: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), made)
    model: nn.Module = made["Checking"]()
    return model.eval()


@pytest.mark.parametrize("name", CHECKS)
def test_the_authors_checks_of_values_are_not_in_the_graph(tmp_path: Path, name: str) -> None:
    model, x = _checking(tmp_path, CHECKS[name]), torch.rand(2, 4)
    graph = capture(model, x)
    assert [str(node.target) for node in graph.operations] == ["aten.linear.default"]
    assert not graph.decided
    assert graph.replay(torch.rand(3, 4)).shape == (3, 4)


def test_a_check_of_a_number_of_rows_is_required_and_no_decision(tmp_path: Path) -> None:
    # The layer needs the number, so that the check is asked with the example's values.
    lines = "columns = (x > 0).any(0).nonzero()\n        if len(columns) != 4: raise ValueError\n"
    model = _checking(tmp_path, f"{lines}        x = x[:, columns[:, 0]]")
    x = torch.tensor([1.0, -1, 1, 1, -1, 1]).expand(2, 6)
    graph = capture(model, x)
    assert graph.decided
    assert not graph.answers
    assert torch.equal(graph.replay(x.flip(1)), model(x))
    with pytest.raises(ValueError, match=r"nonzero .* asked about in .*checking\.py:11"):
        graph.replay(x.abs())


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (0, "if len(x[x[:, 0] > 2]) > 0: x = -x"),
        (0, "if len(x[x[:, 0] > 2]) <= 1: x = -x"),
        (1, "for _ in range(len(x[x[:, 0] > 2])): x = -x"),
    ],
)
def test_a_branch_or_loop_on_few_rows_is_required(tmp_path: Path, rows: int, line: str) -> None:
    x = torch.zeros(3, 4)
    x[:rows] = 9
    graph = capture(_checking(tmp_path, line), x)
    x[:2] = 9
    with pytest.raises(ValueError, match=r"asked about in .*checking\.py"):
        graph.replay(x)


def test_one_row_that_a_squeeze_would_remove_is_refused(tmp_path: Path) -> None:
    model = _checking(tmp_path, "x = x[(x[:, 0] > 2).nonzero().squeeze()]")
    x = torch.zeros(3, 4)
    x[:2] = 9
    graph = capture(model, x)
    x[2] = 8
    assert torch.equal(graph.replay(x), model(x))
    x[1:] = 0  # the author's index has no axis then
    with pytest.raises(ValueError, match=r"other than 1 row, got 1 \(nonzero .*checking\.py:10"):
        graph.replay(x)


@pytest.mark.parametrize("axes", ["0", ""])
def test_a_squeeze_removes_the_one_chosen_row_of_the_example(tmp_path: Path, axes: str) -> None:
    model = _checking(tmp_path, f"x = x[x[:, 0] > 2].squeeze({axes})")
    x = torch.zeros(3, 4)
    x[1] = 9
    graph = capture(model, x)
    assert torch.equal(graph.replay(x[:2].flip(0)), model(x[:2]))
    x[2] = 8
    with pytest.raises(ValueError, match=r"number of rows .*checking\.py:10"):
        graph.replay(x)


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_by_values_is_no_check(tmp_path: Path, name: str) -> None:
    graph = capture(_checking(tmp_path, DECISIONS[name]), torch.rand(2, 4))
    with pytest.raises(ValueError, match=r"asked about in .*checking\.py"):
        graph.replay(20 * torch.ones(2, 4))

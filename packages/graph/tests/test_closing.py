"""Modules that cannot be followed are found in one trace, and are nodes of the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import CaptureError, capture

Forward = Callable[[Any, Tensor], Tensor]


class Part(nn.Module):
    def __init__(self, forward: Forward, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = inside or nn.Linear(4, 4)
        self.own = forward
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def by_numpy(part: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(np.sort(part.layer(x).detach().numpy(), -1))


def by_a_float(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.layer(x)
    return y * float(y.mean()) if float(y.abs().max()) > 0.1 else y


def by_rows(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.layer(x).clone()
    for row in (y[:, 0] > 0).nonzero()[:, 0].tolist():
        y[row] = y[row] * 2
    return y


def with_a_counter(part: Any, x: Tensor) -> Tensor:
    part.calls += 1
    return by_numpy(part, x) + part.calls


def plain(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.layer(x)
    return y.relu()


def chain(*forwards: Forward) -> nn.Module:
    torch.manual_seed(0)
    parts = [Part(forward) for forward in forwards]
    return nn.Sequential(*parts, nn.Linear(4, 2)).eval()


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(None)  # one that ends in an error is counted too
        found[-1] = export(*args, **kwargs)
        return found[-1]

    monkeypatch.setattr(torch.export, "export", counted)
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("forwards", "whole"),
    [
        ([plain, by_numpy], 1),  # closed where the first trace ends; the second one is the graph
        ([by_numpy, plain, by_numpy, by_a_float] * 3, 1),
        ([by_rows, by_numpy, plain, by_a_float] * 3, 1),
        ([by_a_float, plain] * 5, 2),  # floats are refused once the whole is followed
    ],
)
def test_all_are_found_in_one_trace(
    forwards: list[Forward], whole: int, exports: list[Any]
) -> None:
    net, x = chain(*forwards), torch.randn(6, 4)
    graph = capture(net, x)
    assert len([program for program in exports if program is not None]) == whole
    assert len(exports) <= 4
    closed = [str(place) for place, forward in enumerate(forwards) if forward is not plain]
    assert sorted(graph.opaque, key=int) == closed
    for path, entry in graph.opaque.items():
        line = net.get_submodule(path).own.__code__.co_firstlineno  # type: ignore[union-attr]
        file, _, met = entry.reason.rstrip(")").rpartition(":")
        assert file.endswith(__file__)
        assert line < int(met) <= line + 5
        assert entry.called == {path, f"{path}.layer"}
    for rows in (6, 3):
        x = torch.randn(rows, 4)
        assert torch.equal(graph.replay(x), net(x))


@torch.no_grad()
def test_a_module_around_another_one_is_closed_alone() -> None:
    inner = Part(by_a_float, Part(by_numpy))
    net = nn.Sequential(Part(by_numpy), Part(by_rows, inner), Part(plain)).eval()
    x = torch.randn(4, 4)
    graph = capture(net, x)
    assert sorted(graph.opaque) == ["0", "1"]
    assert torch.equal(graph.replay(x), net(x))


class Twice(nn.Module):
    """A shared part whose second call alone cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Part(by_numpy)
        self.shared = Part(self.once)

    @staticmethod
    def once(part: Any, x: Tensor) -> Tensor:
        return plain(part, x) if x.shape[1] == 4 else by_numpy(part, x[:, :4])

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.first(x))
        return y + self.shared(torch.cat([x, y], 1))


@torch.no_grad()
def test_all_calls_of_a_module_are_nodes(exports: list[Any]) -> None:
    net, x = Twice().eval(), torch.randn(4, 4)
    graph = capture(net, x)
    assert {path: len(entry.calls) for path, entry in graph.opaque.items()} == {
        "first": 1, "shared": 2,
    }  # fmt: skip
    assert len(exports) == 3
    assert torch.equal(graph.replay(x), net(x))


@torch.no_grad()
def test_the_model_is_what_it_was() -> None:
    net, x = chain(by_numpy, with_a_counter, by_numpy, with_a_counter), torch.randn(4, 4)
    forwards = [vars(module).get("forward") for module in net.modules()]
    with pytest.raises(CaptureError, match=r"keeps 1\.calls, 3\.calls from call to call"):
        capture(net, x)
    assert [int(part.calls) for part in list(net)[:-1]] == [0] * 4  # type: ignore[arg-type]
    assert [vars(module).get("forward") for module in net.modules()] == forwards


class DoesNotReturn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(by_numpy), Part(by_a_float)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y * 2 if y.sum() > 0 else y


def test_the_models_own_line_is_named_after_its_parts() -> None:
    with pytest.raises(CaptureError, match=r"DoesNotReturn cannot be followed: .*test_closing\.py"):
        capture(DoesNotReturn().eval(), torch.randn(4, 4))

"""Shapes that are found at once are those that torch finds by itself."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from bevquant_graph import capture

EXAMPLE = torch.linspace(-3, 3, 2 * 3 * 4 * 6).view(2, 3, 4, 6)
ACTIVATIONS = {
    "hardsigmoid": nn.functional.hardsigmoid,
    "hardswish": nn.functional.hardswish,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "mish": nn.functional.mish,
    "elu": nn.functional.elu,
    "leaky_relu": nn.functional.leaky_relu,
    "softplus": nn.functional.softplus,
    "hardtanh": nn.functional.hardtanh,
    "clamp": lambda x: x.clamp(-1, 1),
    "exp": torch.exp,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "relu_": lambda x: (x + 0).relu_(),
    "silu_": lambda x: nn.functional.silu(x + 0, inplace=True),
}
# How the operand lies in memory: in rows, channels last, turned, with gaps, repeated.
LAYOUTS = {
    "rows": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.permute(0, 3, 1, 2),
    "gaps": lambda x: x[:, :, ::2],
    "repeated": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "half": lambda x: x.half(),
    "integers": lambda x: (x * 8).int(),
}


class Applied(nn.Module):
    """A function of one value in every layout that torch has it for."""

    def __init__(self, function: Any, layouts: Any) -> None:
        super().__init__()
        self.function, self.layouts = function, layouts

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.function(layout(x)) for layout in self.layouts]


def has(function: Any, layout: Any) -> bool:
    try:
        function(layout(EXAMPLE))
    except RuntimeError:
        return False
    return True


def layouts_kept(net: nn.Module) -> None:
    """Sizes, strides and type of every result, captured and in a run, at two sizes."""
    graph = capture(net, EXAMPLE)
    found = [output.meta["val"] for output in graph.outputs]
    for x in (EXAMPLE, torch.ones(3, 3, 6, 10)):
        symbols = graph.placeholders[0].meta["val"].shape
        known = {
            symbol.node.expr: size
            for symbol, size in zip(symbols, x.shape, strict=True)
            if isinstance(symbol, torch.SymInt)
        }
        assert len(known) >= 3

        def at(sizes: Any, real: Any, known: Any = known) -> list[int]:
            terms = [s.node.expr.subs(known) if isinstance(s, torch.SymInt) else s for s in sizes]
            # torch 2.10 and 2.11 give the size of a slice of a slice a symbol of its own.
            opened = [bool(getattr(term, "free_symbols", ())) for term in terms]
            assert not any(opened) or torch.__version__ < "2.12"
            return [
                own if new else term for term, own, new in zip(terms, real, opened, strict=True)
            ]

        made = net(x)
        captured = [
            (at(v.shape, w.shape), at(v.stride(), w.stride()), v.dtype)
            for v, w in zip(found, made, strict=True)
        ]
        assert captured == [([*v.shape], [*v.stride()], v.dtype) for v in made]


@pytest.mark.parametrize("function", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_have_torchs_own_sizes_strides_and_types(function: Any) -> None:
    layouts = [layout for layout in LAYOUTS.values() if has(function, layout)]
    assert len(layouts) >= 5
    layouts_kept(Applied(function, layouts).eval())


def test_batch_norms_have_torchs_own_sizes_strides_and_types() -> None:
    layouts = [LAYOUTS[n] for n in ("rows", "channels last", "gaps", "repeated")]
    layouts_kept(Applied(nn.BatchNorm2d(3), layouts).eval())


def test_samples_of_maps_have_torchs_own_sizes_strides_and_types() -> None:
    def sampled(x: Tensor) -> Tensor:
        return nn.functional.grid_sample(x, x[:, :2, 1:].permute(0, 2, 3, 1), align_corners=False)

    layouts = [LAYOUTS[n] for n in ("rows", "channels last", "gaps", "repeated")]
    layouts_kept(Applied(sampled, layouts).eval())


class Classifier(nn.Module):
    """An activation in place, and a view of what it wrote: the head of a MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.activation = nn.Hardswish(inplace=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.adaptive_avg_pool2d(x, 3)
        return self.out(self.activation(self.conv(x)).flatten(1))


class ReadsBefore(nn.Module):
    """A view from before the write, read after it: it shows what was written."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        flat = x.flatten(1)
        x.relu_()
        return flat * 2


class WritesWithoutAnInverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x.chunk(2, 2)[0].relu_()
        return x


@pytest.mark.parametrize(
    ("net", "again"),
    [(Classifier(), False), (ReadsBefore(), False), (WritesWithoutAnInverse(), True)],
)
def test_torch_traces_again_only_where_a_view_has_no_inverse(net: nn.Module, again: bool) -> None:
    decompose = ExportedProgram.run_decompositions
    with mock.patch.object(
        ExportedProgram, "run_decompositions", autospec=True, side_effect=decompose
    ) as traced:
        graph = capture(net.eval(), torch.randn(1, 3, 8, 8))
    assert traced.called is again
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(graph.replay(x), net(x))


class Frees(nn.Module):
    """As reversible blocks give their inputs' memory back, which torch cannot with open sizes."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x.shape[0], torch.SymInt):
            raise RuntimeError("set_storage_offset() called on tensor with symbolic shape")
        return x.relu()


def test_where_torch_takes_no_open_sizes_they_are_the_examples() -> None:
    assert capture(Frees(), torch.randn(2, 3)).fixed["x"] == {0: 2, 1: 3}


class ScatteredByBatch(nn.Module):
    """As mmdetection3d's PointPillarsScatter: a loop over the batch size in the coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        y, maps = self.layer(features), []
        for batch in range(coords[-1, 0].item() + 1):
            rows = coords[:, 0] == batch
            maps.append(torch.zeros(4, 50).index_copy(1, coords[rows, 1].long(), y[rows].t()))
        return torch.stack(maps)


def test_the_last_row_fixes_no_number_of_rows() -> None:
    def inputs(count: int) -> tuple[Tensor, Tensor]:
        places = torch.randperm(50)[:count]
        return torch.randn(count, 4), torch.stack([torch.zeros_like(places), places], 1).int()

    model = ScatteredByBatch().eval()
    graph = capture(model, inputs(20))
    for count in (1, 7, 33):
        given = inputs(count)
        assert torch.equal(graph.replay(*given), model(*given))


class Shifts(nn.Module):
    """Chosen rows, and a map plus the first of them, which every place of the map gets."""

    def __init__(self, total: Any) -> None:
        super().__init__()
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.flatten()[x.flatten() > 0]
        return self.total(x, chosen.cumsum(0)[:1])


@pytest.mark.parametrize(
    "total",
    [torch.add, lambda x, row: row + x, lambda x, row: torch.where(x > 0, x, row)],
)
def test_the_first_chosen_row_goes_with_every_size(total: Any) -> None:
    net = Shifts(total)
    graph = capture(net, EXAMPLE)
    for x in (EXAMPLE[:1] + 1, torch.ones(3, 3, 2, 5)):
        assert torch.equal(graph.replay(x), net(x))
    with pytest.raises((ValueError, RuntimeError)):
        net(-torch.ones(2, 3, 4, 6))
    with pytest.raises((ValueError, RuntimeError)):
        graph.replay(-torch.ones(2, 3, 4, 6))


class Keeps(nn.Module):
    """The first tokens, a share of them, asked twice: whether it is all of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for _ in range(2):
            rest = x.shape[1] - 8
            keep = math.ceil(0.7 * rest)
            if keep != rest:
                x = torch.cat([x[:, :8], x[:, 8:].sort(1)[0][:, :keep] * 2], 1)
        return x


def test_a_share_of_a_size_ends_a_slice_at_a_size() -> None:
    graph = capture(Keeps(), torch.randn(2, 4, 7))
    assert not graph.decided
    x = torch.randn(3, 4, 7)
    assert torch.equal(graph.replay(x), Keeps()(x))

"""Sizes that a forward asks about: kept as guards, and other sizes are right or refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv

from bevquant_graph import Guard, capture, check_guards, module_of, part_of
from bevquant_graph._conditions import _always

SIZES = [(7, 7), (12, 10), (5, 6), (16, 12), (9, 6), (8, 7), (6, 8), (1, 6)]
Ask = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.conv, self.ask = nn.Conv2d(3, 4, 3, padding=1), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self.conv(x)) + 1


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.shape[-1] * x.shape[-2] < 50 else x


def even(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 1)) if x.shape[2] % 2 else x


def windows(x: Tensor) -> Tensor:
    _, _, h, w = x.shape
    if h % 4 or w % 4:
        x = F.pad(x, (0, -w % 4, 0, -h % 4))
    n, c, high, wide = x.shape
    parts = x.reshape(n, c, high // 4, 4, wide // 4, 4)
    return (parts - parts.mean((3, 5), keepdim=True)).reshape(x.shape)[:, :, :h, :w]


def halved(x: Tensor) -> Tensor:
    while x.shape[2] > 4:
        x = F.max_pool2d(x, 2, ceil_mode=True)
    return x


def scaled(x: Tensor) -> Tensor:
    return x * {8: 1.0, 12: 2.0}.get(int(x.shape[2]), 3.0)


ASKS: dict[str, Ask] = {
    "even": even,
    "windows": windows,
    "halved": halved,
    "most": lambda x: x.relu() if x.shape[2] <= 9 else x,
    "batch": lambda x: x.relu() if len(x) == 2 else x,
    "product": Inner(),
    "nested": nn.Sequential(nn.Sequential(Inner())),
    "split": lambda x: x.split(2, 3)[-1],
    "chunk": lambda x: x.chunk(4, 3)[-1],
    "tensor_split": lambda x: x.tensor_split(3, 2)[1],
    "unbind": lambda x: torch.stack([row * i for i, row in enumerate(x.unbind(2))], 2),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, (x.shape[2] // 2, 1)),
    "numel": lambda x: x * (float(x.numel()) / 100),
    "root": lambda x: x * int(math.sqrt(x.shape[2] * x.shape[3])),
    "logarithm": lambda x: x * math.log2(x.shape[2]),
    "table": scaled,
    "text": lambda x: x * (1.0 if f"{x.shape[2]}" == "8" else 2.0),
    "set": lambda x: x * (1.0 if x.shape[2] in {8, 9} else 2.0),
    "quotient": lambda x: x * divmod(x.shape[2], 4)[0],
    "cached": lambda x: x * {8: 1.0}.get(x.shape[2], 2.0),
    "squeeze": lambda x: x.squeeze() * 2 if x.squeeze().dim() == 4 else x,
    "remainder": lambda x: F.pad(x, (0, 0, 0, -x.shape[2] % 4)) * max(x.shape[2], 7),
}


@pytest.mark.parametrize("name", ASKS)
def test_other_sizes_are_right_or_refused_with_the_condition(name: str) -> None:
    net = Net(ASKS[name]).eval()
    graph = capture(net, torch.randn(2, 3, 8, 6))
    x = torch.randn(2, 3, 8, 6)
    assert torch.equal(graph.replay(x), net(x))
    for batch in (1, 2, 3):
        for size in SIZES:
            y = torch.randn(batch, 3, *size)
            try:
                made = graph.replay(y)
            except ValueError:
                with pytest.raises(ValueError, match=r"^input x: expected .*, got shape"):
                    graph.replay(y)
                continue
            assert made.shape == net(y).shape
            torch.testing.assert_close(made, net(y))


@pytest.mark.parametrize(
    ("name", "condition", "sizes"),
    [
        ("even", "x.shape[2] % 2 == 0", (7, 6)),
        ("most", "x.shape[2] <= 9", (12, 6)),
        ("quotient", "x.shape[2] == 8", (12, 6)),
        ("cached", "x.shape[2] == 8", (12, 6)),
        ("product", "x.shape[2] * x.shape[3] < 50", (12, 6)),
        ("numel", "4 * x.shape[0] * x.shape[2] * x.shape[3] == 384", (8, 7)),
    ],
)
def test_the_line_that_asks_is_named(name: str, condition: str, sizes: tuple[int, int]) -> None:
    graph = capture(Net(ASKS[name]).eval(), torch.randn(2, 3, 8, 6))
    guard = next(guard for guard in graph.guards if guard.text == condition)
    assert guard.place.startswith(__file__)
    with pytest.raises(ValueError, match=r"test_guards\.py:\d+, got shape \(2, 3, ") as caught:
        graph.replay(torch.randn(2, 3, *sizes))
    wanted = "expected size 8 in axis 2" if guard.fixes else f"expected {condition}"
    assert wanted in str(caught.value)


@pytest.mark.parametrize("squeezed", [lambda y: y[:, 0].squeeze(0), lambda y: y[:, :1].squeeze()])
def test_an_axis_that_is_squeezed_is_gone_for_the_next_operator(squeezed: Any) -> None:
    """As in a detector of key points, which returns the places of a map of one frame."""
    net = Net(lambda x: torch.stack(torch.where(squeezed(x) > 0), -1) * 2.0).eval()
    graph = capture(net, torch.randn(1, 3, 8, 6))
    for size in ((8, 6), (3, 9)):
        x = torch.randn(1, 3, *size)
        assert torch.equal(graph.replay(x), net(x))
    with pytest.raises(ValueError, match=r"^input x: expected size 1 in axis 0"):
        graph.replay(torch.randn(2, 3, 8, 6))


def test_a_height_that_layers_reduce_to_one_is_squeezed() -> None:
    """As in a range image whose rows strided layers reduce to one sequence."""

    def sequence(x: Tensor) -> Tensor:
        x = F.conv2d(F.conv2d(x, torch.ones(4, 4, 2, 1), stride=(2, 1)), torch.ones(4, 4, 4, 1))
        return x.relu().squeeze(2).permute(2, 0, 1).relu()

    net = Net(sequence).eval()
    graph = capture(net, torch.randn(1, 3, 8, 6))
    x = torch.randn(2, 3, 8, 9)
    assert torch.equal(graph.replay(x), net(x))


def test_what_torch_asks_of_strides_and_kernels_is_no_guard() -> None:
    def written(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :2] = x[:, 2:] * 2
        return y.permute(0, 2, 3, 1).contiguous()

    graph = capture(Net(written).eval(), torch.randn(1, 3, 8, 6))
    assert [guard.text for guard in graph.guards] == ["x.shape[1] == 3"]


def test_inputs_that_agree_and_numbers_are_guarded() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor, n: int) -> Tensor:
            z = torch.cat([x, y], 1)
            return z * 2 if n > 3 else z

    graph = capture(Two(), (torch.randn(2, 3), torch.randn(2, 4), 5))
    assert graph.replay(torch.ones(3, 1), torch.ones(3, 2), 4).shape == (3, 3)
    with pytest.raises(ValueError, match=r"inputs x and y: expected .*shape\[0\] == .*shape\[0\]"):
        graph.replay(torch.ones(3, 1), torch.ones(2, 2), 4)
    with pytest.raises(ValueError, match=r"input n: expected n > 3, .*got 2"):
        graph.replay(torch.ones(3, 1), torch.ones(3, 2), 2)


def test_a_graph_that_is_known_and_a_part_keep_the_guards() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.second(y.relu() if y.shape[2] > 3 else y)

    x = torch.randn(1, 3, 12, 12)
    guards = capture(Steps().eval(), x).guards
    graph = capture(Steps().eval(), x)  # of the structure that was followed
    assert graph.guards == guards
    first, second = next(graph.operations), graph.outputs[0]
    part = part_of(graph, {"": second}, {"y": first})
    assert part.replay(y=torch.randn(1, 4, 4, 5)).shape == (1, 4, 4, 5)
    with pytest.raises(ValueError, match=r"input y: expected y\.shape\[2\] > 3"):
        part.replay(y=torch.randn(1, 4, 3, 5))


def test_a_program_of_torchs_keeps_its_guards() -> None:
    net, any_size = Net(even).eval(), torch.export.Dim.AUTO
    x = torch.randn(2, 3, 8, 6)
    sizes = ({0: any_size, 2: any_size, 3: any_size},)
    program = torch.export.export(net, (x,), dynamic_shapes=sizes)
    for source in (program, program.module()):
        made = module_of(source)
        y = torch.randn(1, 3, 6, 5)
        torch.testing.assert_close(made(y), net(y))
        refused = r"input x: expected x\.shape\[2\] % 2 == 0, as the forward asks in .*test_guards"
        with pytest.raises(ValueError, match=refused):
            made(torch.randn(1, 3, 7, 5))
        with pytest.raises(ValueError, match=refused):
            capture(made, x).replay(torch.randn(1, 3, 7, 5))


def test_what_a_module_that_is_one_node_returns_has_the_examples_size_where_it_is_read() -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, ::2] * 2 if x.sum() > 1e9 else x[:, :, ::2]

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decides = Decides()

        def forward(self, x: Tensor) -> Tensor:
            y = self.decides(x)
            return y * y.shape[2]

    graph = capture(Around(), torch.randn(2, 3, 8))
    assert [*graph.opaque] == ["decides"]
    with pytest.raises(ValueError, match="decides: expected an output of size 4 in axis 2"):
        graph.replay(torch.randn(2, 3, 6))


def test_a_guard_of_a_file_is_arithmetic_and_nothing_else() -> None:
    guard = Guard("(s0 + 3) // 4 != s1 and not s0 % 2", (("x", 0), ("n", None)), "net.py", 7)
    assert Guard.from_json(guard.to_json()) == guard
    assert guard.holds({"x": (8, 3), "n": 3})
    assert not guard.holds({"x": (8, 3), "n": 2})
    assert str(guard.where({("n", None): 3})) == (
        "(x.shape[0] + 3) // 4 != 3 and not x.shape[0] % 2 (net.py:7)"
    )
    assert not Guard("10 // s0 > 1", (("x", 0),)).holds({"x": (0,)})
    with pytest.raises(ValueError, match=r"input n: expected n > 4, as the forward asks, got 3; x"):
        check_guards([Guard("s0 > 4", (("n", None),))], {"n": 3}, "x")
    for text in (
        "__import__('os')", "s0.real", "s1", "s0 ** 9 ** 9 ** 9", "open(s0)", "[s0]", "'a' * s0",
        "s0 :=", "(lambda: s0)()", "(" * 9000, "s0 << 99", "min(s0, key=s0)",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"condition|exponent"):
            Guard.from_json({**guard.to_json(), "sizes": [["x", 0]], "condition": text})
    for data in (
        {},
        [],
        {**guard.to_json(), "sizes": [["x", -1]]},
        {**guard.to_json(), "line": ""},
    ):
        with pytest.raises(ValueError, match="expected"):
            Guard.from_json(data)


def _padded(y: Tensor, found: Tensor) -> Tensor:
    kept = y[found > 3]
    return torch.cat([kept, kept[:1]]) if kept.shape[0] % 2 else kept


ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shape": lambda y, n: y * 2 if y[n > 3].shape[0] > 4 else y,
    "len": lambda y, n: y * 2 if len(y[n > 3]) > 4 else y,
    "nonzero": lambda y, n: y * 2 if (n > 3).nonzero().shape[0] == 0 else y,
    "where": lambda y, n: y * 2 if torch.where(n > 3)[0].numel() > 4 else y,
    "selected": lambda y, n: y * 2 if torch.masked_select(y[:, 0], n > 3).size(0) > 4 else y,
    "unique": lambda y, n: y * 2 if torch.unique(n).shape[0] > 4 else y,
    "written": lambda y, n: y.mul_(2) if (n > 3).nonzero().shape[0] > 4 else y,
    "odd": _padded,
    "number": lambda y, n: y[n > 3] * float(y[n > 3].shape[0]),
    "smaller": lambda y, n: y[n > 3][: min(y[n > 3].shape[0], 5)],
}


@pytest.mark.parametrize("name", ROWS)
def test_other_numbers_of_rows_that_values_decide_are_right_or_refused(name: str) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return self.b(ROWS[name](self.a(x), n))

    net, x, refused = Rows().eval(), torch.randn(10, 3), 0
    graph = capture(net, (x, torch.arange(10)))
    for n in (torch.arange(9, -1, -1), torch.arange(10) % 5, torch.arange(10) % 7, torch.ones(10)):
        try:
            made = graph.replay(x, n.long())
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match=r"number of rows \(.*test_guards\.py:\d+"):
                graph.replay(x, n.long())
            continue
        assert torch.equal(made, net(x, n.long()))
    assert bool(refused) == (name != "smaller")


def _levels(x: Tensor, table: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    maps = [x, F.max_pool2d(x, 2)]
    sizes = table([(level.shape[-2], level.shape[-1]) for level in maps])
    return sizes, torch.cat([level.flatten(2) for level in maps], 2)


def _parts(x: Tensor) -> Tensor:
    sizes, flat = _levels(x, torch.as_tensor)
    part = flat.split([int(h * w) for h, w in sizes], 2)[1]
    return part.view(x.shape[0], 4, int(sizes[1, 0]), int(sizes[1, 1]))


def _starts(x: Tensor) -> Tensor:
    sizes, flat = _levels(x, torch.as_tensor)
    start = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]])
    return flat[..., int(start[1]) :]


LEVELS: dict[str, tuple[Ask, bool]] = {
    "scale": (lambda x: x / _levels(x, torch.as_tensor)[0][1, 0], True),
    "new": (lambda x: x / _levels(x, x.new_tensor)[0].prod(1)[0], True),
    "type": (
        lambda x: x * _levels(x, lambda s: torch.as_tensor(s, dtype=torch.long))[0][0, 1],
        True,
    ),
    "branch": (lambda x: x.relu() if _levels(x, torch.tensor)[0].sum() > 22 else x, False),
    "parts": (_parts, False),
    "starts": (_starts, True),
}


@pytest.mark.parametrize("name", LEVELS)
def test_a_table_of_level_sizes_is_computed_or_guarded(name: str) -> None:
    ask, is_open = LEVELS[name]
    net, x, y = Net(ask).eval(), torch.randn(2, 3, 8, 6), torch.randn(1, 3, 12, 8)
    graph = capture(net, x)
    assert not graph.opaque
    assert torch.equal(graph.replay(x * 2), net(x * 2))
    if is_open:
        torch.testing.assert_close(graph.replay(y), net(y))
    else:
        with pytest.raises(ValueError, match=r"expected .*test_guards\.py:\d+, got shape"):
            graph.replay(y)


@pytest.mark.parametrize(
    ("term", "least", "holds"),
    [
        ("2*((s - 1)//2) < s", 1, True),
        ("2*((s - 1)//2) < s", 0, True),
        ("3*((s - 1)//3) <= s - 1", 1, True),
        ("2*((s - 1)//2) < s - 1", 1, False),
        ("2*(s//2) < s", 1, False),
        ("(s//2)//3 <= s", 1, True),
        ("3*(s//2) <= s + 20", 1, False),
        ("(s//2)//2 < 1", 1, False),
        ("s < 5000", 1, False),
        ("s*s < 5*s", 1, False),
    ],
)
def test_conditions_of_one_size_that_hold_for_all(term: str, least: int, holds: bool) -> None:
    size = sympy.Symbol("s", integer=True, positive=True)
    left, sign, right = re.split("(<=|<)", term)

    class Size:
        """Floor divisions as torch writes them."""

        def __init__(self, term: Any) -> None:
            self.term = term

        def __floordiv__(self, other: int) -> Size:
            return Size(FloorDiv(self.term, sympy.Integer(other)))

        def __mul__(self, other: Any) -> Size:
            return Size(self.term * getattr(other, "term", other))

        def __add__(self, other: int) -> Size:
            return Size(self.term + other)

        def __sub__(self, other: int) -> Size:
            return Size(self.term - other)

        __rmul__ = __mul__

    sides = (eval(side, {"s": Size(size)}) for side in (left, right))
    terms = (getattr(side, "term", side) for side in sides)
    kind = sympy.StrictLessThan if sign == "<" else sympy.LessThan
    assert _always(kind(*terms, evaluate=False), least) is holds


class Aligned(nn.Module):
    """A U-Net's step up, which cuts the larger map only where the sizes differ."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        fine, coarse = maps
        up = F.interpolate(coarse, scale_factor=2.0)
        if up.shape[2] != fine.shape[2]:
            up = up[:, :, : fine.shape[2]]
        return up.mean((2, 3)) + fine.mean((2, 3))


def test_a_size_that_must_be_twice_another_one_is_required() -> None:
    net = Aligned().eval()
    graph = capture(net, {"maps": [torch.randn(1, 2, 8, 12), torch.randn(1, 2, 4, 6)]})
    frame = [torch.randn(1, 2, 16, 8), torch.randn(1, 2, 8, 4)]
    assert torch.equal(graph.replay(maps=frame), net(frame))
    with pytest.raises(ValueError, match=r"2 \* maps\[1\]\.shape\[2\] == maps\[0\]\.shape\[2\]"):
        graph.replay(maps=[torch.randn(1, 2, 16, 8), torch.randn(1, 2, 9, 4)])

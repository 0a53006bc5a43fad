"""Whatever Python does in a forward is captured, replayed bit for bit on frames of other sizes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bevquant_graph import CaptureError, Graph, arguments, capture, flatten, op_spec, rebuild
from bevquant_sparse import use_bevquant_kernels


class Output(OrderedDict[str, Any]):
    """As transformers' results: a dict with attributes, made by keywords."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)


class Idioms(nn.Module):
    def __init__(self, idiom: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act, self.drop, self.head = nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 2)
        self.idiom = idiom

    def forward(self, x: Any, *others: Any, **named: Any) -> Any:
        return self.idiom(self, x, *others, **named)

    def stem(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def ratio_of_sizes(net: Any, x: Tensor) -> Tensor:
    y = F.max_pool2d(net.stem(x), 2)
    factor = int(x.shape[2] / y.shape[2])
    return F.interpolate(y, scale_factor=factor)


def lengths_and_text(net: Any, x: Tensor) -> Tensor:
    parts = net.stem(x).chunk(2, 1)
    assert len(x) > 0, f"no frames in {x.shape}"
    return parts[len(parts) - 1]


def asserts_with_and(net: Any, x: Tensor) -> Tensor:
    assert x.dim() == 4 and x.shape[1] == 3  # noqa: PT018 - what public forwards write
    return net.stem(x)


def asks_for_gradients(net: Any, x: Tensor) -> Tensor:
    return net.stem(x) if not x.requires_grad else net.conv(x)


def checkpointed(net: Any, x: Tensor) -> Tensor:
    return checkpoint(net.stem, x, use_reentrant=False)


def slices_written(net: Any, x: Tensor) -> Tensor:
    y = net.stem(x)
    y[:, 1] = y[:, 0] * 2
    y[..., 1:3].sigmoid_()
    return y


def columns_written(net: Any, x: Tensor) -> Tensor:
    y = net.stem(x).permute(0, 2, 3, 1)
    y[..., [0, 2]] = y[..., [0, 2]] + y[..., [1, 3]]
    return net.head(y)


def sum_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.stem(x)
    z = net.norm(y)
    z += y
    return net.act(z)


def old_name_read_late(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    old = y
    y = net.act(y)  # in place: `old` is the same memory
    return y + old


def out_argument(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    torch.add(y, 1, out=y)
    return y


def masked(net: Any, x: Tensor) -> Tensor:
    y = net.stem(x)
    y.masked_fill_(y > 1, 0.5)
    return y.clamp_(max=0.7)


def nested_output(net: Any, x: Tensor) -> Any:
    y = net.stem(x)
    return Output(maps=[y, y.mean((2, 3))], size=(x.shape[0], "kept"))


def dropout_and_flatten(net: Any, x: Tensor) -> Tensor:
    return net.head(net.drop(F.adaptive_avg_pool2d(net.stem(x), 1).flatten(1)))


def einops_like(net: Any, x: Tensor) -> Tensor:
    y = net.stem(x)
    n, c, h, w = y.shape
    return y.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(n, -1, 4 * c)


def data_of_values(net: Any, x: Tensor) -> Tensor:
    y = net.stem(x)
    y.data.mul_(2)
    return torch.cat([y, y.data * net.conv.weight.data.sum()], 1)


def attention(net: Any, x: Tensor) -> Tensor:
    y = net.stem(x).flatten(2).transpose(1, 2)
    y = y * (y.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(y, y, y)


def mapped_mask(net: Any, x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[2]), torch.arange(x.shape[3])
    near = torch.vmap(
        torch.vmap(lambda i, j: (i - j).abs() < 3, in_dims=(None, 0)), in_dims=(0, None)
    )
    return net.stem(x).masked_fill(~near(rows, columns), 0.0)


def joined_with_nothing(net: Any, x: Tensor) -> Tensor:
    past = torch.tensor([])
    return torch.cat([past, net.stem(x), net.stem(x)], dim=-2)


def a_loop_over_maps(net: Any, x: Tensor) -> Tensor:
    maps = [net.stem(x)]
    for _ in range(2):
        maps.append(F.avg_pool2d(maps[-1], 2))
    return torch.cat([F.interpolate(m, size=x.shape[-2:]) for m in maps], 1)


def input_reshaped(net: Any, x: Tensor) -> Tensor:
    x.unsqueeze_(0)
    return net.stem(x.squeeze_(0))


IDIOMS = [
    ratio_of_sizes, lengths_and_text, asserts_with_and, asks_for_gradients, checkpointed,
    slices_written, columns_written, sum_in_place, old_name_read_late, out_argument, masked,
    nested_output, dropout_and_flatten, einops_like, data_of_values, attention, a_loop_over_maps,
    mapped_mask, joined_with_nothing, input_reshaped,
]  # fmt: skip


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(one: Any, other: Any) -> bool:
    left, right = flatten(one)[0], flatten(other)[0]
    return len(left) == len(right) and all(map(torch.equal, left, right))


@torch.no_grad()
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda f: f.__name__)
def test_idioms_are_followed_on_any_size(idiom: Any) -> None:
    net = Idioms(idiom).eval()
    state = {name: t.clone() for name, t in net.state_dict().items()}
    x = image(1, 3, 8, 8)
    kept = x.clone()
    graph = capture(net, x)
    assert not graph.opaque
    assert torch.equal(x, kept)
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())
    assert not any(str(n.target).split(".")[1].endswith("_") for n in graph.operations
                   if str(n.target).startswith("aten."))  # fmt: skip
    # Python drops leading sizes of 1 of what is written to listed columns: one frame stays one.
    batch = 1 if idiom is columns_written else 3
    for shape in ((1, 3, 8, 8), (batch, 3, 16, 8)):
        assert same(graph.replay(image(*shape)), net(image(*shape))), shape


@torch.no_grad()
def test_containers_numbers_and_arrays_among_the_inputs() -> None:
    @dataclasses.dataclass
    class Meta:
        grid: Any
        name: str

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch_dict: dict[str, Any], meta: Meta, *, scale: float = 1.0) -> Any:
            x = batch_dict["features"]
            size = np.asarray(meta.grid)[::-1].copy()
            y = self.linear(x).view(batch_dict["batch_size"], -1, 4) * scale
            batch_dict["out"] = y + int(size[0])
            return batch_dict

    def frame(batch: int, rows: int) -> dict[str, Any]:
        return {"features": image(batch * rows, 4), "batch_size": batch, "note": "kept"}

    net, meta = Takes().eval(), Meta(np.array([3, 5]), "a")
    graph = capture(net, (frame(1, 6), meta))
    assert graph.input_names[:2] == ["batch_dict['features']", "batch_dict['batch_size']"]
    for batch, rows in ((1, 6), (2, 5)):
        made = graph.replay(frame(batch, rows), meta)
        assert made["note"] == "kept"
        assert same(made["out"], net(frame(batch, rows), meta)["out"])
    named = capture(net, {"batch_dict": frame(1, 6), "meta": meta, "scale": 0.5})
    wanted = net(frame(1, 6), meta, scale=0.5)["out"]
    assert same(named.replay(batch_dict=frame(1, 6), meta=meta, scale=0.5)["out"], wanted)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.mean() > 0) else x - 1


@torch.no_grad()
def test_a_decision_by_values_is_one_node_with_reason_file_and_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Branching(), nn.ReLU()).eval()
    graph = capture(net, image(2, 4))
    (entry,) = graph.opaque.values()
    assert entry.path == "1"
    assert "branches on the values of a tensor" in entry.reason
    assert capfd.readouterr() == ("", "")  # torch.export prints its graph so far
    assert __file__ in entry.reason
    for sign in (1, -1):
        x = image(2, 4) * sign
        assert torch.equal(graph.replay(x), net(x))


class Ordered(nn.Module):
    """Rows in the order of their groups, and those of all but the first: views of one tensor."""

    def forward(self, x: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        if bool(x.mean() > 9):
            return group, group
        order = torch.cat([(group == i).nonzero()[:, 0] for i in range(3)])
        return order, order[int((group == 0).sum()) :]


class Grouped(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.order, self.layer, self.fixed = Ordered(), nn.Linear(4, 2), fixed

    def forward(self, x: Tensor, group: Tensor) -> tuple[Tensor, ...]:
        order, rest = self.order(x, group)
        if self.fixed and len(rest) == 0:
            return (self.layer(x),)
        return self.layer(x)[order].view(-1, 2), x[rest].sum(0)


@torch.no_grad()
def test_sizes_that_a_module_makes_of_its_rows_stay_open() -> None:
    net = Grouped(False).eval()
    graph = capture(net, (image(10, 4), torch.arange(10) % 3))
    assert list(graph.opaque) == ["order"]
    for rows in (7, 16):
        given = image(rows, 4), torch.arange(rows) % 3
        assert all(map(torch.equal, graph.replay(*given), net(*given)))


@torch.no_grad()
def test_sizes_that_a_forward_decides_by_are_the_examples() -> None:
    net, given = Grouped(True).eval(), (image(10, 4), torch.arange(10) % 3)
    graph = capture(net, given)
    assert list(graph.opaque) == ["order"]
    assert all(map(torch.equal, graph.replay(*given), net(*given)))


def test_a_decision_of_the_models_own_forward_is_the_examples() -> None:
    net, x = Branching(), image(2, 4).abs()
    graph = capture(net, x)
    assert graph.decided
    assert torch.equal(graph.replay(3 * x), net(3 * x))
    with pytest.raises(ValueError, match=r"asked about in .*test_capture\.py:\d+\)") as e:
        graph.replay(-x)
    assert "only with" not in str(e.value)


class Attends(nn.Module):
    """One projection where query and key are one tensor, as copies of torch 1's attention ask."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q = self.query(query)
        return q @ (q if torch.equal(query, key) else self.key(key)).mT


def test_the_question_whether_query_and_key_are_equal_is_followed() -> None:
    net, part, x, y = Within(Attends()), Attends(), image(5, 4), image(3, 4)
    graph = capture(net, x)
    assert not graph.opaque
    assert not graph.decided
    assert torch.equal(graph.replay(3 * x), net(3 * x))
    graph = capture(part, (x, y))
    assert not graph.decided
    assert torch.equal(graph.replay(x, 3 * y), part(x, 3 * y))
    assert capture(Within(part, own=False), x).opaque  # equal or not, by their values


class Within(nn.Module):
    """Its own attention to the tokens that it makes."""

    def __init__(self, attention: nn.Module, own: bool = True) -> None:
        super().__init__()
        self.attention, self.own = attention, own

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.relu()
        return self.attention(tokens, tokens if self.own else x)  # type: ignore[no-any-return]


class Sums(nn.Module):
    """Attention between two tensors that the forward makes of one."""

    def __init__(self, make: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.attention, self.make = Attends(), make
        self.position, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(*self.make(self, x.relu()))  # type: ignore[no-any-return]


def written(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    first = x + net.position
    row = x[0]
    row += 1
    return first, x + net.position


@pytest.mark.parametrize(
    ("make", "are_equal"),
    [
        (lambda net, x: (x + net.position, x + net.position), True),
        (lambda net, x: (x + net.position, x + net.other), True),  # equal parameters
        (lambda net, x: (torch.cat([x, x]).mT.mT, torch.cat([x, x]).mT.mT), True),
        (lambda net, x: (x + 0.5, x + 0.6), False),
        (lambda net, x: (x + net.position, x), False),
        (lambda net, x: (x + torch.zeros(4), x - torch.zeros(4)), False),
        (written, False),
    ],
)
def test_equal_operations_on_equal_operands_are_equal(make: Any, are_equal: bool) -> None:
    net, x = Sums(make), image(5, 4)
    graph = capture(net, x)
    assert bool(graph.opaque) is not are_equal
    assert not graph.decided
    assert torch.equal(graph.replay(3 * x), net(3 * x))


def test_equal_parameters_must_stay_equal() -> None:
    net, x = Sums(lambda net, x: (x + net.position, x + net.other)), image(5, 4)  # type: ignore
    graph = capture(net, x)
    with torch.no_grad():
        net.other.fill_(2)
    with pytest.raises(ValueError, match="other"):
        graph.replay(x)
    assert torch.equal(capture(net, x).replay(x), net(x))


class Selects(nn.Module):
    """Work on the selected rows, if there are some, and on a flag of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for mask in (x[:, 0] > 0, x[:, 0] > 100):
            if not mask.any():
                continue
            x = x.index_put((mask,), self.layer(x[mask]))
        return x if torch.all(x < 1000) else x / 2


@torch.no_grad()
def test_a_part_that_asks_for_any_selected_row_is_followed() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), Selects()).eval(), torch.randn(9, 4)
    graph = capture(net, x)
    assert graph.decided
    assert not graph.opaque
    for rows in (5, 30):
        frame = torch.randn(rows, 4)
        assert torch.equal(graph.replay(frame), net(frame))
    for frame in (1e3 * x, 1e6 * x):
        with pytest.raises(ValueError, match=r"asked about in .*test_capture\.py:\d+\)"):
            graph.replay(frame)


class Best(nn.Module):
    """The k best of the positive scores, or all of fewer."""

    def __init__(self, count: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        scores = x[x > 0]
        return scores.topk(max(1, min(10, self.count(scores))))[0] * 2


def test_rows_are_counted_in_a_file_that_is_in_no_list_of_modules(tmp_path: Path) -> None:
    # As `exec_module` of importlib runs a file that nobody adds to `sys.modules`.
    text = """
class Net(nn.Module):
    def forward(self, x):
        kept = x[x > 0]
        return x * 2 if len(kept) == 0 else kept * 2
"""
    scope = {"nn": nn, "__name__": "unlisted"}
    exec(compile(text, tmp_path / "net.py", "exec"), scope)
    graph = capture(scope["Net"](), torch.tensor([1.0, -1.0, 2.0]))
    assert graph.replay(torch.tensor([3.0, -1.0])).tolist() == [6.0]


@pytest.mark.parametrize("count", [lambda x: len(x), lambda x: x.shape[0], Tensor.numel])
def test_the_smaller_of_a_number_and_the_rows_is_no_decision(
    count: Callable[[Tensor], int],
) -> None:
    net = Best(count)
    for example in (60, 8):
        graph = capture(net, torch.randn(example))
        assert not graph.decided
        for rows in (100, 30, 8, 4):
            x = torch.cat([torch.ones(1), torch.randn(rows)])
            assert torch.equal(graph.replay(x), net(x))


class Stops(nn.Module):
    """Layers until the result is sure, as in LightGlue, where this is switched on."""

    def __init__(self, confidence: float = 0.5) -> None:
        super().__init__()
        self.layers, self.confidence = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), confidence

    def forward(self, x: Tensor) -> Tensor:
        early = self.confidence > 0 and len(x) > 0
        for layer in self.layers:
            x = layer(x)
            if early:
                sure = x.abs()
                if sure.mean() > self.confidence:
                    break
        return x


@torch.no_grad()
def test_a_stop_by_values_names_the_attribute_that_switches_it_off() -> None:
    torch.manual_seed(0)
    net, x = Stops().eval(), torch.randn(8, 4)
    graph = capture(net, x)
    for frame in (x, 0 * x, 100 * x):
        rounds: list[nn.Module] = []
        hooks = [
            m.register_forward_hook(lambda m, *_, met=rounds: met.append(m)) for m in net.layers
        ]
        wanted = net(frame)
        for hook in hooks:
            hook.remove()
        linears = [n for n in graph.operations if "linear" in str(n.target)]
        if len(rounds) == len(linears):
            assert torch.equal(graph.replay(frame), wanted)
        else:
            with pytest.raises(ValueError, match=r"only with self\.confidence > 0"):
                graph.replay(frame)
    off = capture(Stops(-1).eval(), x)
    assert not off.decided
    assert torch.isfinite(off.replay(100 * x)).all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x: torch.from_numpy(x.detach().numpy() * 2), "numpy.*compute that with torch"),
        (lambda x: x * (x.data_ptr() % 2), "code that torch does not know.*custom_op"),
    ],
)
def test_what_leaves_torch_is_refused_with_the_remedy(step: Any, message: str) -> None:
    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return step(x).sigmoid()

    with pytest.raises(
        CaptureError, match=rf"Outside cannot be followed: .*{message} \(.*\.py:\d+"
    ):
        capture(Outside(), image(1, 3, 4, 4))


def test_integers_taken_out_of_tensors_are_held_to_the_example() -> None:
    class Scatter(nn.Module):
        def forward(self, x: Tensor, coords: Tensor) -> Tensor:
            frames = int(coords[:, 0].max().item()) + 1
            maps = []
            for frame in range(frames):
                canvas = torch.zeros(x.shape[1], 16)
                rows = coords[:, 0] == frame
                canvas[:, coords[rows, 1].long()] = x[rows].t()
                maps.append(canvas)
            return torch.stack(maps)

    def frame(batch: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(10) % 8
        return image(10, 3), torch.stack([torch.arange(10) % batch, places + 1], 1).int()

    net = Scatter().eval()
    graph = capture(net, frame(2))
    assert not graph.opaque
    assert torch.equal(graph.replay(*frame(2)), net(*frame(2)))
    with pytest.raises(ValueError, match="a number that it takes out of a tensor"):
        graph.replay(*frame(1))


@pytest.mark.parametrize("plain", [False, True])  # as BEVDet's grid_size is
@torch.no_grad()
def test_integers_taken_out_of_a_models_tensors_are_those_that_they_hold(plain: bool) -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            nx = torch.tensor([6, 5, 1])
            self.nx = nx if plain else nn.Parameter(nx, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            wide, high = int(self.nx[0]), self.nx[1].item()
            return x.new_ones(x.shape[0], 1, wide, high) + x.mean((2, 3), keepdim=True)

    net = Grid().eval()
    graph = capture(net, image(1, 1, 8, 8))
    assert not graph.opaque
    assert not any("item" in str(node.target) for node in graph.operations)
    x = image(2, 1, 4, 4)
    assert torch.equal(graph.replay(x), net(x))
    net.nx[0] = 7
    with pytest.raises(ValueError, match="numbers that it takes out of tensors"):
        graph.replay(x)
    assert torch.equal(capture(net, image(1, 1, 8, 8)).replay(x), net(x))


_NX = torch.tensor([6, 5])  # as a global of a model's file


@pytest.mark.parametrize("source", ["list", "dict", "object", "class", "global"])
@torch.no_grad()
def test_numbers_of_tensors_in_containers_classes_and_globals_are_constants(source: str) -> None:
    nx = torch.tensor([6, 5])

    class Grid(nn.Module):
        of_class = torch.tensor([6, 5])

        def __init__(self) -> None:
            super().__init__()
            self.sizes, self.named = [nx], {"nx": [nx]}
            self.config = SimpleNamespace(nx=nx)

        def forward(self, x: Tensor) -> Tensor:
            own = {"list": self.sizes[0], "dict": self.named["nx"][0], "object": self.config.nx}
            read = own.get(source, self.of_class if source == "class" else _NX)
            return x.new_zeros(int(read[0]), read[1].item()) + x.mean()

    net = Grid().eval()
    graph = capture(net, image(1, 1, 8, 8))
    assert not any("item" in str(node.target) for node in graph.operations)
    x = image(2, 1, 4, 4)
    assert torch.equal(graph.replay(x), net(x))
    held = {"class": Grid.of_class, "global": _NX}.get(source, nx)
    held[0] = 7
    try:
        with pytest.raises(ValueError, match="numbers that it takes out of tensors"):
            graph.replay(x)
    finally:
        held[0] = 6


def test_weights_of_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(CaptureError, match=r"0\.weight.*inference_mode.*copy\.deepcopy"):
        capture(net, torch.ones(1, 4))
    capture(copy.deepcopy(net), torch.ones(1, 4))


@pytest.mark.parametrize("count", [lambda c: int(c[-1, 0]) + 1, lambda c: c[:, 0].max().item() + 1])
@torch.no_grad()
def test_a_number_out_of_a_view_beside_writes(count: Any) -> None:
    class Scatter(nn.Module):
        def forward(self, x: Tensor, coords: Tensor) -> Tensor:
            maps = []
            for frame in range(count(coords)):
                rows = coords[:, 0] == frame
                canvas = torch.zeros(3, 16, dtype=x.dtype)
                canvas[:, coords[rows, 1].long()] = x[rows].t()
                maps.append(canvas)
            return torch.stack(maps)

    coords = torch.stack([torch.arange(10) // 5, torch.arange(10)], 1).int()
    net, x = Scatter().eval(), image(10, 3)
    graph = capture(net, (x, coords))
    assert not graph.opaque
    assert torch.equal(graph.replay(x * 2, coords), net(x * 2, coords))


def test_a_loop_over_values_ends_as_in_the_model() -> None:
    class Halves(nn.Module):
        rounds: ClassVar[list[int]] = []

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 16.0))

        def forward(self, x: Tensor) -> Tensor:
            y, n = x * self.weight, 0
            while y.abs().max() > 1:
                y, n = y / 2, n + 1
                assert n <= 4, "more than the values ask for"
            self.rounds.append(n)
            return y

    graph = capture(Halves(), torch.ones(4))
    assert set(Halves.rounds) == {4}
    assert torch.equal(graph.replay(torch.full((4,), 0.9)), torch.full((4,), 0.9))
    with pytest.raises(ValueError, match="decision is another one"):
        graph.replay(torch.full((4,), 3.0))


def test_a_forward_that_changes_from_run_to_run_is_refused() -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(4)

    with pytest.raises(CaptureError, match=r"rand in the model .* draws random numbers"):
        capture(Random(), image(2, 4))

    class Python(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + random.random()

    with pytest.raises(CaptureError, match="differs from the model's"):
        capture(Python(), image(2, 4))


@torch.no_grad()
def test_writes_to_buffers_and_inputs_are_listed() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x.mul_(2) + 1

    net = Counts().eval()
    graph = capture(net, image(2, 4), check=False)
    assert set(graph.writes) == {"seen", "x"}


def test_places_of_nodes() -> None:
    net = Idioms(sum_in_place).eval()
    graph = capture(net, image(1, 3, 8, 8))
    nodes = {(graph.call(n), op_spec(n.target).name): n for n in graph.operations}
    assert (("act", 0), "relu") in nodes
    assert (("act", 1), "relu") in nodes
    conv, add = nodes[("conv", 0), "conv2d"], nodes[("", 0), "add"]
    assert graph.constant_path(conv.args[1]) == "conv.weight"
    assert graph.constant(conv.args[1]) is not None
    assert "test_capture.py" in graph.location(add)
    assert graph.fixed["x"] == {1: 3}
    with pytest.raises(ValueError, match="expected size 3 in axis 1"):
        graph.replay(image(1, 4, 8, 8))
    with pytest.raises(TypeError, match=r"\[1\] not in the example"):
        graph.replay(image(1, 3, 8, 8), image(1))


def test_trees_put_together_what_they_took_apart() -> None:
    given = ([image(1), {"a": image(2), "b": None}], (image(3), "text"))
    leaves, tree = flatten(given)
    assert same(rebuild(tree, leaves), given)
    assert rebuild(tree, leaves)[0][1]["b"] is None
    assert arguments({"x": 1}) == ((), {"x": 1})
    assert arguments([1, 2]) == (([1, 2],), {})


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        (torch.ops.aten.permute.default, "layout_op"),
        (torch.relu_, "relu"),
        ("reshape", "layout_op"),
        (nn.Dropout, "identity"),
        (nn.ConvTranspose2d(1, 1, 1), "layer"),
        (torch.cat, "concat"),
        (torch.erf, "float"),
    ],
)
def test_one_table_names_operators_however_they_are_called(named: Any, kind: str) -> None:
    assert op_spec(named).kind == kind


def test_operators_that_keep_values_do() -> None:
    """What the table says of moves, on the operators themselves."""
    x = torch.arange(24.0).view(2, 3, 4)
    for name, args in {
        "permute": ([0, 2, 1],), "reshape": ([6, 4],), "flip": ([1],), "narrow": (1, 0, 2),
        "repeat": ([1, 2, 1],), "roll": (1, 0), "squeeze": (), "transpose": (0, 1),
    }.items():  # fmt: skip
        made = getattr(x, name)(*args)
        spec = op_spec(name)
        assert spec.values
        assert set(made.flatten().tolist()) <= set(x.flatten().tolist())
        if spec.order:
            assert torch.equal(made.flatten(), x.flatten())


def test_fixed_sizes_are_those_of_the_example() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    graph = capture(net, torch.randn(2, 3, 5, 5), open_sizes=False)
    assert [str(node.target) for node in graph.operations] == [
        str(node.target) for node in capture(net, torch.randn(2, 3, 5, 5)).operations
    ]
    assert graph.fixed == {"input": {0: 2, 1: 3, 2: 5, 3: 5}}
    with pytest.raises(ValueError, match="which the forward fixes"):
        graph.replay(torch.randn(1, 3, 5, 5))


class Counted(nn.Module):
    """The number is gone from torch's graph: only its symbol tells of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(x.abs().sum().item()) % 3 + 1]


class Shares(nn.Module):
    """Shares of the rows that a mask leaves, behind a batch norm; a ratio of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mask = x[:, 0] > 0
        kept = self.norm(x[mask])
        order = kept[:, 0].sort(descending=True)[1]
        assert isinstance(int("3"), int)
        best = order[: int(kept.shape[0] * 0.5)]
        some = kept[: int(mask.sum() * 0.3)], kept[: int(mask.sum().item() * 0.7)]
        ordered = torch.empty_like(kept)
        ordered[order] = kept
        halved = x[::2]
        scaled = halved[: int(0.25 * len(x))] * int(x.shape[0] / halved.shape[0])
        return kept[best], *some, ordered, scaled, torch.unique(order // 2).roll(1, 0)


@torch.no_grad()
def test_a_share_of_the_rows_stays_open() -> None:
    net = Shares().eval()
    graph = capture(net, torch.randn(8, 3))
    for rows in (12, 20):
        graph.check(torch.randn(rows, 3))
    assert not graph.opaque
    assert not any("empty" in str(node.target) for node in graph.operations)
    assert "int" not in globals()


class SharesOfSamples(nn.Module):
    def forward(self, x: Tensor, sample: Tensor) -> Tensor:
        best = []
        for index in range(sample.max() + 1):  # type: ignore[call-overload]
            rows = x[sample == index]
            count = (sample == index).sum()
            best.append(rows[rows.mean(1).topk(int(count * 0.4)).indices])
        cells = torch.arange(len(x)) // 2
        sums = torch.zeros(int(cells.max()) + 1, x.shape[1]).index_add_(0, cells, x)
        return torch.cat([*best, sums])


def test_a_share_of_the_rows_stays_open_in_a_loop_over_samples() -> None:
    graph = capture(SharesOfSamples().eval(), (torch.randn(10, 4), torch.arange(10) // 5))
    assert graph.decided
    graph.check((torch.randn(24, 4), torch.arange(24) // 12))
    with pytest.raises(ValueError, match="SharesOfSamples"):
        graph.replay(torch.randn(24, 4), torch.arange(24) // 8)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.conv = 0, nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.conv(x)
        return self.seen


class GivesObject(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return iter([x + 1])


def test_a_number_computed_from_floats_is_no_constant() -> None:
    with pytest.raises(
        CaptureError, match=rf"needs them as a number \({re.escape(__file__)}:\d+\)"
    ):
        capture(Counted(), torch.ones(2, 3), check=False)


def test_attributes_that_a_forward_assigns_are_as_before() -> None:
    net = Keeps()
    capture(net, torch.ones(1, 3, 2, 2), check=False)
    assert net.calls == 0
    assert not hasattr(net, "seen")


def test_a_model_that_returns_no_tensor_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=rf"returns no tensor \({re.escape(__file__)}:\d+\)"):
        capture(GivesObject(), torch.ones(2))


@torch.no_grad()
def test_what_a_forward_notes_in_its_containers_is_not_kept() -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.share: dict[str, object] = {"of": "voxels", "by": [1.0]}

        def forward(self, x: Tensor) -> Tensor:
            self.share["rows"] = x.shape[0] / 3
            self.share["by"].append(x)
            return x * 2

    net = Notes()
    capture(net, image(2, 4), check=False)
    assert net.share == {"of": "voxels", "by": [1.0]}
    copy.deepcopy(net)


class Sliced(nn.Module):
    """Slices of a Sequential (names stay) and of a ModuleList (members are counted anew)."""

    def __init__(self, holder: Any) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        self.layers = nn.Sequential(*layers) if holder is nn.Sequential else holder(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        for layer in self.layers[1:][1:]:
            x = layer(x).relu()
        return self.layers[0](x)


@pytest.mark.parametrize("holder", [nn.Sequential, nn.ModuleList])
def test_members_of_a_slice_have_their_own_paths(holder):
    graph = capture(Sliced(holder), torch.ones(2, 4))
    paths = [graph.path(node) for node in graph.operations if "linear" in str(node.target)]
    assert paths == ["layers.1", "layers.2", "layers.2", "layers.0"]


class Pyramid(nn.Module):
    """As YOLOv9's: means of shifted pairs, then half; a map joins one twice as fine."""

    def forward(self, x):
        fine = self.half(F.max_pool2d(x, 3, 2, 1))
        return torch.cat([F.interpolate(self.half(fine), scale_factor=2), fine], 1)

    def half(self, x):
        return F.max_pool2d(F.avg_pool2d(x, 2, 1), 3, 2, 1)


def fixed_or_right(graph: Graph, sizes: dict[int, int], frames: Tensor, other: Tensor) -> None:
    """The number of frames is open. Sizes are the example's, or open as in torch 2.10 and 2.11."""
    (fixed,) = graph.fixed.values()
    graph.check(frames)
    if fixed:
        assert fixed == sizes
    else:
        graph.check(other)


def test_sizes_that_torch_cannot_solve_for_are_those_of_the_example():
    graph = capture(Pyramid(), torch.randn(1, 2, 64, 64))
    assert not graph.opaque
    frames, other = torch.randn(3, 2, 64, 64), torch.randn(2, 3, 32, 96)
    fixed_or_right(graph, {1: 2, 2: 64, 3: 64}, frames, other)


class Projected(nn.Module):
    """As view transforms do: coordinates by their depth."""

    def forward(self, points: Tensor) -> Tensor:
        return points[..., :2] / points[..., 2:3].clamp(min=1e-5)


class Windows(nn.Module):
    """Where open sizes make torch simplify a long term, as DaViT's padded windows do."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x.shape[0], torch.SymInt):
            sympy.simplify(sum(sympy.Symbol(f"s{i}") ** 2 for i in range(40)))
        return x.relu()


def test_sizes_that_grow_with_every_stage_are_fixed():
    simplify = sympy.simplify
    graph = capture(Windows(), torch.randn(2, 3))
    assert graph.fixed["x"] == {0: 2, 1: 3}
    assert sympy.simplify is simplify


class Same(nn.Module):
    """Padded to a size as by TensorFlow's "same" at every stage of a network."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        for _ in range(5):
            pad = max((math.ceil(size / 2) - 1) * 2 + 3 - size, 0)
            size = (size + pad - 3) // 2 + 1
        return nn.functional.pad(x, [0, size])


def test_sizes_that_torch_asks_too_much_of_are_fixed():
    assert capture(Same(), torch.randn(2, 64)).fixed["x"] == {1: 64}


def test_sizes_that_broadcast_only_as_in_the_example_are_fixed():
    graph = capture(nn.Sequential(nn.Linear(4, 4), Projected()), torch.randn(2, 5, 4))
    assert not graph.opaque
    graph = capture(Projected(), torch.randn(2, 5, 4))
    fixed_or_right(graph, {1: 5, 2: 4}, torch.randn(3, 5, 4), torch.randn(1, 3, 7))


class OfWindows(nn.Module):
    """As Swin's windows: the number of frames is a quotient, and becomes that of the result."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            b, height, width, channels = x.shape
            x = x.view(b, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
            windows = x.reshape(-1, 2, 2, channels).sin()
            frames = int(windows.shape[0] / (height * width / 2 / 2))
            x = windows.view(frames, height // 2, width // 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
            x = x.reshape(frames, height, width, -1)
        return x


class OfTokens(nn.Module):
    """As heads of vision transformers: the sides of a map by the root of its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], side, side)


def test_a_rounded_quotient_or_root_of_sizes_leaves_frames_and_maps_open():
    graph = capture(OfWindows(), torch.randn(1, 4, 6, 3))
    graph.check(torch.randn(2, 4, 6, 3))
    graph.check(torch.randn(3, 8, 2, 3))
    with pytest.raises(ValueError, match=r"as the forward asks in .*test_capture\.py:\d+"):
        graph.replay(torch.randn(1, 5, 6, 3))
    graph = capture(OfTokens(), torch.randn(1, 16, 3))
    graph.check(torch.randn(2, 25, 3))
    with pytest.raises(ValueError, match=r"math\.trunc\(float\(x\.shape\[1\]\) \*\* 0\.5\)"):
        graph.replay(torch.randn(2, 24, 3))


class Numbers(nn.Module):
    """Takes sizes as Python's numbers: those of frames stay open, unless a table asks for them."""

    def __init__(self, table: dict[int, float]) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        frames, channels, width = map(int, x.shape)
        x = x * (self.table[int(x.shape[0])] if self.table else int(width / 2))
        return x.reshape(frames * channels, width).sin()


def test_the_number_of_frames_is_open_where_a_forward_takes_it_by_int():
    graph = capture(Numbers({}), torch.randn(2, 3, 8))
    assert graph.fixed["x"] == {1: 3, 2: 8}
    graph.check(torch.randn(5, 3, 8))
    graph = capture(Numbers({2: 3.0}), torch.randn(2, 3, 8))
    assert not graph.opaque
    assert graph.fixed["x"] == {0: 2, 1: 3, 2: 8}


class Region(nn.Module):
    """As EfficientViT's linear attention: a part that must not run in half precision."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.before, self.behind = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.enabled = enabled

    def forward(self, x):
        y = self.before(x)
        with torch.autocast("cpu", enabled=self.enabled):
            z = self.behind(y.float() * 2)
        with torch.no_grad():
            w = z.softmax(1)
        return w, z


def test_a_part_under_another_autocast_is_among_the_rest():
    graph = capture(Region(False), torch.randn(1, 3, 4, 4))
    kinds = [op_spec(node.target).name for node in graph.operations]
    assert [k for k in kinds if k in ("conv2d", "mul", "softmax")] == [
        "conv2d", "mul", "conv2d", "softmax",
    ]  # fmt: skip
    graph.check(torch.randn(2, 3, 5, 5))
    refused = r"autocast makes .*test_capture\.py:\d+ compute in torch\.bfloat16.*enabled=False"
    with pytest.raises(CaptureError, match=refused):
        capture(Region(True), torch.randn(1, 3, 4, 4))


def test_a_callers_autocast_is_not_in_the_graph():
    net, x = Region(False).eval(), torch.randn(1, 3, 4, 4)
    with torch.autocast("cpu"):
        graph = capture(net, x)
    assert all(torch.equal(*pair) for pair in zip(graph.replay(x), net(x), strict=True))


class CastAlike(nn.Module):
    """Casts to the type that autocast gave: the graph has the cast, and weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        with torch.autocast("cpu"):
            return self.second(x.to(self.first(x).dtype))


def test_a_graph_that_does_not_run_for_autocast_says_so():
    refused = r"of CastAlike does not run: torch.autocast makes .*compute in torch\.bfloat16"
    with pytest.raises(CaptureError, match=refused):
        capture(CastAlike(), torch.randn(1, 3, 4, 4))


def test_an_example_on_the_meta_device_is_refused_by_name():
    with pytest.raises(TypeError, match="example input x is on the meta device, without values"):
        capture(Region(False), torch.ones(1, 3, 4, 4, device="meta"))


def test_a_model_that_does_not_run_is_not_told_to_be_taken_apart() -> None:
    class Checked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 3, "three channels"
            return x * 2

    with pytest.raises(AssertionError, match="three channels") as caught:
        capture(Checked(), torch.zeros(2, 4))
    assert re.search(r"does not run.*test_capture\.py:\d+", caught.value.__notes__[0])


def test_what_changes_nothing_is_no_operation():
    class Sums(nn.Module):
        def forward(self, x, y, count):
            return (sum([x.relu() * 1, y]) / 1.0 - 0).abs(), count / 1, y + 0

    graph = capture(Sums(), (torch.randn(3, 2), torch.randn(3, 2), torch.arange(3)))
    names = [str(node.target) for node in graph.operations]
    assert names == [
        "aten.relu.default",
        "aten.add.Tensor",
        "aten.abs.default",
        "aten.div.Tensor",  # makes floats of integers
        "aten.add.Tensor",  # an output is no input
    ]


def test_what_an_author_checks_of_a_tensor_is_no_operation():
    class Checked(nn.Module):
        def forward(self, x):
            sizes = torch.tensor([[x.shape[1], x.shape[2]]])
            torch._check_tensor_all((sizes[:, 0] * sizes[:, 1]).sum() == x.flatten(1).shape[1])
            return x.relu()

    graph = capture(Checked(), torch.randn(2, 3, 4))
    assert [str(node.target) for node in graph.operations] == ["aten.relu.default"]
    graph.check(torch.randn(2, 3, 5))


def test_where_spconvs_own_kernels_stop_it_says_whose_run(spconv_numbers) -> None:
    spconv = spconv_numbers
    indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.randn(2, 4), indices, [4, 4, 4], 1)
    net = spconv.SparseSequential(spconv.SubMConv3d(4, 4, 3, bias=True)).eval()
    with pytest.raises(AssertionError) as caught:
        capture(net, x)
    assert "in 0 (SubMConv3d" in caught.value.__notes__[0]
    assert "call bevquant_sparse.use_bevquant_kernels(model)" in caught.value.__notes__[0]
    use_bevquant_kernels(net)
    assert len(list(capture(net, x).operations)) >= 2


class _Doubled(nn.Module):
    def forward(self, d):
        return (2 if d["double"] else 1) * (2 * d["x"] - d["y"])


def test_members_of_a_call_are_found_by_their_keys():
    x, y = torch.ones(2), torch.full((2,), 5.0)
    graph = capture(_Doubled(), ({"x": x, "y": y, "double": True},))
    other = {"double": True, "y": y, "x": x}
    assert torch.equal(graph.replay(other), _Doubled()(other))
    with pytest.raises(
        TypeError,
        match=r"expected members \['x', 'y', 'double'\], got \['x', 'double'\]: \['y'\] m",
    ):
        graph.replay({"x": x, "z": y, "double": True})
    with pytest.raises(ValueError, match=r"\['double'\]: the model was captured with True here"):
        graph.replay({"x": x, "y": y, "double": False})


@pytest.mark.filterwarnings("ignore:.*jit.script.* is deprecated:DeprecationWarning")
def test_scripted_modules_are_refused_by_name():
    net = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.ReLU())))
    with pytest.raises(ValueError, match=r"capture: 1 \(RecursiveScriptModule\) is scripted"):
        capture(net, torch.ones(1, 2))


class PerLevel(nn.Module):
    """A head whose forward calls another method for each level, as mmdet's `forward_single`."""

    def forward_single(self, x: Tensor) -> Tensor:
        return x.sin()

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        return list(map(self.forward_single, levels))


def test_lines_are_those_of_the_functions_that_the_forward_calls() -> None:
    graph = capture(PerLevel().eval(), {"levels": [torch.randn(2, 3), torch.randn(4, 3)]})
    line = inspect.getsourcelines(PerLevel.forward_single)[1] + 1
    assert {graph.location(node) for node in graph.operations} == {f"{__file__}:{line}"}

"""In-place writes become new values, and whoever reads the memory afterwards reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from bevquant_graph import capture, registered_once

Forward = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.own = forward

    def forward(self, x: Tensor) -> Any:
        return self.own(self, x)


def a_slice_that_nobody_else_reads(net: Any, x: Tensor) -> Tensor:
    y = torch.cat([net.conv(x), net.conv(x + 1)], 1)[:, :4]
    y += net.conv(x)
    return net.head(y.relu_())


def a_permutation(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x).permute(0, 2, 3, 1)
    y += y.mean(-1, keepdim=True)
    return y.flatten(1, 2)


def one_of_several_parts(net: Any, x: Tensor) -> Tensor:
    kept, changed = net.conv(x).chunk(2, 1)
    total = kept.sum()
    changed.relu_()
    return changed + total


def the_whole_is_read(net: Any, x: Tensor) -> Tensor:
    whole = net.conv(x)
    part = whole[:, 1:3]
    part += 1
    return net.head(whole) + part


def the_whole_is_an_output(net: Any, x: Tensor) -> list[Tensor]:
    whole = net.conv(x)
    whole[:, :2].relu_()
    return [whole]


def parts_overlap(net: Any, x: Tensor) -> Tensor:
    whole = net.conv(x)
    one, other = whole[:, :3], whole[:, 1:]
    one += 1
    other *= 2
    return one.sum(1) - other.sum(1)


def a_part_of_the_part(net: Any, x: Tensor) -> Tensor:
    part = net.conv(x)[:, :3]
    part += 1
    part[:, :2].relu_()
    return part * 2


def the_same_part_once_more(net: Any, x: Tensor) -> Tensor:
    parts = net.conv(x).chunk(2, 1)
    parts[0].relu_()
    return parts[0] + parts[1]


def an_input(net: Any, x: Tensor) -> Tensor:
    x = x.flatten(2)
    x += 1
    return x


def what_nobody_reads_before_no_grad(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.softmax(1)
    with torch.no_grad():
        return y.mul_(2)


IN_ONE_TRACE = [
    a_slice_that_nobody_else_reads, a_permutation, one_of_several_parts,
    what_nobody_reads_before_no_grad,
]  # fmt: skip
OTHERS = [
    the_whole_is_read, the_whole_is_an_output, parts_overlap, a_part_of_the_part,
    the_same_part_once_more, an_input,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("forward", [*IN_ONE_TRACE, *OTHERS], ids=lambda f: f.__name__)
def test_readers_of_the_memory_read_what_was_written(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forward in IN_ONE_TRACE:  # torch's functionalization takes twice the first trace
        monkeypatch.delattr(ExportedProgram, "run_decompositions")
    net, x = Net(forward).eval(), torch.randn(2, 3, 4, 4)
    graph = capture(net, x.clone())
    names = [str(node.target).removesuffix(".default") for node in graph.operations]
    assert not any(name.removesuffix(".Tensor").endswith("_") for name in names)
    for batch in (2, 3):
        x = torch.randn(batch, 3, 4, 4)
        made, wanted = graph.replay(x.clone()), net(x.clone())
        assert torch.equal(made[0], wanted[0]) if isinstance(made, list) else made.equal(wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's export, of itself
@pytest.mark.parametrize("table", [dict, torch.export.default_decompositions])
def test_registrations_from_memory_decompose_alike_and_go(table: Callable[[], Any]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Upsample(scale_factor=2)).eval()
    program = export(net, (torch.randn(1, 3, 4, 4),), strict=False)
    wanted = program.run_decompositions(table()).graph_module.code
    operators = [torch.ops.aten.conv2d.default, torch.ops.aten.upsample_nearest2d.vec]
    held = [dict(operator.py_kernels) for operator in operators]
    for _ in range(3):  # the first is torch's own
        with registered_once():
            assert program.run_decompositions(table()).graph_module.code == wanted
        assert [operator.py_kernels for operator in operators] == held

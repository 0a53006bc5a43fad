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


def a_part_of_an_input(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    for frame in range(2):
        x[frame, :, 1:] = x[frame, :, 1:] * 2
    return net.conv(x), x


def what_nobody_reads_before_no_grad(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.softmax(1)
    with torch.no_grad():
        return y.mul_(2)


def windows_are_numbered(net: Any, x: Tensor) -> Tensor:
    mask, count = torch.zeros(1, 4, 4, 1), 0
    for rows in (slice(0, -2), slice(-2, -1), slice(-1, None)):
        for columns in (slice(0, -2), slice(-2, None)):
            mask[:, rows, columns, :] = count
            count += 1
    windows = mask.view(1, 2, 2, 2, 2, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4)
    return net.conv(x).flatten(2).sum(2) + (windows.unsqueeze(1) - windows.unsqueeze(2)).sum()


def boxes_are_refined(net: Any, x: Tensor) -> Tensor:
    boxes, reference = net.conv(x).permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
    boxes[..., 0:2] += reference[..., :2]
    boxes[..., 0:2] = boxes[..., 0:2].sigmoid()
    boxes[..., 3:4] = boxes[..., 3:4] * 5 - 1
    return boxes


def chosen_rows(net: Any, x: Tensor) -> Tensor:
    y, rows = net.conv(x), torch.tensor([0, 2])
    y[:, rows] += 2
    y[y < 0] = 0
    return y.masked_fill_(y > 0.5, 0.5)


def one_by_one(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    for part in y.unbind(1):
        part *= part.sum()
    y.split([1, 3], 1)[1].zero_()
    y.diagonal(dim1=2, dim2=3).fill_(3.0)
    y.transpose(1, 2)[:, 0, 1:] = 1.0
    return y


def a_view_from_before(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = net.conv(x)
    view = y[:, 1:]
    before = view * 2
    y += 1
    between = view.sum()
    view.mul_(2)
    return before, between, y, view


def a_table_is_filled(net: Any, x: Tensor) -> Tensor:
    made = torch.empty(x.shape[0], 6, 4, 4)
    made[:, :3] = x
    made[:, 3:].copy_(x.double() * 2)
    made.view(-1)[::2].sub_(1)
    return net.conv(made[:, 1:4])


def an_axis_of_one(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.unsqueeze(0)[0, :, 1:].squeeze(0).add_(1)
    return y.flatten(1).unflatten(1, (4, -1)).relu_()


def axes_change_in_place(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = net.conv(x)
    view = y[:, :2]
    y.unsqueeze_(0).transpose_(1, 2)
    y += 1
    y.squeeze_(0)[1:3].mul_(2)
    steps = torch.linspace(-1, 1, 4).unsqueeze_(-1)  # as torch's affine_grid
    return view, y.transpose_(0, 1), net.head(y) * steps


def powers_whose_overloads_have_other_names(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    y **= 2
    y += net.conv(x).pow_(3)
    return y.abs_().pow_(y.sigmoid())


def through_a_view_without_an_inverse(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.mT[..., 0] = 3
    return y


BY_TORCH = [through_a_view_without_an_inverse]
OTHERS = [
    a_slice_that_nobody_else_reads, a_permutation, one_of_several_parts,
    what_nobody_reads_before_no_grad, the_whole_is_read, the_whole_is_an_output, parts_overlap,
    a_part_of_the_part, the_same_part_once_more, windows_are_numbered, boxes_are_refined,
    chosen_rows, one_by_one, a_view_from_before, a_table_is_filled, an_axis_of_one,
    an_input, a_part_of_an_input, axes_change_in_place, powers_whose_overloads_have_other_names,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("forward", [*OTHERS, *BY_TORCH], ids=lambda f: f.__name__)
def test_readers_of_the_memory_read_what_was_written(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forward not in BY_TORCH:  # torch's functionalization takes twice the first trace
        monkeypatch.delattr(ExportedProgram, "run_decompositions")
    net, x = Net(forward).eval(), torch.randn(2, 3, 4, 4)
    graph = capture(net, x.clone())
    names = [str(node.target).removesuffix(".default") for node in graph.operations]
    assert not any(name.removesuffix(".Tensor").endswith("_") for name in names)
    for batch in (2, 3):
        x = torch.randn(batch, 3, 4, 4)
        made, wanted = graph.replay(x.clone()), net(x.clone())
        several = isinstance(made, list | tuple)
        for one, other in zip(made, wanted, strict=True) if several else [(made, wanted)]:
            assert torch.equal(one, other)


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

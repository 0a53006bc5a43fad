"""Numbers out of tensors that stay open: other frames have others, and the graph follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import capture

Forward = Callable[[Tensor, Tensor], Tensor]


class Applied(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function = forward

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.function(x, counts)


def part_written(x: Tensor, counts: Tensor) -> Tensor:
    x = x * 1
    x[counts[0] : counts[1]] = x[counts[0] : counts[1]] * 2
    x[counts[0] : counts[1]] += counts[0]
    x[:, 1 : counts[2]] = 0
    x[[counts[:2], ...]] = 1  # a list that torch reads as a tuple, as spconv's dense() has it
    return x


def windows_filled(x: Tensor, counts: Tensor) -> Tensor:
    """The last window is filled from the one before it, as Point Transformer V3 pads frames."""
    size, padded = 4, (counts[1] + 3) // 4 * 4
    pad = torch.arange(padded)
    if counts[1] != padded:
        rest = counts[1] % size
        pad[padded - size + rest : padded] = pad[padded - 2 * size + rest : padded - size]
    return x[pad].view(-1, size, x.shape[1]).sum(1)


def inferred(x: Tensor, counts: Tensor) -> Tensor:
    with torch.inference_mode():
        total = counts[:2].sum()
    return x.repeat(total.tolist(), 1)


def bits(x: Tensor, counts: Tensor) -> Tensor:
    return x * int(counts.max()).bit_length() + len(x).bit_length()


def filled_with_a_count(x: Tensor, counts: Tensor) -> Tensor:
    return nn.functional.pad(counts, (0, 1), value=counts[0]) * x[0, 0]


def windows_of_frames(x: Tensor, counts: Tensor) -> Tensor:
    """A flag that is converted to a flag, beside a number of frames that decides a loop."""
    inside = ((counts % 4) != 0).to(torch.bool)
    for _ in range(int(counts[2] - 1)):
        x = x + inside.sum()
    return x[: counts[0]]


def rows_by_range(x: Tensor, counts: Tensor) -> Tensor:
    """Each row's chosen value, by several ways to number the rows."""
    chosen = x.argmax(1)
    x = x.clone()
    x[range(len(x)), chosen] *= 2
    numbers = torch.tensor(range(1, len(x) + 1))
    assert isinstance(range(x.shape[0]), range)
    numbers = numbers + torch.from_numpy(np.arange(len(x), dtype=np.float32))
    return x[np.arange(len(x)), chosen] + x[range(x.shape[0])].sum(1) * numbers


def numbered_columns(x: Tensor, counts: Tensor) -> Tensor:
    """A range of plain numbers, and a loop over an open one, which takes the example's."""
    return sum((x[:, i] * i for i in range(x.shape[1])), x[:, range(2)].sum(1))


FORWARDS = (
    part_written, windows_filled, inferred, bits, filled_with_a_count, windows_of_frames,
    rows_by_range, numbered_columns,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_frames_of_other_numbers_have_the_models_bits(forward: Forward) -> None:
    net = Applied(forward).eval()
    graph = capture(net, (torch.randn(9, 3), torch.tensor([3, 7, 2])))
    assert not graph.opaque
    for rows, counts in (12, [2, 9, 2]), (15, [1, 6, 2]), (14, [1, 5, 2]):
        frame = torch.randn(rows, 3), torch.tensor(counts)
        if forward is bits:
            frame = frame[0], torch.tensor([1, 4, 2])
        assert torch.equal(graph.replay(*frame), net(*frame))


def test_the_other_side_of_a_decision_is_refused() -> None:
    graph = capture(Applied(windows_filled).eval(), (torch.randn(9, 3), torch.tensor([3, 7, 2])))
    with pytest.raises(ValueError, match=r"test_open_numbers\.py:\d+\)"):
        graph.replay(torch.randn(9, 3), torch.tensor([3, 8, 2]))
    graph = capture(Applied(bits).eval(), (torch.randn(9, 3), torch.tensor([3, 7, 2])))
    with pytest.raises(ValueError, match=r"decision is another one; capture again .*torch\.where"):
        graph.replay(torch.randn(9, 3), torch.tensor([3, 8, 2]))
    with pytest.raises(ValueError, match=r"x\.shape\[0\] < 16"):
        graph.replay(torch.randn(16, 3), torch.tensor([3, 7, 2]))

"""Planes of channels as rows of pixels."""

import pytest
import torch

pytest.importorskip("numba", reason="the numba extra is not installed")

from bevquant_int8sim._compiled.channels_last import pixel_rows, planes


@pytest.mark.parametrize(
    ("given", "channels"), [(1, 4), (3, 4), (4, 4), (5, 8), (70, 72), (129, 132)]
)
@pytest.mark.parametrize("size", [(1, 1), (7, 9), (63, 65), (50, 83)])
def test_rows_of_pixels(given, channels, size):
    x = torch.randint(-128, 128, (2, given, *size), dtype=torch.int8)
    rows = torch.from_numpy(pixel_rows(x, channels)).view(2, *size, channels)
    assert torch.equal(rows[..., :given], x.movedim(1, -1))
    assert not rows[..., given:].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32, torch.int16])
@pytest.mark.parametrize(
    "shape", [(2, 5, 7, 9), (1, 64, 65, 63), (3, 129, 4, 50), (2, 33, 6, 5, 4), (1, 1, 3, 3)]
)
def test_planes_of_pixels(shape, dtype):
    x = torch.randint(-128, 128, shape, dtype=torch.int8).to(dtype)
    rows = x.movedim(1, -1).contiguous().movedim(-1, 1)
    for given in (rows, x, rows[:, :1], rows.flip(0)):
        made = planes(given)
        assert made.is_contiguous()
        assert torch.equal(made, given)

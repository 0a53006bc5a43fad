"""Ranges of what sums read as accumulators, held against products taken element by element."""

from __future__ import annotations

from types import SimpleNamespace as Fields

import pytest
import torch

from bevquant_export.dense._read_model import _largest
from bevquant_int8sim.program import Add, Ref


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((5,), 0), ((5,), -1), ((2, 5), 1), ((3, 5, 4, 4), 1), ((3, 4, 5), -1)]
)
def test_the_largest_operand_of_a_sum(shape: tuple[int, ...], axis: int, scaled: bool) -> None:
    value = torch.randint(-(2**30), 2**30, shape, dtype=torch.int32)
    scale = torch.rand(5, dtype=torch.float64)
    scales = (scale,) if scaled else ()
    step = Add("", (Ref("a"),), ("y",), form="float", scales=scales, axis=axis)
    program = Fields(values={"a": Fields(form="int32")})
    sizes = [1] * len(shape)
    sizes[axis] = 5
    wanted = (value * scale.view(sizes) if scaled else value).abs().max()
    assert list(_largest(program, step, (value,))) == [("a", wanted.item())]

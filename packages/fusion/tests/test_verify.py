"""How far apart the outputs of two models are, and how far they may be."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bevquant_fusion._fuse_model import in_float64, relative_difference, run, tolerance


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [(torch.float64, 2e5), (torch.float32, 2e3), (torch.float16, 20), (torch.bfloat16, 20)],
)
def test_tolerance_is_a_number_of_rounding_steps(dtype, steps):
    """Rounding of a few layers passes, a wrong weight does not: 2 to 100 000 steps, below 0.25."""
    allowed = tolerance([torch.zeros(1, dtype=dtype)])
    assert 2 < allowed / torch.finfo(dtype).eps
    assert allowed < 0.25
    assert allowed / torch.finfo(dtype).eps < 100 * steps


def test_tolerance_is_the_widest_of_floats():
    narrow, wide = torch.zeros(1).double(), torch.zeros(1).half()
    assert tolerance([narrow, wide]) == tolerance([wide, narrow]) == tolerance([wide])
    assert tolerance([wide]) > tolerance([narrow]) > 0
    assert tolerance([]) == tolerance([torch.zeros(2, dtype=torch.int64)]) == 0


def test_difference_is_relative_to_each_outputs_largest():
    a, b = torch.tensor([4.0, -8.0]), torch.tensor([1.0, 0.5])
    assert relative_difference([a, b], [a + torch.tensor([1.0, 0.0]), b]) == 1 / 8
    assert relative_difference([a, b], [a, b - 0.25]) == 1 / 4
    assert relative_difference([a, b], [a + 1, b - 0.25]) == 1 / 4
    assert relative_difference([a, b], [a, b]) == 0
    assert relative_difference([], []) == 0


def test_difference_of_an_output_of_zeros_is_absolute():
    zero = torch.zeros(3)
    assert relative_difference([zero], [zero + 0.125]) == 0.125
    assert relative_difference([zero], [zero]) == 0


def test_integers_and_empty_outputs_are_not_compared():
    a, empty = torch.arange(3), torch.zeros(0, 2)
    assert relative_difference([a, empty], [a + 1, empty]) == 0
    one = torch.ones(1)
    assert relative_difference([a, empty, one], [a, empty, one * 3]) == 2


def test_nan_is_not_lost_behind_another_output():
    one = torch.ones(1)
    assert math.isnan(relative_difference([one, one], [one * math.nan, one]))
    assert math.isnan(relative_difference([one, one], [one, one * math.nan]))


def test_other_outputs_are_refused():
    one = torch.ones(2)
    with pytest.raises(ValueError, match="made 2 tensors, the fused one makes 1"):
        relative_difference([one, one], [one])
    assert relative_difference([one], [one[None]]) == math.inf


@dataclass
class Both:
    first: torch.Tensor
    second: dict[str, torch.Tensor]


class Noisy(nn.Module):
    """Its input is written to, one of its parts is in training mode, its output is nested."""

    def __init__(self):
        super().__init__()
        self.quiet, self.loud = nn.Identity(), nn.Dropout(1.0)

    def forward(self, x, *, scale):
        x.mul_(scale["by"][0])
        return Both(self.loud(x), {"sum": x.sum()}), [self.quiet(x)]


@pytest.mark.parametrize("train", [True, False])
def test_runs_in_evaluation_mode_on_copies(train):
    model, x = Noisy().eval(), torch.ones(2, requires_grad=True)
    model.loud.train(train)
    scale = {"by": (torch.tensor(3.0),)}
    outputs = run(model, ((x,), {"scale": scale}))
    assert [t.tolist() for t in outputs] == [[3, 3], 6, [3, 3]]
    assert not any(t.requires_grad for t in outputs)
    assert x.tolist() == [1, 1]
    assert model.loud.training is train
    assert not model.quiet.training


def test_float64_copies_leave_integers_and_others():
    inputs = ((torch.ones(1), torch.arange(2), "text"), {"more": [torch.ones(1).half()]})
    args, kwargs = in_float64(inputs)
    assert [args[0].dtype, args[1].dtype, args[2]] == [torch.float64, torch.int64, "text"]
    assert kwargs["more"][0].dtype == torch.float64
    assert inputs[0][0].dtype == torch.float32

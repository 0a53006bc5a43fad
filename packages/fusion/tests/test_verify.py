"""How far apart the outputs of a model and of its folded form are, and how far they may be."""

import math
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_model


class Shifted(nn.Module):
    """Gives pairs' first tensors, and their second ones where its batch norm was folded."""

    def __init__(self, *pairs, nested=list):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)
        self.pairs, self.nested = pairs, nested
        self.eval()

    def forward(self, x):
        nothing = 0 * self.bn(self.conv(x)).sum()
        folded = isinstance(self.bn, nn.Identity)
        made = [pair[folded] for pair in self.pairs if pair[folded] is not None]
        return self.nested([value + nothing.to(value.dtype) for value in made])


def error_of(*pairs, **options):
    """What `fuse_model` found, or said as it refused."""
    try:
        return fuse_model(Shifted(*pairs, **options), torch.ones(1, 1, 2, 2)).max_error
    except ValueError as error:
        found = re.search(r"outputs differ from the model's by (\S+) \(relative\)", str(error))
        if found is None:
            raise
        return float(found[1])


def is_allowed(*pairs):
    try:
        return fuse_model(Shifted(*pairs), torch.ones(1, 1, 2, 2)).max_error >= 0
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [(torch.float64, 2e5), (torch.float32, 2e3), (torch.float16, 20), (torch.bfloat16, 20)],
)
def test_tolerance_is_a_number_of_rounding_steps(dtype, steps):
    """Rounding of a few layers passes, a wrong weight does not: 2 to 100 000 steps, below 0.25."""
    one, eps = torch.ones(1, dtype=dtype), torch.finfo(dtype).eps
    assert is_allowed((one, one + 2 * eps))
    assert not is_allowed((one, one + min(0.25, 100 * steps * eps)))


def test_tolerance_is_the_widest_of_floats():
    narrow, wide = torch.ones(1).double(), torch.ones(1).half()
    shifted, same = (narrow, narrow + 0.01), (wide, wide)
    assert not is_allowed(shifted)
    assert is_allowed(shifted, same)
    assert is_allowed(same, shifted)


def test_difference_is_relative_to_each_outputs_largest():
    a, b = torch.tensor([4.0, -8.0]), torch.tensor([1.0, 0.5])
    assert error_of((a, a + torch.tensor([1.0, 0.0])), (b, b)) == 0.125
    assert error_of((a, a), (b, b - 0.25)) == 0.25
    assert error_of((a, a + 1), (b, b - 0.25)) == 0.25
    assert error_of((a, a + 2**-9), (b, b)) == 2**-12
    assert error_of((a, a), (b, b)) == 0


def test_difference_of_an_output_of_zeros_is_absolute():
    zero = torch.zeros(3)
    assert error_of((zero, zero + 0.125)) == 0.125
    assert error_of((zero, zero)) == 0


def test_integers_and_empty_outputs_are_not_compared():
    a, empty, one = torch.arange(3), torch.zeros(0, 2), torch.ones(1)
    assert error_of((a, a + 1), (empty, empty)) == 0
    assert error_of((a, a + 1), (empty, empty), (one, one * 3)) == 2


def test_nan_is_not_lost_behind_another_output():
    one = torch.ones(1)
    assert math.isnan(error_of((one, one), (one * math.nan, one)))
    assert math.isnan(error_of((one, one * math.nan), (one, one)))


def test_other_outputs_are_refused():
    one = torch.ones(2)
    assert error_of((one, one[None])) == math.inf
    with pytest.raises(ValueError, match="made 2 tensors, the fused one makes 1"):
        error_of((one, one), (one, None))


@dataclass
class Both:
    first: torch.Tensor
    second: dict[str, torch.Tensor]


def as_both(made):
    return Both(made[0], {"sum": made[1]}), made[2:]


@pytest.mark.parametrize("shifted", range(3))
def test_every_tensor_of_nested_outputs_is_compared(shifted):
    one = torch.ones(2)
    assert error_of(*((one, one + (i == shifted)) for i in range(3)), nested=as_both) == 1


class Noisy(nn.Module):
    """Its input is written to, one of its parts is in training mode."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)
        self.quiet, self.loud = nn.Identity(), nn.Dropout(0.5)

    def forward(self, x, *, scale):
        x.mul_(scale["by"][0])
        return self.loud(self.bn(self.conv(self.quiet(x))))


@pytest.mark.parametrize("train", [True, False])
def test_runs_in_evaluation_mode_on_copies(train):
    model, x = Noisy().eval(), torch.ones(1, 1, 8, 8, requires_grad=True)
    model.loud.train(train)
    scale = {"by": (torch.tensor(3.0),)}
    assert fuse_model(model, {"x": x, "scale": scale}).max_error < 1e-5
    assert (x == 1).all()
    assert model.loud.training is train
    assert not model.quiet.training


SEEN = []


class Exact(nn.Module):
    """What its folded form gives is another value in float32 alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)

    def forward(self, x, index, text, more):
        SEEN.append([x.dtype, index.dtype, text, more[0].dtype])
        wrong = isinstance(self.bn, nn.Identity) and x.dtype == torch.float32
        return self.bn(self.conv(x)) + int(wrong)


def test_float64_copies_leave_integers_and_others():
    inputs = torch.ones(1, 1, 2, 2), torch.arange(2), "text", [torch.ones(1).half()]
    assert fuse_model(Exact().eval(), inputs).max_error < 1e-12
    assert SEEN[-1] == [torch.float64, torch.int64, "text", torch.float64]
    assert inputs[0].dtype == torch.float32

"""The parts of quantization-aware training: sums over frames, settings."""

from __future__ import annotations

import pytest
import torch

from bevfusion_quant import InputError
from bevfusion_quant.qat import FramePart, QatConfig, add_up

NOTHING = torch.zeros(0)


def part(seed: int, scale: float = 1.0) -> FramePart:
    generator = torch.Generator().manual_seed(seed)
    gradient = scale * torch.randn(1000, generator=generator)
    return FramePart(torch.tensor([1.0 + seed, 2.0]), gradient, NOTHING)


def test_gradients_are_added_from_the_first_frame_to_the_last() -> None:
    parts = [part(seed, 10.0**seed) for seed in range(5)]
    total = add_up(part for part in parts)
    first, *rest = (p.gradient.numpy() for p in parts)
    wanted = first.copy()
    for gradient in rest:
        wanted = wanted + gradient  # float32, one rounding each
    assert (total.gradient.numpy() == wanted / 5).all()
    torch.testing.assert_close(total.losses, torch.tensor([3.0, 2.0]))
    backwards = add_up(reversed(parts)).gradient
    assert not torch.equal(backwards, total.gradient)  # else the order would not be tested


def test_the_parts_stay_as_they_are() -> None:
    parts = [part(0), part(1)]
    before = [p.gradient.clone() for p in parts]
    add_up(parts)
    assert all(torch.equal(p.gradient, old) for p, old in zip(parts, before, strict=True))


def test_no_frames_have_no_mean() -> None:
    with pytest.raises(ValueError, match="no frames"):
        add_up([])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"steps": 0}, "--steps 0: it must be at least 1"),
        ({"steps": -3}, "--steps -3"),
        ({"batch": 0}, "--batch 0"),
        ({"lr": 0.0}, "--lr 0.0: it must be above 0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"clip": -1.0}, "--clip"),
        ({"weight_decay": 1.0}, "--weight-decay"),
        ({"distill": -1.0}, "--distill -1.0: it must be a weight from 0 up"),
        ({"seed": -1}, "--seed -1"),
        ({"freeze_after": -1}, "--freeze-after -1"),
        ({"freeze_after": 0, "learn_ranges": True}, "leave one of the two out"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], told: str) -> None:
    with pytest.raises(InputError, match=told):
        QatConfig(**settings)

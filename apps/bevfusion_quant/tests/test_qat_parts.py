"""The parts of quantization-aware training: sums over frames, settings."""

from __future__ import annotations

import pytest
import torch

from bevfusion_quant import InputError
from bevfusion_quant.qat import QatConfig

NOTHING = torch.zeros(0)


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
        ({"freeze_after": 0}, "add --no-learn-ranges"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], told: str) -> None:
    with pytest.raises(InputError, match=told):
        QatConfig(**settings)

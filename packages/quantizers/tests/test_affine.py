"""Fake quantization with zero points, beside the formula with stored integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bevquant_quantizers import AffineQuantizer, TensorQuantizer


@pytest.mark.bits
@pytest.mark.parametrize(
    ("zero", "bounds", "bits"),
    [(0, (-128, 127), 8), (0, (0, 255), 9), (131, (0, 255), 9), (-128, (-128, 127), 9),
     (128, (0, 255), 8), (7, (0, 15), 5), (32768, (0, 65535), 16), (0, (0, 65535), 17)],
)  # fmt: skip
def test_values_are_those_of_stored_integers(zero: int, bounds: tuple[int, int], bits: int) -> None:
    x = np.random.default_rng(0).normal(0, 40, 4000).astype(np.float32)
    step = np.float32(0.37)
    stored = np.clip(np.rint(x / step) + zero, *bounds)
    wanted = ((stored - zero) * step).astype(np.float32)
    quantizer = AffineQuantizer(float(step), zero, *bounds)
    assert np.array_equal(quantizer(torch.from_numpy(x)).numpy(), wanted)
    assert quantizer.num_bits == bits
    assert len(np.unique(wanted)) > 10


def test_scales_of_channels_and_what_is_fixed() -> None:
    steps = torch.tensor([0.5, 2.0]).view(2, 1)
    quantizer = AffineQuantizer(steps, torch.tensor([0, 3]).view(2, 1), 0, 7)
    assert quantizer(torch.full((1, 2, 1), 100.0)).flatten().tolist() == [3.5, 8.0]
    assert quantizer.axis == (-2,)
    assert isinstance(quantizer, TensorQuantizer)
    assert "integers=-3…7" in repr(quantizer)
    with pytest.raises(ValueError, match="scale is fixed"):
        quantizer.amax = torch.ones(2, 1)
    quantizer.disable()
    assert quantizer(torch.full((1, 2, 1), 100.0)).max() == 100


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_unusable_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="expected normal, positive and finite"):
        AffineQuantizer(scale)
    with pytest.raises(ValueError, match="zero points must be within 0…255"):
        AffineQuantizer(1.0, -1, 0, 255)


@pytest.mark.parametrize("bits", [(4, 3), (5, 2)])
def test_fp8_is_the_cast_of_the_quotient(bits: tuple[int, int]) -> None:
    dtype = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}[bits[0]]
    steps = torch.tensor([0.37, 2.0]).view(2, 1)
    x = torch.randn(2, 4000) * torch.logspace(-6, 6, 4000)
    quantizer = AffineQuantizer(steps, float_bits=bits)
    top = torch.finfo(dtype).max
    wanted = (x / steps).clamp(-top, top).to(dtype).float() * steps
    assert torch.equal(quantizer(x), wanted)
    assert quantizer.num_bits == bits
    exported = torch.export.export(quantizer, (x,)).module()
    assert torch.equal(exported(x), wanted)

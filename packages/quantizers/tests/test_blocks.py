"""Block formats beside torchao, the definitions in float64, and torch's types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    calibrate,
    fake_quantize,
    fake_quantize_blocks,
    format_of,
    load_ranges,
    quantize_blocks,
    save_ranges,
)

FORMATS = ("mxfp8", "mxfp4", "nvfp4")
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rows() -> Tensor:
    """Values of several sizes, ties, zeros and numbers beyond the largest one."""
    torch.manual_seed(0)
    normal = torch.randn(400, 64) * torch.logspace(-20, 20, 400)[:, None]
    ties = torch.cat([FP4[:-1] + FP4.diff() / 2, FP4, -FP4, torch.tensor([5.0, 7.0, 7.99, -7.5])])
    ties = torch.cat([ties, torch.zeros(64 - len(ties))]).expand(4, 64)
    ties = ties * torch.tensor([1.0, 2.0**-40, 3.0, 64.0])[:, None]
    return torch.cat([normal, ties, torch.zeros(1, 64), torch.full((1, 64), 1e-3)])


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Nearest numbers in float64, ties to the even code."""
    apart = (x.abs()[..., None].clamp(max=float(levels[-1])) - levels).abs()
    least = apart.amin(-1, keepdim=True)
    codes = torch.arange(len(levels))
    two = torch.where(apart == least, codes, -1)
    even = torch.where((apart == least) & (codes % 2 == 0), codes, -1).amax(-1)
    return torch.copysign(levels[torch.where(even >= 0, even, two.amax(-1))], x)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_mx_values_are_those_of_the_specification(name: str) -> None:
    x, form = rows(), format_of(name)
    blocks = x.double().reshape(-1, 2, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.floor(torch.log2(largest.clamp(min=1e-300))).clamp(min=-119)
    scale = torch.exp2(exponent - {8: 8, 4: 2}[form.bits])
    wanted = nearest(blocks / scale, torch.from_numpy(form.levels)) * scale
    made = quantize_blocks(x, name)
    assert torch.equal(made.values().double(), wanted.reshape(x.shape))
    assert made.scales.shape == (len(x), 2)
    assert len(made.numbers.unique()) > (100 if form.bits == 8 else 14)


def test_nvfp4_values_are_those_of_the_definition() -> None:
    x = rows()[150:250]  # of sizes that one scale serves, or does not
    for amax in (x.abs().amax(), torch.tensor(3.0)):
        made = quantize_blocks(x, "nvfp4", amax)
        blocks = x.reshape(-1, 4, 16)
        whole = np.float32(amax) / np.float32(6 * 448)
        wanted = (blocks.abs().amax(-1) / (6 * whole)).clamp(2.0**-9, 448)
        scale = wanted.to(torch.float8_e4m3fn).float()
        assert torch.equal(made.scales, scale)
        assert float(made.tensor_scale) == whole
        step = (scale * whole)[..., None]
        q = nearest((blocks / step).double(), FP4.double()).float()
        assert torch.equal(made.values(), (q * step).reshape(x.shape))
    assert float(made.values().abs().max()) == 3.0  # values beyond amax become it


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_torchaos(name: str) -> None:
    pytest.importorskip("torchao")
    x = rows()[100:300].contiguous()  # torchao's E8M0 below 2⁻¹²⁶ divides by another scale
    if name == "nvfp4":
        nvfp4: Any = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
        from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4

        x = x[60:140].contiguous()
        whole = x.abs().amax() / (6 * 448)
        scales, packed = nvfp4.nvfp4_quantize(x, 16, whole)
        made = quantize_blocks(x, name)
        theirs = scales.float().reshape(len(x), -1)
        regular = theirs > 2.0**-6  # torchao has no smaller scales
        assert torch.equal(made.scales[regular], theirs[regular])
        numbers = f4_unpacked_to_f32(unpack_uint4(packed.view(torch.uint8))).reshape(x.shape)
        same = (made.numbers == numbers).reshape(len(x), -1, 16)[regular]
        assert float(same.float().mean()) > 0.999  # torchao multiplies by a reciprocal
        return
    mx: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    dtype = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}[name]
    scales, data = mx.to_mx(x, dtype, 32)
    back = mx.to_dtype(data, scales, dtype, 32, torch.float32)
    made = quantize_blocks(x, name)
    assert torch.equal(made.scales, scales.float().reshape(made.scales.shape))
    assert torch.equal(made.values(), back)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_infinity_and_zeros(name: str) -> None:
    block = format_of(name).block
    x = torch.ones(4, block)
    x[0, 3], x[1, 3], x[2] = torch.nan, torch.inf, 0.0
    made = fake_quantize_blocks(x, name, torch.tensor(1.0))
    assert made[0].isnan().all()
    if name == "nvfp4":  # amax is the largest value
        assert torch.equal(made[1], x[3])
    else:  # 448 · 2¹²⁰ and 6 · 2¹²⁶, beyond float32, beside which 1 is nothing
        assert made[1].isinf().sum() == 1
        assert made[1].count_nonzero() == 1
    assert not made[2].any()
    assert torch.equal(made[3], x[3])
    assert not fake_quantize_blocks(torch.zeros(2, block), name).any()


@pytest.mark.parametrize("name", FORMATS)
def test_axes_short_blocks_and_types(name: str) -> None:
    torch.manual_seed(0)
    x, amax = torch.randn(2, 40, 3, 5), torch.tensor(4.0)
    made = fake_quantize_blocks(x, name, amax, axis=1)
    turned = fake_quantize_blocks(x.permute(0, 2, 3, 1).contiguous(), name, amax)
    assert torch.equal(made, turned.permute(0, 3, 1, 2))
    block = format_of(name).block
    alone = fake_quantize_blocks(x[:, block * (40 // block) :], name, amax, axis=1)
    assert torch.equal(made[:, block * (40 // block) :], alone)
    assert quantize_blocks(x, name, amax, 1).scales.shape == (2, -(-40 // block), 3, 5)
    half = fake_quantize_blocks(x.half(), name, amax, axis=1)
    assert half.dtype == torch.half
    assert torch.equal(half, fake_quantize_blocks(x.half().float(), name, amax, axis=1).half())


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_pass_straight_through(name: str) -> None:
    x = torch.linspace(-5, 5, 64).requires_grad_()
    fake_quantize_blocks(x, name, torch.tensor(3.0)).sum().backward()
    wanted = (x.detach().abs() <= 3).float() if name == "nvfp4" else torch.ones(64)
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_quantizers_calibrate_export_and_keep_their_ranges(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    quantizer = TensorQuantizer(QuantDescriptor(num_bits=name, calib_method="histogram"))
    model = torch.nn.Sequential(quantizer)
    frames = [torch.randn(4, 64), torch.randn(4, 64)]
    calibrate(model, frames, method="mse")
    largest = max(frame.abs().max() for frame in frames)
    assert quantizer.amax == largest
    wanted = fake_quantize_blocks(frames[0], name, largest)
    assert torch.equal(model(frames[0]), wanted)
    exported = torch.export.export(model, (frames[0],)).module()
    assert torch.equal(exported(frames[0]), wanted)
    save_ranges(model, tmp_path / "ranges.json")
    other = torch.nn.Sequential(TensorQuantizer(QuantDescriptor(num_bits=name)))
    load_ranges(other, tmp_path / "ranges.json")
    assert other[0].amax == largest


def test_wrong_calls_are_named() -> None:
    with pytest.raises(TypeError, match=r"integer, a pair or one of \['mxfp8'.*not 'fp4'"):
        QuantDescriptor(num_bits="fp4")
    with pytest.raises(ValueError, match="mxfp4 has a sign"):
        QuantDescriptor(num_bits="mxfp4", unsigned=True)
    with pytest.raises(TypeError, match="mxfp8 has blocks: use fake_quantize_blocks"):
        fake_quantize(torch.ones(32), 1.0, "mxfp8")
    with pytest.raises(ValueError, match=r"expected 'mxfp8', 'mxfp4' or 'nvfp4'"):
        quantize_blocks(torch.ones(32), (4, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a floating-point tensor, got torch\.int64"):
        quantize_blocks(torch.ones(32, dtype=torch.int64), "mxfp8")
    learned = TensorQuantizer(QuantDescriptor(num_bits="nvfp4", learn_amax=True))
    with pytest.raises(ValueError, match="nvfp4 has no learned range"):
        learned(torch.ones(32))

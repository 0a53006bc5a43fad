"""FP8: values of torch's casts and ONNX's, calibration, gradients, files."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    calibrate,
    fake_quantize,
    format_of,
    load_ranges,
    save_ranges,
)
from bevquant_quantizers.calib import HistogramCalibrator, calibrate_weights
from bevquant_quantizers.tensor_quant import tensor_quant

FORMATS = [(4, 3), (5, 2)]
LARGEST = {(4, 3): 448.0, (5, 2): 57344.0}


def codes_of(bits):
    """All 256 codes as float32, by the definition of the format and not by torch."""
    exponents, mantissas = bits
    bias = 2 ** (exponents - 1) - 1
    values = []
    for code in range(256):
        sign = -1.0 if code & 128 else 1.0
        e, m = (code & 127) >> mantissas, code & (2**mantissas - 1)
        last = e == 2**exponents - 1
        if last and bits == (5, 2):
            values.append(math.nan if m else sign * math.inf)
        elif last and m == 2**mantissas - 1:
            values.append(math.nan)
        elif e == 0:
            values.append(sign * m * 2.0 ** (1 - bias - mantissas))
        else:
            values.append(sign * (1 + m / 2**mantissas) * 2.0 ** (e - bias))
    return torch.tensor(values)


def quantized(x, bits):
    """With a range that makes the scale 1: the format itself."""
    return fake_quantize(x, torch.tensor(LARGEST[bits]), bits)


@pytest.mark.parametrize("bits", FORMATS)
def test_all_codes_are_their_own_values(bits):
    codes = codes_of(bits)
    finite = codes[codes.isfinite()]
    assert len(finite) == {(4, 3): 254, (5, 2): 248}[bits]
    torch.testing.assert_close(quantized(finite, bits), finite, rtol=0, atol=0)
    dtype = format_of(bits).dtype
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    torch.testing.assert_close(theirs, codes, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_even_and_neighbours_to_the_nearer(bits, dtype):
    levels = torch.from_numpy(format_of(bits).levels)
    middles = (levels[1:] + levels[:-1]) / 2
    even = torch.arange(len(middles)) % 2 == 0
    signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    ties = quantized((signs * middles).to(dtype), bits)
    wanted = signs * torch.where(even, levels[:-1], levels[1:])
    torch.testing.assert_close(ties, wanted.to(dtype), rtol=0, atol=0)
    for toward, nearer in ((math.inf, levels[1:]), (0.0, levels[:-1])):
        beside = torch.nextafter(middles.to(dtype), torch.tensor(toward, dtype=dtype))
        torch.testing.assert_close(quantized(beside, bits), nearer.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("bits", FORMATS)
def test_random_values_equal_torchs_casts(bits):
    torch.manual_seed(0)
    x = torch.randn(200_000) * torch.exp2(torch.randint(-24, 20, (200_000,)).float())
    top, dtype = LARGEST[bits], format_of(bits).dtype
    assert torch.equal(quantized(x, bits), x.clamp(-top, top).to(dtype).float())
    amax = torch.tensor(3.7)
    scale = torch.tensor(top) / amax
    wanted = (x * scale).clamp(-top, top).to(dtype).float() / scale
    assert torch.equal(fake_quantize(x, amax, bits), wanted)


@pytest.mark.parametrize("bits", FORMATS)
def test_saturates_and_keeps_nan(bits):
    top = LARGEST[bits]
    x = torch.tensor([top * 1.01, 1e30, math.inf, -math.inf, math.nan, -0.0])
    made = quantized(x, bits)
    assert made[:4].tolist() == [top, top, top, -top]
    assert bool(made[4].isnan())
    assert math.copysign(1.0, float(made[5])) == -1.0


@pytest.mark.parametrize("bits", FORMATS)
def test_onnxruntime_quantizes_to_the_same_values(bits):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    kind = {(4, 3): onnx.TensorProto.FLOAT8E4M3FN, (5, 2): onnx.TensorProto.FLOAT8E5M2}[bits]
    levels = torch.from_numpy(format_of(bits).levels)
    middles = (levels[1:] + levels[:-1]) / 2
    torch.manual_seed(0)
    x = torch.cat([levels, middles, torch.randn(1000) * 3, torch.tensor([1e9, math.inf])]).float()
    x = torch.cat([x, -x, torch.tensor([math.nan])])
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ],
        "pair",
        [helper.make_tensor_value_info("x", 1, [len(x)])],
        [helper.make_tensor_value_info("y", 1, [len(x)])],
        [
            helper.make_tensor("s", 1, [], [0.25]),
            helper.make_tensor("z", kind, [], b"\0", raw=True),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (theirs,) = session.run(None, {"x": x.numpy()})
    mine = fake_quantize(x, torch.tensor(LARGEST[bits] / 4), bits)
    np.testing.assert_array_equal(mine.numpy(), theirs)


def test_the_gradient_passes_within_the_range_alone():
    x = torch.tensor([0.3, -2.0, 2.0, 2.1, -9.0], requires_grad=True)
    amax = torch.tensor(2.0, requires_grad=True)
    fake_quantize(x, amax, (4, 3)).sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 0, 0]
    assert float(amax.grad) == 0.0  # one above the range, one below


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_computed_in_float32(dtype):
    x = torch.linspace(-3, 3, 999).to(dtype)
    quantizer = TensorQuantizer(QuantDescriptor((4, 3), amax=2.5))
    wide = fake_quantize(x.float(), torch.tensor(2.5), (4, 3)).to(dtype)
    torch.testing.assert_close(quantizer(x), wide, rtol=2**-7, atol=0)
    assert quantizer(x).dtype == dtype


def test_per_channel_ranges_and_traced_graphs():
    weight = torch.randn(4, 3, 3) * torch.tensor([1e-3, 1.0, 7.0, 0.0])[:, None, None]
    quantizer = TensorQuantizer(QuantDescriptor((4, 3), axis=0))
    made = quantizer(weight)
    for row, one in zip(weight, made, strict=True):
        torch.testing.assert_close(one, fake_quantize(row, row.abs().max(), (4, 3)))
    assert not bool(made[3].any())
    exported = torch.export.export(quantizer, (weight,)).module()
    assert torch.equal(exported(weight), made)


def test_real_quantization_gives_numbers_of_the_format_and_the_scale():
    q, scale = tensor_quant(torch.tensor([0.3, -9.0]), torch.tensor(2.0), (4, 3))
    assert q.tolist() == [64.0, -448.0]
    assert float(scale) == 224.0


def test_descriptors_as_modelopt_writes_them():
    descriptor = QuantDescriptor(num_bits=(4, 3), axis=0)
    assert descriptor.num_bits == (4, 3)
    assert str(descriptor) == "QuantDescriptor((4, 3)bit fake axis=0)"
    assert QuantDescriptor(**descriptor.dict()) == descriptor
    assert QuantDescriptor(num_bits=[5, 2]).num_bits == (5, 2)
    assert "(4, 3)bit" in repr(TensorQuantizer(descriptor))
    for wrong in ((3, 4), (4,), (2, 1)):
        with pytest.raises(ValueError, match=r"\(4, 3\) or \(5, 2\)"):
            QuantDescriptor(num_bits=wrong)
    with pytest.raises(ValueError, match="has a sign"):
        QuantDescriptor(num_bits=(4, 3), unsigned=True)


def test_torchs_fake_quantization_operators_have_no_fp8():
    quantizer = TensorQuantizer(QuantDescriptor((4, 3), amax=1.0))
    quantizer.use_fb_fake_quant = True
    with pytest.raises(TypeError, match="num_bits=8"):
        quantizer(torch.ones(2))


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_mse_finds_the_range_of_least_error(bits, spread):
    torch.manual_seed(1)
    x = torch.randn(20_000).mul(spread).exp() * torch.randn(20_000).sign()
    calibrator = HistogramCalibrator(bits, None, False)
    calibrator.collect(x)
    found = calibrator.compute_amax("mse")
    edges = calibrator._calib_bin_edges
    centers = ((edges[1:] + edges[:-1]) / 2).double()
    counts = calibrator._calib_hist.double()

    def error(amax):
        made = fake_quantize(centers, torch.as_tensor(amax).double(), bits)
        return float(((made - centers) ** 2) @ counts)

    tried = [*centers[128:].tolist(), float(x.abs().max())]
    assert error(found) <= min(map(error, tried)) * (1 + 1e-9)


def test_entropy_is_refused():
    calibrator = HistogramCalibrator((4, 3), None, False)
    calibrator.collect(torch.randn(5000))
    with pytest.raises(ValueError, match="'mse' or 'max'"):
        calibrator.compute_amax("entropy", start_bin=1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.weight_quantizer = TensorQuantizer(QuantDescriptor((4, 3), axis=0))
        self.read = TensorQuantizer(QuantDescriptor((4, 3), calib_method="histogram"))

    def forward(self, x):
        return self.read(x) @ self.weight_quantizer(self.weight).T


def test_calibration_report_and_ranges_file(tmp_path):
    torch.manual_seed(0)
    model = Pair()
    report = calibrate(model, [torch.randn(64, 5)], method="mse")
    assert model.read.amax is not None
    assert not [f for f in report.findings if f.kind == "outliers"]
    calibrate_weights(model, "mse")
    save_ranges(model, tmp_path / "ranges.json")
    other = Pair()
    load_ranges(other, tmp_path / "ranges.json")
    assert torch.equal(other.read.amax, model.read.amax)
    integers = Pair()
    integers.read.num_bits = 8
    with pytest.raises(ValueError, match=r"num_bits is 8 in the model, \[4, 3\] in the file"):
        load_ranges(integers, tmp_path / "ranges.json")


def test_outliers_of_floats_are_no_finding():
    x = torch.cat([torch.rand(100_000) * 1e-3, torch.tensor([1000.0])])
    for bits, count in ((8, 1), ((4, 3), 0)):
        model = TensorQuantizer(QuantDescriptor(bits, calib_method="histogram"))
        report = calibrate(model, [x], method="max")
        assert sum(f.kind == "outliers" for f in report.findings) == count


def test_a_range_follows_its_tensor_and_numbers_stay_up_to_their_sign():
    weight = torch.randn(3, 50) * 2
    quantizer = TensorQuantizer(QuantDescriptor((4, 3), axis=0))
    quantizer.amax = weight.abs().amax(1, keepdim=True) * 0.7  # some values saturate
    before = quantizer(weight)
    factor = torch.tensor([[4.0], [-0.5], [-2.0]])
    rest = quantizer.scale_range(factor, weight)
    assert torch.equal(rest, weight)
    assert torch.equal(quantizer(rest * factor), before * factor)

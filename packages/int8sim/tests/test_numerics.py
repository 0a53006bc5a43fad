"""quantize, dequantize and requantize against rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevquant_int8sim import (
    AccumulatorOverflowError,
    dequantize,
    fixed_point_multiplier,
    quantize,
    quantize_bias,
    requantize,
)

HALF = Fraction(1, 2)
finite = st.floats(-1e30, 1e30, allow_subnormal=False)
scales = st.floats(1e-9, 1e6)
accs = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 127, -128, 5, -5]),
)


def to_integer(value, rounding):
    """Round a Fraction."""
    if rounding == "half_even":
        return round(value)
    if rounding == "half_away" and value < 0:
        return -math.floor(HALF - value)
    return math.floor(value + HALF)


def clamp(value, low, high):
    return max(low, min(high, value))


@given(
    st.lists(finite, min_size=1, max_size=5),
    scales,
    st.sampled_from(["half_even", "half_up", "half_away"]),
)
def test_quantize_is_the_rounded_float64_quotient(values, scale, rounding):
    got = quantize(torch.tensor(values, dtype=torch.float64), scale, rounding=rounding)
    expected = [clamp(to_integer(Fraction(v / scale), rounding), -128, 127) for v in values]
    assert got.dtype == torch.int8
    assert got.tolist() == expected


@pytest.mark.parametrize(
    ("bits", "narrow", "dtype", "low", "high"),
    [
        (8, False, torch.int8, -128, 127),
        (8, True, torch.int8, -127, 127),
        (4, False, torch.int8, -8, 7),
        (16, False, torch.int16, -(2**15), 2**15 - 1),
        (32, True, torch.int32, -(2**31) + 1, 2**31 - 1),
    ],
)
def test_ranges_saturate(bits, narrow, dtype, low, high):
    got = quantize(torch.tensor([-math.inf, math.inf, 0.0]), 1.0, bits=bits, narrow_range=narrow)
    assert got.dtype == dtype
    assert got.tolist() == [low, high, 0]


def test_the_largest_float_below_a_half_stays_below_it():
    value = torch.tensor([math.nextafter(0.5, 0), -0.5, -1.5, 2.5], dtype=torch.float64)
    assert quantize(value, 1.0, rounding="half_up").tolist() == [0, 0, -1, 3]
    assert quantize(value, 1.0, rounding="half_away").tolist() == [0, -1, -2, 3]
    assert quantize(value, 1.0).tolist() == [0, 0, -2, 2]


def test_scales_run_along_the_axis():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert quantize(x, torch.tensor([1.0, 0.5])).tolist() == [[1, 2], [6, 8]]
    assert quantize(x, torch.tensor([1.0, 0.5]), axis=1).tolist() == [[1, 4], [3, 8]]
    q = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    assert dequantize(q, torch.tensor([1.0, 0.5]), axis=-1).tolist() == [[1.0, 1.0], [3.0, 2.0]]


@given(st.integers(-128, 127), scales)
def test_integers_survive_the_round_trip(value, scale):
    q = torch.tensor([value], dtype=torch.int8)
    assert quantize(dequantize(q, scale, dtype=torch.float64), scale).tolist() == [value]


@given(st.lists(accs, min_size=1, max_size=6), st.floats(1e-12, 2.0**20), st.data())
def test_requantize_float64(values, multiplier, data):
    rounding = data.draw(st.sampled_from(["half_even", "half_up", "half_away"]))
    got = requantize(torch.tensor(values, dtype=torch.int32), multiplier, rounding=rounding)
    # The product as IEEE 754 rounds it, then exactly.
    expected = [
        clamp(to_integer(Fraction(float(v) * multiplier), rounding), -128, 127) for v in values
    ]
    assert got.tolist() == expected


@given(
    st.lists(accs, min_size=1, max_size=6),
    st.floats(2.0**-60, 2.0**20),
    st.integers(7, 31),
    st.data(),
)
def test_requantize_fixed_point(values, multiplier, bits, data):
    rounding = data.draw(st.sampled_from(["half_even", "half_up", "half_away"]))
    got = requantize(
        torch.tensor(values, dtype=torch.int32),
        multiplier,
        rounding=rounding,
        arithmetic="fixed_point",
        multiplier_bits=bits if multiplier < 2.0 ** (bits - 1) else 31,
        bits=32,
    )
    # The mantissa by its definition, in rational arithmetic.
    bits = bits if multiplier < 2.0 ** (bits - 1) else 31
    exponent = 0
    while multiplier >= 2.0**exponent:
        exponent += 1
    while multiplier < 2.0 ** (exponent - 1):
        exponent -= 1
    approximated = Fraction(2) ** (exponent - bits) * math.floor(
        Fraction(multiplier) / Fraction(2) ** (exponent - bits) + HALF
    )
    expected = [clamp(to_integer(v * approximated, rounding), -(2**31), 2**31 - 1) for v in values]
    assert got.tolist() == expected


@given(st.floats(2.0**-60, 2.0**29), st.integers(7, 31))
def test_mantissas_are_normalised_and_near(multiplier, bits):
    if multiplier >= 2.0 ** (bits - 1):
        multiplier /= 2.0**24
    mantissa, shift = (int(v) for v in fixed_point_multiplier(multiplier, bits=bits))
    assert 2 ** (bits - 1) <= mantissa < 2**bits
    error = abs(Fraction(mantissa, 2**shift) / Fraction(multiplier) - 1)
    assert error <= Fraction(1, 2**bits)


@pytest.mark.parametrize("arithmetic", ["float64", "fixed_point"])
def test_ties_on_every_half(arithmetic):
    acc = torch.arange(-40, 41, dtype=torch.int32)
    for rounding in ("half_even", "half_up"):
        got = requantize(acc, 0.5, rounding=rounding, arithmetic=arithmetic)
        assert got.tolist() == [to_integer(Fraction(v, 2), rounding) for v in acc.tolist()]


def test_relu_narrow_range_and_channels():
    acc = torch.tensor([[-300, 300], [-3, 3]], dtype=torch.int32)
    assert requantize(acc, 1.0, narrow_range=True).tolist() == [[-127, 127], [-3, 3]]
    assert requantize(acc, 1.0, relu=True).tolist() == [[0, 127], [0, 3]]
    by_row = requantize(acc, torch.tensor([0.1, 2.0]), axis=0, bits=16)
    assert (by_row.dtype, by_row.tolist()) == (torch.int16, [[-30, 30], [-6, 6]])


def test_bias():
    bias = torch.tensor([1.0, -1.0, 0.025], dtype=torch.float64)
    got = quantize_bias(bias, 0.1, torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64))
    steps = np.array([0.1, 0.05, 0.1 * 0.1])
    assert got.dtype == torch.int32
    assert got.tolist() == np.rint(bias.numpy() / steps).astype(int).tolist()
    message = (
        r"conv1: bias 1.0 of channel 0 is 1e\+12 steps .* leaves int32: with the input scale 1e-06 "
        r"its weight scale must exceed 0.000466, and is 1e-06\. Widen"
    )
    with pytest.raises(ValueError, match=message):
        quantize_bias(torch.ones(2), 1e-6, 1e-6, name="conv1")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_unusable_scales_are_refused(scale):
    x, q = torch.ones(2), torch.ones(2, dtype=torch.int32)
    for call in (lambda: quantize(x, scale), lambda: dequantize(q, scale)):
        with pytest.raises(ValueError, match=r"scale is .*calibrate"):
            call()
    with pytest.raises(ValueError, match="multiplier of channel 1"):
        requantize(q, torch.tensor([1.0, scale], dtype=torch.float64))


def test_refusals_name_what_is_wrong():
    acc = torch.ones(2, 3, dtype=torch.int32)
    with pytest.raises(TypeError, match="acc must be a tensor of int32 or int64, got float32"):
        requantize(acc.float(), 1.0)
    with pytest.raises(ValueError, match="2 values for 3 channels along axis -1"):
        requantize(acc, torch.ones(2))
    for settings, message in (
        (dict(rounding="up"), "layer7: rounding='up'"),
        (dict(arithmetic="int"), "layer7: arithmetic='int'"),
        (dict(bits=64), "layer7: bits=64"),
        (dict(arithmetic="fixed_point", multiplier_bits=40), "layer7: a mantissa of 40 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            requantize(acc, 1.0, name="layer7", **settings)
    with pytest.raises(ValueError, match=r"layer7: multiplier 1099511627776\.0 is too large"):
        requantize(acc, 2.0**40, arithmetic="fixed_point", name="layer7")
    with pytest.raises(AccumulatorOverflowError, match=r"layer7: accumulators of .* leave int32"):
        requantize(acc.long() << 31, 1.0, name="layer7")


def test_quantize_and_dequantize_refuse_by_name():
    x = torch.ones(2)
    with pytest.raises(ValueError, match="stem: values contain NaN"):
        quantize(torch.tensor([math.nan]), 1.0, name="stem")
    for wrong in (x.to(torch.int8), x.to(torch.complex64), [1.0]):
        with pytest.raises(TypeError, match="stem: values must be a float tensor"):
            quantize(wrong, 1.0, name="stem")
    for wrong in (x, x.to(torch.complex64), [1]):
        with pytest.raises(TypeError, match="stem: integers must be a tensor of int8"):
            dequantize(wrong, 1.0, name="stem")
    with pytest.raises(ValueError, match="stem: bits=1"):
        quantize(x, 1.0, bits=1, name="stem")
    with pytest.raises(TypeError, match=r"stem: dtype=torch\.int8: expected a float type"):
        dequantize(x.to(torch.int8), 1.0, dtype=torch.int8, name="stem")
    with pytest.raises(TypeError, match="stem: scale: expected a number, got NoneType"):
        quantize(x, None, name="stem")
    with pytest.raises(ValueError, match="conv: bias of channel 1 is nan"):
        quantize_bias(torch.tensor([0.0, math.nan]), 1.0, 1.0, name="conv")
    with pytest.raises(ValueError, match="conv: input scale is 0"):
        quantize_bias(x, 0.0, 1.0, name="conv")


def test_a_mantissa_has_7_to_31_bits():
    for bits in (7, 31):
        mantissa, _ = fixed_point_multiplier(0.3, bits=bits)
        assert 2 ** (bits - 1) <= int(mantissa) < 2**bits
    for bits in (6, 32):
        with pytest.raises(ValueError, match=f"mantissa of {bits} bits: expected 7 to 31"):
            fixed_point_multiplier(0.3, bits=bits)

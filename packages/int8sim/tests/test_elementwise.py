"""Additions, concatenations, look-up tables, activations, pooling and resizing."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from bevquant_int8sim import (
    AccumulatorOverflowError,
    int8_add,
    int8_avg_pool,
    int8_concat,
    int8_leaky_relu,
    int8_lookup,
    int8_max_pool,
    int8_relu,
    int8_relu6,
    int8_resize,
    lookup_table,
)

HALF = Fraction(1, 2)
EVERY = torch.arange(-128, 128, dtype=torch.int8)
PAIRS = torch.cartesian_prod(EVERY, EVERY)
ROUNDINGS = ["half_even", "half_up", "half_away"]


def rounded(value, rounding, low=-128, high=127):
    value = Fraction(value)
    away = rounding == "half_away" and value < 0
    whole = -math.floor(HALF - value) if away else math.floor(value + HALF)
    whole = round(value) if rounding == "half_even" else whole
    return max(low, min(high, whole))


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.sampled_from(ROUNDINGS))
def test_add_of_unequal_scales(left, right, rounding):
    pairs = PAIRS[:: 257 * 3]
    q = int8_add(pairs[:, 0], pairs[:, 1], left, right, rounding=rounding)
    expected = [rounded(a * left + b * right, rounding) for a, b in pairs.tolist()]
    assert q.tolist() == expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("arithmetic", ["float64", "fixed_point"])
def test_add_on_every_pair_and_tie(rounding, arithmetic):
    a, b = PAIRS.unbind(1)
    q = int8_add(a, b, 0.5, 0.25, rounding=rounding, arithmetic=arithmetic)
    exact = 2 * a.int() + b.int()  # in quarters
    expected = [rounded(Fraction(v, 4), rounding) for v in range(-384, 382)]
    assert q.tolist() == [expected[v + 384] for v in exact.tolist()]


@given(st.floats(2.0**-20, 2.0**10), st.floats(2.0**-20, 2.0**10), st.sampled_from(ROUNDINGS))
def test_fixed_point_add(left, right, rounding):
    pairs = PAIRS[:: 257 * 5]
    q = int8_add(pairs[:, 0], pairs[:, 1], left, right, rounding=rounding, arithmetic="fixed_point")
    exponent = math.frexp(max(left, right))[1]
    unit = Fraction(2) ** (exponent - 31)
    m_a, m_b = (math.floor(Fraction(m) / unit + HALF) for m in (left, right))
    if max(m_a, m_b) == 2**31:
        unit *= 2
        m_a, m_b = (math.floor(Fraction(m) / unit + HALF) for m in (left, right))
    expected = [rounded((a * m_a + b * m_b) * unit, rounding) for a, b in pairs.tolist()]
    assert q.tolist() == expected


def test_add_options_and_refusals():
    a = torch.tensor([-128, -128, 127], dtype=torch.int8)
    assert int8_add(a, a, 1.0, 1.0).tolist() == [-128, -128, 127]
    assert int8_add(a, a, 1.0, 1.0, narrow_range=True).tolist() == [-127, -127, 127]
    assert int8_add(a, a, 1.0, 1.0, relu=True).tolist() == [0, 0, 127]
    wide = torch.tensor([30000], dtype=torch.int16)
    assert int8_add(wide, wide, 0.5, 0.25).tolist() == [22500]
    with pytest.raises(ValueError, match="residual: operands of shape"):
        int8_add(a, a[:2], 1.0, 1.0, name="residual")
    with pytest.raises(TypeError, match="b must be a tensor of int8, got int16"):
        int8_add(a, wide, 1.0, 1.0)
    with pytest.raises(ValueError, match="multiplier_b is 0"):
        int8_add(a, a, 1.0, 0.0)


def test_concat():
    a, b = torch.tensor([[-128, 3]], dtype=torch.int8), torch.tensor([[-127, 5]], dtype=torch.int8)
    q = int8_concat([a, b], [1.0, 0.5])
    assert (q.dtype, q.tolist()) == (torch.int8, [[-128, 3, -64, 2]])
    up = int8_concat([a, b], [2.0, 0.5], axis=0, rounding="half_up", narrow_range=True)
    assert up.tolist() == [[-127, 6], [-63, 3]]
    with pytest.raises(ValueError, match="2 tensors and 1 multipliers"):
        int8_concat([a, b], [1.0])
    with pytest.raises(ValueError, match=r"neck: tensors\[1\]: multiplier"):
        int8_concat([a, b], [1.0, -1.0], name="neck")


@given(st.lists(st.floats(2.0**-20, 2.0**10), min_size=1, max_size=4), st.sampled_from(ROUNDINGS))
def test_concat_of_unequal_scales(multipliers, rounding):
    parts = [EVERY.roll(i) for i in range(len(multipliers))]
    for arithmetic in ("float64", "fixed_point"):
        q = int8_concat(parts, multipliers, axis=0, rounding=rounding, arithmetic=arithmetic)
        expected = []
        for part, m in zip(parts, multipliers, strict=True):
            unit = Fraction(2) ** (math.frexp(m)[1] - 31)
            fixed = math.floor(Fraction(m) / unit + HALF) * unit
            expected += [
                rounded(v * m if arithmetic == "float64" else v * fixed, rounding)
                for v in part.tolist()
            ]
        assert q.tolist() == expected


def test_concat_keeps_int16_and_refuses_by_name():
    wide = torch.tensor([[30000, -32768]], dtype=torch.int16)
    q = int8_concat([wide, wide], [1.0, 0.5], axis=0)
    assert (q.dtype, q.tolist()) == (torch.int16, [[30000, -32768], [15000, -16384]])
    with pytest.raises(TypeError, match=r"neck: tensors\[1\] must be a tensor of int16, got int8"):
        int8_concat([wide, EVERY.view(1, -1)], [1.0, 1.0], name="neck")
    with pytest.raises(
        ValueError, match=r"neck: tensors\[1\] of shape \(1, 2\) .* cannot be joined"
    ):
        int8_concat([wide.view(2, 1), wide], [1.0, 1.0], name="neck")
    with pytest.raises(ValueError, match="neck: axis 2 does not exist"):
        int8_concat([wide, wide], [1.0, 1.0], axis=2, name="neck")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_lookup_of_every_integer(rounding):
    table = lookup_table(torch.tanh, 0.02, 1 / 127, rounding=rounding)
    q = int8_lookup(EVERY.view(2, 2, 64), table)
    values = np.tanh(np.arange(-128, 128) * 0.02) / (1 / 127)
    assert q.flatten().tolist() == [rounded(Fraction(v), rounding) for v in values]
    wide = torch.arange(256, dtype=torch.int32)
    assert int8_lookup(EVERY.flip(0), wide).tolist() == list(range(255, -1, -1))
    strided = EVERY.view(16, 16).t()
    assert torch.equal(int8_lookup(strided, table), int8_lookup(strided.contiguous(), table))
    with pytest.raises(ValueError, match=r"the function is NaN at -1\.28"):
        lookup_table(torch.log, 0.01, 1.0)
    with pytest.raises(ValueError, match="table of 256 entries"):
        int8_lookup(EVERY, table[:100])


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_activations_on_every_integer(rounding):
    every = EVERY.tolist()
    for m in (1.0, 0.5, 1.25, 3.0):
        got = int8_relu(EVERY, m, rounding=rounding).tolist()
        assert got == [rounded(max(v, 0) * m, rounding) for v in every]
        got = int8_leaky_relu(EVERY, 0.25, m, rounding=rounding).tolist()
        assert got == [rounded(v * m if v > 0 else v * 0.25 * m, rounding) for v in every]
    got = int8_relu6(EVERY, 0.0625, 0.03125, rounding=rounding).tolist()
    assert got == [rounded(min(max(v * 0.0625, 0), 6) / 0.03125, rounding) for v in every]
    assert int8_relu(torch.tensor([-300, 300], dtype=torch.int16)).tolist() == [0, 300]


POOLS = [
    dict(kernel_size=2),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=3, stride=2, padding=1, ceil_mode=True),
    dict(kernel_size=2, stride=3, ceil_mode=True),
    dict(kernel_size=1),
    dict(kernel_size=2, padding=1),
]


@pytest.mark.parametrize("shape", [(2, 3, 11), (1, 4, 7, 8), (1, 2, 5, 6, 7)])
@pytest.mark.parametrize("settings", POOLS)
def test_pools_equal_torch_in_float64(shape, settings):
    ndim = len(shape) - 2
    generator = np.random.default_rng(ndim)
    x = torch.from_numpy(generator.integers(-128, 128, shape).astype(np.int8))
    theirs = getattr(F, f"max_pool{ndim}d")(x.double(), **settings)
    assert torch.equal(int8_max_pool(x, **settings).double(), theirs)
    for inside in (True, False):
        options = settings | dict(count_include_pad=inside)
        # The sum times n, then halves exactly as they fall.
        theirs = getattr(F, f"avg_pool{ndim}d")(x.double(), **options)
        got = int8_avg_pool(x, **options).double()
        near = (theirs - theirs.round()).abs() < 0.499
        assert torch.equal(got[near], theirs.round()[near])
        assert bool(((got - theirs).abs() <= 0.5 + 1e-9).all())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_average_ties_and_scale(rounding):
    x = torch.stack([EVERY, EVERY + 1], 1).view(1, 1, -1)  # the last pair wraps to 127, −128
    q = int8_avg_pool(x, 2, rounding=rounding).flatten().tolist()
    sums = x.view(-1, 2).int().sum(1).tolist()
    assert q == [rounded(Fraction(v, 2), rounding) for v in sums]
    q = int8_avg_pool(x, 2, multiplier=3.0, rounding=rounding).flatten().tolist()
    assert q == [rounded(Fraction(3 * v, 2), rounding) for v in sums]


def test_sums_of_an_average_never_wrap():
    count = 66_000
    x = torch.full((1, 2, count), 32767, dtype=torch.int16)
    x[:, 0] = 1000
    with pytest.raises(AccumulatorOverflowError, match=r"gap: .* channel 1 reaches 2162622000,"):
        int8_avg_pool(x, count, name="gap")
    assert int8_avg_pool(x[:, :1], count).item() == 1000


def test_dilated_maximum_and_refusals():
    x = torch.randint(-128, 128, (1, 2, 9, 9), dtype=torch.int8)
    theirs = F.max_pool2d(x.double(), 3, 1, 1, 2)
    assert torch.equal(int8_max_pool(x, 3, 1, 1, 2).double(), theirs)
    with pytest.raises(ValueError, match="pool3: padding="):
        int8_max_pool(x, 2, padding=2, name="pool3")
    with pytest.raises(ValueError, match="does not fit into 9 inputs"):
        int8_max_pool(x, 10)
    with pytest.raises(TypeError, match="got float32"):
        int8_avg_pool(x.float(), 2)


@pytest.mark.parametrize("size", [(6, 10), (4, 5), (3, 7), (8, 8), (1, 1)])
def test_nearest_equals_torch(size):
    x = torch.randint(-128, 128, (2, 3, 4, 5), dtype=torch.int8)
    assert torch.equal(int8_resize(x, size).double(), F.interpolate(x.double(), size))
    by_two = int8_resize(x, scale_factor=2)
    assert torch.equal(by_two.double(), F.interpolate(x.double(), scale_factor=2))


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(8, 10), (7, 9), (3, 2), (1, 1), (64, 49)])
def test_bilinear_is_torch_in_float64_rounded(size, align_corners):
    x = torch.randint(-128, 128, (2, 3, 4, 5), dtype=torch.int8)
    theirs = F.interpolate(x.double(), size, mode="bilinear", align_corners=align_corners)
    got = int8_resize(x, size, mode="bilinear", align_corners=align_corners).double()
    near = (theirs - theirs.round()).abs() < 0.499999
    assert torch.equal(got[near], theirs.round()[near])
    assert bool(((got - theirs).abs() <= 0.5 + 1e-9).all())


@pytest.mark.parametrize("multiplier", [1.0, 0.37, 3.0])
@pytest.mark.parametrize("channels_last", [False, True])
def test_large_bilinear_maps_have_the_bits_of_wider_integers(multiplier, channels_last):
    x = torch.randint(-128, 128, (2, 37, 9, 11), dtype=torch.int8)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    settings = {"mode": "bilinear", "multiplier": multiplier}
    for size, align_corners in [((18, 22), False), ((40, 13), True), ((17, 31), False)]:
        wide = int8_resize(x.short(), size, align_corners=align_corners, **settings)
        got = int8_resize(x, size, align_corners=align_corners, **settings)
        assert torch.equal(got, wide.clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bilinear_by_two_in_rational_arithmetic(rounding):
    x = torch.randint(-128, 128, (1, 1, 3, 4), dtype=torch.int8)
    got = int8_resize(x, scale_factor=2, mode="bilinear", rounding=rounding)[0, 0].tolist()
    values = x[0, 0].tolist()

    def along(out, n):
        place = max(Fraction(2 * out + 1, 4) - HALF, Fraction(0))
        first = math.floor(place)
        return first, min(first + 1, n - 1), place - first

    for r, c in np.ndindex(6, 8):
        (r0, r1, wr), (c0, c1, wc) = along(r, 3), along(c, 4)
        top = values[r0][c0] * (1 - wc) + values[r0][c1] * wc
        bottom = values[r1][c0] * (1 - wc) + values[r1][c1] * wc
        assert got[r][c] == rounded(top * (1 - wr) + bottom * wr, rounding)


def test_resize_refusals():
    x = torch.zeros(1, 1, 2, 2, dtype=torch.int8)
    with pytest.raises(ValueError, match="either size or scale_factor"):
        int8_resize(x)
    with pytest.raises(ValueError, match="mode='cubic'"):
        int8_resize(x, 4, mode="cubic")
    for factor in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected one or two positive"):
            int8_resize(x, scale_factor=factor)
    with pytest.raises(ValueError, match=r"up: nearest resizing keeps the scale, multiplier=2\.0"):
        int8_resize(x, 4, multiplier=2.0, name="up")
    with pytest.raises(ValueError, match="up: there is nothing to resize"):
        int8_resize(x[:, :, :0], 4, name="up")


X = torch.ones(1, 2, 4, 4, dtype=torch.int8)
CALLS = {
    "int8_add": lambda x, **k: int8_add(x, X, 1.0, 1.0, **k),
    "int8_concat": lambda x, **k: int8_concat([X, x], [1.0, 1.0], **k),
    "int8_avg_pool": lambda x, **k: int8_avg_pool(x, 2, **k),
    "int8_resize": lambda x, **k: int8_resize(x, 2, mode="bilinear", **k),
    "int8_relu": lambda x, **k: int8_relu(x, 2.0, **k),
    "int8_relu6": lambda x, **k: int8_relu6(x, 1.0, 2.0, **k),
    "int8_leaky_relu": lambda x, **k: int8_leaky_relu(x, 0.1, **k),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_types_and_settings_are_refused_by_name(call):
    for wrong in (X.float(), X.to(torch.uint8), None, X.numpy()):
        with pytest.raises(TypeError, match=r"head: .* must be a tensor of int8"):
            call(wrong, name="head")
    with pytest.raises(ValueError, match="head: rounding='down'"):
        call(X, name="head", rounding="down")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_unusable_multipliers_are_refused_by_name(scale):
    for call in (
        lambda: int8_add(X, X, 1.0, scale, name="head"),
        lambda: int8_concat([X, X], [1.0, scale], name="head"),
        lambda: int8_avg_pool(X, 2, multiplier=scale, name="head"),
        lambda: int8_resize(X, 2, mode="bilinear", multiplier=scale, name="head"),
        lambda: int8_relu(X, scale, name="head"),
        lambda: int8_relu6(X, 1.0, scale, name="head"),
        lambda: int8_leaky_relu(X, 0.1, scale, name="head"),
        lambda: lookup_table(torch.tanh, scale, 1.0, name="head"),
        lambda: lookup_table(torch.tanh, 1.0, scale, name="head"),
    ):
        with pytest.raises(ValueError, match=r"head: .* is .*calibrate"):
            call()
    with pytest.raises(ValueError, match="head: multiplier: expected one number, got 2"):
        int8_relu(X, torch.ones(2), name="head")
    with pytest.raises(TypeError, match="head: multiplier: expected a number, got str"):
        int8_relu(X, "1", name="head")
    with pytest.raises(ValueError, match="head: negative_slope=nan"):
        int8_leaky_relu(X, math.nan, name="head")


@pytest.mark.parametrize("slope", ["x", None, [1], 10**400, math.nan])
def test_a_slope_that_is_no_number_is_named(slope):
    with pytest.raises(ValueError, match=r"negative_slope=.* is no finite number"):
        int8_leaky_relu(EVERY, slope)


@pytest.mark.parametrize(
    ("tensors", "multipliers", "axis", "words"),
    [
        (None, [1.0], 0, "expected a sequence of tensors"),
        ([EVERY], 1.0, 0, "expected a sequence of multipliers"),
        ([EVERY], [1.0], None, "axis None"),
        ([EVERY], [1.0], False, "axis False"),
    ],
)
def test_what_cannot_be_joined_is_named(tensors, multipliers, axis, words):
    with pytest.raises((TypeError, ValueError), match=words):
        int8_concat(tensors, multipliers, axis)


@pytest.mark.parametrize("function", [None, "tanh", 3])
def test_a_table_of_what_is_no_function_is_refused(function):
    with pytest.raises(TypeError, match="expected a function"):
        lookup_table(function, 0.1, 0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 10**9}, "of which there may be"),
        ({"scale_factor": "x"}, "one or two positive"),
        ({"scale_factor": (2.0, None)}, "one or two positive"),
        ({"scale_factor": 10**400}, "one or two positive"),
        ({"scale_factor": (1.0, 2.0, 3.0)}, "one or two positive"),
        ({"scale_factor": 1e300}, "output size"),
    ],
)
def test_sizes_that_no_picture_has_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        int8_resize(EVERY.view(1, 1, 16, 16), **settings)


def test_one_setting_out_of_range_is_named():
    x = torch.zeros(1, 1, 4, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="pool: stride="):
        int8_max_pool(x, 2, (1, 2**40), name="pool")

"""Sampling at real positions, bit for bit against loops of whole numbers and fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import bevquant_int8sim as sim

PADDINGS = ("zeros", "border", "reflection")


@pytest.fixture(params=["compiled", "torch"])
def kernel(request, monkeypatch):
    """The kernel of large tensors, or torch's operations, for these small ones."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    small = 0 if request.param == "compiled" else 1 << 40
    monkeypatch.setattr("bevquant_int8sim._backends._SMALL", small)


def integers(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, shape, generator=g, dtype=torch.int8)
    values.view(-1)[::5] = -128  # the largest sums
    return values


def positions(sizes, count, seed=0):
    """Pixel centres, edges between pixels, the map's border, outside, far outside, and others."""
    g, axes = torch.Generator().manual_seed(seed), []
    for size in sizes:
        centres = (2 * torch.arange(-2, size + 2) + 1) / size - 1
        edges = 2 * torch.arange(-1, size + 2) / size - 1
        corners = 2 * torch.arange(-1, size + 1) / max(size - 1, 1) - 1
        far = torch.tensor([-1.0, 1.0, -1e9, 3e38, -3.7, 1 + 2**-23, -1 - 2**-23, 0.0, -0.0])
        known = torch.cat([centres, edges, corners, far, torch.rand(9, generator=g) * 4 - 2])
        axes.append(known[torch.randint(len(known), (count,), generator=g)])
    return torch.stack(axes[::-1], -1)  # x first


def pixels(g, size, padding, corners):
    """A position of one axis in pixels, as an exact fraction."""
    g = Fraction(float(g))
    p = (g + 1) / 2 * (size - 1) if corners else ((g + 1) * size - 1) / 2
    if padding == "reflection":
        half = Fraction(1, 2)
        low, high = (Fraction(0), Fraction(size - 1)) if corners else (-half, size - half)
        if low == high:
            return Fraction(0)
        period = 2 * (high - low)
        p = (p - low) % period
        p = low + min(p, period - p)
    if padding != "zeros":
        p = min(max(p, Fraction(0)), Fraction(size - 1))
    return p


def bilinear(values, place):
    """Σ q·w around a position [pixels], zeros outside; whole numbers with 24 bits of fraction."""
    fixed, bits = [round(p * 2**12) for p in place], 12
    if len(place) == 3:
        low, share = divmod(fixed[0], 2**12)
        planes = [(low, 2**12 - share), (low + 1, share)]
        total = sum(
            round(Fraction(bilinear(values[z], place[1:]), 2**12)) * weight
            for z, weight in planes
            if 0 <= z < len(values)
        )
        assert -(2**31) <= total < 2**31
        return total
    total = 0
    for corner in itertools.product((0, 1), repeat=len(fixed)):
        at, weight = [], 1
        for u, step in zip(fixed, corner, strict=True):
            low, share = divmod(u, 2**bits)
            at.append(low + step)
            weight *= share if step else 2**bits - share
        if all(0 <= a < n for a, n in zip(at, values.shape, strict=True)):
            total += int(values[tuple(at)]) * weight
    assert -(2**31) <= total < 2**31
    return total


def rescaled(total, factor):
    return max(-128, min(127, round(float(total) * factor)))  # as `requantize`


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sizes", [(4, 6), (1, 5), (3, 2, 4)])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
def test_bilinear_samples_are_the_sums_of_a_loop(padding, corners, sizes):
    x = integers(2, 3, *sizes)
    grid = positions(sizes, 2 * 30).view(2, *(1,) * (len(sizes) - 1), 30, len(sizes))
    if padding == "reflection":
        grid = grid.clamp(-1e9, 1e9)  # a float64 counts no periods beyond
    multiplier = 0.37
    got = sim.int8_grid_sample(x, grid, "bilinear", padding, corners, multiplier=multiplier)
    assert got.dtype == torch.int8
    assert got.shape == (2, 3, *grid.shape[1:-1])
    for n, c, k in itertools.product(range(2), range(3), range(30)):
        place = [
            pixels(g, size, padding, corners)
            for g, size in zip(grid[n].view(30, -1)[k].flip(0), sizes, strict=True)
        ]
        want = rescaled(bilinear(x[n, c], place), multiplier / 2**24)
        assert int(got[n, c].view(-1)[k]) == want


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
def test_bilinear_samples_lie_within_their_bound_of_torch(padding, corners):
    x, grid = integers(2, 8, 17, 30), positions((17, 30), 2 * 500).view(2, 20, 25, 2)
    grid = grid.clamp(-1e6, 1e6)
    got = sim.int8_grid_sample(x, grid, "bilinear", padding, corners)
    want = F.grid_sample(x.double(), grid.double(), "bilinear", padding, corners)
    bound = 0.5 + sim._sample.sampling_error("grid_sample", (x, grid))
    assert bound < 0.6
    assert float((got - want).abs().max()) <= bound


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
def test_nearest_samples_are_torchs_pixels(padding, corners):
    x, grid = integers(2, 3, 4, 8), positions((4, 8), 2 * 40).view(2, 8, 5, 2).clamp(-9, 9)
    got = sim.int8_grid_sample(x, grid, "nearest", padding, corners)
    want = F.grid_sample(x.float(), grid, "nearest", padding, corners)
    assert torch.equal(got, want.to(torch.int8))
    half = sim.int8_grid_sample(x, grid, "nearest", padding, corners, multiplier=0.5)
    assert torch.equal(half, (want / 2).round().to(torch.int8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_positions_that_are_no_numbers_are_refused(bad):
    grid = torch.zeros(1, 2, 3, 2)
    grid[0, 1, 2, 1] = bad
    with pytest.raises(ValueError, match=rf"head: grid \(0, 1, 2, 1\) is {bad}: expected finite"):
        sim.int8_grid_sample(integers(1, 1, 4, 4), grid, name="head")
    with pytest.raises(TypeError, match=r"expected floats, .* got torch\.int8"):
        sim.int8_grid_sample(integers(1, 1, 4, 4), integers(1, 2, 3, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "bicubic"}, "mode='bicubic'"),
        ({"padding_mode": "wrap"}, "padding_mode='wrap'"),
        ({"grid": torch.zeros(1, 2, 3, 3)}, "expected .*a grid"),
        ({"grid": torch.zeros(2, 2, 3, 2)}, "expected .*a grid"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message):
    given = {"x": integers(1, 1, 4, 4), "grid": torch.zeros(1, 2, 3, 2)} | change
    with pytest.raises(ValueError, match=message):
        sim.int8_grid_sample(**given)


def attention(seed=0, points=4, sizes=((4, 6), (1, 3))):
    """Operands of one deformable attention with 2 frames, 3 heads, 5 queries, 4 channels."""
    g = torch.Generator().manual_seed(seed)
    count = sum(h * w for h, w in sizes)
    value = integers(2, count, 3, 4, seed=seed)
    starts = torch.tensor([0, *itertools.accumulate(h * w for h, w in sizes)][:-1])
    places = torch.stack([
        (positions(size, 2 * 5 * 3 * points, seed).view(2, 5, 3, points, 2).clamp(-99, 99) + 1) / 2
        for size in sizes
    ], 3)  # fmt: skip
    # Half of these samples lie between two of 8 fraction bits.
    h, w = sizes[0]
    places[:, ::2, :, 0, 0] = torch.tensor([(w // 2 + 0.5 + 2**-9) / w, (h // 2 + 0.5) / h])
    weights = torch.randn(2, 5, 3, len(sizes) * points, generator=g).mul(3).softmax(-1)
    return value, torch.tensor(sizes), starts, places, weights.view(2, 5, 3, len(sizes), points)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("signed", [False, True])
def test_deformable_attention_is_the_sum_of_a_loop(signed):
    value, shapes, starts, places, weights = attention()
    if signed:
        weights = torch.where(weights > 0.1, -3 * weights, weights)
    operands = (value, shapes, starts, places, weights)
    got = sim.int8_deformable_attention(*operands, multiplier=1.7)
    assert got.shape == (2, 5, 12)
    sums, bits = sim._sample.attention_sums(*operands, name="")
    assert bits == 22
    for b, q, m, d in itertools.product(range(2), range(5), range(3), range(4)):
        total = 0
        for level, (h, w) in enumerate(shapes.tolist()):
            one = value[b, int(starts[level]) :][: h * w, m, d].view(h, w)
            for p in range(weights.shape[-1]):
                x, y = (Fraction(float(v)) for v in places[b, q, m, level, p])
                sample = bilinear(one, (y * h - Fraction(1, 2), x * w - Fraction(1, 2)))
                weight = round(Fraction(float(weights[b, q, m, level, p])) * 2**14)
                total += round(Fraction(sample, 2**16)) * weight
                assert abs(total) < 2**31
        assert int(sums[b, q, m * 4 + d]) == total
        assert int(got[b, q, m * 4 + d]) == rescaled(total, 1.7 / 2**22)


def test_deformable_attention_lies_within_its_bound_of_the_float_one():
    value, shapes, starts, places, weights = attention(1)
    got = sim.int8_deformable_attention(value, shapes, starts, places, weights)
    want = torch.zeros(2, 5, 3, 4, dtype=torch.float64)
    for level, (h, w) in enumerate(shapes.tolist()):
        maps = value[:, int(starts[level]) :][:, : h * w].permute(0, 2, 3, 1).reshape(6, 4, h, w)
        grid = 2 * places[:, :, :, level].double().transpose(1, 2).flatten(0, 1) - 1
        taken = F.grid_sample(maps.double(), grid, align_corners=False).view(2, 3, 4, 5, -1)
        want += torch.einsum("bmdqp,bqmp->bqmd", taken, weights[:, :, :, level].double())
    operands = (value, shapes, starts, places, weights)
    bound = 0.5 + sim._sample.sampling_error("deformable_attention", operands)
    assert bound < 0.7
    assert float((got - want.flatten(2)).abs().max()) <= bound


@pytest.mark.usefixtures("kernel")
def test_weights_of_samples_never_leave_int32():
    value, shapes, starts, places, weights = attention()
    value.fill_(-128)
    inside = torch.full_like(places, 0.5)
    full = weights / weights.sum((-2, -1), keepdim=True)
    got = sim.int8_deformable_attention(value, shapes, starts, inside, full * 3.99, multiplier=0.25)
    assert got.float().mean() == pytest.approx(-128, abs=0.6)
    with pytest.raises(sim.AccumulatorOverflowError, match=r"net: .* up to 4\.1 in magnitude"):
        sim.int8_deformable_attention(value, shapes, starts, inside, full * 4.1, name="net")
    with pytest.raises(ValueError, match=r"the weights of samples .* is nan"):
        sim.int8_deformable_attention(value, shapes, starts, inside, full * math.nan)
    with pytest.raises(ValueError, match=r"expected value .*levels \["):
        sim.int8_deformable_attention(value[:, 1:], shapes, starts, inside, full)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_deformable_convolution_is_that_of_a_loop(with_mask, groups):
    g = torch.Generator().manual_seed(3)
    x, weight = integers(2, 4, 5, 6), integers(6, 4 // groups, 3, 2, seed=1)
    stride, padding, dilation, sharing, taps, outputs = (2, 1), (1, 0), (1, 2), 2, 6, (3, 4)
    offset = torch.randn(2, sharing * taps * 2, *outputs, generator=g) * 2
    offset[:, ::3] = offset[:, ::3].round()
    offset[:, 1::7] = 0.5
    mask = torch.rand(2, sharing * taps, *outputs, generator=g) if with_mask else None
    bias = torch.arange(-300, 300, 100, dtype=torch.int32)
    got = sim.int8_deform_conv2d(
        x, weight, offset, mask, bias, stride=stride, padding=padding, dilation=dilation,
        multiplier=0.004,
    )  # fmt: skip
    assert got.shape == (2, 6, *outputs)
    for b, o, i, j in itertools.product(range(2), range(6), range(3), range(4)):
        total = int(bias[o])
        for c, ky, kx in itertools.product(range(4 // groups), range(3), range(2)):
            channel, tap = c + o // (6 // groups) * (4 // groups), ky * 2 + kx
            group = channel // (4 // sharing)
            dy, dx = (
                Fraction(float(offset[b, (group * taps + tap) * 2 + axis, i, j])) for axis in (0, 1)
            )
            place = (i * 2 - 1 + ky + dy, j + kx * 2 + dx)
            column = Fraction(bilinear(x[b, channel], place), 2**24)
            if mask is not None:
                sample = round(column * 2**8)
                share = round(Fraction(float(mask[b, group * taps + tap, i, j])) * 2**14)
                column = Fraction(sample * share, 2**22)
            total += max(-128, min(127, round(column))) * int(weight[o, c, ky, kx])
        assert int(got[b, o, i, j]) == rescaled(total, 0.004)


@pytest.mark.usefixtures("kernel")
def test_values_may_lie_in_memory_in_any_order():
    g = torch.Generator().manual_seed(4)
    x, weight = integers(1, 4, 5, 6), integers(3, 4, 1, 1, seed=1)
    offset = torch.randn(1, 2, 5, 6, generator=g)
    twice = sim.int8_deform_conv2d(
        x.expand(2, -1, -1, -1), weight, offset.expand(2, -1, -1, -1), multiplier=0.01
    )
    one = sim.int8_deform_conv2d(x.mT.contiguous().mT, weight, offset, multiplier=0.01)
    assert torch.equal(one, twice[:1])
    value, *others = attention()
    part = torch.cat([value, value], -1)[..., :4]  # of a product with queries and keys
    assert not part.is_contiguous()
    assert torch.equal(
        sim.int8_deformable_attention(part, *others), sim.int8_deformable_attention(value, *others)
    )


def test_offsets_of_another_shape_are_refused():
    x, weight = integers(1, 4, 5, 6), integers(6, 4, 3, 3)
    with pytest.raises(ValueError, match=r"neck: expected offset \[batch, .* 9 · 2, 3"):
        sim.int8_deform_conv2d(x, weight, torch.zeros(1, 18, 5, 5), multiplier=1.0, name="neck")

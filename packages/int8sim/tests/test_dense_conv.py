"""Linear layers and dense convolutions against loops and against float64 convolutions."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bevquant_int8sim import (
    AccumulatorOverflowError,
    int8_conv1d,
    int8_conv2d,
    int8_conv3d,
    int8_conv_transpose2d,
    int8_linear,
    requantize,
)
from bevquant_int8sim._grid_axes import conv_axis, make_grid

CONVS = {1: int8_conv1d, 2: int8_conv2d, 3: int8_conv3d}


def loop_conv(x, w, bias, stride, padding, dilation, groups):
    """Exact sums of ``[b, c, *grid]``, element by element of kernel and grid."""
    x, w = x.astype(np.int64), w.astype(np.int64)
    grid, kernel = x.shape[2:], w.shape[2:]
    sizes = [
        (n + sum(p) - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(grid, kernel, stride, padding, dilation, strict=True)
    ]
    out = np.zeros((len(x), len(w), *sizes), np.int64)
    if bias is not None:
        out += bias.reshape(1, -1, *(1,) * len(sizes))
    width = len(w) // groups
    for place in np.ndindex(*sizes):
        for k in np.ndindex(*kernel):
            at = [o * s - p[0] + kk * d for o, s, p, kk, d in
                  zip(place, stride, padding, k, dilation, strict=True)]  # fmt: skip
            if all(0 <= a < n for a, n in zip(at, grid, strict=True)):
                for group in range(groups):
                    inside = slice(group * w.shape[1], (group + 1) * w.shape[1])
                    outside = slice(group * width, (group + 1) * width)
                    seen = x[(slice(None), inside, *at)][:, None]
                    out[(slice(None), outside, *place)] += (
                        seen * w[(outside, slice(None), *k)][None]
                    ).sum(2)
    return out


def loop_conv_transpose(x, w, stride, padding, output_padding, dilation, groups):
    x, w = x.astype(np.int64), w.astype(np.int64)
    grid, kernel = x.shape[2:], w.shape[2:]
    sizes = [
        (n - 1) * s - 2 * p + d * (k - 1) + o + 1
        for n, k, s, p, o, d in zip(
            grid, kernel, stride, padding, output_padding, dilation, strict=True
        )
    ]
    out = np.zeros((len(x), w.shape[1] * groups, *sizes), np.int64)
    width = x.shape[1] // groups
    for place in np.ndindex(*grid):
        for k in np.ndindex(*kernel):
            at = [i * s - p + kk * d for i, s, p, kk, d in
                  zip(place, stride, padding, k, dilation, strict=True)]  # fmt: skip
            if all(0 <= a < n for a, n in zip(at, sizes, strict=True)):
                for group in range(groups):
                    inside = slice(group * width, (group + 1) * width)
                    outside = slice(group * w.shape[1], (group + 1) * w.shape[1])
                    seen = x[(slice(None), inside, *place)][:, :, None]
                    out[(slice(None), outside, *at)] += (
                        seen * w[(inside, slice(None), *k)][None]
                    ).sum(1)
    return out


def numbers(generator, *shape):
    return generator.integers(-128, 128, shape).astype(np.int8)


def tensors(*arrays):
    return [None if a is None else torch.from_numpy(a) for a in arrays]


CASES = {
    "1d": ((2, 5, 11), (18, 5, 3), dict(stride=2, padding=1)),
    "1d, asymmetric, dilated": ((1, 3, 9), (4, 3, 3), dict(padding=[(0, 3)], dilation=2)),
    "1d, causal": ((1, 7, 6), (5, 7, 3), dict(padding=[(2, 0)])),
    "1d, groups": ((2, 6, 8), (9, 2, 3), dict(groups=3, padding=1, stride=2)),
    "2d, 3×3": ((2, 16, 7, 6), (33, 16, 3, 3), dict(padding=1)),
    "2d, 64 outputs": ((1, 6, 5, 9), (64, 6, 3, 3), dict(padding=1, stride=2)),
    "2d, 1×1": ((1, 20, 4, 5), (48, 20, 1, 1), dict()),
    "2d, 7×7": ((1, 3, 12, 10), (16, 3, 7, 7), dict(padding=3, stride=2)),
    "2d, per axis": (
        (1, 4, 9, 8), (6, 4, 2, 3), dict(stride=(1, 2), padding=((1, 2), (0, 3)), dilation=(2, 1)),
    ),
    "2d, groups": ((2, 12, 6, 5), (18, 4, 3, 3), dict(groups=3, padding=1)),
    "2d, wide groups": ((1, 40, 4, 4), (72, 20, 3, 3), dict(groups=2, padding=1)),
    "2d, depthwise": ((1, 34, 6, 6), (34, 1, 3, 3), dict(groups=34, padding=1, stride=2)),
    "2d, depthwise, 2 each": ((1, 6, 5, 5), (12, 1, 3, 3), dict(groups=6)),
    "3d": ((1, 5, 4, 5, 6), (17, 5, 3, 2, 3), dict(padding=1, stride=(2, 1, 1))),
    "3d, groups, asymmetric, dilated": (
        (1, 4, 4, 5, 5), (6, 2, 2, 3, 2),
        dict(groups=2, padding=((1, 0), (0, 2), (2, 1)), dilation=(2, 1, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_convolutions_equal_loops(backend, case, loop_requantize):
    shape, weight_shape, settings = CASES[case]
    generator = np.random.default_rng(len(case))
    ndim = len(shape) - 2
    x, w = numbers(generator, *shape), numbers(generator, *weight_shape)
    bias = generator.integers(-9000, 9000, len(w)).astype(np.int32)

    def expand(value):
        return (value,) * ndim if isinstance(value, int) else value

    padding = [(p, p) if isinstance(p, int) else p for p in expand(settings.get("padding", 0))]
    expected = loop_conv(
        x, w, bias, expand(settings.get("stride", 1)), padding,
        expand(settings.get("dilation", 1)), settings.get("groups", 1),
    )  # fmt: skip
    conv = CONVS[ndim]
    acc = conv(*tensors(x, w, bias), backend=backend, **settings)
    assert acc.dtype == torch.int32
    assert (acc.numpy() == expected).all()
    multiplier = generator.uniform(1e-4, 3e-3, len(w))
    q = conv(
        *tensors(x, w, bias), multiplier=torch.from_numpy(multiplier), backend=backend, **settings
    )
    by_channel = loop_requantize(np.moveaxis(expected, 1, -1), multiplier)
    assert q.dtype == torch.int8
    assert (np.moveaxis(q.numpy(), 1, -1) == by_channel).all()


TRANSPOSED = {
    "2×2, stride 2": ((1, 12, 4, 5), (12, 20, 2, 2), dict(stride=2)),
    "3×3, stride 2": (
        (2, 5, 4, 3), (5, 16, 3, 3), dict(stride=2, padding=1, output_padding=1),
    ),
    "stride above the kernel": ((1, 4, 3, 3), (4, 3, 2, 1), dict(stride=3)),
    "stride 1": ((1, 4, 5, 4), (4, 7, 3, 3), dict(padding=1)),
    "dilated": ((1, 3, 4, 4), (3, 5, 3, 2), dict(stride=2, dilation=(2, 3), padding=(1, 0))),
    "groups": ((1, 6, 4, 4), (6, 4, 3, 3), dict(stride=2, groups=3)),
}  # fmt: skip


@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolutions_equal_loops(backend, case):
    shape, weight_shape, settings = TRANSPOSED[case]
    generator = np.random.default_rng(len(case))
    x, w = numbers(generator, *shape), numbers(generator, *weight_shape)

    def expand(name, default):
        value = settings.get(name, default)
        return (value,) * 2 if isinstance(value, int) else value

    expected = loop_conv_transpose(
        x, w, expand("stride", 1), expand("padding", 0), expand("output_padding", 0),
        expand("dilation", 1), settings.get("groups", 1),
    )  # fmt: skip
    channels = expected.shape[1]
    bias = generator.integers(-500, 500, channels).astype(np.int32)
    acc = int8_conv_transpose2d(*tensors(x, w, bias), backend=backend, **settings)
    assert (acc.numpy() == expected + bias.reshape(1, -1, 1, 1)).all()
    theirs = F.conv_transpose2d(*(v.double() for v in tensors(x, w, bias)), **settings)
    assert torch.equal(acc.double(), theirs)


@pytest.mark.parametrize(
    "pattern", list(itertools.product((-128, 127, None), repeat=2)), ids=lambda p: f"{p[0]}·{p[1]}"
)
def test_saturating_operands(backend, pattern):
    x, w = (
        np.where(np.arange(np.prod(shape)) % 2, 127, -128).reshape(shape).astype(np.int8)
        if value is None
        else np.full(shape, value, np.int8)
        for value, shape in zip(pattern, ((1, 64, 5, 5), (64, 64, 3, 3)), strict=True)
    )
    acc = int8_conv2d(*tensors(x, w), padding=1, backend=backend)
    one = ((1, 1), (1, 1))
    assert (acc.numpy() == loop_conv(x, w, None, (1, 1), one, (1, 1), 1)).all()
    flat = int8_linear(*tensors(x.reshape(25, 64), w.reshape(-1, 64)), backend=backend)
    assert (flat.numpy() == x.reshape(25, 64).astype(int) @ w.reshape(-1, 64).astype(int).T).all()


@pytest.mark.parametrize(
    "shape", [(1, 4), (7, 33), (2, 3, 64), (5,), (0, 8)], ids=lambda s: "×".join(map(str, s))
)
def test_linear(backend, shape):
    generator = np.random.default_rng(1)
    x, w = numbers(generator, *shape), numbers(generator, 19, shape[-1])
    bias = generator.integers(-500, 500, 19).astype(np.int32)
    acc = int8_linear(*tensors(x, w, bias), backend=backend)
    expected = x.astype(np.int64) @ w.astype(np.int64).T + bias
    assert acc.shape == expected.shape
    assert (acc.numpy() == expected).all()
    q = int8_linear(*tensors(x, w, bias), multiplier=1e-3, relu=True, backend=backend)
    assert torch.equal(q, requantize(acc, 1e-3, relu=True))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_outputs_and_memory_formats(backend, memory_format):
    generator = np.random.default_rng(2)
    x, w = tensors(numbers(generator, 2, 8, 6, 5), numbers(generator, 24, 8, 3, 3))
    x = x.contiguous(memory_format=memory_format)
    before = x.clone()
    multiplier = torch.from_numpy(generator.uniform(1e-4, 1e-3, 24))
    acc = int8_conv2d(x, w, padding=1, backend=backend)
    for settings in (
        dict(relu=True),
        dict(narrow_range=True),
        dict(rounding="half_up"),
        dict(arithmetic="fixed_point"),
        dict(arithmetic="fixed_point", rounding="half_up", relu=True),
    ):
        q = int8_conv2d(x, w, padding=1, multiplier=multiplier, backend=backend, **settings)
        assert torch.equal(q, requantize(acc, multiplier, axis=1, **settings))
    q16 = int8_conv2d(
        x, w, padding=1, multiplier=multiplier, out_dtype=torch.int16, backend=backend
    )
    assert torch.equal(q16, requantize(acc, multiplier, axis=1, bits=16))
    values = int8_conv2d(
        x, w, padding=1, multiplier=multiplier, out_dtype=torch.float32, backend=backend
    )
    assert torch.equal(values, (acc.double() * multiplier.view(-1, 1, 1)).float())
    assert torch.equal(x, before)


def test_int16_inputs(backend):
    generator = np.random.default_rng(3)
    x = generator.integers(-(2**15), 2**15, (1, 6, 7, 5)).astype(np.int16)
    w = numbers(generator, 20, 6, 3, 3)
    if backend in ("amx", "vnni"):
        with pytest.raises(ValueError, match=r"int8, the inputs are torch\.int16"):
            int8_conv2d(*tensors(x, w), backend=backend)
        return
    acc = int8_conv2d(*tensors(x, w), padding=1, backend=backend)
    one = ((1, 1), (1, 1))
    assert (acc.numpy() == loop_conv(x, w, None, (1, 1), one, (1, 1), 1)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_last_sum_that_fits_and_the_first_that_does_not(backend, sign):
    x = torch.full((1, 40, 3, 3), 127, dtype=torch.int8)
    w = torch.full((20, 40, 1, 1), 127 * sign, dtype=torch.int8)
    limit = 2**31 - 1 if sign > 0 else -(2**31)
    bias = torch.full((20,), limit - sign * 40 * 127**2, dtype=torch.int32)
    assert int8_conv2d(x, w, bias, backend=backend).unique().tolist() == [limit]
    bias[7] += sign
    with pytest.raises(
        AccumulatorOverflowError, match=rf"up\.1: .* channel 7 reaches {limit + sign},"
    ):
        int8_conv2d(x, w, bias, backend=backend, name="up.1")
    flat = x[0].flatten(1).t().contiguous()
    with pytest.raises(AccumulatorOverflowError, match=r"fc: .* channel 7"):
        int8_linear(flat, w.flatten(1), bias, backend=backend, name="fc")
    turned = w.movedim(0, 1).contiguous()
    with pytest.raises(AccumulatorOverflowError, match=r"deconv: .* channel 7 reaches"):
        int8_conv_transpose2d(x, turned, bias, stride=2, backend=backend, name="deconv")


def test_overflow_names_layer_and_channel(backend):
    if backend in ("amx", "vnni"):
        pytest.skip("it takes int8 inputs only")
    x = torch.full((1, 600, 2, 2), 32767, dtype=torch.int16)
    w = torch.full((3, 600, 1, 1), 100, dtype=torch.int8)
    w[2] = 127
    with pytest.raises(AccumulatorOverflowError, match=r"neck\.0: .* channel 2 .* 33 bits"):
        int8_conv2d(x, w, backend=backend, name="neck.0")
    assert int(int8_conv2d(x, w[:2], backend=backend).max()) == 32767 * 100 * 600


@pytest.mark.bits
@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same(backend, threads):
    generator = np.random.default_rng(4)
    x, w = tensors(numbers(generator, 2, 32, 40, 40), numbers(generator, 80, 32, 3, 3))
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        results.append(int8_conv2d(x, w, padding=1, multiplier=1e-4, backend=backend))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("shape", "weight_shape"),
    [((0, 4, 5, 5), (6, 4, 3, 3)), ((1, 0, 5, 5), (6, 0, 3, 3)), ((1, 4, 5, 5), (0, 4, 3, 3))],
    ids=["no batch", "no inputs", "no outputs"],
)
def test_nothing_to_compute(backend, shape, weight_shape):
    x, w = torch.zeros(shape, dtype=torch.int8), torch.zeros(weight_shape, dtype=torch.int8)
    bias = torch.arange(len(w), dtype=torch.int32)
    q = int8_conv2d(x, w, bias, multiplier=2.0, backend=backend)
    expected = (2 * bias).view(1, -1, 1, 1).expand(shape[0], -1, 3, 3)
    assert torch.equal(q, expected.to(torch.int8))


def test_a_real_image(backend, data_folder):
    """A camera image's red, green and blue, most of whose neighbours are alike."""
    image_file = next(data_folder.glob("pandaset_002*/**/*.jpg"), None)
    if image_file is None:
        pytest.skip("no camera image in the real data")
    pil = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.asarray(pil.open(image_file))[300:372, 400:496]
    x = np.ascontiguousarray((pixels.astype(np.int16) - 128).astype(np.int8).transpose(2, 0, 1))
    w = numbers(np.random.default_rng(0), 24, 3, 7, 7)
    acc = int8_conv2d(*tensors(x[None], w), stride=4, padding=3, backend=backend)
    expected = loop_conv(x[None], w, None, (4, 4), ((3, 3), (3, 3)), (1, 1), 1)
    assert (acc.numpy() == expected).all()


def test_refusals_name_the_layer():
    x, w = torch.zeros(1, 4, 5, 5, dtype=torch.int8), torch.zeros(6, 4, 3, 3, dtype=torch.int8)

    def run(x=x, w=w, bias=None, **settings):
        return int8_conv2d(x, w, bias, name="stem", **settings)

    with pytest.raises(TypeError, match="stem: x must be a tensor of int8 or int16, got float32"):
        run(x.float())
    with pytest.raises(ValueError, match=r"stem: x of shape .* do not fit with groups=1"):
        run(x[:, :3])
    with pytest.raises(ValueError, match="groups=2"):
        run(groups=2)
    with pytest.raises(ValueError, match="stem: a kernel of 3 with dilation 3 does not fit"):
        run(dilation=3)
    with pytest.raises(ValueError, match="stem: padding=-1"):
        run(padding=-1)
    with pytest.raises(ValueError, match=r"stem: outputs of \(1, 20000000.*there may be 2\*\*31"):
        run(padding=10**9)
    for setting in ("stride", "dilation", "padding"):
        with pytest.raises(ValueError, match=f"stem: {setting}=.*below 2³¹"):
            run(**{setting: 10**30})
    for operands in ((None, w), (x, "w"), (5, w), (x, None)):
        for convolution in (int8_conv2d, int8_conv_transpose2d):
            with pytest.raises(TypeError, match="must be a tensor"):
                convolution(*operands)
    for stride in (10**9, (10**9, 1), (10**5, 10**5)):
        with pytest.raises(ValueError, match=r"deconv: outputs of .*there may be 2\*\*31"):
            int8_conv_transpose2d(x, w.movedim(0, 1).contiguous(), stride=stride, name="deconv")
    with pytest.raises(ValueError, match="stem: stride=0"):
        run(stride=0)
    with pytest.raises(TypeError, match="stem: unknown arguments relu6"):
        run(relu6=True)
    with pytest.raises(ValueError, match="stem: 5 multipliers for 6 output channels"):
        run(multiplier=torch.ones(5))
    with pytest.raises(ValueError, match=r"stem: expected bias \[6\]"):
        run(bias=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"int8_linear: expected x \[\.\.\., 4\]"):
        int8_linear(torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match="output_padding"):
        int8_conv_transpose2d(x, w.movedim(0, 1).contiguous(), stride=2, output_padding=2)


@pytest.mark.parametrize("call", [int8_conv1d, int8_conv2d, int8_conv3d, int8_conv_transpose2d])
def test_a_weight_that_is_no_tensor_is_named(call):
    bias = torch.ones(1, dtype=torch.int32)
    x = torch.ones((1,) * (2 + {int8_conv1d: 1, int8_conv3d: 3}.get(call, 2)), dtype=torch.int8)
    with pytest.raises(TypeError, match="weight must be a tensor of int8, got NoneType"):
        call(x, None, bias)


@pytest.mark.parametrize("behind", [0, 1, 5, 40])
@pytest.mark.parametrize("stride", [1, 2])
def test_outputs_at_the_end_of_memory_go_by_lists(behind, stride):
    axes = tuple(conv_axis(size, 3, stride, (1, 1), 1, "conv") for size in (5, 6))
    grid = make_grid(2, axes, (3, 3), behind)
    seen = make_grid(2, axes, (3, 3)).whole
    last = grid.in_rows + grid.deltas.max() + behind
    assert (grid.whole == (seen & (last < 2 * 5 * 6))).all()
    moved = grid.neighbours[seen[~grid.whole]]
    assert (moved == grid.in_rows[seen & ~grid.whole, None] + grid.deltas).all()
    assert len(moved) == (seen & ~grid.whole).sum()

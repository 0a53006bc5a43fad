"""int8_sparse_conv against loops, a dense convolution and itself on other backends."""

import numpy as np
import pytest
import torch

from bevquant_int8sim import AccumulatorOverflowError, int8_linear, int8_sparse_conv, requantize
from bevquant_sparse import WeightLayout, build_rulebook, permute_weight

SUBM = dict(kernel_size=3, stride=1, padding=1, dilation=1, subm=True)
STRIDED = dict(kernel_size=3, stride=2, padding=1, dilation=1, subm=False)
KINDS = {
    "subm": SUBM,
    "subm, dilated": SUBM | dict(dilation=2),
    "strided": STRIDED,
    "flat": dict(kernel_size=(1, 1, 3), stride=(1, 1, 2), padding=0, dilation=1, subm=False),
    "transposed": STRIDED | dict(transposed=True, padding=0),
    "1x1x1": SUBM | dict(kernel_size=1, padding=0),
}
SHAPE = (9, 8, 7)


def expand(value):
    return (value,) * 3 if isinstance(value, int) else value


def numbers(generator, shape, pattern):
    if pattern == "random":
        return generator.integers(-128, 128, shape).astype(np.int8)
    if pattern == "lowest":
        return np.full(shape, -128, np.int8)
    if pattern == "highest":
        return np.full(shape, 127, np.int8)
    flat = np.where(np.arange(np.prod(shape)) % 2, -128, 127)
    return flat.reshape(shape).astype(np.int8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_channels", "out_channels"), [(5, 16), (16, 33), (7, 64), (3, 1)])
def test_equals_loops(
    backend, kind, in_channels, out_channels, loop_sparse_conv, loop_requantize, random_voxels
):
    generator = np.random.default_rng(in_channels)
    settings = KINDS[kind]
    indices = random_voxels(generator, 2, SHAPE, 60)
    rulebook = build_rulebook(indices, SHAPE, batch_size=2, **settings)
    kernel = rulebook.kernel_size
    x = numbers(generator, (60, in_channels), "random")
    w = numbers(generator, (*kernel, in_channels, out_channels), "random")
    bias = generator.integers(-5000, 5000, out_channels).astype(np.int32)
    arguments = [torch.from_numpy(v) for v in (x, w, bias)]
    acc = int8_sparse_conv(*arguments, rulebook, layout=WeightLayout.RSCK, backend=backend)
    expected = loop_sparse_conv(
        x, w, bias, indices.tolist(), rulebook.out_indices.tolist(),
        rulebook.stride, rulebook.padding, rulebook.dilation, rulebook.transposed,
    )  # fmt: skip
    assert acc.dtype == torch.int32
    assert (acc.numpy() == expected).all()
    multiplier = generator.uniform(1e-4, 2e-3, out_channels)
    q = int8_sparse_conv(
        *arguments,
        rulebook,
        layout=WeightLayout.RSCK,
        backend=backend,
        multiplier=torch.from_numpy(multiplier),
    )
    assert q.dtype == torch.int8
    assert (q.numpy() == loop_requantize(expected, multiplier)).all()


@pytest.mark.parametrize("weights", ["lowest", "highest", "alternating"])
@pytest.mark.parametrize("inputs", ["lowest", "highest", "alternating"])
def test_saturating_operands(backend, inputs, weights, loop_sparse_conv, random_voxels):
    generator = np.random.default_rng(0)
    indices = random_voxels(generator, 1, (4, 4, 4), 50)
    rulebook = build_rulebook(indices, (4, 4, 4), batch_size=1, **SUBM)
    x, w = numbers(generator, (50, 64), inputs), numbers(generator, (3, 3, 3, 64, 64), weights)
    acc = int8_sparse_conv(
        torch.from_numpy(x),
        torch.from_numpy(w),
        None,
        rulebook,
        layout=WeightLayout.RSCK,
        backend=backend,
    )
    coords = indices.tolist()
    expected = loop_sparse_conv(x, w, None, coords, coords, (1,) * 3, (1,) * 3, (1,) * 3)
    assert (acc.numpy() == expected).all()


@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away"])
def test_ties(backend, rounding, loop_requantize):
    # One offset, one channel: the accumulators are the inputs, the products all the halves.
    x = torch.arange(-128, 128, dtype=torch.int8).view(-1, 1)
    indices = torch.stack([torch.zeros(256), torch.arange(256)], 1).int()
    rulebook = build_rulebook(indices, [256], 1, subm=True, batch_size=1)
    weight = torch.ones(1, 1, 20, dtype=torch.int8)
    for multiplier in (0.5, 0.25, 1.5, 2.0):
        q = int8_sparse_conv(
            x,
            weight,
            None,
            rulebook,
            layout=WeightLayout.RSCK,
            multiplier=multiplier,
            rounding=rounding,
            backend=backend,
        )
        expected = loop_requantize(np.arange(-128, 128).reshape(-1, 1), multiplier, rounding)
        assert (q.numpy() == expected).all()


def test_outputs_of_every_kind(backend, random_voxels):
    generator = np.random.default_rng(1)
    indices = random_voxels(generator, 1, SHAPE, 80)
    rulebook = build_rulebook(indices, SHAPE, batch_size=1, **SUBM)
    x = torch.from_numpy(numbers(generator, (80, 16), "random"))
    w = torch.from_numpy(numbers(generator, (3, 3, 3, 16, 32), "random"))
    multiplier = torch.from_numpy(generator.uniform(1e-4, 1e-3, 32))

    def run(**settings):
        return int8_sparse_conv(
            x, w, None, rulebook, layout=WeightLayout.RSCK, backend=backend, **settings
        )

    acc = run()
    plain = requantize(acc, multiplier)
    assert torch.equal(run(multiplier=multiplier), plain)
    assert torch.equal(run(multiplier=multiplier, relu=True), plain.clamp(min=0))
    assert torch.equal(run(relu=True), acc.clamp(min=0))
    narrow = run(multiplier=multiplier, narrow_range=True)
    assert torch.equal(narrow, plain.clamp(min=-127))
    assert int(plain.min()) == -128
    for bits, dtype in ((16, torch.int16), (32, torch.int32)):
        got = run(multiplier=multiplier, out_dtype=dtype)
        assert torch.equal(got, requantize(acc, multiplier, bits=bits))
    fixed = run(multiplier=multiplier, arithmetic="fixed_point", rounding="half_up")
    expected = requantize(acc, multiplier, arithmetic="fixed_point", rounding="half_up")
    assert torch.equal(fixed, expected)
    values = run(multiplier=multiplier, out_dtype=torch.float32)
    assert torch.equal(values, (acc.double() * multiplier).float())


def test_int16_features(backend, loop_sparse_conv, random_voxels):
    generator = np.random.default_rng(2)
    indices = random_voxels(generator, 1, (6, 6, 6), 70)
    rulebook = build_rulebook(indices, (6, 6, 6), batch_size=1, **SUBM)
    x = generator.integers(-(2**15), 2**15, (70, 8)).astype(np.int16)
    w = numbers(generator, (3, 3, 3, 8, 16), "random")
    arguments = torch.from_numpy(x), torch.from_numpy(w), None, rulebook
    if backend in ("amx", "vnni"):
        with pytest.raises(ValueError, match=rf"backend='{backend}' cannot be used: .* int8"):
            int8_sparse_conv(*arguments, layout=WeightLayout.RSCK, backend=backend)
        return
    acc = int8_sparse_conv(*arguments, layout=WeightLayout.RSCK, backend=backend)
    coords = indices.tolist()
    expected = loop_sparse_conv(x, w, None, coords, coords, (1,) * 3, (1,) * 3, (1,) * 3)
    assert (acc.numpy() == expected).all()


def test_overflow_is_named_and_its_neighbourhood_is_exact(backend):
    if backend in ("amx", "vnni"):
        pytest.skip("it takes int8 features only")
    channels = 520
    indices = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [2], 1, subm=True, batch_size=1)
    x = torch.full((2, channels), 32512, dtype=torch.int16)
    x[1] = 100
    w = torch.full((1, channels, 3), 127, dtype=torch.int8)
    w[:, :, 0] = 1
    settings = dict(layout=WeightLayout.RSCK, backend=backend, name="encoder.conv1")
    total = 32512 * 127 * channels
    # The bound cannot tell these apart; the sums themselves can.
    room = 2**31 - 1 - total
    bias = torch.full((3,), room, dtype=torch.int32)
    acc = int8_sparse_conv(x, w, bias, rulebook, **settings)
    assert acc[0].tolist() == [32512 * channels + room, 2**31 - 1, 2**31 - 1]
    with pytest.raises(
        AccumulatorOverflowError,
        match=r"encoder.conv1: .* channel 1 reaches 2147483648, .* 33 bits",
    ):
        int8_sparse_conv(x, w, bias + 1, rulebook, **settings)
    low = int8_sparse_conv(-x, w, -bias - 1, rulebook, **settings)
    assert low[0, 1:].tolist() == [-(2**31)] * 2
    with pytest.raises(AccumulatorOverflowError, match="reaches -2147483649, which takes 33 bits"):
        int8_sparse_conv(-x, w, -bias - 2, rulebook, **settings)


def test_the_bits_that_a_sum_needs_are_those_of_twos_complement():
    x = torch.full((1, 1100), 32767, dtype=torch.int16)
    for value, bits in ((2**32 - 1, 33), (2**32, 34), (-(2**32), 33), (-(2**32) - 1, 34)):
        sign = 1 if value > 0 else -1
        count, rest = divmod(abs(value), 32767 * 127)
        weight = torch.zeros(2, 1100, dtype=torch.int8)
        weight[1, :count] = sign * 127
        with pytest.raises(
            AccumulatorOverflowError, match=f"channel 1 reaches {value}, which takes {bits} b"
        ):
            int8_linear(x, weight, torch.tensor([0, sign * rest], dtype=torch.int32), name="fc")


@pytest.mark.parametrize("sign", [1, -1])
def test_int8_sums_at_the_limit(backend, sign):
    indices = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [2], 3, subm=True, batch_size=1)
    x = torch.full((2, 24), 127, dtype=torch.int8)
    w = torch.full((3, 24, 20), 127 * sign, dtype=torch.int8)
    limit = 2**31 - 1 if sign > 0 else -(2**31)
    bias = torch.full((20,), limit - sign * 2 * 24 * 127**2, dtype=torch.int32)
    settings = dict(layout=WeightLayout.RSCK, backend=backend, name="conv_input")
    assert int8_sparse_conv(x, w, bias, rulebook, **settings).unique().tolist() == [limit]
    bias[3] += sign
    with pytest.raises(AccumulatorOverflowError, match=r"conv_input: .* channel 3 reaches"):
        int8_sparse_conv(x, w, bias, rulebook, **settings)


def test_equals_a_dense_transposed_convolution(backend, random_voxels):
    generator = np.random.default_rng(8)
    indices = random_voxels(generator, 2, SHAPE, 90)
    w = torch.from_numpy(numbers(generator, (3, 3, 3, 6, 20), "random"))
    dense_weight = w.permute(3, 4, 0, 1, 2).double()
    up = build_rulebook(indices, SHAPE, batch_size=2, **KINDS["transposed"])
    down = build_rulebook(indices, SHAPE, batch_size=2, **STRIDED)
    for rulebook, padding in ((up, 0), (down.inverse(), 1)):
        x = torch.from_numpy(numbers(generator, (rulebook.num_in, 6), "random"))
        acc = int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.RSCK, backend=backend)
        grid = torch.zeros(2, *rulebook.in_shape, 6, dtype=torch.float64)
        grid[tuple(rulebook.in_indices.long().unbind(1))] = x.double()
        missing = [
            out - ((n - 1) * 2 - 2 * padding + 3)
            for out, n in zip(rulebook.out_shape, rulebook.in_shape, strict=True)
        ]
        dense = torch.nn.functional.conv_transpose3d(
            grid.movedim(-1, 1), dense_weight, None, 2, padding, missing
        )
        at = dense.movedim(1, -1)[tuple(rulebook.out_indices.long().unbind(1))]
        assert torch.equal(acc.double(), at)


def test_equals_a_dense_convolution(backend, random_voxels):
    generator = np.random.default_rng(3)
    indices = random_voxels(generator, 2, SHAPE, 150)
    x = torch.from_numpy(numbers(generator, (150, 6), "random"))
    w = torch.from_numpy(numbers(generator, (3, 3, 3, 6, 20), "random"))
    grid = torch.zeros(2, *SHAPE, 6, dtype=torch.float64)
    grid[tuple(indices.long().unbind(1))] = x.double()
    dense_weight = permute_weight(w, WeightLayout.RSCK, WeightLayout.KCRS).double()
    for settings in (SUBM, STRIDED):
        rulebook = build_rulebook(indices, SHAPE, batch_size=2, **settings)
        acc = int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.RSCK, backend=backend)
        dense = torch.nn.functional.conv3d(
            grid.movedim(-1, 1), dense_weight, None, settings["stride"], 1
        )
        at = dense.movedim(1, -1)[tuple(rulebook.out_indices.long().unbind(1))]
        assert torch.equal(acc.double(), at)


def test_inverse_and_layouts(backend, loop_sparse_conv, random_voxels):
    generator = np.random.default_rng(4)
    indices = random_voxels(generator, 1, SHAPE, 60)
    down = build_rulebook(indices, SHAPE, batch_size=1, **STRIDED)
    up = down.inverse()
    x = torch.from_numpy(numbers(generator, (up.num_in, 9), "random"))
    w = torch.from_numpy(numbers(generator, (3, 3, 3, 9, 18), "random"))
    # An inverse convolution is the transposed one on the voxels that were there before.
    expected = loop_sparse_conv(
        x.numpy(), w.numpy(), None, up.in_indices.tolist(), up.out_indices.tolist(),
        (2,) * 3, (1,) * 3, (1,) * 3, True,
    )  # fmt: skip
    for layout in WeightLayout:
        weight = permute_weight(w, WeightLayout.RSCK, layout)
        acc = int8_sparse_conv(x, weight, None, up, layout=layout, backend=backend)
        assert (acc.numpy() == expected).all()


def test_empty_tensors(backend):
    none = torch.empty(0, 4, dtype=torch.int32)
    rulebook = build_rulebook(none, (4, 4, 4), batch_size=1, **SUBM)
    x, w = torch.empty(0, 3, dtype=torch.int8), torch.ones(3, 3, 3, 3, 5, dtype=torch.int8)
    q = int8_sparse_conv(
        x, w, None, rulebook, layout=WeightLayout.RSCK, multiplier=0.5, backend=backend
    )
    assert (q.dtype, tuple(q.shape)) == (torch.int8, (0, 5))


@pytest.mark.bits
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_gives_the_same(backend, threads, random_voxels):
    generator = np.random.default_rng(5)
    shape = (40, 40, 12)
    indices = random_voxels(generator, 1, shape, 4000)
    x = torch.from_numpy(numbers(generator, (4000, 16), "random"))
    w = torch.from_numpy(numbers(generator, (3, 3, 3, 16, 80), "random"))
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        rulebook = build_rulebook(indices, shape, batch_size=1, **SUBM)
        results.append(
            int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.RSCK, backend=backend)
        )
    assert torch.equal(*results)


def test_inputs_are_left_alone_and_need_not_be_contiguous(backend, random_voxels):
    generator = np.random.default_rng(6)
    indices = random_voxels(generator, 1, SHAPE, 50)
    rulebook = build_rulebook(indices, SHAPE, batch_size=1, **SUBM)
    x = torch.from_numpy(numbers(generator, (16, 50), "random")).t()
    w = torch.from_numpy(numbers(generator, (24, 3, 3, 3, 16), "random"))
    before = x.clone(), w.clone()
    acc = int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.KRSC, backend=backend)
    again = int8_sparse_conv(
        x.contiguous(), w, None, rulebook, layout=WeightLayout.KRSC, backend=backend
    )
    assert torch.equal(acc, again)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def test_more_offsets_than_a_mask_has_bits(backend, loop_sparse_conv, random_voxels):
    generator = np.random.default_rng(7)
    indices = random_voxels(generator, 1, (8, 8, 8), 60)
    rulebook = build_rulebook(indices, (8, 8, 8), 5, subm=True, batch_size=1)
    x, w = numbers(generator, (60, 4), "random"), numbers(generator, (5, 5, 5, 4, 3), "random")
    acc = int8_sparse_conv(
        torch.from_numpy(x),
        torch.from_numpy(w),
        None,
        rulebook,
        layout=WeightLayout.RSCK,
        backend=backend,
    )
    coords = indices.tolist()
    expected = loop_sparse_conv(x, w, None, coords, coords, (1,) * 3, (2,) * 3, (1,) * 3)
    assert (acc.numpy() == expected).all()


def test_refusals_name_the_layer():
    indices = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [4], 3, subm=True, batch_size=1)
    x, w = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(3, 4, 5, dtype=torch.int8)

    def run(x=x, w=w, bias=None, layout=WeightLayout.RSCK, **settings):
        return int8_sparse_conv(x, w, bias, rulebook, layout=layout, name="conv9", **settings)

    with pytest.raises(
        TypeError, match="conv9: features must be a tensor of int8 or int16, got fl"
    ):
        run(x.float())
    with pytest.raises(TypeError, match="conv9: weight must be a tensor of int8, got int32"):
        run(w=w.int())
    with pytest.raises(TypeError, match="conv9: bias must be a tensor of int32"):
        run(bias=torch.zeros(5))
    with pytest.raises(TypeError, match="conv9: layout must be a WeightLayout"):
        run(layout="RSCK")
    with pytest.raises(ValueError, match=r"conv9: expected features \[2, channels\]"):
        run(x[:1])
    with pytest.raises(ValueError, match=r"conv9: a RSCK weight of shape \(3, 5, 5\)"):
        run(w=torch.zeros(3, 5, 5, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"conv9: expected bias \[5\]"):
        run(bias=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="conv9: 4 multipliers for 5 output channels"):
        run(multiplier=torch.ones(4))
    with pytest.raises(ValueError, match=r"conv9: out_dtype=torch\.uint8"):
        run(out_dtype=torch.uint8)
    with pytest.raises(ValueError, match="conv9: backend='cuda'"):
        run(backend="cuda")
    with pytest.raises(ValueError, match="conv9: multiplier is nan"):
        run(multiplier=float("nan"))

"""sparse_conv against dense convolutions, a loop over four axes, and spconv on one thread."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bevquant_sparse import WeightLayout, build_rulebook, permute_weight, sparse_conv

BACKENDS = ("torch", "numba")
CONV = (functional.conv1d, functional.conv2d, functional.conv3d)
CONV_TRANSPOSE = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


def backend_or_skip(backend):
    if backend == "numba":
        pytest.importorskip("numba", reason="the numba extra is not installed")
    return backend


def random_indices(shape, batch_size, density, generator):
    """Random voxels in random order, none of them twice."""
    mask = torch.rand(batch_size, *shape, generator=generator) < density
    indices = mask.nonzero().int()
    return indices[torch.randperm(len(indices), generator=generator)].contiguous()


def scatter(features, indices, shape, batch_size):
    dense = features.new_zeros(batch_size, *shape, features.shape[1])
    dense[indices.long().unbind(1)] = features
    return dense.movedim(-1, 1)


def gather(dense, indices):
    return dense.movedim(1, -1)[indices.long().unbind(1)]


def tolerance(dtype):
    return {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-5}


def dtype_of(backend):
    return torch.float64 if backend == "torch" else torch.float32


GEOMETRY = ("ndim", "kernel", "stride", "padding", "dilation", "subm", "transposed")
CASES = [
    pytest.param(1, 3, 1, 0, 1, True, False, id="subm1d"),
    pytest.param(2, 3, 1, 0, 1, True, False, id="subm2d"),
    pytest.param(2, (5, 3), 1, 0, (1, 2), True, False, id="subm2d-dilated"),
    pytest.param(3, 3, 1, 0, 1, True, False, id="subm3d"),
    pytest.param(3, 1, 1, 0, 1, True, False, id="subm3d-1x1x1"),
    pytest.param(1, 2, 2, 0, 1, False, False, id="strided1d"),
    pytest.param(2, 3, 2, 1, 1, False, False, id="strided2d"),
    pytest.param(3, 3, 2, 1, 1, False, False, id="strided3d"),
    pytest.param(3, (1, 1, 3), (1, 1, 2), 0, 1, False, False, id="conv_out"),
    pytest.param(3, 3, (2, 1, 2), (1, 1, 0), (1, 2, 1), False, False, id="strided3d-dilated"),
    pytest.param(3, 1, 2, 0, 1, False, False, id="strided3d-1x1x1"),
    pytest.param(1, 3, 2, 1, 1, False, True, id="transposed1d"),
    pytest.param(2, 2, 2, 0, 1, False, True, id="transposed2d"),
    pytest.param(3, 3, 2, 1, 1, False, True, id="transposed3d"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ndim", "kernel", "stride", "padding", "dilation", "subm", "transposed"), CASES
)
def test_equals_dense(backend, ndim, kernel, stride, padding, dilation, subm, transposed):
    backend_or_skip(backend)
    dtype = dtype_of(backend)
    generator = torch.Generator().manual_seed(ndim)
    shape, batch_size = (11, 9, 7)[:ndim], 2
    indices = random_indices(shape, batch_size, 0.3, generator)
    rulebook = build_rulebook(
        indices, shape, kernel, stride, padding, dilation,
        subm=subm, transposed=transposed, batch_size=batch_size,
    )  # fmt: skip
    features = torch.randn(len(indices), 5, dtype=dtype, generator=generator)
    weight = torch.randn(7, 5, *rulebook.kernel_size, dtype=dtype, generator=generator)
    bias = torch.randn(7, dtype=dtype, generator=generator)

    out = sparse_conv(features, weight, bias, rulebook, layout=WeightLayout.KCRS, backend=backend)

    dense = scatter(features, indices, shape, batch_size)
    if transposed:
        expected = CONV_TRANSPOSE[ndim - 1](
            dense, weight.transpose(0, 1), None, stride, padding, 0, 1, dilation
        )
    else:
        implied = [
            d * (k // 2) for d, k in zip(rulebook.dilation, rulebook.kernel_size, strict=True)
        ]
        expected = CONV[ndim - 1](
            dense, weight, None, stride, implied if subm else padding, dilation
        )
    assert out.dtype == dtype
    torch.testing.assert_close(
        out, gather(expected, rulebook.out_indices) + bias, **tolerance(dtype)
    )
    if not subm:  # and nothing is missing
        rest = expected.clone()
        rest.movedim(1, -1)[rulebook.out_indices.long().unbind(1)] = 0
        assert rest.abs().max() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_inverse_equals_dense_transposed(backend):
    backend_or_skip(backend)
    dtype = dtype_of(backend)
    generator = torch.Generator().manual_seed(5)
    shape = (9, 7, 11)  # odd: the transposed convolution restores the extent without extra padding
    indices = random_indices(shape, 1, 0.2, generator)
    down = build_rulebook(indices, shape, 3, 2, 1, subm=False, batch_size=1)
    up = down.inverse()
    features = torch.randn(down.num_out, 6, dtype=dtype, generator=generator)
    weight = torch.randn(3, 3, 3, 6, 4, dtype=dtype, generator=generator)
    out = sparse_conv(features, weight, None, up, layout=WeightLayout.RSCK, backend=backend)
    dense = scatter(features, down.out_indices, down.out_shape, 1)
    kernel = permute_weight(weight, WeightLayout.RSCK, WeightLayout.KCRS).transpose(0, 1)
    expected = functional.conv_transpose3d(dense, kernel, None, 2, 1)
    assert expected.shape[2:] == shape
    torch.testing.assert_close(out, gather(expected, indices), **tolerance(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_4_equals_a_loop(backend):
    backend_or_skip(backend)
    dtype = dtype_of(backend)
    generator = torch.Generator().manual_seed(4)
    shape = (5, 4, 6, 3)
    indices = random_indices(shape, 2, 0.3, generator)
    rulebook = build_rulebook(indices, shape, 3, (2, 1, 2, 1), 1, subm=False, batch_size=2)
    features = torch.randn(len(indices), 3, dtype=dtype, generator=generator)
    weight = torch.randn(3, 3, 3, 3, 3, 2, dtype=dtype, generator=generator)
    out = sparse_conv(features, weight, None, rulebook, layout=WeightLayout.RSCK, backend=backend)

    dense = functional.pad(scatter(features, indices, shape, 2), (1, 1) * 4)
    expected = torch.zeros(2, 2, *rulebook.out_shape, dtype=dtype)
    for offset in itertools.product(range(3), repeat=4):
        window = dense
        for axis, (start, stride, extent) in enumerate(
            zip(offset, rulebook.stride, rulebook.out_shape, strict=True)
        ):
            picked = torch.arange(extent) * stride + start
            window = window.index_select(axis + 2, picked)
        expected += torch.einsum("bi...,ic->bc...", window, weight[offset])
    torch.testing.assert_close(out, gather(expected, rulebook.out_indices), **tolerance(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", list(WeightLayout))
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_every_layout_gives_the_same(backend, layout, rank):
    backend_or_skip(backend)
    generator = torch.Generator().manual_seed(rank)
    shape = (6, 5, 4, 3)[:rank]
    kernel = (3, 1, 3, 1)[:rank]
    indices = random_indices(shape, 1, 0.5, generator)
    rulebook = build_rulebook(indices, shape, kernel, subm=True, batch_size=1)
    features = torch.randn(len(indices), 3, generator=generator)
    weight = torch.randn(*kernel, 3, 4, generator=generator)
    reference = sparse_conv(
        features, weight, None, rulebook, layout=WeightLayout.RSCK, backend=backend
    )
    permuted = permute_weight(weight, WeightLayout.RSCK, layout)
    out = sparse_conv(features, permuted, None, rulebook, layout=layout, backend=backend)
    assert torch.equal(out, reference)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    in_channels=st.sampled_from([1, 2, 5, 16, 33, 64]),
    out_channels=st.sampled_from([1, 3, 15, 16, 17, 32, 48, 64, 80, 130]),
    voxels=st.integers(0, 90),
    subm=st.booleans(),
    with_bias=st.booleans(),
)
def test_any_channels_and_any_number_of_rows(
    backend, in_channels, out_channels, voxels, subm, with_bias
):
    backend_or_skip(backend)
    generator = torch.Generator().manual_seed(voxels)
    cells = torch.randperm(6 * 7 * 5, generator=generator)[:voxels]
    where = torch.stack(torch.unravel_index(cells, (1, 6, 7, 5)), 1).int()
    stride = 1 if subm else 2
    rulebook = build_rulebook(where, (6, 7, 5), 3, stride, 1, subm=subm, batch_size=1)
    features = torch.randn(voxels, in_channels, generator=generator)
    weight = torch.randn(27, in_channels, out_channels, generator=generator)
    bias = torch.randn(out_channels, generator=generator) if with_bias else None
    out = sparse_conv(features, weight, bias, rulebook, layout=WeightLayout.VCK, backend=backend)
    expected = torch.zeros(rulebook.num_out, out_channels, dtype=torch.float64)
    for offset in range(27):
        rows = rulebook.neighbours[:, offset].long()
        seen = features.double()[rows.clamp(min=0)] * (rows >= 0)[:, None] if voxels else 0
        expected += seen @ weight[offset].double() if voxels else 0
    expected += 0 if bias is None else bias.double()
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_neighbours_are_the_bias(backend):
    backend_or_skip(backend)
    # A kernel of extent 2 on a grid of stride 3 leaves cells that no window covers; as inverse
    # outputs they see nothing.
    indices = torch.tensor([[0, 0], [0, 2], [0, 4], [0, 5]], dtype=torch.int32)
    down = build_rulebook(indices, [6], 2, 3, subm=False, batch_size=1)
    alone = (down.inverse().neighbours < 0).all(1)
    assert alone.tolist() == [False, True, False, True]
    bias = torch.tensor([1.5, -2.0])
    out = sparse_conv(
        torch.ones(down.num_out, 3), torch.ones(2, 3, 2), bias, down.inverse(),
        layout=WeightLayout.VCK, backend=backend,
    )  # fmt: skip
    assert torch.equal(out[alone], bias.expand(2, 2))
    assert torch.equal(out[~alone], bias.expand(2, 2) + 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_voxels(backend):
    backend_or_skip(backend)
    rulebook = build_rulebook(
        torch.zeros(0, 4, dtype=torch.int32), (8, 8, 8), 3, 2, 1, subm=False, batch_size=1
    )
    features = torch.zeros(0, 4, requires_grad=True)
    weight = torch.randn(3, 3, 3, 4, 6, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    out = sparse_conv(features, weight, bias, rulebook, layout=WeightLayout.RSCK, backend=backend)
    assert out.shape == (0, 6)
    out.sum().backward()
    assert features.grad.shape == (0, 4)
    assert not weight.grad.any()
    assert not bias.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_reaches_its_neighbours_alone(value, backend):
    backend_or_skip(backend)
    indices = torch.cartesian_prod(torch.arange(1), *[torch.arange(4)] * 3).int()
    rulebook = build_rulebook(indices, (4, 4, 4), 3, subm=True, batch_size=1)
    weight = torch.ones(27, 2, 16)
    weight[0] = value  # of the neighbour before on all axes
    out = sparse_conv(
        torch.ones(64, 2), weight, None, rulebook, layout=WeightLayout.VCK, backend=backend
    )
    assert torch.equal(~out.isfinite().any(1), (indices[:, 1:] > 0).all(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_propagate(backend):
    backend_or_skip(backend)
    indices = torch.tensor([[0, 0], [0, 1], [0, 3], [0, 6], [0, 7]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [8], 3, subm=True, batch_size=1)
    features = torch.ones(5, 2)
    features[1, 0] = torch.nan
    features[3, 1] = torch.inf
    weight = torch.zeros(3, 2, 17)  # 0·NaN is NaN, 0·inf is NaN
    out = sparse_conv(features, weight, None, rulebook, layout=WeightLayout.VCK, backend=backend)
    assert out.isnan().all(1).tolist() == [True, True, False, True, True]
    assert not out[2].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(backend, dtype):
    backend_or_skip(backend)
    generator = torch.Generator().manual_seed(0)
    indices = random_indices((6, 6, 6), 1, 0.5, generator)
    rulebook = build_rulebook(indices, (6, 6, 6), 3, subm=True, batch_size=1)
    features = torch.randn(len(indices), 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(27, 8, 8, generator=generator).to(dtype).requires_grad_()
    out = sparse_conv(features, weight, None, rulebook, layout=WeightLayout.VCK, backend=backend)
    exact = sparse_conv(
        features.float(), weight.float(), None, rulebook, layout=WeightLayout.VCK, backend=backend
    )
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))
    out.sum().backward()
    assert features.grad.dtype == weight.grad.dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_lower_the_sum(backend):
    backend_or_skip(backend)
    generator = torch.Generator().manual_seed(0)
    indices = random_indices((9, 9), 1, 0.5, generator)
    rulebook = build_rulebook(indices, (9, 9), 3, subm=True, batch_size=1)
    features = torch.randn(len(indices), 32, generator=generator)
    weight = torch.randn(9, 32, 32, generator=generator)
    plain = sparse_conv(features, weight, None, rulebook, layout=WeightLayout.VCK, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        cast = sparse_conv(
            features, weight, None, rulebook, layout=WeightLayout.VCK, backend=backend
        )
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_operands_and_no_mutation(backend):
    backend_or_skip(backend)
    generator = torch.Generator().manual_seed(0)
    indices = random_indices((9, 9), 1, 0.5, generator)
    rulebook = build_rulebook(indices, (9, 9), 3, subm=True, batch_size=1)
    wide = torch.randn(8, len(indices), generator=generator)
    features = wide.t()[:, ::2]
    weight = torch.randn(9, 6, 4, generator=generator).transpose(1, 2)
    bias = torch.randn(12, generator=generator)[::2]
    before = wide.clone()
    out = sparse_conv(features, weight, bias, rulebook, layout=WeightLayout.VCK, backend=backend)
    expected = sparse_conv(
        features.contiguous(), weight.contiguous(), bias.contiguous(), rulebook,
        layout=WeightLayout.VCK, backend=backend,
    )  # fmt: skip
    assert torch.equal(out, expected)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["subm", "strided", "inverse"])
def test_equals_spconv_on_one_thread(spconv_numbers, backend, kind):
    backend_or_skip(backend)
    spconv = spconv_numbers
    generator = torch.Generator().manual_seed(1)
    shape = (12, 13, 9)
    indices = random_indices(shape, 2, 0.2, generator)
    features = torch.randn(len(indices), 16, generator=generator)
    x = spconv.SparseConvTensor(features, indices, shape, 2)
    with torch.no_grad():
        if kind == "subm":
            conv = spconv.SubMConv3d(16, 24, 3, padding=1, bias=False).eval()
        else:
            conv = spconv.SparseConv3d(16, 24, 3, 2, 1, bias=False, indice_key="d").eval()
        y = conv(x)
        if kind == "inverse":
            inverse = spconv.SparseInverseConv3d(24, 8, 3, indice_key="d", bias=False).eval()
            z = inverse(y)

    rulebook = build_rulebook(
        indices, shape, 3, 1 if kind == "subm" else 2, 1, subm=kind == "subm", batch_size=2
    )
    layout = WeightLayout.KRSC
    out = sparse_conv(features, conv.weight, None, rulebook, layout=layout, backend=backend)
    got = scatter(out, rulebook.out_indices, rulebook.out_shape, 2)
    expected = scatter(y.features, y.indices, rulebook.out_shape, 2)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    if kind == "inverse":
        out = sparse_conv(
            out, inverse.weight, None, rulebook.inverse(), layout=layout, backend=backend
        )
        got = scatter(out, indices, shape, 2)
        expected = scatter(z.features, z.indices, shape, 2)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", [(5, 16), (16, 32)])
def test_real_frame_is_within_1e_4_of_float64(real_voxels, channels):
    pytest.importorskip("numba", reason="the numba extra is not installed")
    subm = channels == (5, 16)
    rulebook = build_rulebook(
        real_voxels, (1440, 1440, 41), 3, 1 if subm else 2, 1, subm=subm, batch_size=1
    )
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(rulebook.num_in, channels[0], generator=generator)
    weight = torch.randn(27, *channels, generator=generator)
    out = sparse_conv(features, weight, None, rulebook, layout=WeightLayout.VCK, backend="numba")
    exact = sparse_conv(features.double(), weight.double(), None, rulebook, layout=WeightLayout.VCK)
    assert (out.double() - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("channels", [5, 64])
def test_backends_lie_within_the_bound_of_their_sums(backend, channels):
    """|y - exact| is at most n 2^-24 times the sum of |x w|, so two backends differ by twice it."""
    torch.manual_seed(0)
    coords = (torch.rand(1, 12, 12, 8) < 0.3).nonzero().int()
    rulebook = build_rulebook(coords, (12, 12, 8), 3, 1, 1, 1, subm=True)
    x, w = torch.randn(len(coords), channels), torch.randn(3, 3, 3, channels, 16)

    def convolved(x, w, backend="torch"):
        return sparse_conv(x, w, None, rulebook, layout=WeightLayout.RSCK, backend=backend)

    error = (convolved(x, w, backend).double() - convolved(x.double(), w.double())).abs()
    bound = 27 * channels * 2.0**-24 * convolved(x.double().abs(), w.double().abs())
    assert bool((error <= bound).all())

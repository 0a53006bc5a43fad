"""Pools against dense pooling, spconv on one thread, and gradcheck."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bevquant_sparse import build_rulebook, sparse_avg_pool, sparse_max_pool

SHAPE = (9, 8, 7)


def scene(seed=0, density=0.3):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, *SHAPE, generator=generator) < density
    indices = mask.nonzero().int()
    return indices[torch.randperm(len(indices), generator=generator)].contiguous(), generator


def scatter(features, indices, fill):
    dense = torch.full((2, *SHAPE, features.shape[1]), fill, dtype=features.dtype)
    dense[indices.long().unbind(1)] = features
    return dense.movedim(-1, 1)


def gather(dense, indices):
    return dense.movedim(1, -1)[indices.long().unbind(1)]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    window=st.sampled_from([(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), (2, 3, 0, 2), (1, 2, 0, 1)]),
)
def test_max_pool_equals_dense_over_minus_infinity(seed, window):
    indices, generator = scene(seed)
    rulebook = build_rulebook(indices, SHAPE, *window, subm=False, batch_size=2)
    features = torch.randn(len(indices), 3, dtype=torch.float64, generator=generator) - 2
    expected = functional.max_pool3d(scatter(features, indices, -torch.inf), *window)
    assert torch.equal(sparse_max_pool(features, rulebook), gather(expected, rulebook.out_indices))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    window=st.sampled_from([(2, 2, 0), (3, 2, 1), (3, 1, 1), (1, 2, 0)]),
)
def test_avg_pool_divides_by_the_present(seed, window):
    indices, generator = scene(seed)
    rulebook = build_rulebook(indices, SHAPE, *window, subm=False, batch_size=2)
    features = torch.randn(len(indices), 3, dtype=torch.float64, generator=generator)
    total = functional.avg_pool3d(scatter(features, indices, 0.0), *window)
    share = functional.avg_pool3d(
        scatter(torch.ones(len(indices), 1, dtype=torch.float64), indices, 0.0), *window
    )
    expected = gather(total, rulebook.out_indices) / gather(share, rulebook.out_indices)
    torch.testing.assert_close(sparse_avg_pool(features, rulebook), expected, rtol=0, atol=1e-12)


def test_max_pool_equals_spconv_on_one_thread(spconv_numbers):
    indices, generator = scene()
    features = torch.rand(len(indices), 8, generator=generator)
    pool = spconv_numbers.SparseMaxPool3d(3, 2, 1)
    theirs = pool(spconv_numbers.SparseConvTensor(features, indices, SHAPE, 2))
    rulebook = build_rulebook(indices, SHAPE, 3, 2, 1, subm=False, batch_size=2)
    ours = sparse_max_pool(features, rulebook)
    dense = torch.zeros(2, 8, *rulebook.out_shape)
    dense.movedim(1, -1)[theirs.indices.long().unbind(1)] = theirs.features
    assert len(ours) == len(theirs.features)
    assert torch.equal(ours, gather(dense, rulebook.out_indices))


@pytest.mark.parametrize("pool", [sparse_max_pool, sparse_avg_pool])
def test_gradcheck(pool):
    indices, generator = scene(density=0.1)
    rulebook = build_rulebook(indices, SHAPE, 3, 2, 1, subm=False, batch_size=2)
    features = torch.randn(len(indices), 2, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda f: pool(f, rulebook), features.requires_grad_())


def test_max_pool_gives_a_tie_to_the_first_offset():
    indices = torch.tensor([[0, 3], [0, 2], [0, 1]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [6], 3, 3, subm=False, batch_size=1)
    # Offsets ascend with the coordinate: voxel 1 (row 2) comes before voxel 2 (row 1).
    features = torch.tensor([[0.0], [5.0], [5.0]], requires_grad=True)
    sparse_max_pool(features, rulebook).backward(torch.tensor([[7.0], [1.0]]))
    assert features.grad.flatten().tolist() == [1.0, 0.0, 7.0]


def test_nan_propagates():
    indices = torch.tensor([[0, 0], [0, 1], [0, 3], [0, 4]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [6], 2, 2, subm=False, batch_size=1)
    for row in range(4):
        features = torch.arange(4.0)[:, None].clone()
        features[row] = torch.nan
        hit = [row in (0, 1), row == 2, row == 3]
        leaf = features.clone().requires_grad_()
        out = sparse_max_pool(leaf, rulebook)
        assert out.flatten().isnan().tolist() == hit
        out.sum().backward()
        assert leaf.grad[row] == 1
        assert sparse_avg_pool(features, rulebook).flatten().isnan().tolist() == hit


@pytest.mark.parametrize("pool", [sparse_max_pool, sparse_avg_pool])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_and_no_voxels(pool, dtype):
    indices, generator = scene()
    rulebook = build_rulebook(indices, SHAPE, 2, 2, subm=False, batch_size=2)
    features = torch.randn(len(indices), 3, generator=generator).to(dtype)
    assert pool(features, rulebook).dtype == dtype
    none = build_rulebook(indices[:0], SHAPE, 2, 2, subm=False, batch_size=2)
    leaf = torch.zeros(0, 3, requires_grad=True)
    out = pool(leaf, none)
    assert out.shape == (0, 3)
    out.sum().backward()
    assert leaf.grad.shape == (0, 3)


@pytest.mark.bits
@pytest.mark.parametrize("pool", [sparse_max_pool, sparse_avg_pool])
def test_same_bits_at_any_thread_count(pool):
    indices, generator = scene(density=0.5)
    rulebook = build_rulebook(indices, SHAPE, 3, 2, 1, subm=False, batch_size=2)
    features = torch.randn(len(indices), 64, generator=generator)
    results = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        leaf = features.clone().requires_grad_()
        out = pool(leaf, rulebook)
        out.backward(out.detach() * 0.3)
        results.append((out.detach(), leaf.grad))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])

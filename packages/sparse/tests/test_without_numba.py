"""Where numba is not installed "auto" computes the same with torch."""

from __future__ import annotations

import sys

import pytest
import torch

from bevquant_sparse import WeightLayout, build_rulebook, sparse_conv


@pytest.fixture
def without_numba(monkeypatch):
    """As where numba is not installed: importing it, or a module that needs it, fails."""
    for name in ("numba", "bevquant_sparse._conv_numba", "bevquant_sparse._rulebook_numba"):
        monkeypatch.setitem(sys.modules, name, None)


def voxels(share, generator):
    mask = torch.rand(2, 9, 8, 7, generator=generator) < share
    return mask.nonzero().int().contiguous()


@pytest.mark.parametrize("kind", ["subm", "strided", "transposed"])
def test_rulebooks(without_numba, brute_force, pair_set, kind):
    rows = voxels(0.2, torch.Generator().manual_seed(1))
    stride = [1, 1, 1] if kind == "subm" else [2, 2, 2]
    subm, transposed = kind == "subm", kind == "transposed"
    book = build_rulebook(
        rows, (9, 8, 7), 3, stride, 1, 1, subm=subm, transposed=transposed, batch_size=2
    )
    wanted = brute_force(
        rows, book.out_shape, [3] * 3, stride, [1] * 3, [1] * 3, subm=subm, transposed=transposed
    )
    assert pair_set(book) == wanted
    with pytest.raises(ImportError, match="pip install numba"):
        build_rulebook(rows, (9, 8, 7), 3, subm=True, backend="numba")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_convolutions_and_their_gradients(without_numba, dtype):
    """Against sums over the pairs in float64."""
    generator = torch.Generator().manual_seed(2)
    rows = voxels(0.2, generator)
    book = build_rulebook(rows, (9, 8, 7), 3, 2, 1, 1, subm=False, batch_size=2)
    features = torch.randn(len(rows), 5, generator=generator).to(dtype)
    weight = torch.randn(27, 5, 6, generator=generator).to(dtype)
    leaves = [features.requires_grad_(), weight.requires_grad_()]
    out = sparse_conv(features, weight, None, book, layout=WeightLayout.VCK)
    seed = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(seed)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    in_rows, out_rows, bounds = book.pairs
    parts = [
        torch.zeros(book.num_out, 6, dtype=torch.float64).index_add(
            0,
            out_rows[bounds[k] : bounds[k + 1]].long(),
            exact[0][in_rows[bounds[k] : bounds[k + 1]].long()] @ exact[1][k],
        )
        for k in range(27)
    ]
    wanted = torch.stack(parts).sum(0)
    wanted.backward(seed.double())
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(out.double(), wanted, **close)
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, **close)

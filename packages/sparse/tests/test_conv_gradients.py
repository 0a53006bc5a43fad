"""Gradients of sparse_conv: gradcheck in float64, float32 backends against it, second order."""

from __future__ import annotations

import pytest
import torch

from bevquant_sparse import WeightLayout, build_rulebook, permute_weight, sparse_conv


def make_rulebook(kind, rank):
    generator = torch.Generator().manual_seed(rank)
    shape = (4, 3, 3, 3)[:rank]
    mask = torch.rand(2, *shape, generator=generator) < (0.4 if rank < 3 else 0.2)
    indices = mask.nonzero().int().contiguous()
    kernel = (3, 2, 3, 1)[:rank]
    if kind == "subm":
        return build_rulebook(indices, shape, (3, 3, 1, 1)[:rank], subm=True, batch_size=2)
    rulebook = build_rulebook(
        indices, shape, kernel, 2, (1, 0, 1, 0)[:rank],
        subm=False, transposed=kind == "transposed", batch_size=2,
    )  # fmt: skip
    return rulebook.inverse() if kind == "inverse" else rulebook


def operands(rulebook, in_channels, out_channels, layout, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(rulebook.num_in, in_channels, generator=generator, dtype=dtype)
    weight = torch.randn(
        *rulebook.kernel_size, in_channels, out_channels, generator=generator, dtype=dtype
    )
    bias = torch.randn(out_channels, generator=generator, dtype=dtype)
    weight = permute_weight(weight, WeightLayout.RSCK, layout).clone()
    return features.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", list(WeightLayout))
def test_gradcheck_every_layout_and_rank(layout, rank):
    rulebook = make_rulebook("subm" if rank % 2 else "strided", rank)
    values = operands(rulebook, 2, 3, layout)
    assert torch.autograd.gradcheck(
        lambda f, w, b: sparse_conv(f, w, b, rulebook, layout=layout), values, fast_mode=rank > 1
    )


@pytest.mark.parametrize("channels", [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("kind", ["subm", "strided", "transposed", "inverse"])
def test_gradcheck_every_kind(kind, channels):
    rulebook = make_rulebook(kind, 2)
    values = operands(rulebook, *channels, WeightLayout.KRSC)
    assert torch.autograd.gradcheck(
        lambda f, w, b: sparse_conv(f, w, b, rulebook, layout=WeightLayout.KRSC),
        values,
        fast_mode=channels != (1, 1),
    )


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("channels", [(5, 16), (16, 5), (33, 64), (64, 1), (128, 128)])
@pytest.mark.parametrize("kind", ["subm", "strided", "inverse"])
def test_float32_gradients_follow_float64(backend, kind, channels):
    if backend == "numba":
        pytest.importorskip("numba", reason="the numba extra is not installed")
    rulebook = make_rulebook(kind, 3)
    exact = operands(rulebook, *channels, WeightLayout.RSCK)
    single = [value.detach().float().requires_grad_() for value in exact]
    out = sparse_conv(*exact, rulebook, layout=WeightLayout.RSCK)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out.backward(grad)
    sparse_conv(*single, rulebook, layout=WeightLayout.RSCK, backend=backend).backward(grad.float())
    for got, want in zip(single, exact, strict=True):
        scale = want.grad.abs().max()
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=0, atol=1e-5 * float(scale))


@pytest.mark.parametrize("kind", ["subm", "strided"])
def test_numba_over_many_blocks_follows_float64(kind):
    pytest.importorskip("numba", reason="the numba extra is not installed")
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(30 * 30 * 10, generator=generator)[:4000]
    indices = torch.stack(torch.unravel_index(cells, (1, 30, 30, 10)), 1).int()
    stride = 1 if kind == "subm" else 2
    rulebook = build_rulebook(indices, (30, 30, 10), 3, stride, 1, subm=kind == "subm")
    exact = list(operands(rulebook, 16, 80, WeightLayout.RSCK))
    single = [value.detach().float().requires_grad_() for value in exact]
    for values, backend in ((exact, "torch"), (single, "numba")):
        out = sparse_conv(*values, rulebook, layout=WeightLayout.RSCK, backend=backend)
        out.backward(out.detach().sign())
        values.append(out)
    for got, want in zip(single[:3], exact[:3], strict=True):
        error = (got.grad.double() - want.grad).abs().max() / want.grad.abs().max()
        assert error < 2e-5
    assert (single[3].double() - exact[3]).abs().max() < 2e-5 * exact[3].abs().max()


def test_only_wanted_gradients_are_computed():
    rulebook = make_rulebook("strided", 2)
    features, weight, bias = operands(rulebook, 2, 3, WeightLayout.RSCK)
    features, bias = features.detach(), bias.detach()
    sparse_conv(features, weight, bias, rulebook, layout=WeightLayout.RSCK).sum().backward()
    assert features.grad is None
    assert bias.grad is None
    assert weight.grad.any()


def test_no_second_derivative():
    rulebook = make_rulebook("subm", 1)
    features, weight, bias = operands(rulebook, 2, 3, WeightLayout.RSCK)
    out = sparse_conv(features, weight, bias, rulebook, layout=WeightLayout.RSCK)
    (grad,) = torch.autograd.grad(out.square().sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match=r"conv_grad_features.* no autograd formula"):
        grad.sum().backward()


def test_nan_gradient_reaches_its_neighbours_alone():
    indices = torch.tensor([[0, 0], [0, 1], [0, 5]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [8], 3, subm=True, batch_size=1)
    features = torch.ones(3, 2, requires_grad=True)
    out = sparse_conv(features, torch.zeros(3, 2, 2), None, rulebook, layout=WeightLayout.VCK)
    out.backward(torch.tensor([[torch.nan, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    assert features.grad.isnan().all(1).tolist() == [True, True, False]

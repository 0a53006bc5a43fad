"""sparse_conv and the pools on a CUDA device: equal to the CPU, the same bits every time."""

from __future__ import annotations

import pytest
import torch

from bevquant_sparse import (
    WeightLayout,
    build_rulebook,
    sparse_avg_pool,
    sparse_conv,
    sparse_max_pool,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def scene():
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(30 * 30 * 12, generator=generator)[:3000]
    return torch.stack(torch.unravel_index(cells, (1, 30, 30, 12)), 1).int(), generator


def rulebooks(subm):
    indices, generator = scene()
    options = dict(subm=subm, batch_size=1)
    stride = 1 if subm else 2
    books = [
        build_rulebook(indices.to(device), (30, 30, 12), 3, stride, 1, **options)
        for device in ("cpu", "cuda")
    ]
    return *books, generator


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("subm", [True, False])
def test_convolution_and_gradients(subm, dtype):
    cpu, cuda, generator = rulebooks(subm)
    values = [torch.randn(s, generator=generator) for s in [(3000, 16), (27, 16, 24), (24,)]]
    results = []
    for rulebook, device in ((cpu, "cpu"), (cuda, "cuda"), (cuda, "cuda")):
        leaves = [v.to(device, dtype).detach().requires_grad_() for v in values]
        out = sparse_conv(*leaves, rulebook, layout=WeightLayout.VCK)
        out.float().square().sum().backward()
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2}[dtype]
    for here, there, again in zip(*results, strict=True):
        largest = float(here.double().abs().max())
        torch.testing.assert_close(there, here, rtol=0, atol=tolerance * largest)
        assert torch.equal(there, again)


@pytest.mark.parametrize("pool", [sparse_max_pool, sparse_avg_pool])
def test_pools_and_gradients(pool):
    cpu, cuda, generator = rulebooks(False)
    features = torch.randn(3000, 8, generator=generator, dtype=torch.float64)
    results = []
    for rulebook, device in ((cpu, "cpu"), (cuda, "cuda"), (cuda, "cuda")):
        leaf = features.to(device, copy=True).requires_grad_()
        out = pool(leaf, rulebook)
        out.square().sum().backward()
        results.append([out.detach().cpu(), leaf.grad.cpu()])
    for here, there, again in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=1e-12)
        assert torch.equal(there, again)

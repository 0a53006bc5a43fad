"""BEV pooling against index_add, with its gradients, on any number of threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bevfusion.model.camera import (
    PoolPlan,
    _bev_pool,
    _pool_numba,
    _pool_torch,
    bev_pool,
    lift_splat_pool,
    make_pool_plan,
)

NUM_CELLS = 40


def scene(
    channels: int = 19, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Depth [2, 7, 5, 11], context [2, channels, 5, 11], cells: many empty, one crowded."""
    generator = torch.Generator().manual_seed(seed)
    depth = torch.randn(2, 7, 5, 11, generator=generator, dtype=dtype).softmax(1)
    context = torch.randn(2, channels, 5, 11, generator=generator, dtype=dtype) * 100
    cells = torch.randint(-8, 20, (depth.numel(),), generator=generator).clamp_min(-1)
    cells[::3] = 33
    return depth, context, cells


def reference(values: Tensor, cells: Tensor) -> Tensor:
    """A plain float64 index_add, rounded to the type of the values."""
    inside = cells >= 0
    out = torch.zeros(NUM_CELLS, values.shape[1], dtype=torch.float64)
    out.index_add_(0, cells[inside], values.double()[inside])
    return out


def outer(depth: Tensor, context: Tensor) -> Tensor:
    product = depth.double().unsqueeze(2) * context.double().unsqueeze(1)
    return product.permute(0, 1, 3, 4, 2).reshape(-1, context.shape[1])


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_pool_is_a_float64_index_add_bit_for_bit(dtype: torch.dtype) -> None:
    depth, context, cells = scene()
    features = outer(depth, context).to(dtype)
    got = bev_pool(features, cells, NUM_CELLS)
    assert got.dtype == dtype
    assert torch.equal(got, reference(features, cells).to(dtype))


@pytest.mark.parametrize("channels", [1, 16, 19, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_fused_pool_is_the_pool_of_the_outer_product(channels: int, dtype: torch.dtype) -> None:
    depth, context, cells = scene(channels, dtype)
    got = lift_splat_pool(depth, context, cells, NUM_CELLS)
    assert got.dtype == dtype
    assert torch.equal(got, reference(outer(depth, context), cells).to(dtype))


@pytest.mark.parametrize("backend", [_pool_numba, _pool_torch])
def test_gradients_of_the_fused_pool_are_those_of_the_outer_product(backend: Any) -> None:
    depth, context, cells = scene(35, torch.float64)
    depth.requires_grad_()
    context.requires_grad_()
    weights = torch.randn(NUM_CELLS, 35, dtype=torch.float64)
    wanted = torch.autograd.grad((reference(outer(depth, context), cells) * weights).sum(),
                                 (depth, context))  # fmt: skip
    rows = context.detach().permute(0, 2, 3, 1).reshape(-1, 35)
    plan = make_pool_plan(cells, NUM_CELLS)
    to_depth, to_rows = backend.lift_backward(weights, depth.detach(), rows, plan)
    torch.testing.assert_close(to_depth, wanted[0], rtol=1e-12, atol=1e-12)
    to_context = to_rows.view(2, 5, 11, 35).permute(0, 3, 1, 2)
    torch.testing.assert_close(to_context, wanted[1], rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    depth = torch.rand(1, 3, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    context = torch.rand(1, 4, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    cells = torch.randint(-1, 5, (18,), generator=generator)
    assert torch.autograd.gradcheck(lambda d, c: lift_splat_pool(d, c, cells, 5), (depth, context))
    features = torch.rand(18, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: bev_pool(f, cells, 5), (features,))


@pytest.mark.bits
def test_both_backends_agree_bit_for_bit() -> None:
    depth, context, cells = scene(23)
    plan = make_pool_plan(cells, NUM_CELLS)
    rows = context.permute(0, 2, 3, 1).reshape(-1, 23)
    features = outer(depth, context).float()
    assert torch.equal(_pool_numba.pool(features, plan), _pool_torch.pool(features, plan))
    assert torch.equal(_pool_numba.lift(depth, rows, plan), _pool_torch.lift(depth, rows, plan))


def test_both_sorts_agree() -> None:
    _, _, cells = scene()
    narrow = cells.to(torch.int32)
    for ours, theirs in zip(
        _pool_numba.sort_points(narrow, NUM_CELLS),
        _bev_pool.sort_points_torch(narrow, NUM_CELLS),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.bits
def test_the_thread_count_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bev_pool, "_BLOCK", 50)
    depth, context, cells = scene(80)
    depth.requires_grad_()
    context.requires_grad_()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        plan = make_pool_plan(cells, NUM_CELLS)
        assert len(plan.blocks) > 3
        out = lift_splat_pool(depth, context, plan, NUM_CELLS)
        results.append((out, *torch.autograd.grad(out.square().sum(), (depth, context))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_torch_backend_takes_points_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bev_pool, "_BLOCK", 50)
    monkeypatch.setattr(_pool_torch, "_RUN", 60)
    depth, context, cells = scene(5)
    features = outer(depth, context)
    plan = make_pool_plan(cells, NUM_CELLS)
    assert torch.equal(_pool_torch.pool(features, plan), reference(features, cells))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_gradients_reach_half_precision_inputs(half: torch.dtype) -> None:
    depth, context, cells = scene(4, half)
    depth.requires_grad_()
    context.requires_grad_()
    lift_splat_pool(depth, context, cells, NUM_CELLS).float().sum().backward()
    assert depth.grad is not None
    assert depth.grad.dtype == half
    inside = (cells >= 0).view(2, 7, 1, 5, 11)
    wanted = (inside * context.detach().double().unsqueeze(1)).sum(2)
    torch.testing.assert_close(depth.grad.double(), wanted, rtol=1e-2, atol=1.0)


@pytest.mark.bits
def test_without_numba_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, context, cells = scene(6)
    fast = lift_splat_pool(depth, context, cells, NUM_CELLS)
    monkeypatch.setitem(sys.modules, _pool_numba.__name__, None)  # importing it fails
    monkeypatch.delattr(sys.modules[_pool_numba.__package__ or ""], "_pool_numba")
    _bev_pool.numba_kernels.cache_clear()
    try:
        assert _bev_pool.numba_kernels() is None
        assert torch.equal(lift_splat_pool(depth, context, cells.clone(), NUM_CELLS), fast)
    finally:
        _bev_pool.numba_kernels.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_same_bits() -> None:
    depth, context, cells = scene(80)
    features = outer(depth, context).float()
    for _ in range(3):
        at_gpu = cells.cuda()
        pooled = bev_pool(features.cuda(), at_gpu, NUM_CELLS)
        assert torch.equal(pooled.cpu(), bev_pool(features, cells, NUM_CELLS))
        results = []
        for d, c, where in ((depth, context, cells), (depth.cuda(), context.cuda(), at_gpu)):
            d, c = d.detach().requires_grad_(), c.detach().requires_grad_()
            out = lift_splat_pool(d, c, where, NUM_CELLS)
            results.append([out, *torch.autograd.grad(out.square().sum(), (d, c))])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-6, atol=1e-6)
        assert torch.equal(results[1][0].cpu(), results[0][0])


def test_a_map_without_points_is_zero() -> None:
    depth, context, cells = scene(3)
    nowhere = torch.full_like(cells, -1)
    assert not lift_splat_pool(depth, context, nowhere, NUM_CELLS).any()
    assert bev_pool(torch.ones(0, 3), nowhere[:0], 4).shape == (4, 3)


def test_plans_are_remembered_until_the_cells_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = _bev_pool.make_pool_plan
    monkeypatch.setattr(_bev_pool, "make_pool_plan", lambda *args: made.append(1) or make(*args))
    cells = torch.tensor([0, 1, 1])
    features = torch.ones(3, 1)
    bev_pool(features, cells, 2)
    bev_pool(features, cells, 2)
    assert len(made) == 1
    cells[0] = 1
    assert bev_pool(features, cells, 2).tolist() == [[0.0], [3.0]]
    assert bev_pool(features, cells, 3).shape == (3, 1)
    assert len(made) == 3
    before = len(_bev_pool._plans)
    del cells
    assert len(_bev_pool._plans) == before - 1


def test_cells_made_in_inference_mode() -> None:
    with torch.inference_mode():
        cells = torch.tensor([0, 1, 1])
        assert bev_pool(torch.ones(3, 1), cells, 2).tolist() == [[1.0], [2.0]]
        cells[0] = 1
        assert bev_pool(torch.ones(3, 1), cells, 2).tolist() == [[0.0], [3.0]]


def test_points_keep_their_order_within_a_cell() -> None:
    _, _, cells = scene()
    plan = make_pool_plan(cells, NUM_CELLS)
    wanted = np.argsort(np.where(cells >= 0, cells, NUM_CELLS), kind="stable")
    assert plan.order.tolist() == wanted[: int((cells >= 0).sum())].tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_pool_plan(torch.tensor([0.0]), 3), "expected int64"),
        (lambda: make_pool_plan(torch.tensor([[0]]), 3), "expected int64"),
        (lambda: make_pool_plan(torch.tensor([0, 7]), 7), "cell 7 of a map of 7 cells"),
        (lambda: bev_pool(torch.ones(2, 3), torch.tensor([0]), 3), "one row per entry"),
        (lambda: bev_pool(torch.ones(1, 3).int(), torch.tensor([0]), 3), "floating point"),
        (
            lambda: lift_splat_pool(
                torch.ones(1, 2, 3, 4), torch.ones(1, 5, 4, 3), torch.zeros(24).long(), 1
            ),
            "context",
        ),
        (
            lambda: lift_splat_pool(
                torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1).double(), torch.tensor([0]), 1
            ),
            "one type",
        ),
    ],
)
def test_wrong_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_plan_for_another_map_is_refused() -> None:
    plan = make_pool_plan(torch.tensor([0]), 3)
    assert isinstance(plan, PoolPlan)
    with pytest.raises(ValueError, match="plan is for 3 cells, the map has 4"):
        bev_pool(torch.ones(1, 1), plan, 4)

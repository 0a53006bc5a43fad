"""How kernels are compiled."""

from __future__ import annotations

import pytest
import torch

from bevquant_quantizers import _jit, fake_quantize


def test_kernels_without_a_place_for_their_cache_compile_all_the_same():
    pytest.importorskip("numba", reason="numba is not installed")
    scope = {}
    exec("def double(x):\n    return 2 * x", scope)  # no file, so nowhere to keep the cache
    assert _jit.jit(scope["double"])(21) == 42


def test_without_numba_torch_serves(monkeypatch):
    x = torch.randn(20_000)
    wanted = fake_quantize(x, 1.0)
    monkeypatch.setattr(_jit, "has_numba", lambda: False)
    assert torch.equal(fake_quantize(x, 1.0), wanted)
    with pytest.raises(ImportError, match="pip install"):
        fake_quantize(x, 1.0, backend="numba")


def test_where_numba_may_not_compile_torch_serves(monkeypatch):
    _jit.has_numba.cache_clear()
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    try:
        with pytest.raises(ImportError, match="without NUMBA_DISABLE_JIT"):
            fake_quantize(torch.randn(20_000), 1.0, backend="numba")
    finally:
        _jit.has_numba.cache_clear()


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("learns", [False, True])
def test_unsigned_values_below_a_step_are_not_negative(axis, learns):
    pytest.importorskip("numba", reason="numba is not installed")
    x = torch.tensor([[0.0, 1e-9, 0.3], [0.7, 0.999, 1.0]])
    amax = torch.full((x.shape[axis],), 0.9) if axis is not None else torch.tensor(0.9)
    found = [
        fake_quantize(x.clone().requires_grad_(learns), amax, 8, True, axis=axis, backend=backend)
        for backend in ("numba", "torch")
    ]
    assert torch.equal(*found)

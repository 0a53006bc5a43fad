"""How kernels are compiled and spread over threads."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
import torch

from bevquant_quantizers import _jit, fake_quantize
from bevquant_quantizers._threads import run_parts


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)


@pytest.mark.usefixtures("three_threads")
def test_parts_cover_the_whole_once():
    bounds = run_parts(lambda i, j: (i, j), 1_000_000)
    assert len(bounds) == 3
    assert [b[0] for b in bounds[1:]] == [b[1] for b in bounds[:-1]]
    assert (bounds[0][0], bounds[-1][1]) == (0, 1_000_000)
    assert run_parts(lambda i, j: (i, j), 1000) == [(0, 1000)]
    assert len(run_parts(lambda i, j: (i, j), 2, elements=1_000_000)) == 2


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_any_part_comes_back_after_all_have_ended():
    ended = []

    def fails(i, j):
        time.sleep(0.01 if i else 0)
        ended.append(i)
        if i == 0:
            raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        run_parts(fails, 1_000_000)
    assert len(ended) == 3

    def fails_late(i, j):
        if i:
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        run_parts(fails_late, 1_000_000)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    run_parts(lambda i, j: j - i, 1_000_000)
    child = os.fork()
    if child == 0:
        os._exit(sum(run_parts(lambda i, j: j - i, 1_000_000)) != 1_000_000)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked process waits for threads that its parent has")


def test_parts_cover_the_whole_in_order():
    size = (1 << 16) * 16 + 5
    for each in (1, 3, 8):
        parts = run_parts(lambda start, stop: (start, stop), size, each=each)
        assert parts[0][0] == 0
        assert parts[-1][1] == size
        assert all(a[1] == b[0] for a, b in pairwise(parts))


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

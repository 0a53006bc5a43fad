"""Weights packed once, memory handed on: neither may show in a result."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from bevquant_int8sim import (
    int8_conv2d,
    int8_linear,
    int8_sparse_conv,
    int8_to_dense,
    quantize,
    requantize,
)
from bevquant_sparse import WeightLayout, build_rulebook


def numbers(generator, *shape):
    return torch.from_numpy(generator.integers(-128, 128, shape).astype(np.int8))


def test_a_weight_written_to_is_packed_again(backend, random_voxels):
    generator = np.random.default_rng(0)
    x, w = numbers(generator, 1, 8, 6, 6), numbers(generator, 20, 8, 3, 3)
    first = int8_conv2d(x, w, backend=backend)
    assert torch.equal(int8_conv2d(x, w, backend=backend), first)
    w.neg_()
    w.clamp_(min=-127)
    assert torch.equal(
        int8_conv2d(x, w, backend=backend), int8_conv2d(x, w.clone(), backend=backend)
    )
    rulebook = build_rulebook(
        random_voxels(generator, 1, (6, 6, 6), 40), (6, 6, 6), 3, subm=True, batch_size=1
    )
    features, weight = numbers(generator, 40, 8), numbers(generator, 27, 8, 16)
    settings = dict(layout=WeightLayout.VCK, backend=backend)
    before = int8_sparse_conv(features, weight, None, rulebook, **settings)
    weight[0] = 1
    after = int8_sparse_conv(features, weight, None, rulebook, **settings)
    again = int8_sparse_conv(features, weight.clone(), None, rulebook, **settings)
    assert torch.equal(after, again)
    assert not torch.equal(after, before)


def test_one_memory_in_two_shapes(backend):
    generator = np.random.default_rng(1)
    x, w = numbers(generator, 3, 12), numbers(generator, 12, 12)
    forward = int8_linear(x, w, backend=backend)
    backward = int8_linear(x, w.t(), backend=backend)
    assert torch.equal(forward.long(), x.long() @ w.long().t())
    assert torch.equal(backward.long(), x.long() @ w.long())


def test_a_weight_is_let_go():
    weight = torch.ones(4, 4, dtype=torch.int8)
    int8_linear(torch.ones(1, 4, dtype=torch.int8), weight)
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None


class Called(TorchFunctionMode):
    """Names of the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_what_follows_from_a_weight_is_computed_once(backend):
    generator = np.random.default_rng(4)
    x, weight = numbers(generator, 3, 12), numbers(generator, 5, 12)
    said = []
    for rows in (3, 2):  # a call with inputs of another shape
        with Called() as called:
            int8_linear(x[:rows], weight, backend=backend)
        said.append("abs" in called.names)  # of the weight, for the bound of its sums
    assert said == [True, False]


def test_results_do_not_share_memory(backend, random_voxels):
    generator = np.random.default_rng(2)
    indices = random_voxels(generator, 1, (20, 20, 20), 3000)
    rulebook = build_rulebook(indices, (20, 20, 20), 3, subm=True, batch_size=1)
    x, w = numbers(generator, 3000, 16), numbers(generator, 27, 16, 16)
    settings = dict(layout=WeightLayout.VCK, multiplier=1e-3, backend=backend)
    first = int8_sparse_conv(x, w, None, rulebook, **settings)
    kept = first.clone()
    image, kernel = numbers(generator, 1, 16, 60, 60), numbers(generator, 16, 16, 3, 3)
    dense = int8_conv2d(image, kernel, multiplier=1e-3, backend=backend)
    kept_dense = dense.clone()
    for _ in range(3):
        int8_sparse_conv(x.neg(), w, None, rulebook, **settings)
        int8_conv2d(image.neg(), kernel, multiplier=1e-3, backend=backend)
    assert torch.equal(first, kept)
    assert torch.equal(dense, kept_dense)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("out_channels", [16, 40])
def test_residual(backend, relu, out_channels, random_voxels):
    generator = np.random.default_rng(3)
    indices = random_voxels(generator, 1, (9, 9, 9), 200)
    rulebook = build_rulebook(indices, (9, 9, 9), 3, subm=True, batch_size=1)
    x, w = numbers(generator, 200, 16), numbers(generator, 27, 16, out_channels)
    other = numbers(generator, 200, out_channels)
    multiplier = torch.from_numpy(generator.uniform(1e-4, 1e-3, out_channels))
    settings = dict(layout=WeightLayout.VCK, multiplier=multiplier, backend=backend)
    q = int8_sparse_conv(x, w, None, rulebook, **settings).int()
    for scale in (1.0, 0.5, 0.37):
        for rounding in ("half_even", "half_up"):
            got = int8_sparse_conv(
                x, w, None, rulebook, residual=other, sum_multiplier=scale, relu=relu,
                rounding=rounding, **settings,
            )  # fmt: skip
            first = q
            if rounding == "half_up":
                first = int8_sparse_conv(x, w, None, rulebook, rounding=rounding, **settings).int()
            expected = requantize(first + other, scale, relu=relu, rounding=rounding)
            assert torch.equal(got, expected)


def test_residual_refusals():
    indices = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32)
    rulebook = build_rulebook(indices, [4], 3, subm=True, batch_size=1)
    x, w = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(3, 4, 5, dtype=torch.int8)

    def run(residual, **settings):
        return int8_sparse_conv(
            x,
            w,
            None,
            rulebook,
            layout=WeightLayout.VCK,
            residual=residual,
            name="conv2",
            **settings,
        )

    with pytest.raises(TypeError, match="conv2: residual must be a tensor of int8"):
        run(torch.zeros(2, 5), multiplier=1.0)
    with pytest.raises(ValueError, match=r"conv2: expected a residual \[2, 5\]"):
        run(torch.zeros(2, 4, dtype=torch.int8), multiplier=1.0)
    with pytest.raises(ValueError, match="conv2: a residual is added to int8"):
        run(torch.zeros(2, 5, dtype=torch.int8))
    with pytest.raises(ValueError, match="conv2: sum_multiplier"):
        run(torch.zeros(2, 5, dtype=torch.int8), multiplier=1.0, sum_multiplier=0.0)


def test_memory_comes_back_quietly_when_the_interpreter_ends():
    pytest.importorskip("numba", reason="the numba extra is not installed")
    script = (
        "import sys, torch\n"
        "from bevquant_sparse.runtime import workspace\n"
        "sys.kept = torch.from_numpy(workspace.empty((1 << 20,), 'int8'))\n"
        "workspace.also_kept = workspace.empty((1 << 20,), 'int8')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_memory_that_is_not_there_leaves_no_half_made_buffer(capfd):
    """Nothing is printed of an exception in a buffer's end."""
    pytest.importorskip("numba", reason="the numba extra is not installed")
    wide, place = torch.ones(1, 1 << 20, dtype=torch.int8), torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(MemoryError):
        int8_to_dense(wide, place, (1 << 10,) * 3, 1)  # 2⁵⁰ bytes
    assert "Exception ignored" not in capfd.readouterr().err


def test_a_scale_of_400_digits_is_refused_by_name():
    with pytest.raises(ValueError, match="scale exceeds the range of float64"):
        quantize(torch.ones(3), 10**400)

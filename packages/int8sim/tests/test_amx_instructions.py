"""The AMX kernels on a CPU that has the instructions: the same integers as without them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the numba extra is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from extremes import int8

from bevquant_int8sim import backend_report, int8_conv2d, int8_sparse_conv
from bevquant_sparse import WeightLayout, build_rulebook

pytestmark = pytest.mark.skipif(
    not backend_report("amx")[0].available, reason="AMX's instructions cannot be used here"
)


def frame(count, inputs, outputs, seed):
    """A layer's operands and its sums by torch."""
    generator = np.random.default_rng(seed)
    cells = torch.from_numpy(generator.permutation(24 * 24 * 8)[:count])
    indices = torch.stack(torch.unravel_index(cells, (1, 24, 24, 8)), 1).int()
    rulebook = build_rulebook(indices, (24, 24, 8), 3, subm=True, batch_size=1, tiles=True)
    x, w = int8(generator, count, inputs), int8(generator, 27, inputs, outputs)
    return x, w, rulebook


def sums(x, w, rulebook, backend, **settings):
    return int8_sparse_conv(
        x, w, None, rulebook, layout=WeightLayout.VCK, backend=backend, **settings
    )


@pytest.mark.parametrize("outputs", [32, 64, 96, 128])
@pytest.mark.parametrize("inputs", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("count", [1, 31, 4000])
def test_voxels(count, inputs, outputs):
    operands = frame(count, inputs, outputs, count + inputs + outputs)
    assert torch.equal(sums(*operands, "amx"), sums(*operands, "torch"))
    requantized = {"multiplier": 1e-4, "relu": True}
    assert torch.equal(
        sums(*operands, "amx", **requantized), sums(*operands, "torch", **requantized)
    )


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("inputs", [32, 64, 128, 192, 512])
@pytest.mark.parametrize("outputs", [32, 96, 256])
def test_pixels(inputs, outputs, kernel):
    generator = np.random.default_rng(inputs + outputs)
    x = int8(generator, 2, inputs, 19, 23)
    w = int8(generator, outputs, inputs, kernel, kernel)
    settings = {"padding": kernel // 2, "multiplier": 1e-4}
    made = [int8_conv2d(x, w, backend=backend, **settings) for backend in ("amx", "torch")]
    assert torch.equal(*made)


def test_beside_other_users_of_the_tiles():
    """oneDNN configures the same registers for its own products, in the same threads."""
    operands = [frame(2000, inputs, 64, inputs) for inputs in (32, 64, 128)]
    expected = [sums(*o, "torch") for o in operands]
    a = torch.randint(-1, 2, (256, 256)).bfloat16()  # whose sums bfloat16 holds
    product = (a.float() @ a.float()).bfloat16()

    def work(number):
        same = torch.equal(a @ a, product)
        return same and torch.equal(sums(*operands[number % 3], "amx"), expected[number % 3])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(60)))


ASKED_AT_ONCE = """
import atexit, gc; gc.disable(); atexit.register(gc.freeze)  # a quarter of the CPU time
from concurrent.futures import ThreadPoolExecutor

from bevquant_int8sim import backend_report

with ThreadPoolExecutor(4) as pool:
    print(set(pool.map(lambda _: backend_report("amx")[0], range(4))))
"""


def test_threads_that_ask_at_once_get_an_answer(tmp_path):
    """The trial's child, forked while others compiled, waited for their lock until it was ended."""
    run = subprocess.run(
        [sys.executable, "-c", ASKED_AT_ONCE],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == str({backend_report("amx")[0]}), run.stderr

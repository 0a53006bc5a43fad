"""The tiles for CPUs without AVX-512, compiled and run beside this CPU's own."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys

import pytest
import torch

from bevquant_sparse import WeightLayout, build_rulebook, sparse_conv

SCRIPT = """
import atexit, gc, sys
gc.disable(); atexit.register(gc.freeze)  # a quarter of what imports take
sys.path.insert(0, sys.argv[1])
import test_conv_instruction_sets as here
from bevquant_sparse import _conv_kernels
print(_conv_kernels.WIDEST, *here.digests())
"""


def digests():
    """Hashes of the bits of outputs and gradients, over channels of every tile and remainder."""
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(10 * 10 * 10, generator=generator)[:300]
    indices = torch.stack(torch.unravel_index(cells, (1, 10, 10, 10)), 1).int()
    rulebook = build_rulebook(indices, (10, 10, 10), 3, subm=True, batch_size=1, backend="torch")
    found = []
    for in_channels, out_channels in [(5, 16), (16, 32), (7, 48), (33, 130)]:
        shapes = (300, in_channels), (27, in_channels, out_channels), (out_channels,)
        leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
        out = sparse_conv(*leaves, rulebook, layout=WeightLayout.VCK, backend="numba")
        out.backward(torch.randn(out.shape, generator=generator))
        for value in (out, *(leaf.grad for leaf in leaves[:2])):
            found.append(hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()[:16])
    return found


@pytest.mark.bits
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 is x86's")
def test_avx2_gives_the_same_bits():
    pytest.importorskip("numba", reason="the numba extra is not installed")
    from llvmlite import binding

    if not binding.get_host_cpu_features()["fma"]:
        pytest.skip("this CPU has no fused multiply-add")
    environment = os.environ | {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.2,+popcnt,+bmi,+bmi2",
    }
    folder = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    width, *theirs = run.stdout.split()
    assert width == "1"
    assert theirs == digests()

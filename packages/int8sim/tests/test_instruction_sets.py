"""The kernels for CPUs without AVX-512 and without VNNI, compiled and run beside this CPU's own."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from bevquant_int8sim import backend_report, int8_conv2d, int8_sparse_conv
from bevquant_sparse import WeightLayout, build_rulebook

# Forks one process for each CPU, which would otherwise import torch and its compiler anew.
SCRIPT = """
import gc, json, os, sys
gc.disable()  # two fifths of what these processes take, with what is cleared as each of them ends
import torch._dynamo.convert_frame

sys.path.insert(0, sys.argv[1])
for cpu, settings in json.loads(sys.argv[2]).items():
    child = os.fork()
    if child == 0:
        os.environ.update(settings)
        # Kernels of other packages are compiled if they are called: most are not.
        from numba import njit
        from bevquant_sparse.runtime import jit
        jit.compiled = lambda signature, **options: njit(nogil=True, cache=True)
        import test_instruction_sets as here
        print(json.dumps({cpu: here.results()}), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
_AVX2 = "+avx,+avx2,+fma,+sse4.2,+popcnt,+bmi,+bmi2"
_AVX512 = _AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx512vnni"
CPUS = {  # name, features, what the kernels of VNNI and those for any CPU are then compiled to
    "AVX2": ("x86-64", _AVX2, None, "AVX2"),
    "AVX-VNNI": ("x86-64", _AVX2 + ",+avxvnni", "AVX-VNNI", "AVX2"),
    "generic vectors": ("x86-64", "+sse4.2,+popcnt", None, "generic vectors"),
    # Inputs get 128 added one by one there, and line by line here.
    "AMD": ("znver4", _AVX512, "AVX512-VNNI", "AVX-512 BW"),
    "Intel": ("icelake-server", _AVX512, "AVX512-VNNI", "AVX-512 BW"),
}


@functools.cache
def results():
    """Instructions and hashes of the outputs of both compiled backends."""
    generator = np.random.default_rng(0)
    cells = torch.from_numpy(generator.permutation(10**3)[:300])
    indices = torch.stack(torch.unravel_index(cells, (1, 10, 10, 10)), 1).int()
    rulebook = build_rulebook(indices, (10, 10, 10), 3, subm=True, batch_size=1, backend="torch")
    found = {}
    for status in backend_report():
        if status.name == "torch":
            continue
        found[status.name] = [status.available, status.detail]
        digest = hashlib.sha256()
        for in_channels, out_channels in [(5, 16), (16, 32), (33, 130), (64, 64), (72, 48)]:
            x, w = (
                torch.from_numpy(generator.integers(-128, 128, shape).astype(np.int8))
                for shape in ((300, in_channels), (27, in_channels, out_channels))
            )
            for multiplier in (None, 1e-4):
                if status.available:
                    q = int8_sparse_conv(
                        x, w, None, rulebook, layout=WeightLayout.VCK, multiplier=multiplier,
                        backend=status.name,
                    )  # fmt: skip
                    digest.update(q.numpy().tobytes())
        for groups, stride in [(1, 1), (1, 2), (4, 1), (32, 1)]:
            x, w = (
                torch.from_numpy(generator.integers(-128, 128, shape).astype(np.int8))
                for shape in ((2, 32, 9, 8), (64, 32 // groups, 3, 3))
            )
            for multiplier in (None, 1e-4):
                if status.available:
                    q = int8_conv2d(
                        x, w, padding=1, stride=stride, groups=groups, multiplier=multiplier,
                        backend=status.name,
                    )  # fmt: skip
                    digest.update(q.numpy().tobytes())
        found[status.name].append(digest.hexdigest())
    return found


@pytest.fixture(scope="module")
def of_others():
    """By CPU, the results of all that this one can run, and what went wrong."""
    pytest.importorskip("numba", reason="the numba extra is not installed")
    from llvmlite import binding

    host = binding.get_host_cpu_features()
    settings = {
        cpu: {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
        for cpu, (name, features, _, _) in CPUS.items()
        if all(host.get(feature) for feature in features.replace("+", "").split(","))
    }
    words = [sys.executable, "-c", SCRIPT, os.path.dirname(__file__), json.dumps(settings)]
    run = subprocess.run(words, capture_output=True, text=True)
    found = {cpu: None for cpu in settings}
    for line in run.stdout.splitlines():
        found |= json.loads(line)
    return found, run.stderr


@pytest.mark.bits
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86's instructions")
@pytest.mark.parametrize("cpu", CPUS)
def test_other_cpus_compute_the_same(of_others, cpu):
    found, error = of_others
    if cpu not in found:
        pytest.skip(f"this CPU cannot run {cpu}")
    theirs, ours = found[cpu], results()
    assert theirs is not None, error
    _, _, vnni, portable = CPUS[cpu]
    assert theirs["vnni"][0] == (vnni is not None)
    assert theirs["portable"] == [True, portable, ours["portable"][2]]
    if vnni is not None:
        assert theirs["vnni"][1] == vnni
        if ours["vnni"][0]:
            assert theirs["vnni"][2] == ours["vnni"][2]


PRODUCTS = """
import atexit, gc; gc.disable(); atexit.register(gc.freeze)  # a quarter of the CPU time
import torch
from bevquant_int8sim import int8_linear

for rows, depth, outputs in ((40, 64, 16), (100, 1000, 40)):
    x = torch.full((rows, depth), 127, dtype=torch.int8)
    w = torch.full((outputs, depth), 127, dtype=torch.int8)
    x[:, ::3], w[1::2] = -128, -128
    assert torch.equal(int8_linear(x, w, backend="torch").long(), x.long() @ w.long().t())
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86's instructions")
def test_torch_products_without_vnni():
    """``torch._int_mm`` saturates there; the self-test must send products another way."""
    run = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr

"""When AMX is used: what LLVM makes of its kernels, and machines on which they cannot run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("numba", reason="the numba extra is not installed")

from bevquant_int8sim import BackendStatus, _backends, backend_report, choose_backend
from bevquant_int8sim._compiled import dot_product, self_test

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="instructions of x86"
)

ASSEMBLY = """
from bevquant_int8sim._compiled.dot_product import instruction_set
from bevquant_int8sim._compiled.kernels import kernel

assert instruction_set("amx") == "AMX", instruction_set("amx")
for job in ("sparse", "grid"):
    print(kernel("amx", job, 32, 2)._library.get_asm_str())
    print("END OF A KERNEL")
"""
FEATURES = (
    "+sse4.2,+popcnt,+avx,+avx2,+fma,+bmi,+bmi2,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni,"
    "+amx-tile,+amx-int8"
)


def test_the_code_for_such_a_cpu_has_the_instructions(tmp_path):
    """Compiled, looked at, not run; between the first and the last tile nothing is called."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": FEATURES,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, "-c", ASSEMBLY], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    kernels = run.stdout.split("END OF A KERNEL")[:-1]
    assert len(kernels) == 2
    for text in kernels:
        lines = [line.split()[0] for line in text.splitlines() if line.startswith("\t")]
        assert lines.count("ldtilecfg") == lines.count("tilerelease") == 1
        assert lines.count("tdpbssd") >= 4
        first, last = (
            order.index(True)
            for order in (
                [line == "tileloadd" for line in lines],
                [line == "tilestored" for line in reversed(lines)],
            )
        )
        between = lines[first : len(lines) - last]
        assert between.count("tdpbssd") == lines.count("tdpbssd")
        assert not {"callq", "call", "vzeroupper"} & set(between)


@pytest.fixture
def says_so(monkeypatch, forget_backends):
    """A CPU with VNNI that says it has AMX, on a system that gives leave to use it."""
    real = dot_product.instruction_set
    if not hasattr(os, "fork") or real("amx") is not None:
        pytest.skip("needs fork, and a CPU without AMX")
    monkeypatch.setattr(
        dot_product, "instruction_set", lambda kind: "AMX" if kind == "amx" else real(kind)
    )
    monkeypatch.setitem(_backends._known, "vnni", BackendStatus("vnni", True, "VNNI"))
    monkeypatch.setattr(self_test, "_has_leave", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("has_leave", "reason"),
    [(False, "does not give this process leave"), (True, "self-test ended with signal")],
)
def test_a_cpu_that_only_says_so_costs_nothing_but_a_warning(says_so, caplog, has_leave, reason):
    """Here the instructions are none, and end the child that tries them."""
    says_so.setattr(self_test, "_has_leave", lambda: has_leave)
    status = backend_report()[0]
    assert (status.name, status.available) == ("amx", False)
    assert reason in status.detail
    assert reason in caplog.text
    with pytest.raises(ValueError, match="backend='amx' cannot be used: AMX: "):
        choose_backend("amx", torch.device("cpu"), torch.int8, "conv")
    assert choose_backend("auto", torch.device("cpu"), torch.int8, "conv") != "amx"


def test_a_child_that_does_not_answer_is_ended(says_so):
    real = self_test.kernels_are_exact
    says_so.setattr(self_test, "_PATIENCE", 0.05)
    says_so.setattr(
        self_test, "kernels_are_exact", lambda kind: time.sleep(60) if kind == "amx" else real(kind)
    )
    (status,) = backend_report("amx")
    assert status.detail == "AMX: the self-test ended with no answer"

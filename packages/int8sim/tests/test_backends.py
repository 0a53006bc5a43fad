"""Which backend runs: the first that is there and passes its self-test, or the one asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bevquant_int8sim import (
    backend_report,
    choose_backend,
    int8_conv2d,
    int8_linear,
    simulate,
    usable_backend,
)
from bevquant_int8sim.__main__ import main
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch, forget_backends):
    """Forget what was tried, before and after."""
    return monkeypatch


def failing(monkeypatch, *kinds):
    self_test = pytest.importorskip(
        "bevquant_int8sim._compiled.self_test", reason="numba is not installed"
    )
    real = self_test.kernels_are_exact
    monkeypatch.setattr(
        self_test, "kernels_are_exact", lambda kind: kind not in kinds and real(kind)
    )


def test_the_report_says_what_runs():
    report = {status.name: status for status in backend_report()}
    assert list(report) == ["amx", "vnni", "portable", "torch"]
    assert report["torch"].available
    assert all(status.detail for status in report.values())
    first = next(status.name for status in report.values() if status.available)
    assert choose_backend("auto", CPU, torch.int8, "conv") == first


def test_a_report_of_some_tries_these_alone(fresh):
    self_test = pytest.importorskip(
        "bevquant_int8sim._compiled.self_test", reason="numba is not installed"
    )
    fresh.setattr(self_test, "kernels_are_exact", lambda kind: pytest.fail(f"{kind} was tried"))
    assert [status.name for status in backend_report("torch")] == ["torch"]
    with pytest.raises(ValueError, match="'auto': expected some of amx, vnni, portable, torch"):
        backend_report("auto")


def test_threads_that_ask_at_once_wait_for_one_trial(fresh):
    self_test = pytest.importorskip(
        "bevquant_int8sim._compiled.self_test", reason="numba is not installed"
    )
    tried = []

    def trial(kind):
        tried.append(kind)
        time.sleep(0.05)
        return True

    fresh.setattr(self_test, "kernels_are_exact", trial)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: backend_report("portable"), range(4)))
    assert len(found) == 1
    assert tried == ["portable", "portable16"]


def test_kernels_that_compute_wrong_are_not_used(fresh, caplog):
    failing(fresh, "vnni", "portable")
    report = {status.name: status for status in backend_report()}
    for name in ("vnni", "portable"):
        if "CPU has no" in report[name].detail:
            continue
        assert not report[name].available
        assert "wrong results in the self-test" in report[name].detail
        with pytest.raises(ValueError, match=rf"conv: backend='{name}' cannot be used: .* wrong"):
            choose_backend(name, CPU, torch.int8, "conv")
        with pytest.raises(ValueError, match=f"{name} cannot be used here: .* wrong results"):
            usable_backend(name)
    assert usable_backend("auto") == report["torch"] == usable_backend("torch")
    with pytest.raises(ValueError, match="nope cannot be used here: it is unknown"):
        usable_backend("nope")
    assert "fail their self-test" in caplog.text
    assert choose_backend("auto", CPU, torch.int8, "conv") == "torch"


def test_int16_goes_past_kernels_for_int8(fresh):
    failing(fresh, "vnni")
    assert choose_backend("auto", CPU, torch.int8, "conv") == "portable"
    assert choose_backend("auto", CPU, torch.int16, "conv") == "portable"


def test_other_devices_go_to_torch():
    cuda = torch.device("cuda", 0)
    assert choose_backend("auto", cuda, torch.int8, "conv") == "torch"
    with pytest.raises(ValueError, match=r"conv: .* runs on a CPU, the inputs are on cuda:0"):
        choose_backend("portable", cuda, torch.int8, "conv")


def test_unknown_backends_name_the_layer():
    x = torch.ones(2, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match="fc: backend='cuda': expected one of auto, amx, vnni"):
        int8_linear(x, x, backend="cuda", name="fc")


WITHOUT = """
import atexit, gc; gc.disable(); atexit.register(gc.freeze)  # a quarter of the CPU time
import torch
from bevquant_int8sim import backend_report, int8_conv2d

x = torch.full((1, 24, 5, 5), 127, dtype=torch.int8)
acc = int8_conv2d(x, x.expand(16, -1, -1, -1)[..., :3, :3])
assert acc.unique().tolist() == [24 * 9 * 127**2]
print([status.name for status in backend_report() if status.available])
"""


def test_without_compiled_code():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "['torch']", run.stderr


def test_kernels_are_compiled_ahead(capsys):
    chosen = choose_backend("auto", CPU, torch.int8, "test")
    assert main(["auto"]) == (1 if chosen == "torch" else 0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[0] == chosen
    assert "not usable" not in line


def test_ahead_of_time_without_a_compiled_backend(capsys):
    assert main(["torch"]) == 1
    assert capsys.readouterr().out.startswith("torch ")
    assert main(["sse"]) == 2
    assert "'sse': expected some of amx, vnni, portable, torch" in capsys.readouterr().err


def test_torch_compile_calls_kernels_and_models_as_they_are():
    """Its tracer made tensors of their arrays: wrong numbers, and writes outside of memory."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((1, 16, 32, 32), (16, 16, 3, 3))
    )

    def convolve(x):
        return int8_conv2d(x, w, padding=1) + 1

    assert torch.equal(torch.compile(convolve, backend="eager")(x), convolve(x))
    images = torch.randn(2, 3, 64, 64, generator=generator)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 1))
    quantized = quantize_model(net.eval(), example_inputs=images).model
    calibrate(quantized, [images])
    integers = simulate(quantized, images)
    assert torch.equal(torch.compile(integers, backend="eager")(images), integers(images))

"""Weights by default: the fastest form that is exact on the CPU at hand, and what a file costs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from bevquant_export import (  # noqa: E402
    _cpu,
    compare_qdq_onnx,
    cpu_at_hand,
    export_qdq_onnx,
    lint_onnx,
    open_onnx,
)
from bevquant_export._figures import timed  # noqa: E402
from bevquant_int8sim import simulate  # noqa: E402
from bevquant_qnn import QuantConfig, quantize_model  # noqa: E402
from bevquant_quantizers import calibrate, quantization_disabled  # noqa: E402


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return torch.relu(self.second(y) + y)


def calibrated(bits: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.rand(1, 3, 12, 12)
    model = quantize_model(net, QuantConfig(weight_bits=bits), example_inputs=x).model
    calibrate(model, [x])
    return model, x


def noted(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


@pytest.mark.parametrize(("cpu", "weights"), [("vnni", "int8"), ("any", "uint8")])
@pytest.mark.parametrize("profile", ["onnxruntime", "openvino"])
def test_the_cpu_at_hand_decides(
    profile: str, cpu: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEVQUANT_CPU", cpu)
    model, x = calibrated()
    made = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile, verify=False)
    assert (made.figures.weights, made.figures.cpu) == (weights, cpu)
    assert noted(made.path)["bevquant.cpu"] == cpu
    assert f"weights {weights}: exact on" in str(made)


def test_the_default_is_exact_here(tmp_path: Path) -> None:
    model, x = calibrated()
    made = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    for tensor in compare_qdq_onnx(made, model, torch.rand_like(x)):
        assert tensor.unexplained == 0
    assert lint_onnx(made.path, "onnxruntime", cpu="here") == []


def test_seven_bits_are_int8_and_exact_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = calibrated(bits=7)
    made = []
    for cpu in ("vnni", "any"):
        monkeypatch.setenv("BEVQUANT_CPU", cpu)
        file = export_qdq_onnx(model, x, tmp_path / f"{cpu}.onnx", "onnxruntime")
        assert (file.figures.weights, file.figures.cpu) == ("int8", "any")
        open_onnx(file.path, "onnxruntime")
        made.append(onnx.load(file.path).graph)
    assert made[0] == made[1]


def test_a_file_is_not_run_where_it_saturates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = calibrated()
    monkeypatch.setenv("BEVQUANT_CPU", "any")
    made = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime", weights="int8")
    with pytest.raises(ValueError, match=r"net\.onnx is for CPUs that .* weights='uint8'"):
        open_onnx(made.path, "onnxruntime")
    assert {finding.id for finding in lint_onnx(made.path, "onnxruntime", cpu="here")} == {"ORT004"}
    # Node by node products are of floats, which hold every sum of this model.
    wanted = simulate(model, x)(x)
    got = open_onnx(made.path)({"input": x})["output"]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert all(tensor.unexplained == 0 for tensor in compare_qdq_onnx(made, model, x))


def test_other_names_of_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEVQUANT_CPU", "avx2")
    with pytest.raises(ValueError, match="BEVQUANT_CPU=avx2: expected one of vnni, any, or unset"):
        cpu_at_hand()


@pytest.mark.parametrize(
    ("machine", "found", "cpu"),
    [
        ("aarch64", {}, "vnni"),
        ("arm64", {}, "vnni"),
        ("x86_64", {"avx2": True, "avx512_f": True}, "any"),
        ("x86_64", {"avx2": True, "avx_vnni": True}, "vnni"),
        ("x86_64", {"avx512_vnni": True}, "vnni"),
        ("AMD64", {"amx_int8": True}, "vnni"),
    ],
)
def test_instructions_decide_without_onnxruntime(
    machine: str, found: dict[str, bool], cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cpu.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert _cpu._by_instructions() == cpu


def test_weights_that_a_target_does_not_have_are_refused(tmp_path: Path) -> None:
    model, x = calibrated()
    for profile, weights in (("onnxruntime", "int4"), ("tensorrt", "int8"), ("openvino", None)):
        with pytest.raises(ValueError, match=f"weights={weights!r}: expected one of 'auto'"):
            export_qdq_onnx(model, x, tmp_path / "net.onnx", profile, weights=weights)
    assert list(tmp_path.iterdir()) == []


def test_a_file_says_its_size(tmp_path: Path) -> None:
    model, x = calibrated()
    figures = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime").figures
    assert figures.size == (tmp_path / "net.onnx").stat().st_size
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    assert figures.float_size == figures.size + 3 * weights
    whole = export_qdq_onnx(model, x, tmp_path / "trt.onnx", "tensorrt").figures
    assert (whole.weights, whole.cpu, whole.float_size) == ("", "", whole.size)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_time_is_that_of_the_file_beside_the_same_model_in_float32(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(engine)
    from bevquant_export.dense import _export

    peers: list[Any] = []
    timed = _export.timed
    monkeypatch.setattr(_export, "timed", lambda *given: peers.append(given[1]) or timed(*given))
    model, x = calibrated()
    made = export_qdq_onnx(model, x, tmp_path / "net.onnx", engine, measure=True)
    timing = made.figures.timing
    assert timing.milliseconds > 0
    assert timing.threads == torch.get_num_threads()
    assert f"{timing.ratio:.2f} times as fast as float32" in str(made)
    (peer,) = peers
    assert [node.op_type for node in peer.graph.node] == ["Conv", "Relu", "Conv"]
    with quantization_disabled(model):
        wanted = model(x)
    (name,) = (port.name for port in peer.graph.output)
    torch.testing.assert_close(open_onnx(peer)({"input": x})[name], wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_only_an_engine_on_a_cpu_is_measured(tmp_path: Path) -> None:
    model, x = calibrated()
    with pytest.raises(ValueError, match=r"measure=True with profile='tensorrt' .*'onnxruntime'"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", measure=True)
    with pytest.raises(ValueError, match="and a IntegerModel: expected"):
        export_qdq_onnx(simulate(model, x), x, tmp_path / "n.onnx", "onnxruntime", measure=True)


def test_a_sum_that_keeps_a_layer_in_float_is_noted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.rand(1, 3, 8, 8)
    model = quantize_model(Residual().eval(), example_inputs=x).model
    calibrate(model, [x])
    made = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert any("integer_sums=True" in note for note in made.notes)
    made = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime", integer_sums=True)
    assert made.notes == ()


@pytest.mark.skipif(time.get_clock_info("process_time").resolution >= 1e-5, reason="coarse clock")
def test_waiting_for_other_processes_is_not_counted_on_one_thread(monkeypatch) -> None:
    clocks = {"process_time": 0.0, "perf_counter": 0.0}
    for name in clocks:
        monkeypatch.setattr(time, name, lambda name=name: clocks[name])

    class Session:
        def __init__(self, waits: float) -> None:
            self.waits = waits

        def get_inputs(self) -> list:
            return []

        get_outputs = get_inputs

        def run(self, names: list, given: dict) -> None:
            clocks["process_time"] += 0.002
            clocks["perf_counter"] += 0.002 + self.waits

    for threads, ratio in ((1, 1.0), (2, 11.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert timed(0.0, 0.02, {}, Session).ratio == pytest.approx(ratio)

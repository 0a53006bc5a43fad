"""CenterPoint in the commands: quantized, loaded, exported, trained; what it lacks is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bevfusion.detectors import DETECTORS
from bevfusion.model import read_state_dict
from bevfusion_quant.cli import main
from bevfusion_quant.stages import built_parts, quantized_parts, reads_images, sizes_of

MODELS = ("centerpoint", "centerpoint-pillars")


@pytest.fixture(autouse=True)
def _two_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the six task heads, which are alike and take most of a capture's time."""
    for model in MODELS:
        configs = DETECTORS[model].configs
        head = replace(configs["tiny"].head, tasks=configs["tiny"].head.tasks[:2])
        monkeypatch.setitem(configs, "tiny", replace(configs["tiny"], head=head))


@pytest.mark.usefixtures("no_pictures")  # the run for a BPU draws them
@pytest.mark.parametrize("model", MODELS)
def test_a_run_is_read_back_and_exported(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bevfusion_quant.ptq import load_run

    runs = ["--runs", str(tmp_path), "--quiet"]
    given = ["--dataset", "street", *runs]
    ptq = ["ptq", "--model", model, "--config", "tiny", *given[:-1], "--name", "q"]
    assert main(ptq) == 0
    assert "random, so boxes mean nothing; " in capsys.readouterr().out
    settings = json.loads((tmp_path / "q" / "config.json").read_text())
    assert (settings["model"], settings["branch"]) == (model, "all")
    loaded = load_run(tmp_path / "q")
    assert loaded.settings.parts == ("lidar", "decoder", "head")
    assert loaded.quantized_model.kind == model
    page = (tmp_path / "q" / "report.html").read_text()
    assert "Heatmap of the head" in page
    assert "Camera features" not in page
    if model == "centerpoint-pillars":  # its files: in the next test, and of bevfusion's own tests
        return
    pytest.importorskip("onnxruntime")
    run = ["--run", str(tmp_path / "q")]
    assert main(["export", *run, *given, "--target", "onnxruntime", "--name", "files"]) == 0
    names = {path.name for path in (tmp_path / "files" / "onnx").glob("*.onnx")}
    assert names == {"centerpoint.scn.onnx", "rpn_centerhead.onnx"}


def test_a_bpu_runs_decoder_and_head(tmp_path: Path) -> None:
    from bevfusion_quant.bpu import load_bpu_run

    runs = ["--dataset", "street", "--runs", str(tmp_path), "--quiet"]
    model = ["--model", "centerpoint-pillars", "--config", "tiny"]
    assert main(["ptq", *model, "--target", "bpu", *runs, "--name", "q"]) == 0
    plan = json.loads((tmp_path / "q" / "plan.json").read_text())
    on_cpu = {n["path"] for n in plan["nodes"] if (n["kind"], n["place"]) == ("operator", "CPU")}
    assert on_cpu == {"pts_voxel_encoder", "pts_middle_encoder"}
    (output,) = (node for node in plan["nodes"] if node["kind"] == "output")
    assert len(output["inputs"]) == 12
    loaded = load_bpu_run(tmp_path / "q")
    assert loaded.units.parts == ("decoder", "head")
    summary = json.loads((tmp_path / "q" / "summary.json").read_text())
    found = {row["stage"]: row["integer_sqnr_db"] for row in summary["bpu"]["stages"]}
    assert found.keys() == {"lidar", "decoder", "head"}
    assert found["decoder"] > 15
    assert found["head"] > 15
    pytest.importorskip("onnxruntime")
    assert main(["export", "--run", str(tmp_path / "q"), *runs, "--name", "files"]) == 0
    names = {path.name for path in (tmp_path / "files" / "onnx").iterdir()}
    assert names >= {"pts_voxel_encoder.onnx", "rpn_centerhead.onnx", "rpn_centerhead.yaml"}


def test_two_steps_of_training_leave_weights_that_load(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--model", "centerpoint-pillars", "--dataset", "street", "--config", "tiny"]
    words += ["--count", "1", "--steps", "2", "--batch", "1", "--held-out", "0", "--workers", "0"]
    assert main(["train", *words, "--out", str(out), "--quiet"]) == 0
    state = read_state_dict(out / "weights.safetensors")
    from bevfusion.detectors import build_detector
    from bevfusion.model import load_state_dict

    model = build_detector(sizes_of("centerpoint-pillars", "tiny"))
    assert len(load_state_dict(model, state).loaded) == len(model.state_dict())
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())


def test_what_the_model_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "centerpoint", "--config", "tiny", "--dataset", "street"]
    for more, reason in (
        (["--branch", "camera"], "--branch camera: --model centerpoint has lidar, decoder, head"),
        (["--branch", "fuser"], "--branch fuser"),
        (["--target", "bpu", "--branch", "lidar"], "its sparse convolutions have no BPU form"),
        (["--target", "bpu", "--branch", "fuser"], "has no such part; choose --branch decoder, he"),
        (["--config", "nuscenes-mmdet3d"], "expected one of nuscenes, nuscenes-voxel01, waymo"),
    ):
        assert main(["ptq", *given, *more]) != 0
        assert reason in capsys.readouterr().err


def test_parts_go_by_the_model() -> None:
    assert quantized_parts("all", "centerpoint") == ("lidar", "decoder", "head")
    assert "head" not in quantized_parts("all")
    assert built_parts("decoder", "centerpoint") == ("lidar", "decoder", "head")
    assert not reads_images("all", "centerpoint")

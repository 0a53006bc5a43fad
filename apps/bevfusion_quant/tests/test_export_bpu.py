"""`bevfusion-quant export` of a run for a BPU: dense parts for hb_mapper, the rest in float."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
import onnx
from bpu_split import TINY, small_frame

from bev_data.datasets import write_frame_folder
from bevfusion_quant.bpu import BpuConfig, run_bpu
from bevfusion_quant.cli import main
from bevquant_export import lint_onnx

FILES = ["camera.backbone.onnx", "camera.depth.onnx", "camera.vtransform.onnx"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the camera branch, its frame, and its files."""
    runs = tmp_path_factory.mktemp("runs")
    write_frame_folder(runs / "street", small_frame())
    run_bpu([small_frame()], BpuConfig(config="tiny", branch="camera"), runs=runs, name="a")
    assert main(export(runs, "--name files")) == 0
    return runs


def export(runs: Path, more: str) -> list[str]:
    data = f"--dataset files --data {runs}/street --runs {runs}"
    return f"export --run {runs}/a {data} {more}".split()


def test_the_set_and_its_settings(runs: Path) -> None:
    folder = runs / "files" / "onnx"
    told = json.loads((folder / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert (told["target"], told["verified"]) == ("bpu", True)
    assert [file["name"] for file in told["files"]] == FILES
    assert [file["kind"] for file in told["files"]] == ["bpu", "float", "float"]
    dense = told["files"][0]
    settings = folder / "camera.backbone.yaml"
    assert dense["companions"] == {settings.name: hashlib.sha256(settings.read_bytes()).hexdigest()}
    assert 'march: "bayes"' in settings.read_text()
    assert dense["build"].startswith("hb_mapper makertbin")
    assert dense["opset"] == onnx.load(folder / FILES[0]).opset_import[0].version == 11
    height, width = TINY.camera.image_size
    assert [(p["name"], p["shape"]) for p in dense["inputs"]] == [("img", [6, 3, height, width])]
    assert {p.name for p in folder.iterdir()} == {*FILES, settings.name, "manifest.json"}
    assert lint_onnx(folder / FILES[0], "horizon") == []
    assert dense["checked"]["tensors"] > 20
    assert dense["checked"]["wrong"] == 0


def test_layers_stand_beside_float_fake_and_integers(runs: Path) -> None:
    summary = json.loads((runs / "files" / "summary.json").read_text())
    layers = summary["export"]["files"][0]["layers"]
    convs = [layer for layer in layers if layer["op"] == "conv"]
    assert all(layer["path"].startswith("encoders.camera.") for layer in convs)
    assert sum(layer["integer_sqnr_db"] is not None for layer in convs) > 10
    stages = {stage["tensor"]: stage for stage in summary["export"]["stages"]}
    assert set(stages) == {"neck", "camera"}
    for stage in stages.values():
        assert stage["onnx_sqnr_db"] == pytest.approx(stage["integer_sqnr_db"], abs=0.5)


def test_another_engine_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(export(runs, "--target tensorrt")) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "is a run for a BPU" in message
    assert "--target bpu" in message

"""`bevfusion-quant export` of a LiDAR detector: one file for Autoware's node, a set for others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
import onnx
from clouds import cloud
from without_pictures import without_pictures

from bevfusion_quant.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized detector and its export."""
    runs = tmp_path_factory.mktemp("runs")
    np.savez(runs / "frame.npz", points=cloud(1500))
    given = f"--points {runs}/frame.npz --runs {runs}"
    run = f"ptq {given} --config tiny --method max --branch lidar-detector --name a"
    with without_pictures():
        assert main(run.split()) == 0
    assert main(f"export --run {runs}/a {given} --target autoware --name b".split()) == 0
    return runs / "b" / "onnx"


def test_the_set_is_right(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    assert content["target"] == "autoware"
    assert content["verified"], content["failures"]
    files = {file["name"]: file for file in content["files"]}
    whole = files["bevfusion_lidar.onnx"]
    assert set(files) == {
        "lidar.backbone.xyz.onnx", "decoder.onnx", "head.bbox.onnx", "bevfusion_lidar.onnx",
    }  # fmt: skip
    assert all(file["findings"] == [] for file in files.values())
    assert [p["name"] for p in whole["inputs"]] == ["voxels", "coors", "num_points_per_voxel"]
    outputs = {p["name"]: (p["dtype"], p["shape"]) for p in whole["outputs"]}
    assert outputs == {
        "bbox_pred": ("float32", [10, 100]),
        "score": ("float32", [100]),
        "label_pred": ("int64", [100]),
    }
    assert "8 pair generations for 21 layers" in whole["notes"]
    encoder = files["lidar.backbone.xyz.onnx"]["checked"]
    assert (encoder["tensors"], encoder["wrong"], encoder["different"]) == (30, 0, [])
    page = (folder.parent / "report.html").read_text()
    assert "30 of 30 tensors are equal to what the plugin" in page  # an apostrophe is escaped
    assert "30 tensors in the plugin" in page
    assert " 0 of 0 " not in page


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_the_detector_for_other_engines(folder: Path, target: str) -> None:
    runs = folder.parent.parent
    given = f"--points {runs}/frame.npz --runs {runs} --name {target}"
    assert main(f"export --run {runs}/a {given} --target {target}".split()) == 0
    content = json.loads((runs / target / "onnx/manifest.json").read_text())
    assert content["verified"], content["failures"]
    files = {file["name"]: file for file in content["files"]}
    assert list(files) == ["lidar.backbone.xyz.onnx", "decoder.onnx", "head.bbox.onnx"]
    assert all(file["findings"] == [] for file in files.values())
    assert [p["name"] for p in files["decoder.onnx"]["inputs"]] == ["lidar"]
    stages = content["chain"]["stages"]
    right = [(row["tensor"], row["is_right"]) for row in stages]
    assert right == [("lidar", True), ("middle", True)]


def test_the_whole_file_is_its_parts(folder: Path) -> None:
    names = ["lidar.backbone.xyz.onnx", "decoder.onnx", "bevfusion_lidar.onnx"]
    encoder, decoder, whole = (onnx.load(folder / name) for name in names)
    onnx.checker.check_model(whole, full_check=True)
    ops = [[n.op_type for n in m.graph.node] for m in (encoder, decoder, whole)]
    assert ops[2][: len(ops[0])] == ops[0]
    assert [op for op in ops[2][len(ops[0]) :] if op == "QuantizeLinear"]

"""`run_any`: a network of the user's own code to files and a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from bev_data import InputError
from bev_scenes import street_frame
from bevfusion.frameworks import load_detector
from bevfusion_quant.any_model import AnyConfig, AnyResult, any_text, run_any
from bevfusion_quant.cli import main
from bevfusion_quant.verdict import verdict

FRAMES = [street_frame(seed=seed, size="tiny", cameras=None) for seed in range(2)]


pytestmark = [
    pytest.mark.usefixtures("spconv"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),  # spconv's dense()
]


@pytest.fixture(scope="module")
def result(spconv: object, tmp_path_factory: pytest.TempPathFactory) -> AnyResult:
    return run_any(FRAMES, AnyConfig("own_detector:make"), runs=tmp_path_factory.mktemp("runs"))


def test_files_are_written_and_verified(result: AnyResult) -> None:
    assert result.files is not None
    for name in ("sparse.onnx", "dense.onnx"):
        onnx.load(result.folder / "onnx" / name)
    for check in result.files.checks:
        assert check.layers[0] == check.tensors[0] == 0
        assert check.layers[1] > 0
        assert check.tensors[1] > 0
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["weight_bytes"]["after"] * 3 < summary["weight_bytes"]["before"]
    assert not any("/." in line for line in summary["files"])  # paths of the finished folder


def test_integers_are_compared_with_float_and_fake(result: AnyResult) -> None:
    simulation = result.simulation
    in_int8 = [row.path for row in simulation.layers if row.form == "int8"]
    assert {"encoder.0", "encoder.2", "neck.0"} <= set(in_int8)
    assert not simulation.wrong
    assert simulation.integer_share > 0.9
    assert simulation.agreement[1].float_detections == 40
    assert simulation.found[0].labels > 0


def test_text_and_page(result: AnyResult) -> None:
    text = "\n".join(any_text(result))
    assert "Left out: stages and maps" in text
    assert str(result.folder / "onnx" / "dense.onnx") in text
    assert [line.split("  ")[0] for line in verdict(result)] == [
        "Boxes", "Worst layer", "Weights", "Files", "Open",
    ]  # fmt: skip
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    for title in ("Scene", "Layers", "Quantizers", "Integer simulation"):
        assert title in page


def test_without_boxes_they_are_left_out(tmp_path: Path) -> None:
    made = run_any(FRAMES[:1], AnyConfig("own_detector:without_boxes"), runs=tmp_path)
    assert not made.simulation.agreement
    assert "boxes (the model gives no function" in any_text(made)[-1]
    assert verdict(made)[0].startswith("Worst layer")


def test_classes_without_names_are_numbers(tmp_path: Path) -> None:
    made = run_any(FRAMES[:1], AnyConfig("own_detector:unnamed_classes"), runs=tmp_path)
    assert made.simulation.agreement[0].float_detections == 20
    assert not made.simulation.found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:make", "No module named 'nowhere'"),
        ("own_detector:absent", "has no attribute 'absent'"),
        ("own_detector:wrong", "it returned str"),
        ("own_detector", "give package.module:function"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run_any(FRAMES[:1], AnyConfig(name), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"head.weight": torch.ones(1)}}, tmp_path / "other.pth")
    with pytest.raises(InputError, match=r"head\.weight"):
        load_detector("own_detector:make", tmp_path / "other.pth")


def test_weights_are_loaded(tmp_path: Path) -> None:
    state = {n: t + 1 for n, t in load_detector("own_detector:make").network.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "own.pth")
    loaded = load_detector("own_detector:make", tmp_path / "own.pth").network.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_calibration_frames_are_counted(tmp_path: Path) -> None:
    config = replace(AnyConfig("own_detector:make"), calibration_frames=3)
    with pytest.raises(InputError, match="--calibration-frames 3 of 1"):
        run_any(FRAMES[:1], config, runs=tmp_path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "ptq",
        "--model",
        "own_detector:make",
        "--dataset",
        "street",
        "--runs",
        str(tmp_path),
    ]
    assert main([*command, "--quiet"]) == 0
    assert "sparse.onnx, dense.onnx for tensorrt11, verified" in capsys.readouterr().out
    assert main([*command, "--branch", "lidar", "--no-fold"]) == 2
    assert "--branch, --no-fold: --model own_detector:make does not read it" in (
        capsys.readouterr().err
    )

"""Networks in other code: from `ptq` through every command that reads its run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from bev_data import InputError
from bev_data.datasets import open_dataset
from bev_data.points import Frame
from bev_scenes import street_frame
from bevfusion.evaluation import FrameBatches
from bevfusion.frameworks import ForeignDetector, ForeignModel, ForeignSizes, load_detector
from bevfusion_quant.cli import main
from bevfusion_quant.compare import run_compare
from bevfusion_quant.export import export_run
from bevfusion_quant.ptq import PtqConfig, PtqResult, load_quantized, run_evaluate, run_ptq
from bevfusion_quant.sensitivity import run_sensitivity
from bevfusion_quant.verdict import verdict

FRAMES = [street_frame(seed=seed, size="tiny", cameras=None) for seed in range(2)]


pytestmark = [
    pytest.mark.usefixtures("spconv", "no_pictures"),  # `result` has them
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),  # spconv's dense()
]


def quantized(runs: Path, model: str = "own_detector:make", **how: Any) -> PtqResult:
    """A run of the whole job on tiny streets."""
    place = {key: how.pop(key) for key in ("name", "integers", "export") if key in how}
    frames = how.pop("frames", FRAMES)
    config = PtqConfig(model=model, config="nuscenes", branch="all", **how)
    return run_ptq(frames, config, runs=runs, **place)


def test_other_code_gets_the_cameras_that_are_named() -> None:
    frames = [street_frame(size="tiny", cameras="tiny")]

    def arguments(frame: Frame) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor([[float(c.name == "CAM_BACK")]]) for c in frame.cameras)

    detector = ForeignDetector(torch.nn.Identity(), arguments)
    sizes, model = ForeignSizes("own:make", detector), ForeignModel(detector)
    batches = FrameBatches(frames, sizes, model, ("CAM_FRONT", "CAM_BACK"))
    assert [float(value) for value in batches[0]] == [0, 1]
    with pytest.raises(InputError, match="no camera CAM_TOP"):
        _ = FrameBatches(frames, sizes, model, ("CAM_TOP",))[0]


def test_a_forward_that_writes_to_its_arguments_changes_no_frame() -> None:
    network = torch.nn.Threshold(3, 0, inplace=True)
    model = ForeignModel(ForeignDetector(network, lambda frame: (torch.ones(2),)))
    given = torch.ones(2)
    assert not model(given).any()
    assert given.all()


@pytest.fixture(scope="module")
def result(spconv: object, tmp_path_factory: pytest.TempPathFactory) -> PtqResult:
    runs = tmp_path_factory.mktemp("runs")
    return quantized(runs, name="own", integers="auto", export="tensorrt")


def test_files_are_written_and_verified(result: PtqResult) -> None:
    assert result.exported is not None
    assert not result.exported.failures
    for name in ("sparse.onnx", "dense.onnx"):
        onnx.load(result.folder / "onnx" / name)
    assert "network.neck.0" in {layer.path for layer in result.exported.layers}
    sparse, dense = result.exported.files
    assert any(line.startswith("encoder.0: fp16") for line in sparse.runs_in_float)
    assert any(line.startswith("one behind the other, example: output") for line in dense.notes)
    for layer in result.exported.layers:
        assert layer.elements > 0
        assert not layer.different
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["weight_bytes"]["after"] * 3 < summary["weight_bytes"]["before"]
    assert summary["export"]["verified"]


def test_integers_are_compared_with_float_and_fake(result: PtqResult) -> None:
    simulation = result.simulation
    assert simulation is not None
    in_int8 = [row.path for row in simulation.layers if row.form == "int8"]
    assert {"network.encoder.2", "network.neck.0"} <= set(in_int8)
    assert not simulation.wrong
    assert simulation.integer_share > 0.9
    assert simulation.agreement[1].float_detections == 40
    assert simulation.found[0].labels > 0


def test_verdict_and_page(result: PtqResult) -> None:
    assert [line.split("  ")[0] for line in verdict(result)] == [
        "Boxes", "Worst layer", "Weights", "Files", "Open",
    ]  # fmt: skip
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    for title in ("Scene", "Layers", "Quantizers", "Integer simulation", "ONNX files"):
        assert title in page
    assert "Left out: feature maps of stages" in page


def test_a_useless_result_says_so(tmp_path: Path) -> None:
    made = quantized(tmp_path, "own_detector:faint_first_frame", calibration_frames=1)
    first = verdict(made)[0]
    assert re.match(r"Result +NOT usable: \S+ has -?\d\.\d dB SQNR .*\(--exclude 0\)", first)
    page = (made.folder / "report.html").read_text(encoding="utf-8")
    assert "NOT usable" in page
    assert "NOT usable" not in str(verdict(quantized(tmp_path, name="good")))


def test_a_useless_result_names_the_layer_and_the_plan_that_repairs_it(tmp_path: Path) -> None:
    made = quantized(tmp_path, "own_detector:collapsing_layer", method="max")
    first = verdict(made)[0]
    assert re.match(
        r"Result +NOT usable: the worst output has .* dB with network.1 in float", first
    )
    assert "--plan remedy.json" in (made.folder / "report.html").read_text(encoding="utf-8")
    again = quantized(
        tmp_path, "own_detector:collapsing_layer", method="max", plan=made.folder / "remedy.json",
        name="repaired",
    )  # fmt: skip
    assert not again.remedy
    assert again.layers[-1].sqnr_db > 25


def test_an_output_behind_a_top_k_is_compared_object_by_object(tmp_path: Path) -> None:
    made = quantized(tmp_path, "own_detector:best_cells", integers="auto")
    output, model = made.layers[-1], load_quantized(made.folder)
    assert output.matched is not None
    assert output.matched[1:] == (200, 200)
    assert 100 < output.matched[0] < 200
    assert output.sqnr_db is not None
    detector = load_detector("own_detector:best_cells")
    power = noise = 0.0
    for frame in FRAMES:
        given = detector.arguments(frame)
        with torch.no_grad():
            wanted, got = detector.network(*given), model.network(*given)
        power, noise = (
            power + float(wanted.square().sum()),
            noise + float((got - wanted).square().sum()),
        )
    by_rank = 10 * math.log10(power / noise)
    assert output.sqnr_db > by_rank + 3
    assert made.simulation is not None
    rows = [row for row in made.simulation.layers if row.matched and row.integer_sqnr_db]
    assert rows[-1].matched[2] == 200
    page = (made.folder / "report.html").read_text(encoding="utf-8")
    assert f"{output.matched[0]} of 200 objects matched" in page


def test_the_run_loads_with_the_same_bits(result: PtqResult) -> None:
    detector = load_detector("own_detector:make")
    model = load_quantized(result.folder)
    given = detector.arguments(FRAMES[0])
    with torch.no_grad():
        output = model(*given)
        assert torch.equal(output, model.network(*given))
        assert not torch.equal(output, detector.network(*given))
    again = run_evaluate(result.folder, FRAMES, runs=result.folder.parent, name="again")
    assert again.layers == result.layers


def test_a_run_has_the_frame_that_its_model_is_traced_with(
    result: PtqResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    (frame,) = open_dataset("files", result.folder / "example")
    assert frame.points is not None
    assert np.array_equal(frame.points, FRAMES[0].points)
    assert frame.labels is None
    monkeypatch.setattr("bevfusion_quant.saved_run.stored_street", None)  # not asked for
    given = load_detector("own_detector:make").arguments(FRAMES[1])
    assert torch.isfinite(load_quantized(result.folder)(*given)).all()


def test_evaluate_judges_by_labels(result: PtqResult) -> None:
    runs = result.folder.parent
    found = run_evaluate(result.folder, FRAMES, runs=runs, name="judged", integers="auto")
    assert found.accuracy is not None
    assert [row.model for row in found.accuracy.models] == ["float", "quantized", "integer"]
    assert found.simulation is not None
    assert not found.simulation.wrong


@pytest.mark.parametrize("metric", ["sqnr", "mAP"])
def test_sensitivity(result: PtqResult, metric: str) -> None:
    found = run_sensitivity(
        result.folder, FRAMES[:1], runs=result.folder.parent, name=f"sens-{metric}",
        metric=metric, without=False,
    )  # fmt: skip
    names = {path for row in found.outcome.table for path in row.modules}
    assert "network.neck.0" in names


def test_sensitivity_by_classes_is_refused(result: PtqResult, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metric='kl': the model .* no heat map"):
        run_sensitivity(result.folder, FRAMES[:1], runs=tmp_path, metric="kl")


def test_compare(result: PtqResult) -> None:
    runs = result.folder.parent
    other = quantized(runs, name="six", weight_bits=6)
    found = run_compare([result.folder, other.folder], FRAMES, runs=runs, integers="auto")
    assert len(found.comparison.accuracy.models) == 5
    assert found.comparison.differing() == ["weight bits"]


def test_compare_needs_boxes_and_names(result: PtqResult, tmp_path: Path) -> None:
    for model, lacks in (("without_boxes", "no boxes"), ("unnamed_classes", "no class names")):
        made = quantized(tmp_path, f"own_detector:{model}", name=model, frames=FRAMES[:1])
        with pytest.raises(InputError, match=f"{lacks}.*evaluate"):
            run_compare([made.folder], FRAMES, runs=tmp_path)
        with pytest.raises(InputError, match="its model is"):
            run_compare([result.folder, made.folder], FRAMES, runs=tmp_path)


@pytest.mark.parametrize("target", ["tensorrt11", "onnxruntime"])
def test_export(result: PtqResult, target: str) -> None:
    made = export_run(
        result.folder, FRAMES[:1], target=target, runs=result.folder.parent, name=target
    )
    assert not made.exported.failures
    assert [file.name for file in made.exported.files] == ["sparse.onnx", "dense.onnx"]
    compared = [layer for layer in made.exported.layers if layer.integer_sqnr_db is not None]
    assert compared  # beside the figures of the integer model


def test_report_names_no_command_that_refuses(
    result: PtqResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--run", str(result.folder), "--runs", str(result.folder.parent)]) == 0
    text = capsys.readouterr().out
    assert "verified and unchanged" in text
    assert "qat" not in text
    assert "bpu" not in text.lower()


def test_qat_is_refused(result: PtqResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qat", "--run", str(result.folder), "--dataset", "street"]) == 2
    assert "losses and targets are in its own code" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["float", "fused", "quantized"])
def test_tree(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "--model", "own_detector:make", "--stage", stage]) == 0
    tree = capsys.readouterr().out
    assert ("BatchNorm2d" in tree) == (stage == "float")
    assert ("QuantConv2d" in tree) == (stage == "quantized")


def test_without_boxes_they_are_left_out(tmp_path: Path) -> None:
    made = quantized(tmp_path, "own_detector:without_boxes", frames=FRAMES[:1], integers="auto")
    assert made.simulation is not None
    assert not made.simulation.agreement
    assert "boxes and mAP: the model gives no function" in made.left_out[1]
    assert verdict(made)[0].startswith("Worst layer")


def test_classes_without_names_are_numbers(tmp_path: Path) -> None:
    made = quantized(tmp_path, "own_detector:unnamed_classes", frames=FRAMES[:1])
    assert made.agreement[0].float_detections == 20
    assert not made.labels_found
    assert made.notes == ("the network has no camera branch",)
    page = (made.folder / "report.html").read_text(encoding="utf-8")
    assert "About the model" in page
    assert "Left out: the network has no camera branch" not in page
    found = run_evaluate(made.folder, FRAMES[:1], runs=tmp_path, name="judged")
    assert found.accuracy is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:make", "No module named 'nowhere'"),
        ("openpcdett:second.yaml", "probably openpcdet:… is meant"),
        ("own_detector:absent", "has no attribute 'absent'"),
        ("own_detector:short_boxe", "has no attribute 'short_boxe'.*nearest: short_boxes"),
        ("own_detector:CLASSES", "has a tuple by this name; expected a function"),
        ("own_detector:raises", r"the function raised RuntimeError: no weights \(.*own_det"),
        ("own_detector:make@forward,left", "expected the directions of x, y and z"),
        ("own_detector:wrong", "it returned str"),
        ("own_detector:nothing", "it returned NoneType"),
        ("own_detector:without_values", r"own_detector:without_values: parameter .* meta device"),
        ("own_detector:compiled", r"own_detector:compiled: .* is compiled; give the module itself"),
        ("own_detector:failing_forward", r"forward of the model raised RuntimeError: .*own_det"),
        ("own_detector:failing_arguments", r"arguments of the model raised KeyError: .*own_det"),
        ("own_detector:list_of_arguments", "returned Tensor for street_0: return a tuple"),
        ("own_detector:short_boxes", r"boxes of the model: scores is shape \(3,\), expected"),
        ("own_detector:class_too_high", "labels from 0 to 9, expected 0 to 1"),
        ("own_detector:text", "the model returned str: expected tensors"),
        ("own_detector:numpy_arguments", r"returned numpy.ndarray for street_0: return torch"),
        ("own_detector:no_layers", "none of its layers is quantized: it has no convolution"),
        ("own_detector", "expected one of bevfusion, .*package.module:function"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        quantized(tmp_path / "runs", name, frames=FRAMES[:1])
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_forward_says_what_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"called with \('float32 \[\d+, 4\]', 'int32 \[\d+, 4\]'"):
        quantized(tmp_path, "own_detector:failing_forward", frames=FRAMES[:1])


def test_a_model_without_integers_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of its layers computes in integers \(.*own_det"):
        quantized(tmp_path, "own_detector:chooses", frames=FRAMES[:1], integers="auto")


def test_pillar_encoders_stay_in_float_and_say_why(tmp_path: Path) -> None:
    made = quantized(tmp_path, "own_detector:pillars", frames=FRAMES[:1], integers="auto")
    assert made.simulation is not None
    reasons = {part.path: part.reason for part in made.simulation.islands}
    assert "coordinates in metres" in reasons["network.encoder.pfn_layers.0"]
    assert [row.layer for row in made.layers] == ["network.neck", "output"]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"head.weight": torch.ones(1)}}, tmp_path / "other.pth")
    with pytest.raises(InputError, match=r"head\.weight"):
        load_detector("own_detector:make", tmp_path / "other.pth")


def test_weights_are_loaded(tmp_path: Path) -> None:
    state = {n: t + 1 for n, t in load_detector("own_detector:make").network.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "own.pth")
    loaded = load_detector("own_detector:make", tmp_path / "own.pth").network.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_files_that_cannot_be_written_end_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ptq", "--dataset", "street", "--runs", str(tmp_path), "--quiet"]
    assert main([*command, "--model", "own_detector:without_form"]) == 1
    shown = capsys.readouterr()
    assert "no ONNX files: the model cannot be exported" in shown.err
    assert "Files        none" in shown.out
    assert (tmp_path / "ptq" / "report.html").is_file()


def test_poor_calibration_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ptq", "--dataset", "street", "--runs", str(tmp_path), "--quiet"]
    command += ["--model", "own_detector:one_value"]
    assert main(command) == 1
    assert "the calibration cannot be right" in capsys.readouterr().err
    assert main([*command, "--allow-poor-calibration"]) == 0


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ptq", "--model", "own_detector:make", "--dataset", "street"]
    command += ["--runs", str(tmp_path)]
    assert main([*command, "--quiet"]) == 0
    assert "2 for tensorrt verified" in capsys.readouterr().out
    assert main([*command, "--seed", "1", "--quantize-head"]) == 2
    assert "--seed, --quantize-head: --model own_detector:make does not read it" in (
        capsys.readouterr().err
    )
    assert main([*command, "--branch", "lidar"]) == 2
    assert "own_detector:make has network and nothing else" in capsys.readouterr().err
    config = str(tmp_path / "ptq")
    assert main(["ptq", "--config", config, "--dataset", "street", "--dry-run"]) == 0
    assert "model own_detector:make" in capsys.readouterr().out

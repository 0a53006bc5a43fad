"""A run of the whole model, and that run on other frames: what is written and what comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_files import digest, summary
from without_pictures import without_pictures

from bev_scenes import street_frame
from bevfusion.model import CONFIGS
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.ptq import FrameBatches, compare_layers, load_run

TINY = CONFIGS["tiny"]
STAGES = ["neck", "camera", "lidar", "fuser", "decoder", "head"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the whole model on one street."""
    runs = tmp_path_factory.mktemp("runs")
    arguments = f"ptq --dataset street --config tiny --runs {runs} --name a"
    with without_pictures(page=True):
        assert main(arguments.split()) == 0
    return runs


def test_the_whole_model_is_compared_at_every_stage(runs: Path) -> None:
    written = summary(runs / "a")
    assert written["branch"] == "all"
    assert [row["stage"] for row in written["stages"]] == STAGES
    assert all(row["sqnr_db"] > 5 and row["cosine"] > 0.8 for row in written["stages"])
    kinds = {row["layer"]: row["kind"] for row in written["layers"]}
    for layer, kind in {
        "encoders.camera.backbone.conv1": "QuantConv2d",
        "encoders.camera.backbone.layer1.0": "Bottleneck",
        "encoders.camera.vtransform.depthnet.6": "QuantConv2d",
        "encoders.lidar.backbone.conv_out.0": "QuantSparseConvolution",
        "fuser": "ConvFuser",
        "decoder.neck.deblocks.1.0": "QuantConvTranspose2d",
        "output": "heatmap",
    }.items():
        assert kinds[layer] == kind
    assert not any(layer.startswith("heads") for layer in kinds)
    assert [row["distance"] for row in written["agreement"]] == [0.5, 1.0, 2.0]
    assert written["labels_found"][0]["labels"] > 5
    assert written["fusion"]["largest_relative_change"] < 1e-3
    reasons = {item["path"]: item["reason"] for item in written["quantization"]["skipped"]}
    assert "NVIDIA" in reasons["heads.object"]


def test_the_page_is_there_and_asks_the_network_for_nothing(runs: Path) -> None:
    page = (runs / "a" / "report.html").read_text(encoding="utf-8")
    assert "CAM_BACK_LEFT" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_other_frames_are_compared_and_the_run_stays_as_it_is(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(runs / "a")
    arguments = f"evaluate --run {runs / 'a'} --dataset street --first 3 --count 2 --runs {runs}"
    assert main(arguments.split()) == 0
    assert digest(runs / "a") == before
    evaluation = runs / "evaluate"
    assert str(evaluation / "report.html") in capsys.readouterr().out
    assert {p.name for p in evaluation.iterdir()} == {
        "summary.json", "config.json", "page.json", "digests.json",
        "report.html", "bev.png", "layers.png",
    }  # fmt: skip
    written = summary(evaluation)
    assert [frame["name"] for frame in written["frames"]] == ["street_3", "street_4"]
    assert written["evaluates"] == str(runs / "a")
    assert written["agreement"][0]["float_detections"] > 10

    with pytest.raises(InputError, match=r"figures of .* and no model"):
        load_run(evaluation)


def test_the_same_frame_gives_the_runs_own_figures(runs: Path) -> None:
    run = load_run(runs / "a")
    frame = street_frame(0, size="tiny", cameras="tiny")
    batches = FrameBatches([frame], TINY, run.quantized_model)
    rows, stages, *_ = compare_layers(run.float_model, run.quantized_model, batches)
    written = summary(runs / "a")
    assert [row.layer for row in rows] == [row["layer"] for row in written["layers"]]
    for row, old in zip(rows, written["layers"], strict=True):
        assert row.sqnr_db == pytest.approx(old["sqnr_db"], rel=1e-6)
    assert [s.row.sqnr_db for s in stages] == pytest.approx(
        [row["sqnr_db"] for row in written["stages"]]
    )


def test_the_float_model_of_a_run_is_the_folded_one(runs: Path) -> None:
    run = load_run(runs / "a")
    with torch.no_grad():
        for name, tensor in run.float_model.state_dict().items():
            assert torch.equal(tensor, run.quantized_model.state_dict()[name]), name
    assert not any("_amax" in name for name in run.float_model.state_dict())


def test_mistakes_leave_everything_as_it_was(
    runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = digest(runs / "a")

    def refused(arguments: str) -> str:
        assert main(arguments.split()) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert sorted(p.name for p in runs.iterdir()) == names
        return captured.err

    names = sorted(p.name for p in runs.iterdir())
    evaluate = f"evaluate --run {runs / 'a'} --runs {runs}"
    assert "no frames given" in refused(evaluate)
    assert "is the run that is read" in refused(f"{evaluate} --dataset street --name a --overwrite")
    assert "cannot be loaded as a run" in refused(
        f"evaluate --run {tmp_path} --runs {runs} --dataset street"
    )
    assert digest(runs / "a") == before

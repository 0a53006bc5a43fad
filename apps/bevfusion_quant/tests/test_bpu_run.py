"""`ptq --target bpu` as a command: what it writes, what it prints, what it gives back."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from bpu_split import TINY, small_frame
from run_files import digest, summary
from without_pictures import without_pictures

from bev_data.datasets import write_frame_folder
from bev_data.metrics import DetectionRules, evaluate_detections
from bev_data.points import Labels
from bevfusion.model import build_model
from bevfusion_quant import InputError
from bevfusion_quant.bpu import load_bpu_run
from bevfusion_quant.cli import main
from bevfusion_quant.ptq import FrameBatches, load_run
from bevfusion_quant.saved_run import read_run_config
from bevquant_hybrid.partition import Plan

FILES = {
    "config.json", "summary.json", "report.html", "plan.json", "partition.svg", "bev.png",
    "layers.png", "weights.safetensors", "page.json", "digests.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of the whole model, beside its frame, and what it printed."""
    runs = tmp_path_factory.mktemp("runs")
    write_frame_folder(runs / "street", small_frame())
    with redirect_stdout(StringIO()) as printed:
        assert main(["ptq", "--target", "bpu", *given(runs), "--name", "a"]) == 0
    return runs, printed.getvalue()


@pytest.fixture(scope="module")
def runs(made: tuple[Path, str]) -> Path:
    return made[0]


def given(runs: Path) -> list[str]:
    return f"--config tiny {frames(runs)}".split()


def frames(runs: Path) -> str:
    return f"--dataset files --data {runs}/street --runs {runs}"


def test_the_folder_holds_plan_picture_and_page(runs: Path) -> None:
    folder = runs / "a"
    assert {p.name for p in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text())
    assert (config["target"], config["march"], config["method"]) == ("bpu", "bayes", "percentile")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert '<section id="bpu"' in page
    assert "no measurement" in page
    svg = (folder / "partition.svg").read_text()
    assert svg.startswith("<svg ")
    assert svg.split("</style>")[1] in page
    assert "bevquant-hybrid" in page


def test_the_plan_is_the_whole_model(runs: Path) -> None:
    plan = Plan.load(runs / "a" / "plan.json")
    assert [s.place for s in plan.segments] == ["CPU", "BPU", "CPU", "BPU", "CPU"]
    on_cpu = {node.path: node.reason for node in plan.nodes if node.place == "CPU" and node.path}
    assert {p for p in on_cpu if p.startswith(("encoders", "heads"))} >= {
        "encoders.lidar.backbone", "encoders.camera.vtransform", "heads.object",
    }  # fmt: skip
    assert "sparse" in on_cpu["encoders.lidar.backbone"]
    model = build_model(TINY)
    dense = {
        path
        for path, module in model.named_modules()
        if isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d))
        and path.startswith(("encoders.camera.backbone", "encoders.camera.neck", "fuser", "deco"))
    }
    assert dense <= {node.path for node in plan.nodes if node.place == "BPU"}
    assert plan.warnings == ()


def test_bytes_across_boundaries_follow_from_the_sizes(runs: Path) -> None:
    height, width = TINY.camera.image_size
    rows, columns = TINY.camera.feature_size
    camera, lidar = TINY.fuser.in_channels
    cells = TINY.head.map_size[0] * TINY.head.map_size[1]
    wanted = {
        "quant_images": 6 * 3 * height * width,
        "dequant_features": 6 * TINY.camera.neck_channels * rows * columns,
        "quant_camera_map": camera * cells,
        "quant_lidar_map": lidar * cells,
        "dequant_map": sum(TINY.decoder.upsample_channels) * cells,
    }
    written = summary(runs / "a")["bpu"]
    assert {b["name"]: b["transfer_bytes"] for b in written["boundaries"]} == wanted
    assert written["transfer_bytes"] == sum(wanted.values())


def test_the_screen_says_what_the_summary_holds(made: tuple[Path, str]) -> None:
    runs, printed = made
    written = summary(runs / "a")
    stage = next(row for row in written["bpu"]["stages"] if row["stage"] == "decoder")
    figures = rf"{stage['fake_sqnr_db']:.1f} +{stage['integer_sqnr_db']:.1f}"
    assert re.search(rf"^Decoder +64 +{figures} ", printed, re.MULTILINE)
    total = f"{written['bpu']['transfer_bytes']:,}"
    assert re.search(rf"^together +{total}$", printed, re.MULTILINE)
    assert "LiDAR encoder: sparse convolutions" in printed
    assert "BPU and CPU, march BAYES" in printed
    assert re.search(r"one core of Journey 5: a roofline .* no measurement", printed)
    assert f"Written to {runs / 'a'}: " in printed
    for name in FILES - {"report.html", "page.json", "digests.json"}:
        assert name in printed
    assert max(map(len, printed.splitlines()[:60])) <= 100


def test_folding_and_placement_are_recorded(runs: Path) -> None:
    written = summary(runs / "a")
    assert written["fusion"]["largest_relative_change"] < 1e-3
    folded = {item["bn"]: item["conv"] for item in written["fusion"]["fused"]}
    model = build_model(TINY)
    norms = {
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.BatchNorm2d)
        and path.startswith(("encoders.camera.backbone", "encoders.camera.neck", "fuser", "deco"))
    }
    assert set(folded) == norms
    assert folded["fuser.1"] == "fuser.0"
    block = "encoders.camera.backbone.layer2.0"
    assert folded[f"{block}.bn3"] == f"{block}.conv3"
    assert folded[f"{block}.downsample.1"] == f"{block}.downsample.0"
    assert written["warnings"] == []


def test_a_loaded_run_computes_the_same(runs: Path) -> None:
    settings = runs / "a/config.json"
    written = settings.read_text()
    settings.write_text(written.replace('"weights": null', '"weights": "w.pth"'))
    loaded = load_bpu_run(runs / "a")  # whose weights came from a file
    settings.write_text(written)
    assert loaded.config.weights == Path("w.pth")
    assert loaded.config.branch == "all"
    batches = FrameBatches([small_frame()], TINY, loaded.units.model)
    with torch.no_grad():
        outputs = [model(*batches[0])["dense_heatmap"] for model in loaded.models]
    wanted = {row["stage"]: row for row in summary(runs / "a")["bpu"]["stages"]}["head"]
    for form, name in ((1, "fake"), (2, "integer")):
        noise = (outputs[form] - outputs[0]).double().square().sum()
        ratio = 10 * torch.log10(outputs[0].double().square().sum() / noise)
        assert float(ratio) == pytest.approx(wanted[f"{name}_sqnr_db"], rel=1e-6)


def test_simulate_gives_the_runs_own_figures_and_leaves_it_alone(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(runs / "a")
    assert main(f"simulate --run {runs}/a {frames(runs)}".split()) == 0
    assert digest(runs / "a") == before
    again = runs / "simulate"
    assert {p.name for p in again.iterdir()} == FILES - {"weights.safetensors"}
    here, there = summary(runs / "a"), summary(again)
    assert here["bpu"] == there["bpu"]
    assert here["stages"] == there["stages"]
    assert there["evaluates"] == str(runs / "a")
    assert re.search(
        r"^stage +channels +fake dB +integer dB", capsys.readouterr().out, re.MULTILINE
    )
    assert '<section id="bpu"' in (again / "report.html").read_text(encoding="utf-8")


def test_all_three_models_are_judged_by_labels(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The labels are what the float model is surest of, so that it finds them all."""
    loaded = load_bpu_run(runs / "a")
    model, frame = loaded.units.model, small_frame()
    batch = FrameBatches([frame], TINY, model)[0]
    with torch.no_grad():
        found = [model.head.decode(form(*batch))[0] for form in loaded.models]
    sure = np.argsort(-found[0].scores)[:30]
    names = tuple(TINY.head.classes[label] for label in found[0].labels[sure])
    labels = Labels(found[0].boxes[sure], names)
    write_frame_folder(runs / "sure", replace(frame, labels=labels))
    data = f"--dataset files --data {runs}/sure --runs {runs} --name judged --resamples 20"
    with without_pictures(page=True):
        assert main(f"evaluate --run {runs}/a {data}".split()) == 0
    assert "Against labels" in capsys.readouterr().out
    page = (runs / "judged/report.html").read_text(encoding="utf-8")
    assert 'class="box integer"' in page
    written = summary(runs / "judged")["accuracy"]
    assert list(written["models"]) == ["float", "quantized", "integer"]
    assert written["bootstrap"]["resamples"] == 20
    low_x, low_y, _, high_x, high_y, _ = TINY.lidar.point_cloud_range
    rules = DetectionRules(extent=(low_x, low_y, high_x, high_y))
    for told, own in zip(written["models"].values(), found, strict=True):
        wanted = evaluate_detections([own], [labels], rules=rules)
        assert told["labels"] == wanted.labels > 5
        assert told["mean_ap"] == wanted.mean_ap
        assert told["errors"]["ASE"] == wanted.errors["ASE"]
    means = [told["mean_ap"] for told in written["models"].values()]
    assert len(set(means)) == 3
    assert means[0] > 0.9
    assert means[0] == max(means)


def test_runs_that_are_not_what_they_seem_are_refused(runs: Path) -> None:
    assert read_run_config(runs / "a")["target"] == "bpu"
    with pytest.raises(InputError, match=r"load_bpu_run.*bevfusion-quant evaluate"):
        load_run(runs / "a")
    weights = runs / "a" / "weights.safetensors"
    saved = weights.read_bytes()
    try:
        weights.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
        with pytest.raises(InputError, match="not the file that the run wrote"):
            load_bpu_run(runs / "a")
    finally:
        weights.write_bytes(saved)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_bpu_run(runs / "street")

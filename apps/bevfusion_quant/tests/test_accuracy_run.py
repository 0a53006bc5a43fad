"""Runs judged by labels; on a miniature in nuScenes' format, by labels that the model finds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from metric_scenes import detections, labels
from nuscenes_mini import LIDAR, about_z, ego_at, quaternion, write_mini
from run_files import summary
from without_pictures import without_pictures

from bev_data.metrics import (
    AccuracyAccumulator,
    DetectionRules,
    accuracy_text,
    evaluate_detections,
)
from bevfusion.model import CONFIGS
from bevfusion.model.head import NUSCENES_CLASSES, Detections
from bevfusion_quant.cli import main
from bevfusion_quant.datasets import labelled_region, open_dataset, range_origin, scene_name
from bevfusion_quant.ptq import FrameBatches, load_run
from bevfusion_quant.saved_run import LoadedRun
from bevquant_int8sim import IntegerModel, simulate

TINY = CONFIGS["tiny"]
TIMES = (10.0, 10.25, 30.0, 30.25)  # of the miniature's keyframes
LABELS = 40
CATEGORIES = {
    **{name: f"vehicle.{name}" for name in ("car", "truck", "trailer", "motorcycle", "bicycle")},
    "bus": "vehicle.bus.rigid",
    "construction_vehicle": "vehicle.construction",
    "pedestrian": "human.pedestrian.adult",
    "traffic_cone": "movable_object.trafficcone",
    "barrier": "movable_object.barrier",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that quantizes the fuser, which is soon done, in the whole model."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = f"ptq --dataset street --config tiny --branch fuser --runs {folder} --name a"
    with without_pictures():
        assert main(arguments.split()) == 0
    return folder


@pytest.fixture(scope="module")
def root(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature, its labels exactly what the run's float model is surest of."""
    pytest.importorskip("nuscenes.nuscenes", reason="no nuscenes-devkit", exc_type=ImportError)
    folder = write_mini(tmp_path_factory.mktemp("nuscenes"))
    found = float_detections(runs, folder)
    reach = np.array([DetectionRules().reach(name) for name in NUSCENES_CLASSES])
    origin = range_origin("nuscenes")
    near = [np.hypot(*(d.boxes[:, :2] - origin).T) < reach[d.labels] - 1e-3 for d in found]
    scores = np.concatenate([d.scores[kept] for d, kept in zip(found, near, strict=True)])
    least = np.sort(scores)[-LABELS]
    samples = json.loads((folder / "v1.0-mini/sample.json").read_text())
    categories = [{"token": n, "name": n, "description": ""} for n in CATEGORIES.values()]
    annotations, instances = [], []
    for sample, time, seen, kept in zip(samples, TIMES, found, near, strict=True):
        for row in np.flatnonzero(kept & (seen.scores >= least)):
            name = NUSCENES_CLASSES[seen.labels[row]]
            token = f"{sample['token']}/{row}"
            instances.append(
                {
                    "token": token,
                    "category_token": CATEGORIES[name],
                    "nbr_annotations": 1,
                    "first_annotation_token": token,
                    "last_annotation_token": token,
                }
            )
            annotations.append({
                "token": token, "sample_token": sample["token"], "instance_token": token,
                "visibility_token": "4", "attribute_tokens": [], "prev": "", "next": "",
                **in_the_world(seen.boxes[row], time), "num_lidar_pts": 5, "num_radar_pts": 0,
            })  # fmt: skip
    for name, rows in (("sample_annotation", annotations), ("instance", instances),
                       ("category", categories)):  # fmt: skip
        (folder / f"v1.0-mini/{name}.json").write_text(json.dumps(rows))
    return folder


def in_the_world(box: np.ndarray, time: float) -> dict[str, list[float]]:
    """A box of the scanner's frame as nuScenes writes it."""
    x, y, z, length, width, height, yaw = map(float, box)
    motion = ego_at(time) @ LIDAR @ about_z(yaw, x, y, z)
    return {
        "translation": motion[:3, 3].tolist(),
        "rotation": quaternion(motion[:3, :3]),
        "size": [width, length, height],
    }


def decoded(run: LoadedRun, model: torch.nn.Module, root: Path) -> list[Detections]:
    batches = FrameBatches(open_dataset("nuscenes", root), TINY, run.float_model)
    with torch.no_grad():
        return [run.float_model.head.decode(model(*batch))[0] for batch in batches]


def float_detections(runs: Path, root: Path) -> list[Detections]:
    run = load_run(runs / "a")
    return decoded(run, run.float_model, root)


def test_a_model_is_found_right_on_the_labels_it_made(
    runs: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"evaluate --run {runs / 'a'} --dataset nuscenes --data {root} --runs {runs}"
    assert main([*arguments.split(), "--name", "mini", "--resamples", "50"]) == 0
    printed = capsys.readouterr().out
    written = summary(runs / "mini")["accuracy"]
    assert (written["frames"], written["labels"]) == (4, LABELS)
    assert written["bootstrap"] == {"draws": "scenes", "resamples": 50, "seed": 0, "level": 0.95}
    real, quantized = written["models"]["float"], written["models"]["quantized"]
    # What lies behind the last label costs the last of 90 recalls alone.
    assert real["mean_ap"] > 0.98
    assert real["errors"]["ATE"] < 1e-4
    assert real["errors"]["AOE"] < 1e-4
    assert real["errors"]["AVE"] is None  # an object seen once has no velocity
    assert real["missing"] == ["AVE", "AAE"]
    assert real["interval"]["scenes"] == 2
    assert quantized["mean_ap"] < real["mean_ap"]
    assert quantized["difference"]["mean_ap"] == pytest.approx(
        quantized["mean_ap"] - real["mean_ap"]
    )
    assert real["difference"] is None
    assert f"{LABELS} labelled objects in 4 frames." in printed
    assert "50 bootstrap resamples of 2 scenes" in printed
    assert f"{100 * quantized['mean_ap']:.2f}" in printed
    page = (runs / "mini/report.html").read_text(encoding="utf-8")
    assert "Precision over recall" in page
    assert page.count('class="curve quantized"') >= 5


def test_what_is_written_is_what_the_functions_say(runs: Path, root: Path) -> None:
    frames = open_dataset("nuscenes", root)
    low_x, low_y, _, high_x, high_y, _ = TINY.lidar.point_cloud_range
    wanted = evaluate_detections(
        float_detections(runs, root),
        [frame.labels for frame in frames],
        rules=DetectionRules(
            extent=(low_x, low_y, high_x, high_y), origin=range_origin("nuscenes")
        ),
    )
    assert wanted.mean_ap > 0.98
    assert wanted.labels == LABELS


@pytest.mark.parametrize(("split", "numbers"), [("mini_train", (0, 1)), ("mini_val", (2, 3))])
def test_the_devkits_whole_evaluation_says_the_same(
    runs: Path, root: Path, tmp_path: Path, split: str, numbers: tuple[int, int]
) -> None:
    """Boxes of the quantized model, handed in as a result file, in the world's coordinates."""
    devkit = importlib.import_module("nuscenes.nuscenes")
    evaluation = importlib.import_module("nuscenes.eval.detection.evaluate")
    config = importlib.import_module("nuscenes.eval.detection.config")
    frames = open_dataset("nuscenes", root)
    run = load_run(runs / "a")
    found = decoded(run, run.quantized_model, root)
    samples = json.loads((root / "v1.0-mini/sample.json").read_text())
    results = {
        samples[number]["token"]: [
            {
                "sample_token": samples[number]["token"],
                **in_the_world(row[0], TIMES[number]),
                "velocity": [0.0, 0.0],
                "detection_name": NUSCENES_CLASSES[row[2]],
                "detection_score": float(row[1]),
                "attribute_name": "",
            }
            for row in zip(*found[number], strict=True)
        ]
        for number in numbers
    }
    (tmp_path / "results.json").write_text(json.dumps({"results": results, "meta": {}}))
    theirs, _ = evaluation.DetectionEval(
        devkit.NuScenes("v1.0-mini", str(root), verbose=False),
        config.config_factory("detection_cvpr_2019"),
        str(tmp_path / "results.json"),
        split,
        str(tmp_path / "theirs"),
        verbose=False,
    ).evaluate()
    ours = evaluate_detections(
        [found[number] for number in numbers],
        [frames[number].labels for number in numbers],
        rules=DetectionRules(absent="zero", origin=range_origin("nuscenes")),
    )
    assert 0.05 < ours.mean_ap < 0.95
    assert ours.mean_ap == pytest.approx(theirs.mean_ap, abs=1e-9)
    # The scanner leans by a degree, and with it the plane in which distances are measured.
    assert ours.errors["ATE"] == pytest.approx(theirs.tp_errors["trans_err"], abs=1e-3)
    assert ours.errors["ASE"] == pytest.approx(theirs.tp_errors["scale_err"], abs=1e-4)
    assert ours.errors["AOE"] == pytest.approx(theirs.tp_errors["orient_err"], abs=1e-3)


def test_integers_stand_beside_float_and_quantized(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"simulate --run {runs / 'a'} --dataset street --first 9 --runs {runs}"
    with without_pictures(page=True):
        assert main([*arguments.split(), "--resamples", "20"]) == 0
    written = summary(runs / "simulate")["accuracy"]
    assert list(written["models"]) == ["float", "quantized", "integer"]
    assert written["labels"] > 10
    assert len({model["labels"] for model in written["models"].values()}) == 1
    assert written["bootstrap"]["draws"] == "frames"
    assert "less float" in capsys.readouterr().out
    page = (runs / "simulate/report.html").read_text(encoding="utf-8")
    assert 'class="box integer"' in page
    assert 'class="box label"' in page
    # The whole detector is one file, its view transform's operator included.
    run = load_run(runs / "a")
    batch = FrameBatches(
        open_dataset("street", first_seed=9, count=1, size="tiny", cameras="tiny"),
        TINY,
        run.quantized_model,
    )[0]
    saved = IntegerModel.load(runs / "simulate/integer/model", operators=["bevfusion"])
    made, expected = saved(*batch), simulate(run.quantized_model, tuple(batch))(*batch)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)


def test_frames_without_labels_are_passed_over() -> None:
    accumulator = AccuracyAccumulator(NUSCENES_CLASSES)
    assert accumulator.result() is None
    found, there = detections((0, 5, "car", 0.5)), labels((0, 5, "car"))
    accumulator.add("float", 0, "bare", found, None)
    assert accumulator.result() is None
    accumulator.add("float", 1, "labelled", found, there)
    got = accumulator.result()
    assert (got.unlabelled, got.reference.frames, got.reference.mean_ap) == (1, 1, 1.0)
    assert [sketch.frame for sketch in got.sketches] == ["labelled"]
    assert got.models[0].difference is None
    text = accuracy_text(got)
    assert "1 labelled object in 1 frame, 1 more without labels." in text
    assert "No intervals" in text


def test_the_data_set_says_where_labels_are_and_what_is_drawn() -> None:
    there = labels((0, 9, "car"), (9, 9, "car"))
    found = detections((0, 9, "car", 0.5), (0, -9, "car", 0.9), (9, 9.5, "car", 0.8))
    results = {}
    for kind in ("kitti", "nuscenes", None):
        accumulator = AccuracyAccumulator(NUSCENES_CLASSES, dataset=kind)
        for index in range(4):
            accumulator.add("float", index, f"scene-{index // 2}_{index}", found, there)
        results[kind] = accumulator.result()
    ahead = results["kitti"]
    assert (ahead.reference.labels, ahead.reference.classes[0].detections) == (4, 4)
    assert (ahead.reference.mean_ap, ahead.drawn) == (1.0, "frames")
    scenes = results["nuscenes"]
    assert (scenes.drawn, scenes.reference.interval.scenes) == ("scenes", 2)
    assert scenes.reference.classes[0].detections == 12
    assert (results[None].drawn, results[None].reference.interval.scenes) == ("frames", 4)


def test_mistakes_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate = f"evaluate --run {runs / 'a'} --dataset street --runs {runs} --name never"
    assert main([*evaluate.split(), "--resamples", "-1"]) == 2
    assert "must be from 0 to" in capsys.readouterr().err
    assert not (runs / "never").exists()


def test_kitti_is_labelled_ahead_and_frames_of_nuscenes_belong_to_scenes() -> None:
    boxes = np.array([[0.0, 5, 0], [0, -5, 0], [4.2, 5, 0], [-4.4, 5, 0]])
    assert labelled_region("kitti")(boxes).tolist() == [True, False, True, False]
    assert labelled_region("street") is None
    assert labelled_region(None) is None
    assert scene_name("nuscenes", "scene-0103_12") == "scene-0103"
    assert scene_name("kitti", "000012") is None

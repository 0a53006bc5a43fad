"""nuScenes' metrics against nuscenes-devkit's own functions on the same boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from metric_scenes import random_frames

from bev_data.boxes import NUSCENES_CLASSES, Detections
from bev_data.metrics import ERRORS, DetectionRules, evaluate_detections
from bev_data.points import Labels

WHY = "nuscenes-devkit is not installed: pip install nuscenes-devkit"
algo = pytest.importorskip("nuscenes.eval.detection.algo", reason=WHY, exc_type=ImportError)
common = pytest.importorskip("nuscenes.eval.common.data_classes", reason=WHY, exc_type=ImportError)
boxes = pytest.importorskip("nuscenes.eval.detection.data_classes", reason=WHY)
config = pytest.importorskip("nuscenes.eval.detection.config", reason=WHY)
distance = pytest.importorskip("nuscenes.eval.common.utils", reason=WHY).center_distance

THEIR_ERRORS = dict(zip(ERRORS, ("trans_err", "scale_err", "orient_err", "vel_err"), strict=True))
EXACT = {"rel": 0, "abs": 1e-12}


def theirs(row: np.ndarray, name: str, velocity: np.ndarray, score: float, token: str) -> object:
    x, y, z, length, width, height, yaw = map(float, row)
    return boxes.DetectionBox(
        sample_token=token,
        translation=(x, y, z),
        size=(width, length, height),
        rotation=(math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)),
        velocity=tuple(map(float, velocity)),
        detection_name=name,
        detection_score=float(score),
    )


def their_boxes(
    found: list[Detections], there: list[Labels], rules: DetectionRules
) -> tuple[object, object]:
    """Both as the devkit has them, what is out of range left out."""
    sides = common.EvalBoxes(), common.EvalBoxes()
    for index, (seen, real) in enumerate(zip(found, there, strict=True)):
        token = f"{index}"
        kinds = [NUSCENES_CLASSES[n] for n in seen.labels]
        truth = [
            theirs(*row, -1.0, token)
            for row in zip(real.boxes, real.names, real.velocities, strict=True)
        ]
        guess = [
            theirs(box, name, velocity, score, token)
            for box, name, velocity, score in zip(
                seen.boxes, kinds, seen.velocities, seen.scores, strict=True
            )
        ]
        for side, rows in zip(sides, (truth, guess), strict=True):
            near = [
                box
                for box in rows
                if np.hypot(*box.translation[:2]) < rules.reach(box.detection_name)
            ]
            side.add_boxes(token, near)
    return sides


def their_metrics(found: list[Detections], there: list[Labels], rules: DetectionRules) -> object:
    """What `DetectionEval.evaluate` does with its own functions."""
    settings = config.config_factory("detection_cvpr_2019")
    metrics = boxes.DetectionMetrics(settings)
    truth, guess = their_boxes(found, there, rules)
    for name in settings.class_names:
        for limit in settings.dist_ths:
            data = algo.accumulate(truth, guess, name, distance, limit)
            ap = algo.calc_ap(data, settings.min_recall, settings.min_precision)
            metrics.add_label_ap(name, limit, ap)
            if limit == settings.dist_th_tp:
                for error in THEIR_ERRORS.values():
                    value = algo.calc_tp(data, settings.min_recall, error)
                    metrics.add_label_tp(name, error, value)
    for error in ("vel_err", "orient_err"):
        metrics.add_label_tp("traffic_cone", error, np.nan)
    metrics.add_label_tp("barrier", "vel_err", np.nan)
    for name in settings.class_names:
        metrics.add_label_tp(name, "attr_err", np.nan)
    return metrics


@pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning")  # no attributes anywhere
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_figure_is_the_devkits(seed: int, ties: bool) -> None:
    rules = DetectionRules(absent="zero")
    classes = NUSCENES_CLASSES[:: 1 + seed % 3]  # some classes have no labels
    found, there = random_frames(seed, 16, classes=classes, ties=ties)
    found = [
        d._replace(labels=np.array([NUSCENES_CLASSES.index(classes[n]) for n in d.labels], int))
        for d in found
    ]
    wanted = their_metrics(found, there, rules)
    got = evaluate_detections(found, there, rules=rules)
    assert 0.01 < got.mean_ap < 0.9
    for row in got.classes:
        for limit, ap in row.average_precision.items():
            assert ap == pytest.approx(wanted.get_label_ap(row.name, limit), **EXACT)
        for error, name in THEIR_ERRORS.items():
            value = wanted.get_label_tp(row.name, name)
            if row.errors[error] is None:
                assert np.isnan(value)
            else:
                assert row.errors[error] == pytest.approx(value, **EXACT), (row.name, error)
    assert got.mean_ap == pytest.approx(wanted.mean_ap, **EXACT)
    scores = []
    for error, name in THEIR_ERRORS.items():
        assert got.errors[error] == pytest.approx(wanted.tp_errors[name], **EXACT)
        scores.append(max(0.0, 1 - wanted.tp_errors[name]))
    assert got.nds == pytest.approx((5 * wanted.mean_ap + sum(scores)) / 9, **EXACT)
    assert got.missing == ("AAE",)


def test_the_curve_is_the_devkits_at_every_recall() -> None:
    rules = DetectionRules()
    found, there = random_frames(7, 20, classes=("car", "truck"))
    truth, guess = their_boxes(found, there, rules)
    got = evaluate_detections(found, there)
    for row in got.classes[:2]:
        for limit, precision in row.precision.items():
            data = algo.accumulate(truth, guess, row.name, distance, limit)
            np.testing.assert_allclose(precision, data.precision, rtol=0, atol=1e-15)


def test_settings_are_the_devkits() -> None:
    rules, settings = DetectionRules(), config.config_factory("detection_cvpr_2019")
    assert dict(rules.class_ranges) == settings.class_range
    assert list(rules.distances) == settings.dist_ths
    assert rules.error_distance == settings.dist_th_tp
    assert (rules.min_recall, rules.min_precision) == (settings.min_recall, settings.min_precision)

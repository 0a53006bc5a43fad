"""Decoding against an inverse that is written from mmdetection3d's box definition."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bev_data import InputError
from bevfusion.model.head import HeadConfig, decode

CONFIG = HeadConfig()
BOXES = np.array(
    [
        [10.0, -20.0, 0.5, 4.5, 1.9, 1.6, 0.3],
        [-31.3, 44.4, -1.0, 0.6, 0.7, 1.8, -3.0],
        [0.0, 0.0, 1.5, 12.0, 2.9, 3.5, math.pi / 2],
        [53.9, 0.1, 0.0, 2.0, 0.8, 1.1, -math.pi / 2],
        [5.0, 5.0, -2.0, 0.4, 0.4, 0.9, 3.1],
    ]
)
LABELS = [0, 8, 3, 6, 9]


def encode(boxes: np.ndarray, labels: list[int], config: HeadConfig = CONFIG) -> dict[str, Tensor]:
    """Outputs of a head that has found `boxes` with certainty, one frame.

    mmdetection3d 0.x: nuScenes' box (centre, width-length-height, yaw ψ) becomes (centre taken for
    the bottom, w, l, h, −ψ − π/2); targets are cells, bottom + h/2, logarithms, sine and cosine.
    """
    x, y, z, length, width, height, yaw = boxes.T
    turned = -yaw - math.pi / 2
    values = {
        "center": [
            (x + 54.0) / (8 * config.voxel_size[0]),
            (y + 54.0) / (8 * config.voxel_size[1]),
        ],
        "height": [z + 0.5 * height],
        "dim": [np.log(width), np.log(length), np.log(height)],
        "rot": [np.sin(turned), np.cos(turned)],
        "vel": [x / 10, -y / 10],
    }
    outputs = {name: torch.tensor(np.array([rows])) for name, rows in values.items()}
    certain = torch.full((1, config.num_classes, len(boxes)), 50.0)
    outputs["heatmap"] = certain
    outputs["query_heatmap_score"] = torch.linspace(0.9, 0.1, len(boxes)).expand_as(certain)
    outputs["query_labels"] = torch.tensor([labels])
    return outputs


def corners(box: np.ndarray) -> np.ndarray:
    """The eight corners of a box in this package's convention, [8, 3]."""
    x, y, z, length, width, height, yaw = box
    along = np.array([math.cos(yaw), math.sin(yaw), 0.0]) * length / 2
    across = np.array([-math.sin(yaw), math.cos(yaw), 0.0]) * width / 2
    up = np.array([0.0, 0.0, height / 2])
    signs = [(a, b, c) for a in (1, -1) for b in (1, -1) for c in (1, -1)]
    return np.array([np.array([x, y, z]) + a * along + b * across + c * up for a, b, c in signs])


def mmdet_corners(box: np.ndarray) -> np.ndarray:
    """The same of mmdetection3d's (x, y, bottom z, w, l, h, yaw): rotated clockwise by yaw."""
    x, y, z, size_x, size_y, size_z, yaw = box
    signs = [(a, b, c) for a in (1, -1) for b in (1, -1) for c in (0, 1)]
    local = np.array([(a * size_x / 2, b * size_y / 2, c * size_z) for a, b, c in signs])
    turn = np.array(
        [[math.cos(yaw), -math.sin(yaw), 0], [math.sin(yaw), math.cos(yaw), 0], [0, 0, 1]]
    )
    return local @ turn + [x, y, z]


def as_sets(points: np.ndarray) -> np.ndarray:
    return points[np.lexsort(points.round(4).T)]


def test_a_decoded_box_is_the_encoded_one() -> None:
    (found,) = decode(encode(BOXES, LABELS), CONFIG)
    np.testing.assert_allclose(found.boxes, BOXES, rtol=0, atol=1e-5)
    assert found.labels.tolist() == LABELS
    np.testing.assert_allclose(found.scores, np.linspace(0.9, 0.1, 5), atol=1e-6)
    np.testing.assert_allclose(found.velocities, BOXES[:, :2] * [0.1, -0.1], atol=1e-6)
    kinds = [array.dtype for array in found]
    assert kinds == [np.float32, np.float32, np.int64, np.float32]


def test_it_is_the_same_solid_as_mmdetection3ds() -> None:
    outputs = encode(BOXES, LABELS)
    (found,) = decode(outputs, CONFIG)
    for row, box in enumerate(found.boxes):
        width, length, height = outputs["dim"][0, :, row].exp().tolist()
        sine, cosine = outputs["rot"][0, :, row].tolist()
        center = outputs["center"][0, :, row] * 0.6 - 54.0
        # visualize.py of mit-bevfusion: half a height below what its coder gives is the bottom.
        bottom = outputs["height"][0, 0, row].item() - height / 2 - height / 2
        solid = [*center.tolist(), bottom, width, length, height, math.atan2(sine, cosine)]
        np.testing.assert_allclose(
            as_sets(corners(box)), as_sets(mmdet_corners(np.array(solid))), atol=1e-4
        )


def test_larger_cells_have_their_own_size() -> None:
    coarse = HeadConfig(map_size=(45, 45), voxel_size=(0.3, 0.3))
    (found,) = decode(encode(BOXES, LABELS, coarse), coarse)
    np.testing.assert_allclose(found.boxes, BOXES, rtol=0, atol=1e-5)


def test_the_score_is_the_product_of_both_heatmaps_at_the_querys_class() -> None:
    outputs = encode(BOXES[:2], [0, 8])
    outputs["heatmap"] = torch.full((1, 10, 2), 9.0)
    outputs["heatmap"][0, 0, 0], outputs["heatmap"][0, 8, 1] = 0.0, math.log(3.0)
    outputs["query_heatmap_score"] = torch.full((1, 10, 2), 0.99)
    outputs["query_heatmap_score"][0, 0, 0], outputs["query_heatmap_score"][0, 8, 1] = 0.4, 0.8
    (found,) = decode(outputs, CONFIG)
    np.testing.assert_allclose(found.scores, [0.75 * 0.8, 0.5 * 0.4], rtol=1e-6)
    assert found.labels.tolist() == [8, 0]


def test_frames_are_decoded_by_themselves() -> None:
    one, two = encode(BOXES, LABELS), encode(BOXES[::-1].copy(), LABELS)
    batch = decode({name: torch.cat([one[name], two[name]]) for name in one}, CONFIG)
    for found, alone in zip(batch, (one, two), strict=True):
        np.testing.assert_array_equal(found.boxes, decode(alone, CONFIG)[0].boxes)


def test_threshold_and_range_drop_boxes() -> None:
    far = BOXES.copy()
    far[0, 0], far[1, 2] = 61.3, -10.1
    (found,) = decode(encode(far, LABELS), CONFIG, score_threshold=0.25)
    # Scores are 0.9, 0.7, 0.5, 0.3, 0.1: two are out of range, one is below.
    np.testing.assert_allclose(found.scores, [0.5, 0.3], atol=1e-6)


def test_a_score_of_exactly_zero_is_no_detection() -> None:
    outputs = encode(BOXES, LABELS)
    outputs["query_heatmap_score"] = torch.zeros(1, 10, 5)
    (found,) = decode(outputs, CONFIG)
    assert [array.shape for array in found] == [(0, 7), (0,), (0,), (0, 2)]


def test_nan_and_infinite_boxes_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    outputs = encode(BOXES, LABELS)
    outputs["center"][0, 0, 0] = torch.nan
    outputs["dim"][0, 1, 1] = 1e4  # e^10000
    outputs["heatmap"][0, 3, 2] = torch.nan
    outputs["vel"][0, 1, 3] = torch.inf
    with caplog.at_level(logging.WARNING):
        (found,) = decode(outputs, CONFIG)
    np.testing.assert_allclose(found.boxes, BOXES[4:], atol=1e-5)
    assert "4 of 5 boxes" in caplog.text


def test_no_queries_give_no_detections() -> None:
    empty = {name: t[..., :0] for name, t in encode(BOXES, LABELS).items()}
    (found,) = decode(empty, CONFIG)
    assert len(found.boxes) == 0


@pytest.mark.parametrize(("nms", "kept"), [("none", [0, 1, 2, 3]), ("circle", [0, 2, 3]),
                                           ("rotated", [0, 2, 3])])  # fmt: skip
def test_suppression_stays_inside_a_class_and_the_named_classes(nms: str, kept: list[int]) -> None:
    boxes = np.repeat(BOXES[1:2], 4, 0)
    boxes[:, 0] += [0.0, 0.1, 0.0, 0.0]
    config = dataclasses.replace(CONFIG, nms=nms)
    outputs = encode(boxes, [8, 8, 9, 0])
    (found,) = decode(outputs, config)
    scores = outputs["query_heatmap_score"][0, 0, kept].numpy()
    np.testing.assert_allclose(found.scores, scores, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dim": None}, "no 'dim'"),
        ({"rot": torch.zeros(1, 2, 4)}, r"rot must be \[1, 2, 5\].*\[1, 2, 4\]"),
        ({"query_labels": torch.tensor([[0, 1, 2, 3, 10]])}, "from 0 to 9"),
        ({"query_labels": torch.tensor([0])}, r"\[batch, queries\]"),
    ],
)
def test_outputs_that_do_not_fit_are_named(change: dict[str, Tensor | None], said: str) -> None:
    outputs = {**encode(BOXES, LABELS), **change}
    with pytest.raises(InputError, match=said):
        decode({name: t for name, t in outputs.items() if t is not None}, CONFIG)

"""Targets, heatmaps and the matching, each against its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bev_data import InputError
from bev_data.points import Labels
from bevfusion.model.head import HeadConfig, decode, rotated_iou
from bevfusion.training import (
    Targets,
    assign,
    encode_boxes,
    gaussian_radius,
    heatmap_target,
    matching_cost,
    targets_of,
)

CONFIG = HeadConfig(map_size=(20, 30), voxel_size=(0.1, 0.2), origin=(-8.0, -24.0), num_queries=6)


def boxes_of(seed: int, count: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    xyz = np.array([-7.9, -23.9, -3]) + generator.random((count, 3)) * [15.8, 47.8, 4]
    sizes = 0.3 + 5 * generator.random((count, 3))
    return np.concatenate([xyz, sizes, generator.uniform(-3.1, 3.1, (count, 1))], 1).astype("f4")


def test_what_is_encoded_decodes_to_the_same_boxes() -> None:
    boxes = boxes_of(0, 6)
    velocities = np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)
    code = encode_boxes(Targets(boxes, velocities, np.arange(6)), CONFIG)
    parts = np.split(code.T[None].astype(np.float64), [2, 3, 6, 8], axis=1)
    names = ("center", "height", "dim", "rot", "vel")
    outputs = {name: torch.from_numpy(part) for name, part in zip(names, parts, strict=True)}
    outputs["heatmap"] = torch.linspace(3, -3, 6, dtype=torch.float64).expand(1, 10, 6)
    outputs["query_heatmap_score"] = torch.ones(1, 10, 6, dtype=torch.float64)
    outputs["query_labels"] = torch.zeros(1, 6, dtype=torch.int64)
    (found,) = decode(outputs, CONFIG)
    np.testing.assert_allclose(found.boxes, boxes, atol=2e-5)
    np.testing.assert_allclose(found.velocities, velocities, atol=1e-6)


def test_only_what_the_head_can_find_is_a_target() -> None:
    boxes = boxes_of(2, 5)
    boxes[1, :2] = 8.0, 0.0  # on the map's upper edge, which is outside
    names = ("car", "car", "unicorn", "pedestrian", "bus")
    counts = np.array([3, 3, 3, 0, 1], np.int32)
    found = targets_of(Labels(boxes, names, num_points=counts), CONFIG)
    assert found.classes.tolist() == [0, 3]
    np.testing.assert_array_equal(found.boxes, boxes[[0, 4]])
    assert np.isnan(found.velocities).all()


@given(
    st.floats(0.2, 40), st.floats(0.2, 40), st.sampled_from([0.1, 0.3, 0.5, 0.7])
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_the_radius_keeps_the_overlap_in_all_three_cases(
    length: float, width: float, least: float
) -> None:
    r = gaussian_radius(length, width, least)
    area = length * width
    inner = max(length - r, 0) * max(width - r, 0)
    overlaps = [
        inner / (2 * area - inner),
        max(length - 2 * r, 0) * max(width - 2 * r, 0) / area,
        area / ((length + 2 * r) * (width + 2 * r)),
    ]
    assert min(overlaps) == pytest.approx(least, rel=1e-9)


def test_the_heatmap_is_the_largest_gaussian_of_each_cell() -> None:
    generator = np.random.default_rng(3)
    boxes = boxes_of(3, 12)
    boxes[0, :2] = -7.99, -23.99  # a corner of the map
    boxes[1, 3:5] = 14.0, 9.0
    classes = generator.integers(0, 3, 12)
    got = heatmap_target(Targets(boxes, np.zeros((12, 2), "f4"), classes), CONFIG)
    wanted = np.zeros((10, 20, 30))
    for (x, y, _, length, width, *_), label in zip(boxes.astype(float), classes, strict=True):
        i0, j0 = int((x + 8) / 0.8), int((y + 24) / 1.6)
        r = max(1, int(gaussian_radius(length / 0.8, width / 1.6)))
        for i, j in itertools.product(range(20), range(30)):
            if abs(i - i0) <= r and abs(j - j0) <= r:
                squared = (i - i0) ** 2 + (j - j0) ** 2
                value = np.exp(-squared / (2 * ((2 * r + 1) / 6) ** 2))
                wanted[label, i, j] = max(wanted[label, i, j], value)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert ((got == 1) == (wanted == 1)).all()


def test_cells_of_mit_bevfusion_have_its_least_radius() -> None:
    box = np.array([[0.1, 0.1, 0, 0.4, 0.4, 1, 0]], np.float32)
    drawn = heatmap_target(Targets(box, np.zeros((1, 2), "f4"), np.array([8])), HeadConfig())
    assert (drawn[8] > 0).sum() == 25  # two cells to each side


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_matching_is_the_cheapest_of_all(rows: int, columns: int, seed: int) -> None:
    cost = np.random.default_rng(seed).integers(-5, 6, (rows, columns)).astype(float)
    left, right = assign(cost)
    assert len(left) == len(right) == min(rows, columns)
    assert len(set(left)) == len(left)
    assert len(set(right)) == len(right)
    assert list(left) == sorted(left)
    tall = cost if rows >= columns else cost.T
    best = min(
        sum(tall[row, column] for column, row in enumerate(order))
        for order in itertools.permutations(range(tall.shape[0]), tall.shape[1])
    )
    assert cost[left, right].sum() == best


def test_a_cost_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="NaN or infinity"):
        assign([[1.0, float("nan")]])
    with pytest.raises(InputError, match="must be a matrix"):
        assign([1.0, 2.0])


def test_the_cost_is_its_formula() -> None:
    generator = np.random.default_rng(6)
    probabilities = generator.random((4, 10))
    probabilities[0, 0] = 0.0
    predicted, boxes = boxes_of(7, 4).astype(float), boxes_of(8, 3).astype(float)
    predicted[0] = boxes[0]
    classes = np.array([0, 4, 9])
    got = matching_cost(probabilities, predicted, boxes, classes, (16.0, 48.0))
    for q, o in itertools.product(range(4), range(3)):
        p = probabilities[q, classes[o]]
        focal = -0.25 * (1 - p) ** 2 * np.log(p + 1e-12) + 0.75 * p**2 * np.log(1 - p + 1e-12)
        apart = abs(predicted[q, 0] - boxes[o, 0]) / 16 + abs(predicted[q, 1] - boxes[o, 1]) / 48
        overlap = rotated_iou(predicted[q : q + 1], boxes[o : o + 1])[0, 0]
        assert got[q, o] == pytest.approx(0.15 * focal + 0.25 * apart - 0.25 * overlap, rel=1e-9)

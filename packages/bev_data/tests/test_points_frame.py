from __future__ import annotations

import numpy as np
import pytest

from bev_data import InputError
from bev_data.cameras import Camera
from bev_data.points import Frame, Labels

POINTS = np.zeros((3, 5), np.float32)
BOX = np.array([[1, 2, 0, 4, 2, 1.5, 0.3], [9, 2, 0, 1, 1, 2, 0]], np.float32)
NAMES = ("car", "pedestrian")


def changed(row: int, column: int, value: float) -> np.ndarray:
    boxes = BOX.copy()
    boxes[row, column] = value
    return boxes


def test_labels_with_everything():
    labels = Labels(
        BOX,
        NAMES,
        np.array([[1, 2], [np.nan, np.nan]], np.float32),
        np.array([0.5, np.nan], np.float32),
        np.array([12, 0], np.int32),
    )
    assert Frame("a", POINTS, labels=labels).labels is labels
    nothing = Labels(
        BOX[:0], (), np.zeros((0, 2), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    )
    assert len(Frame("a", POINTS, labels=nothing).labels.boxes) == 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Labels(changed(1, 0, np.nan), NAMES), r"a: 1 of 2 boxes hold NaN .* box 1 \(pedestrian\)"),
        (Labels(changed(0, 6, np.inf), NAMES), r"box 0 \(car\).*leave out such boxes"),
        (Labels(changed(0, 4, -2), NAMES), "a size that is not positive"),
        (Labels(changed(0, 5, 0), NAMES), "a size that is not positive"),
        (Labels(BOX, NAMES[:1]), "2 boxes but 1 class names"),
        (Labels(BOX, NAMES, velocities=np.zeros((2, 3), np.float32)), r"float32 \[2, 2\] for 2"),
        (Labels(BOX, NAMES, velocities=np.zeros((1, 2), np.float32)), "labels.velocities must be"),
        (Labels(BOX, NAMES, velocities=np.full((2, 2), np.inf, np.float32)), "holds Inf"),
        (Labels(BOX, NAMES, visibility=np.zeros(2)), "labels.visibility must be .* not float64"),
        (
            Labels(BOX, NAMES, visibility=np.array([0, 80], np.float32)),
            r"spans 0\.\.80; expected a",
        ),
        (Labels(BOX, NAMES, num_points=np.zeros(2, np.int64)), "labels.num_points must be int32"),
        (Labels(BOX, NAMES, num_points=np.array([3, -1], np.int32)), "num_points holds -1"),
    ],
)
def test_labels_that_are_none(labels, message):
    with pytest.raises(InputError, match=message):
        Frame("a", POINTS, labels=labels)


def test_two_cameras_of_one_name():
    matrix = np.array([[50.0, 0, 32], [0, 50, 18], [0, 0, 1]])
    camera = Camera("CAM_FRONT", np.zeros((36, 64, 3), np.uint8), matrix, np.eye(4))
    with pytest.raises(InputError, match="each name must be its own"):
        Frame("a", POINTS, cameras=(camera, camera))
    assert Frame("a", POINTS, cameras=(camera,)).cameras == (camera,)

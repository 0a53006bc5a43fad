"""What processes tell each other of a frame that one of them has run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bev_data.points import Frame, Labels
from bevfusion.evaluation import (
    FrameBatches,
    FrameNote,
    PoorData,
    data_findings,
    detections_of,
    detections_record,
    note_of,
    note_record,
)
from bevfusion.model import CONFIGS, build_model
from bevfusion.model.head import Detections
from bevquant_quantizers import CalibrationFinding
from bevquant_quantizers.ranks import pack, unpack


def test_notes_come_back_as_they_were() -> None:
    boxes = np.arange(14, dtype=np.float32).reshape(2, 7)
    labels = Labels(boxes, ("car", "traffic_cone"), num_points=np.array([3, 0], np.int32))
    wrong = PoorData("encoders.lidar", "street ü", "few voxels", "9 points", "use whole scans")
    for given, findings in (
        (labels, ()),
        (Labels(boxes[:0], ()), (wrong,)),
        (None, (wrong, wrong)),
    ):
        note = FrameNote("street ü", 9, given, findings)
        name, size, found, told = note_of(unpack(pack(note_record(note))))
        assert (name, size, found is None, told) == ("street ü", 9, given is None, findings)
        if given is not None:
            assert found is not None
            assert found.names == given.names
            assert np.array_equal(found.boxes, given.boxes)
            assert (found.num_points is None) == (given.num_points is None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frame.name", None), ("frame.size", np.zeros(2)), ("labels.names", np.zeros(3)),
        ("labels.boxes", np.float32(1)), ("frame.findings", np.array("[{}]")),
        ("frame.findings", np.array("[" * 5000)), ("found.scores", np.zeros(3, np.float32)),
        ("found.labels", None),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_one_value_error(name: str, value: object) -> None:
    labels = Labels(np.ones((2, 7), np.float32), ("car", "bus"))
    poor = PoorData("encoders.lidar", "f", "few voxels", "1 voxel", "calibrate")
    kept = note_record(FrameNote("f", 9, labels, (poor,)))
    floats = np.zeros((2, 9), np.float32)
    found = Detections(floats[:, :7], floats[:, 0], np.zeros(2, np.int64), floats[:, :2])
    kept |= detections_record("found", found)
    assert note_of(kept).findings == (poor,)
    assert len(detections_of("found", kept).scores) == 2
    changed = {key: array for key, array in (kept | {name: value}).items() if array is not None}
    with pytest.raises(ValueError, match=r"not a (record of a frame|list of findings)"):
        (note_of(changed), detections_of("found", changed))


@pytest.mark.parametrize("count", [1, 2])
def test_findings_do_not_depend_on_which_batches_were_made(count: int) -> None:
    points = np.array([[10.0, 0.0, -1.0, 80.0, 0.0]], np.float32)
    frames, sizes = [Frame(name, points) for name in "ab"], CONFIGS["tiny"]
    fresh, used = (FrameBatches(frames, sizes, build_model(sizes, ("lidar",))) for _ in range(2))
    assert len(list(used)) == 2
    everywhere = CalibrationFinding("fuser", None, "constant", "one value", "other frames")
    report: Any = SimpleNamespace(findings=(everywhere,))
    found = data_findings(fresh, count, report)
    assert found == data_findings(used, count, report)
    assert [finding.kind for finding in found] == ["few voxels"] * count + ["constant"]
    assert found[-1].frame == ("a" if count == 1 else "all 2 frames")

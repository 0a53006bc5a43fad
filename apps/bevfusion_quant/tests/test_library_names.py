"""What the libraries make public is still found under the app's names."""

from __future__ import annotations

import importlib

import pytest

# Public in the libraries alone: they came with them.
NEW = {
    "bev_data.cameras": {"IMAGE_MEAN", "IMAGE_STD"},
    "bev_data.datasets": {"NUSCENES_NAMES", "register_dataset"},
    "bev_data.metrics": {"aligned_table"},
    "bevfusion.model.camera": {"splat"},
    "bevfusion.training": {
        "CHECKPOINT", "Checkpoint", "CompactFrame", "DetectorTrainer", "FrameForm",
        "PreparedFrames", "Trainer", "begun_before", "check_identity", "compact",
        "decode_boxes", "identity_of", "in_parts", "losses_table",
        "make_batch", "one_cycle", "order_of", "run_steps",
        "stored_weights", "take_steps", "untrained_model",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("points", "bev_data.points"),
        ("cameras", "bev_data.cameras"),
        ("datasets", "bev_data.datasets"),
        ("metrics", "bev_data.metrics"),
        ("voxelize", "bev_data.voxelize"),
        ("scenes", "bev_scenes"),
        ("model", "bevfusion.model"),
        ("model.camera", "bevfusion.model.camera"),
        ("model.head", "bevfusion.model.head"),
        ("train", "bevfusion.training"),
    ],
)
def test_the_same_objects(name: str, library: str) -> None:
    ours = importlib.import_module(f"bevfusion_quant.{name}")
    theirs = importlib.import_module(library)
    names = set(theirs.__all__) - NEW.get(library, set())
    assert names <= set(ours.__all__)
    assert [n for n in sorted(names) if getattr(ours, n) is not getattr(theirs, n)] == []

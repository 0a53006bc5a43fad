"""A detector's files in one call: written and held against the integers, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from bev_data import InputError
from bev_data.points import Frame
from bevfusion.deployment import _export, export_files, nvidia_pieces
from bevfusion.detectors import example_of
from bevfusion.evaluation import FrameBatches
from bevfusion.model import CONFIGS, build_model, random_weights
from bevfusion.quantization import fuse_detector, quantize_detector
from bevquant_quantizers import TensorQuantizer, calibrate

TINY = CONFIGS["tiny"]


def test_a_sparse_encoder_is_written_and_computes_what_the_integers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = np.zeros((400, 5), np.float32)
    points[:, :3] = np.random.default_rng(0).uniform((-9, -9, -1), (9, 9, 1), (400, 3))
    model = build_model(TINY, ("lidar",)).eval()
    batches = FrameBatches([Frame("one", points)], TINY, model)
    random_weights(model, *batches[0], seed=0)
    example = example_of(TINY, batches[0])
    folded = fuse_detector(model, example).model
    quantized = quantize_detector(folded, example, ["lidar"], first_layer=False).model
    calibrate(quantized, batches, forward=lambda net, batch: net(*batch), method="max")

    made = export_files(folded, quantized, batches, tmp_path / "onnx")
    assert made.failures == ()
    (file,) = made.files
    assert (file.name, file.kind) == ("lidar.backbone.xyz.onnx", "sparse")
    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {file.name}
    exact = [layer for layer in file.layers if layer.form == "int8"]
    assert len(exact) > 10
    assert not sum(layer.different or 0 for layer in exact)
    (stage,) = made.stages
    assert stage.onnx_sqnr_db == pytest.approx(stage.integer_sqnr_db, abs=0.5)

    # What it is captured on does not show in the file, and as few voxels do as there may be.
    monkeypatch.setattr(_export, "_EXAMPLE_VOXELS", 40)
    again = export_files(folded, quantized, batches, tmp_path / "fewer")
    assert again.files == made.files
    assert again.stages == made.stages


def test_maps_are_captured_on_the_middle_of_the_first_of_them() -> None:
    pictures = torch.arange(2 * 3 * 100 * 70.0).view(1, 2, 3, 100, 70)
    image, depth = _export._middle_of(pictures, pictures[:, :, :1])
    assert torch.equal(image, pictures[:1, :1, :, 18:82, 3:67])
    assert torch.equal(depth, image[:, :, :1])
    small, large = pictures[0, :, :, :32], pictures[0, :, :, :64]
    of_two_sizes = _export._middle_of(small, large)
    assert [tuple(value.shape) for value in of_two_sizes] == [(1, 3, 32, 70), (1, 3, 64, 70)]


def test_what_has_no_file_is_refused() -> None:
    camera = build_model(TINY, ("camera", "decoder", "head"))
    with pytest.raises(InputError, match="the model has no LiDAR branch"):
        nvidia_pieces(camera, camera, "autoware")
    quantized = build_model(TINY, ("camera", "decoder", "head"))
    quantized.head.heatmap_head.add_module("watched", TensorQuantizer())
    with pytest.raises(InputError, match=r"head is quantized.*ptq without --quantize-head"):
        nvidia_pieces(camera, quantized)

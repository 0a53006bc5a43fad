"""The app's LiDAR encoder on a real frame: simulator, libspconv file and onnxruntime agree."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bevquant_export import (
    compare_sparse_onnx,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("spconv.pytorch", reason="spconv is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from bevfusion.model import CONFIGS, Batch, build_lidar_branch, random_weights
from bevfusion_quant.ptq import calibrate_branch, fuse_branch, quantize_branch


def test_no_value_differs_at_any_layer(tmp_path: Path) -> None:
    features, coords = real_frame()
    near = (coords[:, 1] - 720).abs() < 30
    few = Batch(features[near], coords[near].contiguous(), 1)
    model = build_lidar_branch(CONFIGS["nuscenes"].lidar)
    random_weights(model, few.features, few.coords)
    quantized = quantize_branch(fuse_branch(model, few).model, few).model
    calibrate_branch(quantized, [few])
    example, inputs = (few.features, few.coords, 1), (features, coords, 1)

    written = export_sparse_onnx(quantized, example, tmp_path / "a.onnx", batches=[inputs])
    portable = lower_to_portable(written.path, tmp_path / "portable.onnx")
    assert written.layers[0].output_bound == 120000  # 79,745 voxels and half as many again
    assert [str(finding) for finding in lint_onnx(written.path, "libspconv")] == []
    assert [str(finding) for finding in lint_onnx(portable.path, "onnxruntime")] == []

    for path, backend in ((written.path, "auto"), (portable.path, "onnxruntime")):
        rows = compare_sparse_onnx(load_sparse_onnx(path, backend=backend), quantized, inputs)
        assert len(rows) == 21 + 8 + 1
        assert rows[0].elements == 79745 * 16
        assert rows[-1].elements == 256 * 180 * 180
        assert [row.node for row in rows if row.different] == []


def real_frame() -> tuple[Tensor, Tensor]:
    folder = Path(os.environ.get("BEVQUANT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not (folder / "nvidia_scn").is_dir():
        pytest.skip("real voxels not found: set BEVQUANT_DATA")

    def read(name: str) -> Tensor:
        raw = (folder / "nvidia_scn" / name).read_bytes()
        _, rank, kind = np.frombuffer(raw, "<i4", 3)
        shape = np.frombuffer(raw, "<i4", rank, 12)
        values = np.frombuffer(raw, {1: "<i4", 2: "<f2"}[int(kind)], offset=12 + 4 * rank)
        return torch.from_numpy(values.reshape(shape).copy())

    features = read("in_features.torch.fp16.tensor").float()
    return features, read("in_indices_xyz.torch.int32.tensor")

"""A real nuScenes frame through the encoder of CUDA-BEVFusion's sizes."""

import importlib.util

import torch

from bevquant_export import (
    compare_sparse_onnx,
    export_sparse_onnx,
    load_sparse_onnx,
    lower_to_portable,
)


def test_whole_encoder_has_no_mismatch(nets, real_frame, tmp_path):
    features, coords = real_frame
    near = coords[:, 1].sub(720).abs() < 8
    few = (features[near], coords[near], 1)
    torch.manual_seed(0)
    net = nets.Encoder((16, 32, 64, 128), (1440, 1440, 41))
    model = nets.calibrated(net, [few], method="max")
    frame = (features, coords, 1)
    written = export_sparse_onnx(model, few, tmp_path / "a.onnx", batches=[frame])
    assert written.layers[0].output_bound == 120000  # 79,745 voxels and half as many again
    runs = [load_sparse_onnx(written.path)]
    if importlib.util.find_spec("onnxruntime") is not None:
        portable = lower_to_portable(written.path, tmp_path / "portable.onnx").path
        runs.append(load_sparse_onnx(portable, backend="onnxruntime"))
    for run in runs:
        rows = compare_sparse_onnx(run, model, frame)
        assert len(rows) == 21 + 8 + 1
        assert rows[-1].elements == 32 * 180 * 180
        assert {row.different for row in rows} == {0}

"""A real nuScenes frame through the encoder of CUDA-BEVFusion's sizes."""

import torch

from bevquant_export import export_sparse_onnx, load_sparse_onnx, with_half_constants


def test_whole_encoder_has_no_mismatch(nets, real_frame, tmp_path):
    features, coords = real_frame
    near = coords[:, 1].sub(720).abs() < 8
    few = (features[near], coords[near], 1)
    torch.manual_seed(0)
    net = nets.Encoder((16, 32, 64, 128), (1440, 1440, 41))
    model = nets.calibrated(net, [few], method="max")
    frame = (features, coords, 1)
    export_sparse_onnx(model, few, tmp_path / "a.onnx", batches=[frame])
    out, dump = load_sparse_onnx(tmp_path / "a.onnx").run(*frame)
    wanted, records = nets.simulate(with_half_constants(model), few).run(frame)
    assert out.shape == (1, 32, 180, 180)
    assert torch.equal(out, wanted)
    found = nets.mismatches(dump, records)
    assert len(found) == 21 + 8
    assert set(found.values()) == {0}

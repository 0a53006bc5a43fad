"""Sparse UNets: skips that are concatenated have a portable file, and none for libspconv."""

import pytest
import torch
from torch import nn

from bevquant_export import compare_sparse_onnx, export_sparse_onnx, load_sparse_onnx


def unet(nets):
    """A voxel UNet: one stage down and up again, its skip concatenated, its channels halved."""
    spconv = nets.spconv

    def layer(conv):
        return spconv.SparseSequential(conv, nn.ReLU())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = layer(spconv.SubMConv3d(5, 8, 3, indice_key="subm1"))
            self.down = layer(spconv.SparseConv3d(8, 12, 3, 2, padding=1, indice_key="down"))
            self.up = layer(spconv.SparseInverseConv3d(12, 8, 3, indice_key="down"))
            self.mix = layer(spconv.SubMConv3d(16, 8, 3, indice_key="subm1"))
            self.out = layer(spconv.SubMConv3d(8, 6, 3, indice_key="subm1"))

        def forward(self, features, coords, batch_size):
            skip = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            up = self.up(self.down(skip))
            both = up.replace_feature(torch.cat((up.features, skip.features), dim=1))
            mixed = self.mix(both)
            halves = both.features.view(both.features.shape[0], 8, -1).sum(dim=2)
            out = self.out(mixed.replace_feature(mixed.features + halves))
            centres = (out.indices[:, [3, 2, 1]].float() + 0.5) * 0.2
            return {"features": out.features, "centres": centres}

    torch.manual_seed(0)
    return nets.calibrated(UNet().eval(), [nets.frame(0)])


@pytest.mark.parametrize("backend", ["auto", "onnxruntime"])
def test_a_unet_runs_as_the_integer_model(nets, tmp_path, backend):
    pytest.importorskip("onnxruntime")
    model, path = unet(nets), tmp_path / "unet.onnx"
    made = export_sparse_onnx(model, nets.frame(0), path, dialect="portable")
    assert made.verified == "onnxruntime"
    file = load_sparse_onnx(path, backend=backend)
    rows = compare_sparse_onnx(file, model, nets.frame(1))
    assert [row.node for row in rows if row.different] == []
    # Centres follow from the coordinates, which whoever runs the file has.
    assert [row.node for row in rows].count("output") == 1


def test_the_other_order_of_axes(nets, tmp_path):
    model, path = unet(nets), tmp_path / "unet.onnx"
    export_sparse_onnx(model, nets.frame(0), path, dialect="portable", order="zyx")
    rows = compare_sparse_onnx(load_sparse_onnx(path), model, nets.frame(0), reversed_axes=True)
    assert [row.node for row in rows[:-1] if row.different] == []


def test_libspconv_has_no_concatenation(nets, tmp_path):
    message = r"cat.*test_portable_unets\.py:\d+.*no concatenation.*dialect='portable'"
    with pytest.raises(ValueError, match=message):
        export_sparse_onnx(unet(nets), nets.frame(0), tmp_path / "unet.onnx")
    assert list(tmp_path.iterdir()) == []

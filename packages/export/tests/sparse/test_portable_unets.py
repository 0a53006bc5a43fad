"""Sparse UNets: skips that are concatenated, in portable files and in those for libspconv."""

import pytest
import torch
from torch import nn

from bevquant_export import (
    compare_sparse_onnx,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
)
from bevquant_quantizers import TensorQuantizer


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
    assert [row.node for row in rows if row.different] == []


def test_features_alone_are_compared_where_they_lie(nets, tmp_path):
    spconv = nets.spconv

    class Coarse(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = spconv.SparseConv3d(5, 8, 3, 2, padding=1)
            self.head = nn.Linear(8, 3)

        def forward(self, features, coords, batch_size):
            x = spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            return self.head(self.down(x).features)

    torch.manual_seed(0)
    model, path = nets.calibrated(Coarse().eval(), [nets.frame(0)]), tmp_path / "coarse.onnx"
    export_sparse_onnx(model, nets.frame(0), path, order="zyx")
    file, (features, coords, _) = load_sparse_onnx(path), nets.frame(1)
    rows = compare_sparse_onnx(file, model, nets.frame(1), reversed_axes=True)
    assert [row.node for row in rows if row.different] == []
    # The rows of the file come in another order than the model's.
    there = file(features, coords[:, [0, 3, 2, 1]]).indices[:, [0, 3, 2, 1]]
    same = load_sparse_onnx(export_sparse_onnx(model, nets.frame(0), tmp_path / "b.onnx").path)
    assert not torch.equal(there, same(features, coords).indices)


@pytest.mark.parametrize("order", ["xyz", "zyx"])
def test_libspconv_concatenates_by_convolutions_and_sums(nets, tmp_path, order):
    model, path = unet(nets), tmp_path / "unet.onnx"
    made = export_sparse_onnx(model, nets.frame(0), path, order=order)
    assert made.verified == "bevquant"
    assert lint_onnx(path, "libspconv") == []
    file = load_sparse_onnx(path)
    turned = order != "xyz"
    rows = compare_sparse_onnx(file, model, nets.frame(1), reversed_axes=turned)
    assert [row.node for row in rows if row.different] == []
    assert {type(node).__name__ for node in file.nodes} == {"Add", "Conv"}
    moves = [n for n in file.nodes if type(n).__name__ == "Conv" and "channels" in n.rulebook]
    assert [n.precision for n in moves] == ["int8", "int8", "fp16"]
    assert len({n.rulebook for n in moves}) == 1  # all on the input's voxels
    assert all(n.output_bound == file.nodes[0].output_bound for n in moves)


def test_the_portable_form_of_a_file_for_libspconv(nets, tmp_path):
    pytest.importorskip("onnxruntime")
    model, path, other = unet(nets), tmp_path / "unet.onnx", tmp_path / "portable.onnx"
    export_sparse_onnx(model, nets.frame(0), path)
    lower_to_portable(path, other)
    rows = compare_sparse_onnx(load_sparse_onnx(other, backend="onnxruntime"), model, nets.frame(1))
    assert [row.node for row in rows if row.different] == []


@pytest.mark.parametrize("quantized", [True, False])
def test_three_tensors_and_the_order_of_their_channels(nets, tmp_path, quantized):
    spconv = nets.spconv

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = spconv.SubMConv3d(5, 3, 3, indice_key="a")
            self.b = spconv.SubMConv3d(5, 4, 3, indice_key="a")
            self.c = spconv.SubMConv3d(12, 6, 3, indice_key="a")

        def forward(self, features, coords, batch_size):
            x = spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            parts = [self.b(x).features, x.features, self.a(x).features]
            return self.c(x.replace_feature(torch.cat(parts, 1)))

    torch.manual_seed(0)
    model = nets.calibrated(Joined().eval(), [nets.frame(0)])
    if not quantized:
        for module in model.modules():
            if isinstance(module, TensorQuantizer):
                module.disable()
    path = tmp_path / "joined.onnx"
    export_sparse_onnx(model, nets.frame(0), path)
    rows = compare_sparse_onnx(load_sparse_onnx(path), model, nets.frame(1))
    assert [row.node for row in rows if row.different] == []


def test_the_input_features_alone_have_no_bound(nets, tmp_path):
    spconv = nets.spconv

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = spconv.SparseConv3d(10, 6, 3, 2)

        def forward(self, features, coords, batch_size):
            x = spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            return self.down(x.replace_feature(torch.cat([x.features, x.features], 1)))

    model = nets.calibrated(Doubled().eval(), [nets.frame(0)])
    with pytest.raises(ValueError, match=r"how many voxels.*dialect='portable'|no convolution"):
        export_sparse_onnx(model, nets.frame(0), tmp_path / "doubled.onnx")
    assert list(tmp_path.iterdir()) == []

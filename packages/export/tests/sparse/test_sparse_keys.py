"""Rulebook keys in the file: the engine wants subm1 at the first submanifold convolution."""

import pytest
import torch

from bevquant_export import compare_sparse_onnx, export_sparse_onnx, lint_onnx, load_sparse_onnx


class Chain(torch.nn.Module):
    """Submanifold convolutions with the given keys, some under one key, on one grid."""

    def __init__(self, nets, keys):
        super().__init__()
        widths = [5, *[8] * len(keys)]
        self.convs = torch.nn.ModuleList(
            nets.spconv.SubMConv3d(i, o, 3, indice_key=key)
            for i, o, key in zip(widths, widths[1:], keys, strict=False)
        )
        self.tensor = nets.spconv.SparseConvTensor

    def forward(self, features, coords, batch_size):
        x = self.tensor(features, coords, [12, 10, 9], batch_size)
        for conv in self.convs:
            x = conv(x)
        return x


@pytest.mark.parametrize(
    ("keys", "written"),
    [
        (["subm1", "b"], ["subm1", "b"]),
        (["a", "a", "b"], ["subm1", "subm1", "b"]),
        (["a", "subm1", "subm1", "a"], ["subm1", "subm1_2", "subm1_2", "subm1"]),
        (["a", "subm1", "subm1_2"], ["subm1", "subm1_3", "subm1_2"]),
        ([None, "a", None], ["subm1", "a", ""]),
        ([None, "subm1"], ["subm1", "subm1_2"]),
    ],
)
def test_the_first_key(nets, tmp_path, keys, written):
    model = nets.calibrated(Chain(nets, keys), [nets.frame(0)], method="max")
    path = tmp_path / "a.onnx"
    export_sparse_onnx(model, nets.frame(0), path)
    file = load_sparse_onnx(path)
    assert [node.rulebook for node in file.nodes] == written
    assert lint_onnx(path, "libspconv") == []
    rows = compare_sparse_onnx(file, model, nets.frame(1))
    assert {row.different for row in rows} == {0}


@pytest.mark.parametrize("order", ["xyz", "zyx"])
def test_files_with_inverse_convolutions_and_other_tails_have_no_finding(nets, tmp_path, order):
    models = {"up": nets.hourglass(), "dense": nets.encoder(tail="none"), "map": nets.encoder()}
    for number, (name, model) in enumerate(models.items()):
        # Each model in both orders and both dialects, each order in both dialects.
        portable = (number % 2 == 0) == (order == "xyz")
        dialect, engine = ("portable", "onnxruntime") if portable else ("libspconv", "libspconv")
        path = tmp_path / f"{name}.onnx"
        export_sparse_onnx(model, nets.frame(0), path, order=order, dialect=dialect)
        assert [str(finding) for finding in lint_onnx(path, engine)] == []


def test_a_zyx_model_with_its_height_first_has_no_finding_either_way(nets, tmp_path):
    """As mmdetection3d: the dense grid is z, y, x, and its height is folded where it stands."""

    class Folded(torch.nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder = encoder

        def forward(self, features, coords, batch_size):
            return self.encoder(features, coords, batch_size).flatten(1, 2)

    model = Folded(nets.encoder(tail="none")).eval()
    for order in ("zyx", "xyz"):
        path = tmp_path / f"{order}.onnx"
        export_sparse_onnx(model, nets.frame(0), path, model_order="zyx", order=order)
        assert [str(finding) for finding in lint_onnx(path, "libspconv")] == []


def test_only_the_first_convolution_has_the_first_key(nets, tmp_path):
    """A tower of other weights reads the input too, under a key of its own."""

    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nets.spconv.SubMConv3d(5, 8, 3, indice_key="a")
            self.other = nets.spconv.SubMConv3d(5, 8, 5, indice_key="b")

        def forward(self, features, coords, batch_size):
            x = nets.spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            one, other = self.one(x), self.other(x)
            return one.replace_feature(one.features + other.features)

    model = nets.calibrated(Towers(), [nets.frame(0)], method="max")
    path = tmp_path / "a.onnx"
    export_sparse_onnx(model, nets.frame(0), path)
    convs = [node for node in load_sparse_onnx(path).nodes if hasattr(node, "rulebook")]
    assert [node.rulebook for node in convs] == ["subm1", "b"]
    assert lint_onnx(path, "libspconv") == []

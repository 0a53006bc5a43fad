"""Layers on the rows of voxels: linear layers, norms that nothing folds, constants, mixed sums."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_export import (
    compare_sparse_onnx,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
    with_half_constants,
)
from bevquant_qnn import QuantConfig


class Net(nn.Module):
    """A stem, one stage down, and `head` on the features of what comes out."""

    def __init__(self, nets, head):
        super().__init__()
        self.grid, self.head = list(nets.GRID), head
        self.stem = nets.spconv.SubMConv3d(5, 8, 3, indice_key="stem")
        self.down = nets.spconv.SparseConv3d(8, 8, 3, 2, padding=1, indice_key="down")
        self.same = nets.spconv.SubMConv3d(8, 8, 3, indice_key="same")
        self.SparseConvTensor = nets.spconv.SparseConvTensor

    def forward(self, features, coords, batch_size):
        x = self.stem(self.SparseConvTensor(features, coords, self.grid, batch_size))
        return self.head(self, self.down(x))


class Linear(nn.Module):
    def __init__(self, spconv=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, net, x):
        return {"scores": self.layers(x.features), "places": x.indices[:, 1:].float() * 0.2}


class PreNorm(nn.Module):
    """A norm in front of a convolution, and the sum with what it read."""

    def __init__(self, spconv):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.conv = spconv.SubMConv3d(8, 8, 3, indice_key="same")
        self.after = nn.BatchNorm1d(8)

    def forward(self, net, x):
        normed = torch.relu(self.norm(x.features))
        made = self.conv(x.replace_feature(normed))
        summed = made.replace_feature(made.features + x.features)
        return net.same(summed.replace_feature(self.after(summed.features)))


class Constants(nn.Module):
    def __init__(self, spconv):
        super().__init__()
        self.place = nn.Parameter(torch.arange(8.0).reshape(1, 8) / 4)

    def forward(self, net, x):
        moved = x.features * 0.5 + self.place
        return net.same(x.replace_feature(sum([moved, x.features])))


class Matrix(nn.Module):
    """A branch that multiplies rows by a weight itself, as SoftGroup's blocks do."""

    def __init__(self, spconv):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).div(4).half().float())
        self.conv = spconv.SubMConv3d(8, 8, 3, indice_key="same")

    def forward(self, net, x):
        branch = torch.mm(x.features, self.weight.t())
        return net.same(x.replace_feature(self.conv(x).features + branch))


def build(nets, head):
    torch.manual_seed(0)
    model = Net(nets, head)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight, 1, 0.2)
    return nets.calibrated(model.eval(), [nets.frame(0)])


@pytest.mark.parametrize("head", [Linear, PreNorm, Constants, Matrix])
def test_every_value_is_the_integer_models(nets, tmp_path, head):
    pytest.importorskip("onnxruntime")
    model, path, other = build(nets, head(nets.spconv)), tmp_path / "a.onnx", tmp_path / "b.onnx"
    export_sparse_onnx(model, nets.frame(0), path)
    assert [f for f in lint_onnx(path, "libspconv") if f.severity == "error"] == []
    lower_to_portable(path, other)
    for file in (load_sparse_onnx(path), load_sparse_onnx(other, backend="onnxruntime")):
        rows = compare_sparse_onnx(file, model, nets.frame(1))
        assert [row.node for row in rows if row.different] == []
        assert rows[-1].elements


def test_a_linear_layer_stands_on_the_voxels_that_it_reads(nets, tmp_path):
    export_sparse_onnx(build(nets, Linear()), nets.frame(0), tmp_path / "a.onnx")
    _, down, *head = load_sparse_onnx(tmp_path / "a.onnx").nodes
    assert [n.path for n in head] == ["head.layers.0", "head.layers.2"]
    assert {n.kernel_size for n in head} == {(1, 1, 1)}
    assert {n.input_spatial_shape for n in head} == {down.output_spatial_shape}
    assert {n.output_bound for n in head} == {down.output_bound}
    assert [n.activation for n in head] == ["ReLU", "None"]


def test_a_norm_becomes_float16_numbers():
    norm = nn.Sequential(nn.BatchNorm1d(3)).eval()
    assert isinstance(with_half_constants(norm)[0], nn.BatchNorm1d)  # nothing sparse in it


@pytest.mark.filterwarnings("ignore")
def test_a_norm_without_statistics_is_named(nets, tmp_path):
    head = PreNorm(nets.spconv)
    model = build(nets, head)
    model.get_submodule("head.after").running_mean = None
    with pytest.raises(ValueError, match=r"head\.after: a batch norm without running statistics"):
        with_half_constants(model)


def test_a_constant_that_float16_does_not_hold(nets, tmp_path):
    class Tenth(nn.Module):
        def forward(self, net, x):
            return net.same(x.replace_feature(x.features * 0.1))

    model = build(nets, Tenth())
    message = r"mul.*test_rows_of_voxels\.py:\d+.*takes 0\.1, which float16.*write 0\.0999"
    with pytest.raises(ValueError, match=message):
        export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")


def test_a_linear_layer_on_the_input_features(nets, tmp_path):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = nn.Linear(5, 5)
            self.down = nets.spconv.SparseConv3d(5, 6, 3, 2)

        def forward(self, features, coords, batch_size):
            given = (self.lift(features), coords, list(nets.GRID), batch_size)
            return self.down(nets.spconv.SparseConvTensor(*given))

    torch.manual_seed(0)
    model = nets.calibrated(First().eval(), [nets.frame(0)])
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")
    file = load_sparse_onnx(tmp_path / "a.onnx")
    assert file.nodes[0].path == "lift"
    assert file.nodes[0].output_bound == 1000
    assert file.grid == nets.GRID
    rows = compare_sparse_onnx(file, model, nets.frame(1))
    assert [row.node for row in rows if row.different] == []


def test_a_module_that_is_called_twice(nets, tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nets.spconv.SubMConv3d(8, 8, 3, indice_key="same")

        def forward(self, net, x):
            return self.conv(self.conv(x))

    model, path = build(nets, Twice()), tmp_path / "a.onnx"
    export_sparse_onnx(model, nets.frame(0), path)
    rows = compare_sparse_onnx(load_sparse_onnx(path), model, nets.frame(1))
    assert [row.path for row in rows].count("head.conv") == 2
    assert [row.node for row in rows if row.different] == []


def test_a_file_begins_behind_what_makes_the_features(nets, tmp_path):
    """Means over the points of a voxel, and voxels in another order, are made before it runs."""

    class Voxelized(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nets.spconv.SubMConv3d(5, 8, 3, indice_key="stem")
            self.down = nets.spconv.SparseConv3d(8, 6, 3, 2, padding=1)

        def forward(self, points, coords, batch_size):
            means = points.sum(1) / points.shape[1]
            order = torch.argsort(coords[:, 3] * 100 + coords[:, 2], stable=True)
            given = (means[order], coords[order], list(nets.GRID), batch_size)
            x = self.down(self.stem(nets.spconv.SparseConvTensor(*given)))
            return {"voxel_features": means, "centres": means[:, :3] + 0.3, "encoded": x}

    def scan(seed):
        features, coords, batch_size = nets.frame(seed)
        return features[:, None] * torch.tensor([0.5, 1.0, 1.5])[:, None], coords, batch_size

    torch.manual_seed(0)
    model = nets.calibrated(Voxelized().eval(), [scan(0)])
    for dialect in ("libspconv", "portable"):
        path = tmp_path / f"{dialect}.onnx"
        loud = pytest.warns(UserWarning, match=rf"{dialect}\.onnx: .*Compute these before")
        with loud if dialect == "libspconv" else nullcontext():
            made = export_sparse_onnx(model, scan(0), path, dialect=dialect)
        assert made.features == ("0" if dialect == "libspconv" else "getitem_features")
        assert any(step.startswith("sum in the model's forward") for step in made.begins_behind)
        assert "the file begins behind sum in the model's forward" in str(made)
        assert f"their result is the input {made.features!r}" in str(made)
        rows = compare_sparse_onnx(load_sparse_onnx(path), model, scan(1))
        assert [row.path for row in rows] == ["stem", "down", ""]
        assert [row.node for row in rows if row.different] == []


@pytest.mark.parametrize("kind", ["function", "norm", "product"])
def test_raw_features_are_refused_where_a_file_begins_behind_steps(nets, tmp_path, kind):
    onnxruntime = pytest.importorskip("onnxruntime")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(5)
            self.stem = nets.spconv.SubMConv3d(5, 8, 3, indice_key="stem")

        def forward(self, features, coords, batch_size):
            made = {"function": torch.sigmoid, "norm": self.norm, "product": lambda x: x * 0.3}
            given = (made[kind](features), coords, list(nets.GRID), batch_size)
            return self.stem(nets.spconv.SparseConvTensor(*given))

    torch.manual_seed(0)
    model, frame = nets.calibrated(Net().eval(), [nets.frame(0)]), nets.frame(1)
    made = export_sparse_onnx(model, frame, tmp_path / "a.onnx", dialect="portable")
    again = lower_to_portable(made.path, tmp_path / "b.onnx")
    for file in (made, again):
        assert file.features.endswith("_features")
        session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
        assert session.get_inputs()[0].name == file.features
        rest = {"coords": frame[1].int().numpy(), "batch_size": np.array([frame[2]], np.int64)}
        with pytest.raises(ValueError, match="features"):
            session.run(None, {"features": frame[0].numpy(), **rest})
        for backend in ("auto", "onnxruntime"):
            read = load_sparse_onnx(file.path, backend=backend)
            rows = compare_sparse_onnx(read, model, frame)
            assert [row.node for row in rows if row.different] == []


@pytest.mark.parametrize("dialect", ["libspconv", "portable"])
def test_two_layers_read_an_encoder_that_ends_in_a_relu(nets, tmp_path, dialect):
    """A float layer and a quantized one, whose integers are those of the ReLU's result."""

    class Encoded(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
            self.one = nets.spconv.SubMConv3d(8, 8, 3, indice_key="k")
            self.other = nets.spconv.SubMConv3d(8, 8, 3, indice_key="k")

        def forward(self, features, coords, batch_size):
            given = (self.encoder(features), coords, list(nets.GRID), batch_size)
            x = nets.spconv.SparseConvTensor(*given)
            one, other = self.one(x), self.other(x)
            return one.replace_feature(torch.relu(one.features + other.features))

    torch.manual_seed(0)
    config = QuantConfig(exclude=("encoder.0", "one"))
    model = nets.calibrated(Encoded().eval(), [nets.frame(0)], config)
    path = tmp_path / "a.onnx"
    loud = pytest.warns(UserWarning, match="Compute these before")
    with loud if dialect == "libspconv" else nullcontext():
        made = export_sparse_onnx(model, nets.frame(0), path, dialect=dialect)
    assert len(made.begins_behind) == 2
    rows = compare_sparse_onnx(load_sparse_onnx(path), model, nets.frame(1))
    assert {"one", "other"} <= {row.path for row in rows}
    assert [row.node for row in rows if row.different] == []


def test_what_begins_a_file_is_not_read_again(nets, tmp_path):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nets.spconv.SubMConv3d(5, 8, 3, indice_key="stem")
            self.last = nn.Linear(13, 4)

        def forward(self, points, coords, batch_size):
            means = points.mean(1)
            x = self.stem(nets.spconv.SparseConvTensor(means, coords, list(nets.GRID), batch_size))
            return self.last(torch.cat([x.features, points.amax(1)], 1))

    features, coords, batch_size = nets.frame(0)
    given = (features[:, None].repeat(1, 3, 1), coords, batch_size)
    model = nets.calibrated(Again().eval(), [given])
    with pytest.raises(ValueError, match=r"max.*has no operator|reads a second input"):
        export_sparse_onnx(model, given, tmp_path / "a.onnx")


def test_what_is_made_of_coordinates_is_no_input(nets, tmp_path):
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nets.spconv.SubMConv3d(5, 8, 3, indice_key="stem")
            self.last = nn.Linear(11, 4)

        def forward(self, features, coords, batch_size):
            x = self.stem(nets.spconv.SparseConvTensor(features, coords, [12, 10, 9], batch_size))
            return self.last(torch.cat([x.features, x.indices[:, 1:].float() * 0.1], 1))

    model = nets.calibrated(Places().eval(), [nets.frame(0)])
    reason = r"\(.*test_rows_of_voxels\.py:\d+\) reads what is made of coordinates.*export_qdq_onnx"
    with pytest.raises(ValueError, match=reason):
        export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")


def test_a_norm_that_is_called_as_a_function(nets, tmp_path):
    """Folded, it hands on what it reads; its module is a norm still, whose tensors are read."""

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nets.spconv.SubMConv3d(5, 8, 3, bias=False)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, features, coords, batch_size):
            x = nets.spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            x, n = self.conv(x), self.norm
            called = nn.functional.batch_norm(
                x.features, n.running_mean, n.running_var, n.weight, n.bias, False, 0.0, n.eps
            )
            return x.replace_feature(called.relu())

    model = nets.calibrated(Called().eval(), [nets.frame(0)])
    made = export_sparse_onnx(model, nets.frame(0), tmp_path / "norm.onnx")
    file = load_sparse_onnx(made.path)
    assert [(node.kind, node.activation) for node in file.graph.nodes] == [("conv", "ReLU")]
    rows = compare_sparse_onnx(file, model, nets.frame(1))
    assert [row.node for row in rows if row.different] == []


def test_ranges_of_the_input_channels_begin_the_file(nets, tmp_path):
    """Places, intensities and times in one tensor: the file takes them as they are."""
    units = torch.tensor([140.0, 80, 4, 255, 0.5])

    def frame(seed):
        features, *rest = nets.frame(seed)
        return (torch.rand(features.shape) - 0.5) * units, *rest

    torch.manual_seed(0)
    net = nets.Encoder(widths=(8,), blocks=1)
    net.conv_input[0].weight.data /= units
    model = nets.calibrated(net, [frame(0), frame(1)])
    assert model.conv_input[0]._input_quantizer.channel_factors[4] == 256  # 127.5 / 0.25, below
    for dialect in ("libspconv", "portable"):
        made = export_sparse_onnx(model, frame(0), tmp_path / f"{dialect}.onnx", dialect=dialect)
        assert made.begins_behind == ()
        assert [layer.precision for layer in made.layers[:2]] == ["fp16", "int8"]
        rows = compare_sparse_onnx(load_sparse_onnx(made.path), model, frame(2))
        assert [row.node for row in rows if row.different] == []
        assert [f for f in lint_onnx(made.path, dialect) if f.severity == "error"] == []

"""What sparse models compute between their layers, in portable files: pooling, merging, gates."""

import pytest
import torch
from torch import nn

from bevquant_export import (
    compare_sparse_onnx,
    export_qdq_onnx,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
)
from bevquant_export.sparse._between import follow
from bevquant_export.sparse._compare import counted
from bevquant_export.sparse._observe import Sparse

onnxruntime = pytest.importorskip("onnxruntime")


def subm(nets, ins, outs, flat=False):
    kind = nets.spconv.SubMConv2d if flat else nets.spconv.SubMConv3d
    return nets.spconv.SparseSequential(kind(ins, outs, 3, padding=1), nn.ReLU())


def pooled(nets):
    """Down by pooling, and up again by the inverse of one."""
    spconv = nets.spconv

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.mid = subm(nets, 5, 8), subm(nets, 8, 8)
            self.pool = spconv.SparseMaxPool3d(3, 2, padding=1, indice_key="pool")
            self.up = spconv.SparseInverseConv3d(8, 6, 3, indice_key="pool")

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            y = self.mid(self.pool(x))
            return self.up(y), y

    return Pooled()


def merged(nets):
    """Coarser voxels put among finer ones, and all of one pillar summed; on two axes behind."""
    spconv = nets.spconv

    class Merged(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = subm(nets, 5, 8)
            self.down = spconv.SparseConv3d(8, 8, 3, 2, padding=1)
            self.flat, self.head = subm(nets, 8, 8, flat=True), spconv.SubMConv2d(8, 3, 1)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            y = self.down(x)
            y.indices[:, 1:] *= 2
            both = x.replace_feature(torch.cat([x.features, y.features]))
            both.indices = torch.cat([x.indices, y.indices])
            places, inverse = torch.unique(both.indices[:, [0, 2, 3]], dim=0, return_inverse=True)
            sums = both.features.new_zeros((places.shape[0], 8))
            sums.index_add_(0, inverse, both.features)
            above = spconv.SparseConvTensor(sums, places, both.spatial_shape[1:], batch_size)
            head = self.head(self.flat(above))
            return {"head": head, "both": both, "size": head.replace_feature(head.features.exp())}

    return Merged()


def gated(nets):
    """Every channel by a gate that all voxels of the frame decide on."""
    spconv = nets.spconv

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.last = subm(nets, 5, 8), subm(nets, 8, 6)
            self.gate = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8), nn.Sigmoid())

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            frames = x.indices[:, 0].long()
            means = [x.features[frames == b].mean(0) for b in range(batch_size)]
            gates = self.gate(torch.stack(means))
            return self.last(x.replace_feature(x.features * gates[frames]))

    return Gated()


def focal(nets):
    """Voxels that a layer finds important go on, with the neighbours that it wants."""
    spconv = nets.spconv

    class Focal(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.last = subm(nets, 5, 8), subm(nets, 8, 6)
            self.judge = spconv.SubMConv3d(8, 3, 3, padding=1)
            self.offsets = torch.tensor([[0, 0, 1], [1, 0, 0]], dtype=torch.int32)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            wanted = self.judge(x).features.sigmoid()
            x = x.replace_feature(x.features * wanted[:, :1])
            kept = wanted[:, 0] > 0.5
            marked = (wanted[:, 1:] >= 0.5)[kept]
            near = self.offsets.unsqueeze(0).repeat(marked.shape[0], 1, 1)
            near = (x.indices[kept][:, 1:].unsqueeze(1) + near)[marked]
            near = near[(near[:, 0] < nets.GRID[0]) & (near[:, 2] < nets.GRID[2])]
            near = torch.cat([torch.zeros_like(near[:, :1]), near], 1)
            places = torch.cat([x.indices[kept], near])
            rows = torch.cat([x.features[kept], torch.zeros(near.shape[0], 8)])
            places, inverse = torch.unique(places, dim=0, return_inverse=True)
            sums = rows.new_zeros((places.shape[0], 8)).index_add_(0, inverse, rows)
            shape = x.spatial_shape
            return self.last(spconv.SparseConvTensor(sums, places.int(), shape, batch_size))

    return Focal()


def pruned(nets):
    """Voxels of a good score alone go on: their layer has another range than the score's."""
    spconv = nets.spconv

    class Pruned(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.last = subm(nets, 5, 8), subm(nets, 8, 6)
            self.judge = spconv.SubMConv3d(8, 1, 3, padding=1)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            wanted = self.judge(x).features.sigmoid()[:, 0]
            kept = (wanted > 0.5) & (x.indices[:, 3] % 3 > 0)
            rows, places = x.features[kept], x.indices[kept]
            return self.last(spconv.SparseConvTensor(rows, places, x.spatial_shape, batch_size))

    return Pruned()


def summed(nets):
    """Voxels of two branches, added where both have one."""
    spconv = nets.spconv

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.last = subm(nets, 5, 8), subm(nets, 8, 6)
            self.wide = spconv.SparseConv3d(8, 8, 3, padding=1)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            return self.last(spconv.functional.sparse_add(x, self.wide(x)))

    return Summed()


def shared(nets):
    """The better half of a frame's voxels behind a gate, the rest as it is; a residual sum."""
    spconv = nets.spconv

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.last = subm(nets, 5, 8), subm(nets, 8, 6)
            self.judge = spconv.SubMConv3d(8, 1, 3, padding=1)
            self.conv = spconv.SubMConv3d(8, 8, 3, padding=1)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            wanted = self.judge(x).features.sigmoid()
            here = x.indices[:, 0] == 0
            rows, places, gates = x.features[here], x.indices[here], wanted[here]
            order = gates[:, 0].sort(descending=True)[1]
            half = int(gates.shape[0] * 0.5)
            best, rest = order[:half], order[half:]
            rows = torch.cat([rows[best] * gates[best], rows[rest]])
            frame = torch.ones(half, 1) * 0  # of floats: so are the joined places
            best = torch.cat([frame, places[best, 1:]], 1)
            places = torch.cat([best, places[rest]]).int()
            y = spconv.SparseConvTensor(rows, places, x.spatial_shape, batch_size)
            z = self.conv(y)
            return self.last(z.replace_feature(z.features + y.features))

    return Shared()


def windowed(nets):
    """Voxels in the order of their windows, padded to groups of eight that share their mean."""
    spconv = nets.spconv

    class Windowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.last = subm(nets, 5, 8), subm(nets, 8, 6)
            self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            places, n = x.indices.long(), len(x.features)
            windows = places[:, 1] // 4 * 16 + places[:, 2] // 4
            order = torch.argsort(windows * 4096 + places[:, 3])
            padded = torch.cat([order, order[:1].repeat(-n % 8)])
            groups = x.features[padded].view(-1, 8, 8)
            means = groups + self.gate(groups).softmax(1).mean(1, keepdim=True)
            means = means[: (n - 1) // 8 + 1].reshape(-1, 8)
            back = torch.empty_like(x.features)
            back[order] = means[:n]
            return self.last(x.replace_feature(self.norm(back)))

    return Windowed()


@pytest.mark.parametrize(
    ("make", "frames", "refused"),
    [
        (pooled, 2, r"pool \(sparse_max_pool\)"),
        (merged, 2, r"\(cat\)|cat in"),
        (gated, 2, "getitem in"),
        (focal, 1, "sigmoid|mul"),
        (pruned, 1, "sigmoid"),
        (shared, 1, "sigmoid|mul"),
        (summed, 2, "cat in"),
        (windowed, 1, "getitem in|floor_divide in"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # spconv's sparse_add
def test_a_file_makes_the_integers_of_the_model(nets, tmp_path, make, frames, refused):
    torch.manual_seed(0)
    given = [nets.frame(s, share=0.1 + 0.05 * s, batch_size=frames) for s in range(3)]
    model = nets.calibrated(make(nets).eval(), given[:1], method="max")
    path = tmp_path / "portable.onnx"
    written = export_sparse_onnx(
        model, given[0], path, dialect="portable", model_order="zyx", head_room=9
    )
    assert written.verified == "onnxruntime"
    assert [str(finding) for finding in lint_onnx(path, "portable")] == []
    again = lower_to_portable(path, tmp_path / "again.onnx", verify=False).path
    for file, frame in (
        (load_sparse_onnx(path, backend="onnxruntime"), given[1]),
        (load_sparse_onnx(again), given[2]),
    ):
        rows = compare_sparse_onnx(file, written.integer_model, frame)
        assert len(rows) > 2
        assert [row.node for row in rows if row.different] == []
    line = rf"({refused}).*test_between_layers\.py:\d+\) has no operator"
    with pytest.raises(ValueError, match=line):
        follow(written.integer_model, extended=False)
    if make is gated:
        three = nets.frame(1, batch_size=3)
        for backend in ("auto", "onnxruntime"):
            with pytest.raises(ValueError, match="number of frames of the example"):
                load_sparse_onnx(path, backend=backend)(*three)


def test_a_result_that_is_called_as_an_input_has_another_name(nets, tmp_path):
    torch.manual_seed(0)
    model = nets.calibrated(gated(nets).eval(), [nets.frame(0)], method="max")
    path = tmp_path / "whole.onnx"
    whole = export_qdq_onnx(model, nets.frame(0), path, "onnxruntime", verify=False)
    assert list(whole.inputs) == ["features", "coords"]
    assert list(whole.outputs) == ["output_features", "indices"]


def test_voxels_that_a_model_makes_twice_end_the_run(nets, tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.last = subm(nets, 5, 8), subm(nets, 8, 6)

        def forward(self, features, coords, batch_size):
            tensor = nets.spconv.SparseConvTensor
            x = self.stem(tensor(features, coords, list(nets.GRID), batch_size))
            return self.last(tensor(x.features, x.indices // 2, list(nets.GRID), batch_size))

    torch.manual_seed(0)
    features, coords, _ = nets.frame(0)
    even = (coords % 2 == 0).all(1)
    given = features[even], coords[even].contiguous(), 1
    model = nets.calibrated(Twice().eval(), [given])
    for settings, words in (
        ({"verify": False}, r"floor_divide in .*test_between_layers\.py"),
        ({"dialect": "portable", "order": "zyx"}, "leave out order"),
    ):
        with pytest.raises(ValueError, match=words):
            export_sparse_onnx(model, given, tmp_path / "a.onnx", **settings)
    path = export_sparse_onnx(model, given, tmp_path / "a.onnx", dialect="portable").path
    with pytest.raises(ValueError, match="a voxel occurs twice"):
        load_sparse_onnx(path, backend="onnxruntime")(features, coords)


@pytest.mark.parametrize(("bits", "different"), [(-19, 0), (-17, 2)])
def test_only_what_functions_of_floats_make_may_be_rounded_otherwise(bits, different):
    voxels = torch.zeros(3, 4, dtype=torch.int32)
    want = torch.tensor([[1.0], [2.0], [-4.0]])
    made = want + torch.tensor([[1.0], [-1.0], [0.0]]) * 4 * 2.0**bits
    pair = Sparse(made, None, voxels), Sparse(want, None, voxels)
    assert counted("output", "", *pair, slack=2.0**-18).different == different
    assert counted("output", "", *pair).different == 2


def test_layers_behind_functions_of_floats_are_told(nets, tmp_path):
    """Activation, then batch norm: both run in floats, and no two runtimes sum alike."""

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.aside, self.last = subm(nets, 5, 8), subm(nets, 5, 6), subm(nets, 8, 6)
            self.act, self.norm = nn.LeakyReLU(), nn.BatchNorm1d(8)

        def forward(self, features, coords, batch_size):
            given = nets.spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            x = self.stem(given)
            x = x.replace_feature(self.norm(self.act(x.features)))
            return self.last(x), self.aside(given)

    torch.manual_seed(0)
    model = Leaky().eval()
    nn.init.uniform_(model.norm.running_mean), nn.init.uniform_(model.norm.running_var, 0.5, 2)
    frame = nets.frame(0)
    written = export_sparse_onnx(
        nets.calibrated(model, [frame]), frame, tmp_path / "a.onnx", dialect="portable"
    )
    rows = compare_sparse_onnx(load_sparse_onnx(written.path), written.integer_model, frame)
    told = {row.path: row.behind_functions for row in rows if row.path}
    assert told == {"stem.0": False, "last.0": True, "aside.0": False}


def test_a_pool_whose_voxels_nothing_reads(nets, tmp_path):
    spconv = nets.spconv

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SparseConv3d(5, 8, 3, 2, padding=1)
            self.pool = spconv.SparseMaxPool3d(3, 2, padding=1)

        def forward(self, features, coords, batch_size):
            x = spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            return self.pool(self.stem(x)).features

    torch.manual_seed(0)
    model, frame = nets.calibrated(Pooled().eval(), [nets.frame(0)]), nets.frame(1)
    file = export_sparse_onnx(
        model, nets.frame(0), tmp_path / "pooled.onnx", dialect="portable", model_order="zyx"
    )
    rows = compare_sparse_onnx(load_sparse_onnx(file.path), model, frame)
    assert rows[-1].node == "output"
    assert [row.different for row in rows] == [0] * len(rows)


@pytest.mark.parametrize("target", ["openvino", "horizon", "tensorrt11"])
def test_engines_without_operators_of_voxels_refuse_sparse_models(nets, tmp_path, target):
    torch.manual_seed(0)
    model = nets.calibrated(nets.Hourglass().eval(), [nets.frame(0)])
    with pytest.raises(ValueError, match="is sparse; export_sparse_onnx writes an encoder"):
        export_qdq_onnx(model, nets.frame(0), tmp_path / "a.onnx", target)

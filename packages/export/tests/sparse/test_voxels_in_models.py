"""Whole models with sparse convolutions in them, written for stock ONNX Runtime."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_export import compare_qdq_onnx, cpu_at_hand, export_qdq_onnx, lint_onnx
from bevquant_fusion import fuse_model
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import to_dense, use_bevquant_kernels

onnxruntime = pytest.importorskip("onnxruntime")
GRID = [9, 12, 10]


def frame(seed, grid=GRID, frames=1, share=0.08):
    """Features, coordinates and the number of frames; voxels as a scanner gives them, unsorted."""
    generator = torch.Generator().manual_seed(seed)
    found = (torch.rand(frames, *grid, generator=generator) < share).nonzero().int()
    found = found[torch.randperm(len(found), generator=generator)]
    return torch.randn(len(found), 4, generator=generator), found, frames


def prepared(model, frames, config=None):
    torch.manual_seed(0)
    use_bevquant_kernels(model)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    fused = fuse_model(model.eval(), copy.deepcopy(frames[0])).model
    model = quantize_model(fused, config, example_inputs=copy.deepcopy(frames[0])).model
    calibrate(model, [copy.deepcopy(f) for f in frames], method="max")
    return model


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "features"):
        return [value.features, value.indices]
    members = value.values() if isinstance(value, dict) else value
    kept = [m for m in members if not isinstance(m, int | list)] if members is not None else []
    return [t for member in kept for t in tensors(member)]


def check(model, frames, path, **settings):
    """Written from the first frame; on every one the file's integers and floats are the model's."""
    file = export_qdq_onnx(model, copy.deepcopy(frames[0]), path, "onnxruntime", **settings)
    assert file.verified.startswith("onnxruntime")
    assert [str(finding) for finding in lint_onnx(path, "onnxruntime")] == []
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rows = compare_qdq_onnx(file, model, copy.deepcopy(frames[-1]))
    assert rows
    assert {row.unexplained for row in rows} == {0}
    for given in frames:
        wanted = tensors(file.integer_model(*copy.deepcopy(given)))
        read = [t.numpy() for t in tensors(given)]
        got = session.run(None, dict(zip(file.inputs, read, strict=True)))
        for want, made in zip(wanted, got, strict=True):
            assert want.shape == made.shape
            np.testing.assert_allclose(made, want.numpy(), atol=1e-4, rtol=1e-4)
    return file


def block(conv, channels):
    return [conv, nn.BatchNorm1d(channels), nn.ReLU()]


class UNet(nn.Module):
    """Up by an inverse convolution, joined with what was there, channels summed in pairs."""

    def __init__(self, spconv):
        super().__init__()
        seq = spconv.SparseSequential
        self.tensor = spconv.SparseConvTensor
        self.first = seq(*block(spconv.SubMConv3d(4, 8, 3, indice_key="a", bias=False), 8))
        self.down = seq(*block(spconv.SparseConv3d(8, 16, 3, 2, 1, indice_key="d"), 16))
        self.deep = seq(*block(spconv.SubMConv3d(16, 16, 3, indice_key="b"), 16))
        self.up = seq(*block(spconv.SparseInverseConv3d(16, 8, 3, indice_key="d"), 8))
        self.last = seq(*block(spconv.SubMConv3d(16, 8, 3, indice_key="a"), 8))

    def forward(self, features, coords, batch_size):
        x = self.first(self.tensor(features, coords, GRID, batch_size))
        up = self.up(self.deep(self.down(x)))
        both = torch.cat([up.features, x.features], 1)
        up = up.replace_feature(both)
        out = self.last(up)
        less = both.view(both.shape[0], 8, -1).sum(2)
        out = out.replace_feature(out.features + less)
        return {"points": out.features, "places": coords[:, 1:].float() * 0.1, "voxels": out}


class Detector(nn.Module):
    """Voxels to maps to boxes."""

    def __init__(self, spconv):
        super().__init__()
        self.tensor = spconv.SparseConvTensor
        self.encoder = spconv.SparseSequential(
            *block(spconv.SubMConv3d(4, 8, 3, indice_key="a"), 8),
            *block(spconv.SparseConv3d(8, 16, 3, 2, 1), 16),
        )
        self.neck = nn.Sequential(
            nn.ZeroPad2d(1), nn.Conv2d(80, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.boxes = nn.Conv2d(16, 7, 1)

    def forward(self, frame):
        coords = frame["coords"].int()
        x = self.encoder(self.tensor(frame["features"], coords, GRID, frame["batch_size"]))
        x = to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)  # spconv's own warns
        n, c, d, h, w = x.shape
        boxes = self.boxes(self.neck(x.view(n, c * d, h, w)))
        return boxes.permute(0, 2, 3, 1).reshape(n, -1, 7).sigmoid()


class Pillars(nn.Module):
    """Two axes; a pooling; a sparse tensor in and out."""

    def __init__(self, spconv):
        super().__init__()
        self.first = spconv.SubMConv2d(4, 8, 3, indice_key="a")
        self.pool = spconv.SparseMaxPool2d(2, 2)
        self.second = spconv.SubMConv2d(8, 8, 3, padding=1, indice_key="b")

    def forward(self, x):
        return self.second(self.pool(self.first(x)))


class TwoReaders(nn.Module):
    """One result that two layers read in scales of their own, one of them in float."""

    def __init__(self, spconv):
        super().__init__()
        self.tensor = spconv.SparseConvTensor
        self.first = spconv.SubMConv3d(4, 8, 3, indice_key="a")
        self.second = spconv.SubMConv3d(8, 8, 3, indice_key="a")
        self.third = spconv.SubMConv3d(8, 8, 1, indice_key="c")

    def forward(self, features, coords, batch_size):
        x = self.first(self.tensor(features, coords, GRID, batch_size))
        return self.second(x).features, self.third(x).features, x.features


@pytest.mark.parametrize("weights", ["uint8", "int8"])
def test_a_unet(nets, tmp_path, weights):
    if weights == "int8" and cpu_at_hand() == "any":
        pytest.skip("this CPU saturates sums of pairs")
    frames = [frame(0), frame(1, share=0.2)]
    file = check(prepared(UNet(nets.spconv), frames), frames, tmp_path / "a.onnx", weights=weights)
    assert file.inputs == {"features": ("voxels", 4), "coords": ("voxels", 4)}
    assert list(file.outputs) == ["points", "places", "voxels_features", "voxels_indices"]
    assert "batch_size: is 1 in the file" in file.notes


def test_a_detector_of_two_frames(nets, tmp_path):
    frames = [
        ({"features": x, "coords": where.float(), "batch_size": n},)
        for x, where, n in (frame(seed, frames=2, share=s) for seed, s in ((0, 0.1), (1, 0.05)))
    ]
    file = check(prepared(Detector(nets.spconv), frames), frames, tmp_path / "a.onnx")
    assert file.outputs == {"output": (2, 30, 7)}


def test_two_axes_and_a_sparse_tensor_in_and_out(nets, tmp_path):
    grid = [12, 11]
    frames = [
        (nets.spconv.SparseConvTensor(x, where, grid, n),)
        for x, where, n in (frame(s, grid, frames=2, share=0.3) for s in (0, 1))
    ]
    file = check(prepared(Pillars(nets.spconv), frames), frames, tmp_path / "a.onnx")
    assert [shape[1] for shape in file.inputs.values()] == [4, 3]
    assert [shape[1] for shape in file.outputs.values()] == [8, 3]


@pytest.mark.parametrize("off", ["", "third", "second"])
def test_sums_that_several_layers_read(nets, tmp_path, off):
    frames = [frame(0), frame(1)]
    config = QuantConfig(exclude=(off,)) if off else None
    check(prepared(TwoReaders(nets.spconv), frames, config), frames, tmp_path / "a.onnx")


def test_a_grid_as_large_as_the_voxels_need(nets, tmp_path):
    frames = []
    for seed, grid, count in ((0, GRID, 2), (1, [20, 9, 14], 3)):
        x, where, _ = frame(seed, grid, count)
        where = where[where[:, 0].sort().indices]  # the last voxel is of the last frame
        frames.append((x, where[:, 1:].long(), where[:, 0]))
    file = check(prepared(AsLargeAsNeeded(nets.spconv), frames), frames, tmp_path / "a.onnx")
    assert file.outputs["output_2"][1:] == (4,)


def test_pooled_voxels_whose_frames_are_counted_anew(nets, tmp_path):
    frames = [(x, where) for x, where, _ in (frame(0), frame(1))]
    model = prepared(PooledPoints(nets.spconv), frames)
    check(model, frames, tmp_path / "a.onnx")


def test_voxels_that_are_none_end_the_run(nets, tmp_path):
    frames = [frame(0)]
    path = tmp_path / "a.onnx"
    export_qdq_onnx(prepared(UNet(nets.spconv), frames), frames[0], path, "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    features, coords, _ = (t.numpy() if hasattr(t, "numpy") else t for t in frames[0])
    for rule, change in {
        "voxels_lie_in_the_grid_and_the_batch": (0, 1, 99),
        "voxels_occur_once": (slice(0, 2), slice(None), coords[0]),
    }.items():
        *index, value = change
        wrong = coords.copy()
        wrong[tuple(index)] = value
        with pytest.raises(Exception, match=rule):
            session.run(None, {"features": features, "coords": wrong})


class Ends(nn.Module):
    """One layer, on a given grid or on one as large as the voxels need."""

    def __init__(self, conv, grid, spconv, dense=False):
        super().__init__()
        self.conv, self.grid, self.dense = conv, grid, dense
        self.tensor = spconv.SparseConvTensor

    def forward(self, features, coords, batch_size):
        grid = (coords[:, 1:].max(0).values + 2).tolist() if self.grid is None else self.grid
        x = self.conv(self.tensor(features, coords, grid, batch_size))
        if self.dense:
            return to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)
        return x.features


class AsLargeAsNeeded(nn.Module):
    """Grid and number of frames are read from the voxels; a frame's last voxel is asked for."""

    def __init__(self, spconv):
        super().__init__()
        self.tensor = spconv.SparseConvTensor
        self.layers = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, indice_key="a"),
            spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="d"),
            spconv.SparseInverseConv3d(8, 8, 3, indice_key="d"),
            spconv.SubMConv3d(8, 4, 3, indice_key="a"),
        )

    def forward(self, features, places, frames):
        grid = torch.add(places.max(0).values, 9).tolist()
        coords = torch.cat([frames.unsqueeze(-1).int(), places.int()], 1).contiguous()
        x = self.tensor(features, coords, grid, frames[-1].tolist() + 1)
        x = self.layers(x).features
        return x, x[-1], x[1:-2], x.new_zeros(x.shape[0], 3) + x[:, :3]


class PooledPoints(nn.Module):
    """Points, attention in patches of them, and coarser points, as a point transformer has."""

    def __init__(self, spconv):
        super().__init__()
        self.tensor = spconv.SparseConvTensor
        self.first = spconv.SubMConv3d(4, 8, 3, padding=1, indice_key="a")
        self.qkv, self.down = nn.Linear(8, 24), nn.Linear(8, 8)
        self.second = spconv.SubMConv3d(8, 8, 3, padding=1, indice_key="b")
        self.head = nn.Linear(8, 3)

    def attend(self, x, frames, patch):
        patch = min(frames.bincount().min().tolist(), patch)
        place = torch.arange((x.shape[0] + patch - 1) // patch * patch)
        place = place - (place >= x.shape[0]) * patch
        qkv = self.qkv(x)[place].reshape(-1, patch, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + y.transpose(1, 2).reshape(-1, 8)[: x.shape[0]]

    def forward(self, features, coords):
        frames = coords[:, 0].long()
        x = self.first(self.tensor(features, coords, GRID, frames[-1].tolist() + 1)).features
        x = self.attend(x, frames, 16)
        coarse, cell, counts = torch.unique(
            coords.long() // torch.tensor([1, 2, 2, 2]), dim=0, return_inverse=True,
            return_counts=True,
        )  # fmt: skip
        ends = nn.functional.pad(counts.cumsum(0), (1, 0))
        pooled = torch.segment_reduce(self.down(x)[cell.argsort(stable=True)], "max", offsets=ends)
        count = coarse[:, 0][-1].tolist() + 1
        pooled = self.second(self.tensor(pooled, coarse.int(), [5, 6, 5], count)).features
        return self.head(pooled[cell] + x)


class PointsOfVoxels(nn.Module):
    """Voxels of points given beside them: as many points as a scan has, whatever its voxels."""

    def __init__(self, spconv):
        super().__init__()
        self.tensor = spconv.SparseConvTensor
        self.layers = spconv.SparseSequential(*block(spconv.SubMConv3d(4, 8, 3, padding=1), 8))
        self.branch = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, points, voxel_of, near, weights, coords, batch_size):
        counts = torch.zeros(len(coords)).index_add(0, voxel_of, torch.ones(len(points)))
        sums = torch.zeros(len(coords), points.shape[1]).index_add(0, voxel_of, points)
        means = sums / counts[:, None]
        x = self.layers(self.tensor(means, coords, GRID, batch_size)).features
        return self.head((x[near] * weights[..., None]).sum(1) + self.branch(points))


def scan(seed, each):
    features, coords, batch_size = frame(seed)
    generator = torch.Generator().manual_seed(seed)
    voxel_of = torch.arange(len(features)).repeat(each)
    points = features.repeat(each, 1) + 0.1 * torch.randn(len(voxel_of), 4, generator=generator)
    near = torch.randint(0, len(features), (len(points), 8), generator=generator)
    weights = torch.rand(len(points), 8, generator=generator).softmax(1)
    return points, voxel_of, near, weights, coords, batch_size


def test_tables_beside_voxels_have_any_number_of_rows(nets, tmp_path):
    frames = [scan(0, 2), scan(1, 3)]
    model = prepared(PointsOfVoxels(nets.spconv), frames)
    check(model, frames, tmp_path / "points.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "points.onnx"))
    shapes = {port.name: port.shape for port in session.get_inputs()}
    assert isinstance(shapes["points"][0], str)
    assert shapes["points"][1:] == [4]
    assert shapes["near"] == [shapes["points"][0], 8]
    assert shapes["coords"][0] != shapes["points"][0]


class Lifted(nn.Module):
    """Camera features at the cells of a fixed grid; every cell is a voxel."""

    def __init__(self, spconv):
        super().__init__()
        self.tensor = spconv.SparseConvTensor
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.encoder = spconv.SparseSequential(*block(spconv.SubMConv2d(4, 8, 3), 8))
        cells = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(5), indexing="ij"), -1)
        self.register_buffer("cells", cells)

    def forward(self, cameras, shifts):
        frames = len(shifts)
        maps = self.conv(cameras.flatten(0, 1)).unflatten(0, cameras.shape[:2]).mean(1)
        rows = (maps + shifts.sum((1, 2))[:, :, None, None]).permute(0, 2, 3, 1).flatten(0, 2)
        cells = self.cells.repeat(frames, 1, 1, 1).flatten(0, 2)
        frame = torch.arange(len(cameras)).repeat_interleave(len(self.cells.flatten(0, 1)))
        coords = torch.cat([frame[:, None], cells], 1).int()
        x = self.encoder(self.tensor(rows, coords, [6, 5], len(cameras)))
        return to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)


def test_voxels_that_are_a_grids_cells_leave_the_number_of_frames_fixed(nets, tmp_path):
    frames = [(torch.randn(1, 2, 3, 6, 5), torch.randn(1, 3, 3, 4)) for _ in range(3)]
    file = check(prepared(Lifted(nets.spconv), frames), frames, tmp_path / "a.onnx")
    assert file.inputs["shifts"] == (1, 3, 3, 4)


def test_what_has_no_form_is_refused(nets, tmp_path):
    spconv, path = nets.spconv, tmp_path / "a.onnx"
    frames = [frame(0)]
    plain = prepared(Ends(spconv.SubMConv3d(4, 4, 3), GRID, spconv), frames)
    for settings, words in (
        ({"profile": "tensorrt"}, "conv is sparse; .* export_detector a model with layers behind"),
        ({"profile": "onnxruntime", "dynamic_batch": True}, "number of frames is a constant"),
    ):
        with pytest.raises(ValueError, match=words):
            export_qdq_onnx(plain, frames[0], path, **settings)
    wide = prepared(TwoReaders(spconv), frames)
    quantizers = [wide.second._input_quantizer, wide.third._input_quantizer]
    for quantizer in quantizers:
        quantizer.num_bits = 16
    with pytest.raises(ValueError, match=r"second: it reads int16 from voxels; expected int8"):
        export_qdq_onnx(wide, frames[0], path, "onnxruntime")
    moved = prepared(Ends(spconv.SparseConvTranspose3d(4, 4, 3, 2), GRID, spconv), frames)
    with pytest.raises(ValueError, match="conv: a sparse convolution that is transposed has no"):
        export_qdq_onnx(moved, frames[0], path, "onnxruntime")
    grown = prepared(Ends(spconv.SubMConv3d(4, 4, 3), None, spconv, dense=True), frames)
    with pytest.raises(
        ValueError, match=r"dense\(\) on a grid that is computed from voxels has no"
    ):
        export_qdq_onnx(grown, frames[0], path, "onnxruntime")
    assert not path.exists()

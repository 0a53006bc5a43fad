"""A model is cut at dense() and written as files that make together what it makes alone."""

from __future__ import annotations

import importlib
import math
import re
from functools import cache

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from bevquant_export import (
    export_detector,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    open_onnx,
    with_half_constants,
)
from bevquant_export.detector._chain import refuse_other, sqnr_db
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import to_dense, use_bevquant_kernels

GRID = [4, 8, 8]


def frame(seed, share=0.3):
    generator = torch.Generator().manual_seed(seed)
    coords = (torch.rand(1, *GRID, generator=generator) < share).nonzero().int().contiguous()
    features = torch.randn(len(coords), 4, generator=generator)
    camera = torch.randn(1, 3, 8, 8, generator=generator)
    return {"camera": camera, "features": features, "coords": coords, "batch_size": 1}


class Detector(nn.Module):
    """A stem and two scales on voxels, layers on their maps and on a camera's."""

    def __init__(self, spconv, behind):
        super().__init__()
        self.stem = spconv.SubMConv3d(4, 8, 3, indice_key="subm1")
        self.down = spconv.SparseConv3d(8, 16, 3, 2, padding=1)
        self.head = nn.Conv2d(32, 4, 3, padding=1)
        self.tall = nn.Conv2d(8, 4, 1)
        self.eye = nn.Conv2d(3, 4, 1)
        self.relu = nn.ReLU()
        self.table = {"make": spconv.SparseConvTensor, "behind": behind}

    def forward(self, camera, features, coords, batch_size):
        x = self.table["make"](features, coords.int(), GRID, batch_size)
        x = self.stem(x)
        x = x.replace_feature(self.relu(x.features))
        y = self.down(x)
        y = y.replace_feature(self.relu(y.features))
        return self.table["behind"](self, camera, x, y)


def dense(x):  # spconv's own warns
    return to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)


def flat(x):
    x = dense(x)
    frames, channels, *grid = x.shape
    return x.view(frames, channels * grid[0], grid[1], grid[2])


def one_map(net, camera, x, y):
    return {"heat": net.head(flat(y)).sigmoid(), "camera": camera}


def two_maps(net, camera, x, y):
    tall = net.tall(dense(x).sum(2))  # heights pooled
    return [net.head(flat(y)), {"tall": tall, "voxels": y}, net.eye(camera)]


def same_shapes(net, camera, x, y):
    permuted = dense(y).permute(0, 1, 3, 2, 4).contiguous()
    swapped = permuted.view(1, 32, 4, 4)[:, :, :, :]
    return net.head(flat(y)) - net.head(swapped)


def resized(net, camera, x, y):
    """Interpolated before a layer reads it: the whole integer model rounds the map first."""
    return net.head(nn.functional.interpolate(flat(y), scale_factor=2, mode="bilinear"))


def gated(net, camera, x, y):
    """What lies between layers, and in front of dense(), portable files have as functions."""
    return net.head(flat(y.replace_feature(y.features * y.features[:, :1].sigmoid())))


def chosen(net, camera, x, y):
    heat = net.head(flat(y))
    return heat, torch.where(heat > 0.1, heat, -heat)


def nothing_behind(net, camera, x, y):
    return y, flat(y)


def beside(net, camera, x, y):
    return y.features, net.eye(camera)


def no_voxels(net, camera, x, y):
    return net.eye(camera)


def voxels_and_map(net, camera, x, y):
    cells = y.indices.long()
    return net.head(flat(y))[cells[:, 0], :, cells[:, 2], cells[:, 3]]


@cache
def _quantized(spconv, behind):
    torch.manual_seed(0)
    net = Detector(spconv, behind).eval()
    use_bevquant_kernels(net)
    frames = [frame(0), frame(1)]
    model = quantize_model(net, example_inputs=frames[0]).model
    calibrate(model, frames, method="mse", forward=lambda m, batch: m(**batch))
    return model


@pytest.fixture
def write(spconv, tmp_path):
    def export(behind, target="tensorrt", **settings):
        settings.setdefault("batches", [frame(0), frame(5, 0.5)])  # many more voxels
        model = _quantized(spconv, behind)
        return export_detector(model, frame(0), tmp_path, target, model_order="zyx", **settings)

    return export


def test_steps_in_front_of_the_sparse_file_are_named(spconv, tmp_path):
    class Averaged(Detector):
        def forward(self, camera, features, coords, batch_size):
            return super().forward(camera, features.sum(1), coords, batch_size)

    given = frame(0)
    given["features"] = given["features"][:, None].repeat(1, 3, 1)
    torch.manual_seed(0)
    net = Averaged(spconv, one_map).eval()
    use_bevquant_kernels(net)
    model = quantize_model(net, example_inputs=given).model
    calibrate(model, [given], forward=lambda m, batch: m(**batch))
    place = re.escape(str(tmp_path / "sparse.onnx"))  # not the temporary folder's
    with pytest.warns(UserWarning, match=f"export_detector: {place}: the file begins behind sum"):
        made = export_detector(model, given, tmp_path, model_order="zyx")
    assert "Compute these before the engine" in str(made)


def chained(made, inputs):
    """The files one behind the other, by the names of their ports alone."""
    given = dict(inputs)
    file = load_sparse_onnx(made.sparse.path)
    outputs = file(inputs["features"], inputs["coords"], 1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given |= dict(zip(file.graph.outputs, outputs, strict=True))
    return given | open_onnx(made.dense.path, made.target)(given)


@pytest.mark.parametrize("target", ["tensorrt10", "tensorrt11", "onnxruntime", "horizon"])
def test_a_map_is_an_output_here_and_an_input_there(write, target):
    made = write(one_map, target)
    (handed_on,) = made.maps
    assert (handed_on.name, handed_on.shape) == ("spatial_features", (1, 32, 4, 4))
    assert [o.name for o in onnx.load(made.sparse.path).graph.output] == ["spatial_features"]
    assert list(made.dense.inputs) == ["spatial_features"]
    assert made.outputs == {"heat": ("dense.onnx", "heat")}
    assert made.left_out == ("camera",)
    assert made.findings == ()
    assert not lint_onnx(made.dense.path, target)
    assert "view in the model (" in str(made)
    example, other = made.checks
    assert (example.frame, other.frame) == ("example", "batches[1]")
    # Layers on 77 voxels, then on 133.
    assert example.layers[0] == other.layers[0] == 0 < example.layers[1] < other.layers[1]
    (heat,) = example.outputs
    assert heat.name == "heat"
    assert heat.sqnr_db > 30
    assert not heat.is_chosen


def test_both_files_have_the_one_range_of_the_map(write, spconv):
    made = write(one_map)
    amax = float(_quantized(spconv, one_map).head._input_quantizer.amax)
    assert made.maps[0].amax == pytest.approx(amax)
    graph = onnx.load(made.dense.path).graph
    first = next(node for node in graph.node if "spatial_features" in node.input)
    assert first.op_type == "QuantizeLinear"
    scales = {c.name: numpy_helper.to_array(c) for c in graph.initializer}
    assert scales[first.input[1]] == pytest.approx(amax / 127)
    last = onnx.load(made.sparse.path).graph.node[1]
    stated = {a.name: a for a in last.attribute}
    assert stated["output_precision"].s == b"fp16"


def test_the_files_by_their_names_alone_make_what_the_model_makes(write, spconv):
    made = write(two_maps, "onnxruntime")
    assert [m.name for m in made.maps] == ["spatial_features_0", "spatial_features_1"]
    assert dict(made.outputs) == {
        "1_voxels": ("sparse.onnx", "output_1_voxels"),
        "0": ("dense.onnx", "output_0"),
        "1_tall": ("dense.onnx", "output_1_tall"),
        "2": ("dense.onnx", "output_2"),
    }
    inputs = frame(7, 0.2)
    found = chained(made, inputs)
    whole = simulate(with_half_constants(_quantized(spconv, two_maps)), frame(0), verify=False)
    head, rest, eye = whole(**inputs)
    for name, wanted in {"output_0": head, "output_1_tall": rest["tall"], "output_2": eye}.items():
        assert (found[name] - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert torch.equal(found["output_1_voxels"].features, rest["voxels"].features)


def test_a_map_is_rounded_before_anything_else(write):
    made = write(resized)
    graph = onnx.load(made.dense.path).graph
    assert [n.op_type for n in graph.node if "spatial_features" in n.input] == ["QuantizeLinear"]


def test_what_no_engine_has_on_voxels_is_in_a_portable_file(write):
    made = write(gated, "onnxruntime")
    assert made.maps[0].shape == (1, 32, 4, 4)
    assert all(check.outputs[0].sqnr_db > 100 for check in made.checks)
    with pytest.raises(ValueError, match=r"sigmoid.* has no operator in the dialect libspconv"):
        write(gated, "tensorrt")


def test_outputs_behind_a_choice_are_marked(write):
    made = write(chosen)
    assert [(o.name, o.is_chosen) for o in made.checks[0].outputs] == [
        ("output_0", False), ("output_1", True),
    ]  # fmt: skip
    assert re.search(r"^output_1 .* dB\), chosen$", str(made), re.MULTILINE)


def test_files_for_a_cpu_are_timed_beside_float32(write):
    made = write(one_map, "onnxruntime", measure=True)
    for file in (made.sparse, made.dense):
        assert file.figures.timing.milliseconds > 0
        assert f"{file.figures.timing.ratio:.2f} times as fast as float32" in str(file)
    assert all(not check.tensors[0] for check in made.checks)  # what is written is as before


def test_files_of_other_engines_are_not_timed(write):
    with pytest.raises(ValueError, match=r"measure=True with target='tensorrt': expected"):
        write(one_map, "tensorrt", measure=True)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^export_detector: .*file is a file; give the folder"):
        export_detector(nn.Identity(), frame(0), tmp_path / "file")


def test_nothing_behind_the_map(write):
    made = write(nothing_behind)
    assert made.dense is None
    assert dict(made.outputs) == {
        "0": ("sparse.onnx", "output_0"), "1": ("sparse.onnx", "spatial_features"),
    }  # fmt: skip
    assert sorted(p.name for p in made.folder.iterdir()) == ["sparse.onnx"]


def test_layers_beside_the_voxels(write):
    made = write(beside)
    assert made.maps == ()
    assert dict(made.outputs) == {
        "0": ("sparse.onnx", "output_0"), "1": ("dense.onnx", "output_1"),
    }  # fmt: skip
    assert list(made.dense.inputs) == ["camera"]
    assert [output.sqnr_db > 100 for output in made.checks[1].outputs] == [True]


def test_a_model_without_voxels_is_its_dense_file(write):
    made = write(no_voxels)
    assert made.sparse is None
    assert sorted(p.name for p in made.folder.iterdir()) == ["dense.onnx"]
    assert made.checks[1].tensors[0] == 0


def test_what_reads_voxels_and_maps_is_refused(write, tmp_path):
    with pytest.raises(ValueError, match=r"test_export_detector\.py:\d+\) reads maps and what lie"):
        write(voxels_and_map)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_split_is_one_file_for_onnxruntime(write):
    made = write(voxels_and_map, "onnxruntime")
    assert [path.name for path in made.folder.iterdir()] == ["dense.onnx"]
    assert (made.sparse, made.maps) == (None, ())
    assert re.match(r"one file, as .*test_export_detector\.py:\d+", made.dense.notes[0])
    assert [check.tensors[0] for check in made.checks] == [0, 0]
    assert all(check.tensors[1] for check in made.checks)


def test_a_whole_sparse_file_of_it_names_the_remedy(spconv, tmp_path):
    with pytest.raises(ValueError, match=r"no operator.*export_detector writes the model as two"):
        export_sparse_onnx(_quantized(spconv, one_map), frame(0), tmp_path / "a.onnx")


# What has gone wrong is found, and leaves nothing


def damaged(monkeypatch, change):
    """Let `change` have the dense file before it is run behind the sparse one."""
    module = importlib.import_module("bevquant_export.detector._export")
    real = module.QdqTarget.write

    def write(self, model, args, path, **options):
        made = real(self, model, args, path, **options)
        proto = onnx.load(path)
        change(proto.graph)
        path.write_bytes(proto.SerializeToString())
        return made

    monkeypatch.setattr(module.QdqTarget, "write", write)


def test_another_scale_at_the_cut_of_the_file(write, tmp_path, monkeypatch):
    def double(graph):
        first = next(node for node in graph.node if "spatial_features" in node.input)
        scale = next(c for c in graph.initializer if c.name == first.input[1])
        scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 2, scale.name))

    damaged(monkeypatch, double)
    with pytest.raises(ValueError, match=r"integers are others than the model's"):
        write(one_map)
    assert list(tmp_path.iterdir()) == []


def test_another_range_at_the_cut_of_the_part(write, tmp_path, monkeypatch):
    module = importlib.import_module("bevquant_export.detector._export")
    real = module._Writer._simulated

    def simulated(self, graph, inputs=None):
        quantizer = self.rounded.head._input_quantizer
        amax = quantizer.amax.clone()
        quantizer.amax = amax * (1.25 if inputs is not None else 1)
        made = real(self, graph, inputs)
        quantizer.amax = amax
        return made

    monkeypatch.setattr(module._Writer, "_simulated", simulated)
    with pytest.raises(ValueError, match="heat of a part is not that of the whole integer model"):
        write(one_map)
    assert list(tmp_path.iterdir()) == []


def test_swapped_ports(write, tmp_path, monkeypatch):
    module = importlib.import_module("bevquant_export.detector._export")
    real = module.write_sparse

    def swapped(*args, names, **settings):
        ports = list(names.values())
        return real(*args, names=dict(zip(names, ports[::-1], strict=True)), **settings)

    monkeypatch.setattr(module, "write_sparse", swapped)
    with pytest.raises(ValueError, match=r"spatial_features_\d: .* that the sparse file hands on"):
        write(same_shapes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_output_that_is_not_finite_is_refused(wrong):
    wanted = torch.tensor([1.0, 2.0, -math.inf])  # a masked score, which is right
    assert sqnr_db(wanted, wanted.clone()) == math.inf
    refuse_other("example", "heat", wanted, torch.tensor([1.0, 2.01, -math.inf]))
    with pytest.raises(ValueError, match=r"heat of the dense file, run as one on example.*-inf dB"):
        refuse_other("example", "heat", wanted, torch.tensor([1.0, wrong, -math.inf]))
    with pytest.raises(ValueError, match="heat of the dense file"):
        refuse_other("example", "heat", wanted, wanted[:2])

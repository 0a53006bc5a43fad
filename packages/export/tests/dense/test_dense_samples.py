"""Files of models that sample integers: GridSample, or gathers where the engine has none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_export import (
    compare_qdq_onnx,
    export_qdq_onnx,
    lint_onnx,
    open_onnx,
)
from bevquant_graph import deformable_attention
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


PLUGIN = "MultiscaleDeformableAttnPlugin_TRT"


class Warp(nn.Module):
    """A ReLU and a layer behind the samples, or floats (`apart`)."""

    def __init__(self, apart=False, **settings):
        super().__init__()
        self.features, self.flow = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 2, 1)
        self.head, self.apart, self.settings = nn.Conv2d(6, 4, 1), apart, settings

    def forward(self, x):
        grid = 2 * self.flow(x).permute(0, 2, 3, 1)
        y = F.grid_sample(self.features(x).relu(), grid, align_corners=False, **self.settings)
        return self.head(y.sigmoid() + y if self.apart else y.relu())


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv3d(3, 6, 1), nn.Conv3d(6, 4, 1)
        self.register_buffer("grid", torch.rand(2, 2, 3, 4, 3) * 2.4 - 1.2)

    def forward(self, x):
        y = self.features(x[:, :, None].repeat(1, 1, 5, 1, 1))
        return self.head(F.grid_sample(y, self.grid, align_corners=True))


class Attention(nn.Module):
    def __init__(self, apart=False):
        super().__init__()
        self.value, self.offsets = nn.Linear(8, 8), nn.Linear(8, 2 * 2 * 3 * 2)
        self.weights, self.out, self.apart = nn.Linear(8, 2 * 6), nn.Linear(8, 5), apart
        self.register_buffer("places", torch.rand(7, 1, 1, 1, 2) * 1.2 - 0.1)

    def forward(self, query, memory):
        batch, count, _ = query.shape
        places = self.places + self.offsets(query).view(batch, count, 2, 2, 3, 2) / 8
        weights = self.weights(query).view(batch, count, 2, 6).softmax(-1).unflatten(-1, (2, 3))
        value = self.value(memory).unflatten(-1, (2, 4))
        shapes, starts = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])
        made = deformable_attention(value, shapes, starts, places, weights)
        return self.out(made.tanh() + made if self.apart else made)


NETS = {
    "zeros": Warp,
    "border": lambda: Warp(padding_mode="border"),
    "reflection, nearest": lambda: Warp(mode="nearest", padding_mode="reflection"),
    "read by functions": lambda: Warp(apart=True),
    "volume": Volume,
    "attention": Attention,
    "attention read by functions": lambda: Attention(apart=True),
}


def frame(name, seed):
    g = torch.Generator().manual_seed(seed)
    if name.startswith("attention"):
        return torch.randn(2, 7, 8, generator=g), torch.randn(2, 30, 8, generator=g)
    return (torch.randn(2, 3, 8, 12, generator=g),)


@pytest.mark.parametrize("profile", ["tensorrt11", "onnxruntime", "horizon"])
@pytest.mark.parametrize("name", NETS)
def test_files_have_the_integers_of_samples(name, profile, tmp_path):
    torch.manual_seed(4)
    model = quantize_model(NETS[name]().eval(), example_inputs=frame(name, 0)).model
    calibrate(model, [frame(name, 0), frame(name, 1)])
    file = export_qdq_onnx(model, frame(name, 0), tmp_path / "net.onnx", profile)
    kinds = {node.op_type for node in onnx.load(file.path).graph.node}
    plugin = name.startswith("attention") and profile == "tensorrt11"
    assert (PLUGIN in kinds) == plugin
    flat = profile != "horizon" and name != "volume"  # operator set 16 samples no volumes
    assert ("GridSample" in kinds) == (flat and not plugin)
    rows = compare_qdq_onnx(file, model, frame(name, 2))
    assert [r.op for r in rows if "sample" in r.op or "attention" in r.op] or "functions" in name
    assert sum(row.unexplained for row in rows) == 0


@pytest.mark.parametrize("profile", ["tensorrt10", "tensorrt11"])
def test_tensorrts_plugin_gets_the_inputs_of_its_schema(profile, tmp_path):
    torch.manual_seed(4)
    model = quantize_model(Attention().eval(), example_inputs=frame("attention", 0)).model
    calibrate(model, [frame("attention", 0)])
    path = tmp_path / "net.onnx"
    file = export_qdq_onnx(model, frame("attention", 0), path, profile)
    assert file.verified
    proto = onnx.load(path)
    (node,) = (node for node in proto.graph.node if node.op_type == PLUGIN)
    assert (node.domain, len(node.input)) == ("trt.plugins", 5)
    version = {"tensorrt10": "1", "tensorrt11": "2"}[profile]
    settings = {a.name: a.s.decode() for a in node.attribute}
    assert settings == {"plugin_version": version, "plugin_namespace": ""}
    held = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    shapes, starts = (held[name] for name in node.input[1:3])
    assert (shapes.tolist(), starts.tolist()) == ([[4, 6], [2, 3]], [0, 24])
    assert shapes.dtype == starts.dtype == "int32"
    inferred = onnx.shape_inference.infer_shapes(proto).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in inferred}
    assert {types[node.input[i]] for i in (0, 3, 4)} == {1}  # one type for all floats
    assert not lint_onnx(path, profile)
    query, memory = frame("attention", 3)
    names = [port.name for port in proto.graph.input]
    (made,) = open_onnx(path, profile)(dict(zip(names, (query, memory), strict=True))).values()
    with torch.no_grad():
        torch.testing.assert_close(made, model(query, memory), atol=0.02, rtol=0.02)


def test_float_attention_is_written_too(tmp_path):
    torch.manual_seed(4)
    config = QuantConfig(quantize_sample=False)
    given = frame("attention", 0)
    model = quantize_model(Attention().eval(), config, example_inputs=given).model
    calibrate(model, [given])
    for profile in ("tensorrt11", "onnxruntime"):
        file = export_qdq_onnx(model, given, tmp_path / f"{profile}.onnx", profile)
        assert sum(row.unexplained for row in compare_qdq_onnx(file, model, given)) == 0


def test_sizes_of_levels_that_are_inputs_are_refused(tmp_path):
    class Free(Attention):
        def forward(self, query, memory, shapes):
            value = self.value(memory).unflatten(-1, (2, 4))
            places, weights = torch.full((2, 7, 2, 2, 3, 2), 0.4), torch.full((2, 7, 2, 2, 3), 0.1)
            starts = torch.tensor([0, 24])
            return self.out(deformable_attention(value, shapes, starts, places, weights) + query)

    given = (*frame("attention", 0), torch.tensor([[4, 6], [2, 3]]))
    net = Free()
    net.out = nn.Linear(8, 5)
    model = quantize_model(net.eval(), example_inputs=given).model
    calibrate(model, [given])
    with pytest.raises(ValueError, match="sizes of the sampled levels are computed from inputs"):
        export_qdq_onnx(model, given, tmp_path / "net.onnx", "onnxruntime")

"""What stands in the file: names, types and values of NVIDIA's dialect."""

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, TensorProto, numpy_helper

from bevquant_export import export_sparse_onnx

CONV = {
    "activation": "STRING", "dilation": "INTS", "groups": "INT", "in_channels": "INT",
    "input_dynamic_range": "FLOAT", "input_shape": "INTS", "input_spatial_shape": "INTS",
    "inverse": "INT", "kernel_size": "INTS", "ndim": "INT", "out_channels": "INT",
    "output_bound": "INT", "output_padding": "INTS", "output_precision": "STRING",
    "output_shape": "INTS", "output_spatial_shape": "INTS", "padding": "INTS",
    "precision": "STRING", "rulebook": "STRING", "stride": "INTS", "subm": "INT",
    "transposed": "INT", "weight_dynamic_ranges": "FLOATS",
}  # fmt: skip
ADD = {
    "input0_dynamic_range": "FLOAT", "input1_dynamic_range": "FLOAT",
    "output_precision": "STRING", "precision": "STRING",
}  # fmt: skip
SCATTER = {"format": "STRING", "input_spatial_shape": "INTS", "output_shape": "INTS"}
TYPES = {
    "SparseConvolution": CONV, "Add": ADD, "Relu": {}, "ScatterDense": SCATTER,
    "Transpose": {"dims": "INTS"}, "Reshape": {"dims": "INTS"},
}  # fmt: skip


def written(nets, model, path, **settings):
    export_sparse_onnx(model, nets.frame(0), path, **settings)
    return onnx.load(path)


def attributes(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


@pytest.fixture(scope="module")
def proto(nets, tmp_path_factory):
    return written(nets, nets.encoder(), tmp_path_factory.mktemp("file") / "a.onnx")


def test_every_attribute_has_its_name_type_and_place(proto):
    for node in proto.graph.node:
        kinds = {a.name: AttributeProto.AttributeType.Name(a.type) for a in node.attribute}
        assert kinds == TYPES[node.op_type]
        assert list(kinds) == sorted(kinds)


def test_names_run_in_order_of_execution(proto):
    nodes = proto.graph.node
    assert [n.output[0] for n in nodes] == [str(i) for i in range(1, len(nodes) + 1)]
    assert [n.name for n in nodes][:7] == [
        "conv0", "conv1", "conv2", "add0", "relu0", "conv3", "conv4"
    ]  # fmt: skip
    assert [n.name for n in nodes][-4:] == ["conv10", "scatter0", "transpose0", "reshape0"]
    assert nodes[1].doc_string == "encoder_layers.encoder_layer1.0.conv1"
    assert [v.name for v in proto.graph.input] == ["0"]
    assert [v.name for v in proto.graph.output] == [nodes[-1].output[0]]


def test_header_and_boundary(proto):
    (opset,) = proto.opset_import
    assert (opset.domain, opset.version) == ("ai.onnx", 11)
    for value, shape in ((proto.graph.input[0], [1, 5]), (proto.graph.output[0], [1, 32, 6, 5])):
        kind = value.type.tensor_type
        assert kind.elem_type == TensorProto.FLOAT16
        assert [d.dim_value for d in kind.shape.dim] == shape


def test_relu_is_folded_and_bias_is_there(proto):
    weights = {t.name: t for t in proto.graph.initializer}
    assert all(t.data_type == TensorProto.FLOAT16 and t.raw_data for t in weights.values())
    made_by = {n.output[0]: n for n in proto.graph.node}
    for i, node in enumerate(n for n in proto.graph.node if n.op_type == "SparseConvolution"):
        said = attributes(node)
        assert list(node.input[1:]) == [f"spconv{i}.weight", f"spconv{i}.bias"]
        shape = [said["out_channels"], *said["kernel_size"], said["in_channels"]]
        assert list(weights[node.input[1]].dims) == shape
        assert list(weights[node.input[2]].dims) == shape[:1]
        residual = node.doc_string.endswith("conv2")
        assert said["activation"] == (b"None" if residual else b"ReLU")
    relus = [n for n in proto.graph.node if n.op_type == "Relu"]
    assert len(relus) == 4
    assert {made_by[n.input[0]].op_type for n in relus} == {"Add"}


def test_one_range_per_tensor(proto):
    ranges = {}
    keys = {"Add": ["input0_dynamic_range", "input1_dynamic_range"]}
    for node in proto.graph.node:
        said = attributes(node)
        for name, key in zip(
            node.input, keys.get(node.op_type, ["input_dynamic_range"]), strict=False
        ):
            if key in said:
                ranges.setdefault(name, set()).add(said[key])
    assert len(ranges) == 11 + 4  # inputs of convolutions, and what is added to them
    assert all(len(found) == 1 for found in ranges.values())


def test_weights_are_the_integers_under_any_rounding(nets, proto):
    """Ties would depend on the reader's arithmetic: values lie on the grid, not between."""
    model = nets.encoder()
    tensors = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    for node in (n for n in proto.graph.node if n.op_type == "SparseConvolution"):
        module = model.get_submodule(node.doc_string)
        amax = module._weight_quantizer.amax.flatten()
        assert attributes(node)["weight_dynamic_ranges"] == amax.tolist()
        scale = (amax.double() / 127).view(-1, 1, 1, 1, 1)
        q = torch.round(module.weight.detach().double() / scale)
        steps = tensors[node.input[1]].astype(np.float64) / scale.numpy()
        assert np.abs(steps - q.numpy()).max() < 0.07
        bias = module.bias.detach().half().numpy()
        assert (tensors[node.input[2]] == bias).all()
        amax = float(module._input_quantizer.amax)
        assert attributes(node)["input_dynamic_range"] == amax


def test_precision_follows_the_quantizers(nets, tmp_path):
    model = nets.switch_off(nets.encoder(), "conv_input.0", "encoder_layers.encoder_layer1.0.conv1")
    graph = written(nets, model, tmp_path / "a.onnx").graph
    said = {n.doc_string + ":" + n.op_type: attributes(n) for n in graph.node}
    first = said["conv_input.0:SparseConvolution"]
    block = "encoder_layers.encoder_layer1.0."
    assert (first["precision"], first["output_precision"]) == (b"fp16", b"fp16")
    assert first["input_dynamic_range"] > 0  # as NVIDIA's exporters write it, for fp16 too
    inner = said[block + "conv1:SparseConvolution"]
    assert (inner["precision"], inner["output_precision"]) == (b"fp16", b"int8")
    assert len(inner["weight_dynamic_ranges"]) == 8
    last = said[block + "conv2:SparseConvolution"]
    assert (last["precision"], last["output_precision"]) == (b"int8", b"fp16")
    added = said[block + "quant_add:Add"]
    assert (added["precision"], added["output_precision"]) == (b"fp16", b"int8")
    assert "input0_dynamic_range" not in added
    assert said["conv_out.0:SparseConvolution"]["output_precision"] == b"fp16"


def test_reversed_axes(nets, tmp_path):
    plain = written(nets, nets.encoder(), tmp_path / "a.onnx").graph
    turned = written(nets, nets.encoder(), tmp_path / "b.onnx", order="zyx").graph
    for old, new in zip(plain.node, turned.node, strict=True):
        before, after = attributes(old), attributes(new)
        if old.op_type == "SparseConvolution":
            for name in ("kernel_size", "stride", "padding", "input_spatial_shape"):
                assert after[name] == before[name][::-1]
        if old.op_type == "Transpose":
            assert (before["dims"], after["dims"]) == ([0, 1, 4, 2, 3], [0, 1, 2, 4, 3])
        if old.op_type == "ScatterDense":
            assert (before["output_shape"], before["format"]) == ([1, 16, 6, 5, 2], b"xyz")
            assert (after["output_shape"], after["format"]) == ([1, 16, 2, 5, 6], b"zyx")
    for old, new in zip(plain.initializer, turned.initializer, strict=True):
        a, b = numpy_helper.to_array(old), numpy_helper.to_array(new)
        assert (b == (a.transpose(0, 3, 2, 1, 4) if a.ndim == 5 else a)).all()


def test_bounds_count_the_voxels_of_a_frame(nets, tmp_path):
    full = nets.frame(0, share=1.0, batch_size=2)
    graph = written(nets, nets.encoder(), tmp_path / "a.onnx", batches=[full], head_room=2.0).graph
    bounds = [attributes(n)["output_bound"] for n in graph.node if n.op_type == "SparseConvolution"]
    assert bounds[:5] == [3000] * 5  # 12·10·9 = 1080 voxels each frame, twice that, in thousands
    assert set(bounds[5:]) == {1000}


def test_the_same_model_gives_the_same_bytes(nets, tmp_path):
    for name in "ab":
        export_sparse_onnx(nets.encoder(), nets.frame(0), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_inverse_convolution_and_the_key_of_its_partner(nets, tmp_path):
    graph = written(nets, nets.hourglass(), tmp_path / "a.onnx").graph
    said = {n.doc_string: attributes(n) for n in graph.node}
    assert said["up"]["inverse"] == 1
    assert said["up"]["rulebook"] == said["down.0"]["rulebook"] == b"down"
    assert said["up"]["output_spatial_shape"] == [12, 10, 9]
    assert said["down.0"]["inverse"] == 0

"""Lowering files that were not written here: float ones, own ranges, damage."""

import contextlib

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bevquant_export import export_sparse_onnx, lint_onnx, load_sparse_onnx, lower_to_portable

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.fixture(scope="module")
def file(nets, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "a.onnx"
    export_sparse_onnx(nets.encoder(), nets.frame(0), path)
    return path


def put(model, name, **attributes):
    node = next(n for n in model.graph.node if n.name == name)
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())


def off_the_grid(model):
    """Float weights, as a file holds them whose engine quantizes them itself."""
    generator = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("weight"):
            values = numpy_helper.to_array(tensor)
            values = values * generator.uniform(0.5, 1.0, values.shape)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), tensor.name))


def own_ranges(model):
    """The operands of a sum in ranges of their own."""
    put(model, "add0", input0_dynamic_range=3.25)
    put(model, "add3", input0_dynamic_range=1.125)


def sum_in_floats(model):
    """A sum of integers that is given away before it is rounded."""
    put(model, "add1", output_precision="fp16")


def sum_without_relu(model):
    node = next(n for n in model.graph.node if n.name == "relu1")
    read, made = node.input[0], node.output[0]
    model.graph.node.remove(node)
    for other in model.graph.node:
        other.input[:] = [read if name == made else name for name in other.input]


def two_outputs(model):
    name = next(n for n in model.graph.node if n.name == "conv5").output[0]
    put(model, "conv5", output_precision="fp16")
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 12]))


@pytest.mark.parametrize(
    "change",
    [off_the_grid, own_ranges, sum_in_floats, sum_without_relu, two_outputs],
    ids=lambda change: change.__name__,
)
def test_files_of_integers(nets, file, tmp_path, change):
    model = onnx.load(file)
    change(model)
    onnx.save(model, tmp_path / "other.onnx")
    lower_to_portable(tmp_path / "other.onnx", tmp_path / "portable.onnx")
    assert lint_onnx(tmp_path / "portable.onnx", "onnxruntime") == []
    inputs = nets.frame(3, batch_size=2)
    wanted, dump = load_sparse_onnx(tmp_path / "other.onnx").run(*inputs)
    run = load_sparse_onnx(tmp_path / "portable.onnx", backend="onnxruntime")
    made, found = run.run(*inputs)
    layers = [r for r in dump.values() if r.op in ("Conv", "Add", "Relu")]
    assert len(layers) >= 18
    for (name, mine), other in zip(found.items(), layers, strict=True):
        assert mine.scale == other.scale
        assert torch.equal(mine.value, other.value), name
    for mine, other in zip(_all(made), _all(wanted), strict=True):
        assert torch.equal(mine, other)


def _all(output):
    parts = output if isinstance(output, tuple) else (output,)
    return [getattr(part, "features", part) for part in parts]


def float_file(path, grid=(12, 10, 9)):
    """Without precisions, ranges, keys and names, with a Relu behind a QuantAdd."""
    generator = np.random.default_rng(0)
    values = {
        "a.weight": generator.normal(0, 0.2, (4, 3, 3, 3, 5)), "a.bias": generator.normal(0, 1, 4),
        "b.weight": generator.normal(0, 0.2, (4, 3, 3, 3, 4)), "b.bias": generator.normal(0, 1, 4),
    }  # fmt: skip
    sizes = {name: [1, 1, 1] for name in ("stride", "padding", "dilation")}
    shapes = {"input_spatial_shape": grid, "output_spatial_shape": grid}
    given = {**sizes, **shapes, "kernel_size": [3, 3, 3], "subm": 1}
    a, b = ([f"{name}.weight", f"{name}.bias"] for name in "ab")
    nodes = [
        helper.make_node("SparseConvolution", ["0", *a], ["x"], activation="ReLU", **given),
        helper.make_node("SparseConvolution", ["x", *b], ["y"], activation="None", **given),
        helper.make_node("QuantAdd", ["y", "x"], ["z"]),
        helper.make_node("Relu", ["z"], ["out"]),
    ]
    tensors = [numpy_helper.from_array(v.astype(np.float16), n) for n, v in values.items()]
    graph = helper.make_graph(
        nodes, "scn", [helper.make_tensor_value_info("0", TensorProto.FLOAT16, None)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT16, [1, 4])], tensors,
    )  # fmt: skip
    path.write_bytes(helper.make_model(graph).SerializeToString())


def test_a_float_file_of_another_exporter(nets, tmp_path):
    float_file(tmp_path / "a.onnx")
    lower_to_portable(tmp_path / "a.onnx", tmp_path / "p.onnx", all_layers=True)
    onnx.checker.check_model(onnx.load(tmp_path / "p.onnx"), full_check=True)
    features, coords, _ = nets.frame(0)
    wanted = load_sparse_onnx(tmp_path / "a.onnx")(features, coords)
    session = ort.InferenceSession(str(tmp_path / "p.onnx"), providers=["CPUExecutionProvider"])
    assert [n.path for n in load_sparse_onnx(tmp_path / "p.onnx").nodes] == [
        "node 0", "node 1", "node 2", "node 3",
    ]  # fmt: skip
    layers = ["conv0", "conv1", "add0", "relu0"]
    assert [v.name for v in session.get_outputs()] == [*layers, "output", "output.coords"]
    feed = {"features": features.numpy(), "coords": coords.numpy(), "batch_size": np.array([1])}
    *_, relu, out, voxels = session.run(None, feed)
    assert np.array_equal(voxels, coords.numpy())
    np.testing.assert_allclose(out, wanted.features.numpy(), rtol=1e-4, atol=1e-5)
    assert np.array_equal(relu, out)


def disagree(model):
    put(model, "conv1", input_dynamic_range=2.5)


def large_bias(model):
    node = next(n for n in model.graph.node if n.name == "conv2")
    tensor = next(t for t in model.graph.initializer if t.name == node.input[2])
    tensor.raw_data = np.full(tensor.dims[0], 60000, np.float16).tobytes()
    put(model, "conv2", weight_dynamic_ranges=[3e-3] * tensor.dims[0], input_dynamic_range=0.15)
    weight = next(t for t in model.graph.initializer if t.name == node.input[1])
    small = numpy_helper.to_array(weight) * np.float16(1e-3)
    weight.CopyFrom(numpy_helper.from_array(small, weight.name))


def inverse_of_nothing(model):
    put(model, "conv5", inverse=1, subm=0)


def even_kernel(model):
    node = next(n for n in model.graph.node if n.name == "conv1")
    weight = next(t for t in model.graph.initializer if t.name == node.input[1])
    part = np.ascontiguousarray(numpy_helper.to_array(weight)[:, :2])
    weight.CopyFrom(numpy_helper.from_array(part, weight.name))
    put(model, "conv1", kernel_size=[2, 3, 3])


def other_voxels(model):
    put(model, "conv2", subm=0, stride=[1, 1, 1], padding=[1, 1, 1])


def reshape_of_another_size(model):
    put(model, "reshape0", dims=[1, 33, 6, 5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (disagree, "conv0 makes int8, and its readers say these ranges: conv1 2.5, add0"),
        (large_bias, "conv2: (sums of output channel|bias 60000)"),
        (inverse_of_nothing, "conv5: nothing to invert"),
        (even_kernel, "conv1: .*has a centre"),
        (other_voxels, "add0: its operands lie on different voxels: those of conv2 and of input"),
        (reshape_of_another_size, r"reshape0: dims \(1, 33, 6, 5\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_lowered(file, tmp_path, change, message):
    model = onnx.load(file)
    change(model)
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(ValueError, match=rf"lower_to_portable: {message}"):
        lower_to_portable(tmp_path / "a.onnx", tmp_path / "p.onnx")
    assert not (tmp_path / "p.onnx").exists()


@pytest.fixture(scope="module")
def lowered(file):
    target = file.with_name("lowered.onnx")
    lower_to_portable(file, target, verify=False)
    return target.read_bytes()


PLACES = st.tuples(st.floats(0, 1), st.integers(0, 255))


@given(st.lists(PLACES, min_size=1, max_size=3))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_bytes_are_an_error_or_a_model(lowered, tmp_path, places):
    content = bytearray(lowered)
    for place, value in places:
        content[int(place * (len(content) - 1))] = value
    (tmp_path / "damaged.onnx").write_bytes(content)
    with contextlib.suppress(ValueError):
        load_sparse_onnx(tmp_path / "damaged.onnx")

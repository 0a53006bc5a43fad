"""Reading: files of another exporter, and broken ones, of which each is named."""

import contextlib

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bevquant_export import export_sparse_onnx, load_sparse_onnx
from bevquant_int8sim import SparseOutput


@pytest.fixture(scope="module")
def file(nets, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "a.onnx"
    export_sparse_onnx(nets.encoder(), nets.frame(0), path)
    return path


def changed(file, path, change):
    model = onnx.load(file)
    change(model.graph)
    path.write_bytes(model.SerializeToString())
    return path


def of(graph, name):
    return next(n for n in graph.node if n.name == name)


def put(graph, node, name, value):
    """Replace an attribute; ``None`` removes it."""
    target = of(graph, node)
    kept = [a for a in target.attribute if a.name != name]
    del target.attribute[:]
    target.attribute.extend(kept)
    if value is not None:
        target.attribute.append(helper.make_attribute(name, value))


def drop_bias(graph):
    del of(graph, "conv3").input[2]


def as_float(graph):
    tensor = graph.initializer[0]
    values = numpy_helper.to_array(tensor).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def typed(graph):
    tensor = graph.initializer[0]
    numbers = np.frombuffer(tensor.raw_data, np.uint16).tolist()
    tensor.ClearField("raw_data")
    tensor.int32_data.extend(numbers)


def external(graph):
    graph.initializer[2].data_location = TensorProto.EXTERNAL


def shorten(graph):
    graph.initializer[1].raw_data = graph.initializer[1].raw_data[:-2]


def forget_weight(graph):
    del graph.initializer[4]


def infinite(graph):
    tensor = graph.initializer[1]
    tensor.raw_data = np.full(len(tensor.raw_data) // 2, np.inf, np.float16).tobytes()


def swap(graph):
    first, second = graph.node[1], graph.node[2]
    kept = onnx.NodeProto()
    kept.CopyFrom(first)
    first.CopyFrom(second)
    second.CopyFrom(kept)


def stray_relu(graph):
    del of(graph, "relu0").input[:]
    of(graph, "relu0").input.append(of(graph, "conv2").output[0])


def rename_output(graph):
    graph.output[0].name = "999"


def second_input(graph):
    graph.input.append(helper.make_tensor_value_info("coords", TensorProto.INT32, [1, 4]))


def unknown(graph):
    of(graph, "relu1").op_type = "Cast"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_bias, "conv3: SparseConvolution takes 3 inputs.*bias is mandatory"),
        (as_float, r"spconv0\.weight is FLOAT; the engine reads FLOAT16"),
        (typed, r"spconv0\.weight is not in raw_data"),
        (external, r"spconv1\.weight is not in raw_data"),
        (shorten, r"spconv0\.bias of shape \[8\] has 14 bytes"),
        (forget_weight, r"conv2: initializer spconv2\.weight is missing"),
        (infinite, r"spconv0\.bias holds NaN or infinity"),
        (swap, "conv2 reads '2', which nothing before it makes"),
        (stray_relu, "relu0: a Relu behind something else than an Add"),
        (rename_output, "the output '999' is made by no node"),
        (second_input, r"expected one input.*\['0', 'coords'\]"),
        (unknown, "operators Cast: a libspconv file has SparseConvolution"),
        (lambda g: put(g, "conv1", "precision", "INT8"), "conv1: precision is 'INT8'"),
        (lambda g: put(g, "conv1", "activation", None), "conv1: activation is None"),
        (lambda g: put(g, "conv1", "stride", None), "conv1: attribute stride is None"),
        (lambda g: put(g, "conv1", "kernel_size", [3, 3, 1]), "conv1: weight of shape"),
        (lambda g: put(g, "conv1", "input_dynamic_range", 3), "input_dynamic_range is INT.*FLOAT"),
        (lambda g: put(g, "conv1", "input_dynamic_range", 0.0), "expected a positive range"),
        (lambda g: put(g, "conv1", "input_dynamic_range", None), "without input_dynamic_range"),
        (lambda g: put(g, "conv1", "weight_dynamic_ranges", [1.0]), "1 weight_dynamic_ranges for"),
        (lambda g: put(g, "conv1", "transposed", 1), "conv1: transposed"),
        (lambda g: put(g, "add0", "input1_dynamic_range", None), "add0: .*both input ranges"),
        (lambda g: put(g, "transpose0", "dims", [0, 1, 1, 2, 3]), "transpose0: .*no permutation"),
        (lambda g: put(g, "reshape0", "dims", None), "reshape0: Reshape needs the attribute dims"),
        (lambda g: put(g, "scatter0", "output_shape", [1, 2]), "scatter0: output_shape"),
    ],
)
def test_broken_files(file, tmp_path, change, message):
    path = changed(file, tmp_path / "broken.onnx", change)
    with pytest.raises(ValueError, match=rf"load_sparse_onnx: broken\.onnx: .*{message}"):
        load_sparse_onnx(path)


def test_not_a_model(tmp_path):
    path = tmp_path / "pointer.onnx"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ValueError, match=r"pointer\.onnx: not an ONNX file .*Git LFS"):
        load_sparse_onnx(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"pointer\.onnx"):
        load_sparse_onnx(path)


PLACES = st.tuples(st.integers(0, 7000), st.integers(0, 255))


@given(st.lists(PLACES, min_size=1, max_size=3))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_bytes_are_an_error_or_a_model(file, tmp_path, places):
    damaged = bytearray(file.read_bytes())
    for place, value in places:
        damaged[place] = value
    path = tmp_path / "damaged.onnx"
    path.write_bytes(damaged)
    with contextlib.suppress(ValueError):
        load_sparse_onnx(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut(file, tmp_path, share):
    path = tmp_path / "cut.onnx"
    whole = file.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"cut\.onnx"):
        load_sparse_onnx(path)


def test_readers_that_disagree_run_in_float_only(nets, file, tmp_path):
    def disagree(graph):
        put(graph, "conv1", "input_dynamic_range", 2.5)

    model = load_sparse_onnx(changed(file, tmp_path / "a.onnx", disagree))
    inputs = nets.frame(2)
    with pytest.raises(ValueError, match=r"conv0 makes int8.*conv1 2\.5, add0 .*mode=\"float\""):
        model(*inputs)
    assert torch.equal(model(*inputs, mode="float"), load_float(file, tmp_path)(*inputs))


def load_float(file, tmp_path):
    path = changed(file, tmp_path / "b.onnx", lambda graph: None)
    return lambda *inputs: load_sparse_onnx(path)(*inputs, mode="float")


def other_file(path):
    """A float file as another exporter writes it: no precision, no key, QuantAdd without ranges."""
    generator = np.random.default_rng(0)
    values = {
        "a.weight": generator.normal(0, 0.2, (4, 3, 3, 3, 5)), "a.bias": generator.normal(0, 1, 4),
        "b.weight": generator.normal(0, 0.2, (4, 3, 3, 3, 4)), "b.bias": generator.normal(0, 1, 4),
    }  # fmt: skip
    sizes = {name: [1, 1, 1] for name in ("stride", "padding", "dilation")}
    shapes = {"input_spatial_shape": [12, 10, 9], "output_spatial_shape": [12, 10, 9]}
    settings = {**sizes, **shapes, "kernel_size": [3, 3, 3], "subm": 1}
    nodes = [
        helper.make_node(
            "SparseConvolution", ["0", "a.weight", "a.bias"], ["x"], activation="ReLU", **settings
        ),
        helper.make_node(
            "SparseConvolution", ["x", "b.weight", "b.bias"], ["y"], activation="None", **settings
        ),
        helper.make_node("QuantAdd", ["y", "x"], ["z"]),
        helper.make_node("Relu", ["z"], ["out"]),
    ]
    tensors = [numpy_helper.from_array(v.astype(np.float16), n) for n, v in values.items()]
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes, "scn", [helper.make_tensor_value_info("0", half, [1, 5])],
        [helper.make_tensor_value_info("out", half, [1, 4])], tensors,
    )  # fmt: skip
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return values


def test_a_float_file_against_dense_convolutions(nets, tmp_path):
    values = other_file(tmp_path / "a.onnx")
    features, coords, _ = nets.frame(0)
    out, dump = load_sparse_onnx(tmp_path / "a.onnx").run(features, coords)
    assert isinstance(out, SparseOutput)
    assert list(dump) == ["node 0", "node 1", "node 2", "node 3"]
    at = coords.long().unbind(1)
    grid = torch.zeros(1, 12, 10, 9, 5).index_put(at, features).permute(0, 4, 1, 2, 3)
    mask = torch.zeros(1, 1, 12, 10, 9)
    mask[:, 0][at] = 1
    weight = {n: torch.tensor(v.astype(np.float16)).float() for n, v in values.items()}

    def conv(x, name):
        kernel = weight[f"{name}.weight"].permute(0, 4, 1, 2, 3)
        return torch.nn.functional.conv3d(x, kernel, weight[f"{name}.bias"], padding=1) * mask

    x = conv(grid, "a").relu()
    wanted = (conv(x, "b") + x).relu()
    torch.testing.assert_close(out.dense(), wanted, rtol=1e-4, atol=1e-4)


def test_wrong_inputs(nets, file, tmp_path):
    model = load_sparse_onnx(changed(file, tmp_path / "a.onnx", lambda graph: None))
    features, coords, _ = nets.frame(0)
    with pytest.raises(ValueError, match=r"expected \[voxels, 5\] and \[voxels, 4\]"):
        model(features[:, :4], coords)
    with pytest.raises(ValueError, match="and three axes"):
        model(features, coords[:, 1:])
    with pytest.raises(TypeError, match="expected floats and integers"):
        model(features, coords.float())
    with pytest.raises(ValueError, match=r"mode='fp16'"):
        model(features, coords, mode="fp16")
    with pytest.raises(ValueError, match="conv0: "):
        model(features, coords + 20)
    with pytest.raises(ValueError, match="NaN"):
        model(features * float("nan"), coords)


def of_points(path, **second):
    """Two convolutions of kernel 1×1×1; `second` are other attributes of the latter."""
    values = {"weight": np.ones((5, 1, 1, 1, 5), np.float16), "bias": np.zeros(5, np.float16)}
    sizes = {"kernel_size": [1] * 3, "stride": [1] * 3, "dilation": [1] * 3, "padding": [0] * 3}
    shapes = {"input_spatial_shape": [12, 10, 9], "output_spatial_shape": [12, 10, 9]}
    given = {**sizes, **shapes, "subm": 1, "activation": "None"}
    nodes = [
        helper.make_node("SparseConvolution", [x, *values], [y], **given | more)
        for x, y, more in (("0", "x", {}), ("x", "y", second))
    ]
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes, "scn", [helper.make_tensor_value_info("0", half, [1, 5])],
        [helper.make_tensor_value_info("y", half, [1, 5])],
        [numpy_helper.from_array(v, n) for n, v in values.items()],
    )  # fmt: skip
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return load_sparse_onnx(path)


def test_layers_on_points_refuse_wrong_voxels_too(nets, tmp_path):
    model = of_points(tmp_path / "a.onnx")
    features, coords, _ = nets.frame(0)
    assert model(features, coords).features.shape == features.shape
    with pytest.raises(ValueError, match="node 0: "):
        model(features, coords + 20)
    with pytest.raises(ValueError, match="node 0: "):
        model(features, coords[:1].expand_as(coords))


def test_an_inverse_convolution_of_points_needs_its_partner(nets, tmp_path):
    model = of_points(tmp_path / "a.onnx", subm=0, inverse=1, rulebook="down")
    with pytest.raises(ValueError, match=r"node 1: nothing to invert: .* rulebook 'down'"):
        model(*nets.frame(0))


def test_a_frame_without_voxels(nets, file, tmp_path):
    model = load_sparse_onnx(changed(file, tmp_path / "a.onnx", lambda graph: None))
    out = model(torch.zeros(0, 5), torch.zeros(0, 4, dtype=torch.int32))
    assert out.shape == (1, 32, 6, 5)
    assert not out.any()

"""Each rule about libspconv files is broken once, and found by that rule alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bevquant_export.lint import RULES, lint_onnx

HALF = onnx.TensorProto.FLOAT16


def _tensor(name: str, values: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(values, name)


def _conv(
    index: int,
    channels: tuple[int, int],
    key: str,
    grids: tuple[list[int], list[int]],
    precisions: tuple[str, str],
    tensors: tuple[str, str],
    amax: float | None = None,
    stride: int = 1,
    activation: str = "ReLU",
) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    inputs, outputs = channels
    rng = np.random.default_rng(index)
    weight = rng.uniform(-1, 1, (outputs, 3, 3, 3, inputs)).astype(np.float16)
    attributes: dict[str, object] = {
        **{"ndim": 3, "input_spatial_shape": grids[0], "output_spatial_shape": grids[1]},
        **{"in_channels": inputs, "out_channels": outputs, "kernel_size": [3, 3, 3]},
        **{"stride": [stride] * 3, "padding": [1] * 3, "dilation": [1] * 3, "groups": 1},
        **{"subm": int(stride == 1), "inverse": 0, "transposed": 0, "output_padding": [0] * 3},
        **{"rulebook": key, "activation": activation, "output_bound": 200000},
        **{"precision": precisions[0], "output_precision": precisions[1]},
        **{"input_shape": [0, inputs], "output_shape": [0, outputs]},
    }
    if "int8" in precisions:
        ranges = np.abs(weight.astype(np.float32)).reshape(outputs, -1).max(axis=1)
        attributes["weight_dynamic_ranges"] = ranges.tolist()
    if amax is not None:
        attributes["input_dynamic_range"] = amax
    names = [f"spconv{index}.weight", f"spconv{index}.bias"]
    node = helper.make_node(
        "SparseConvolution", [tensors[0], *names], [tensors[1]], name=f"conv{index}", **attributes
    )
    bias = np.zeros(outputs, np.float16)
    return node, [_tensor(names[0], weight), _tensor(names[1], bias)]


def good() -> onnx.ModelProto:
    """conv_input, one residual block, one strided conv, the dense tail: xyz."""
    fine, coarse = [16, 16, 9], [8, 8, 5]
    parts = [
        _conv(0, (5, 16), "subm1", (fine, fine), ("fp16", "int8"), ("0", "1")),
        _conv(1, (16, 16), "subm1", (fine, fine), ("int8", "int8"), ("1", "2"), 4.0),
        _conv(
            *(2, (16, 16), "subm1", (fine, fine), ("int8", "int8"), ("2", "3"), 2.0),
            activation="None",
        ),
        _conv(3, (16, 32), "down1", (fine, coarse), ("int8", "fp16"), ("5", "6"), 4.0, stride=2),
    ]
    nodes = [node for node, _ in parts]
    ranges = {"input0_dynamic_range": 4.0, "input1_dynamic_range": 4.0}
    words = {"precision": "int8", "output_precision": "int8"}
    nodes[3:3] = [
        helper.make_node("Add", ["3", "1"], ["4"], name="add0", **ranges, **words),
        helper.make_node("Relu", ["4"], ["5"], name="relu0"),
    ]
    shape = [1, 32, 8, 8, 5]
    nodes += [
        helper.make_node(
            *("ScatterDense", ["6"], ["7"]),
            **{"name": "scatter0", "format": "xyz", "output_shape": shape},
            input_spatial_shape=coarse,
        ),
        helper.make_node("Transpose", ["7"], ["8"], name="transpose0", dims=[0, 1, 4, 2, 3]),
        helper.make_node("Reshape", ["8"], ["9"], name="reshape0", dims=[1, 160, 8, 8]),
    ]
    graph = helper.make_graph(
        nodes,
        "scn",
        [helper.make_tensor_value_info("0", HALF, [1, 5])],
        [helper.make_tensor_value_info("9", HALF, [1, 160, 8, 8])],
        [tensor for _, tensors in parts for tensor in tensors],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx", 11)])


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def put(model: onnx.ModelProto, name: str, **attributes: object) -> None:
    """Set attributes of a node; None takes one away."""
    target = node(model, name)
    kept = [a for a in target.attribute if a.name not in attributes]
    new = [helper.make_attribute(k, v) for k, v in attributes.items() if v is not None]
    del target.attribute[:]
    target.attribute.extend([*kept, *new])


def tensor(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def replace(model: onnx.ModelProto, name: str, values: np.ndarray) -> None:
    tensor(model, name).CopyFrom(_tensor(name, values))


def _three(model: onnx.ModelProto) -> None:
    del node(model, "conv0").input[2]
    model.graph.initializer.remove(tensor(model, "spconv0.bias"))


def _computed_bias(model: onnx.ModelProto) -> None:
    model.graph.initializer.remove(tensor(model, "spconv3.bias"))
    node(model, "conv3").input[2] = "2"


def _typed(model: onnx.ModelProto) -> None:
    bias = tensor(model, "spconv0.bias")
    bias.ClearField("raw_data")
    bias.int32_data.extend([0] * 16)


def _external(model: onnx.ModelProto) -> None:
    bias = tensor(model, "spconv0.bias")
    bias.ClearField("raw_data")
    bias.data_location = onnx.TensorProto.EXTERNAL
    bias.external_data.add(key="location", value="bad.onnx")


def _stray_relu(model: onnx.ModelProto) -> None:
    relu = helper.make_node("Relu", ["6"], ["6r"], name="relu1")
    model.graph.node.insert(6, relu)
    node(model, "scatter0").input[0] = "6r"


def _not_adjacent(model: onnx.ModelProto) -> None:
    # A conv without any part in the sum runs between Add and Relu.
    model.graph.node.remove(node(model, "relu0"))
    extra, tensors = _conv(
        *(8, (16, 16), "subm1", ([16, 16, 9],) * 2, ("int8", "fp16"), ("1", "e"), 4.0)
    )
    place = list(model.graph.node).index(node(model, "conv3"))
    model.graph.node.insert(place, helper.make_node("Relu", ["4"], ["5"], name="relu0"))
    model.graph.node.insert(place, extra)
    model.graph.initializer.extend(tensors)


def _second_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("coords", onnx.TensorProto.INT32, [1]))


def _other_points(model: onnx.ModelProto) -> None:
    """The shortcut passes a strided conv, of the block's own grid by its padding."""
    fine = [16, 16, 9]
    extra, tensors = _conv(
        *(8, (16, 16), "down8", (fine, fine), ("int8", "int8"), ("1", "e"), 4.0), activation="None"
    )
    model.graph.node.insert(3, extra)
    model.graph.initializer.extend(tensors)
    put(model, "conv8", subm=0)
    node(model, "add0").input[1] = "e"


def _float_branch(model: onnx.ModelProto) -> None:
    put(model, "conv2", output_precision="fp16")


def _independent(model: onnx.ModelProto) -> None:
    put(model, "conv1", input_dynamic_range=3.5)


def _wide(model: onnx.ModelProto) -> None:
    ranges = next(a for a in node(model, "conv1").attribute if a.name == "weight_dynamic_ranges")
    ranges.floats[3] /= 2


def _no_reader_range(model: onnx.ModelProto) -> None:
    put(model, "conv3", output_precision="int8")


def _int8_out(model: onnx.ModelProto) -> None:
    del model.graph.node[6:]
    put(model, "conv3", output_precision="int8")
    model.graph.output[0].name = "6"


def _infinite(model: onnx.ModelProto) -> None:
    values = np.zeros(32, np.float16)
    values[3] = np.inf
    replace(model, "spconv3.bias", values)


def _renamed(model: onnx.ModelProto) -> None:
    tensor(model, "spconv0.weight").name = "w0"
    node(model, "conv0").input[1] = "w0"


def _inverse(model: onnx.ModelProto) -> None:
    put(model, "conv3", inverse=1, subm=0)


def _inverse_of_another_kernel(model: onnx.ModelProto) -> None:
    """The block's input, upsampled from conv3 again with a smaller kernel; a second output."""
    fine, coarse = [16, 16, 9], [8, 8, 5]
    grids = (coarse, fine)
    extra, _ = _conv(8, (32, 16), "down1", grids, ("fp16", "fp16"), ("6", "up"), stride=2)
    model.graph.node.append(extra)
    put(model, "conv8", subm=0, inverse=1, kernel_size=[1, 1, 1])
    names = ("spconv8.weight", "spconv8.bias")
    shapes = ((16, 1, 1, 1, 32), (16,))
    for name, shape in zip(names, shapes, strict=True):
        model.graph.initializer.append(_tensor(name, np.zeros(shape, np.float16)))
    model.graph.output.append(helper.make_tensor_value_info("up", HALF, [1, 16]))


def _types(model: onnx.ModelProto) -> None:
    put(model, "conv1", input_dynamic_range=4)


def _output_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def _perm(model: onnx.ModelProto) -> None:
    put(model, "transpose0", dims=None, perm=[0, 1, 4, 2, 3])


def _key(model: onnx.ModelProto) -> None:
    for name in ("conv0", "conv1", "conv2"):
        put(model, name, rulebook="subm_one")


def _edit(name: str, **attributes: object) -> Callable[[onnx.ModelProto], None]:
    return lambda model: put(model, name, **attributes)


def _values(name: str, values: np.ndarray) -> Callable[[onnx.ModelProto], None]:
    return lambda model: replace(model, name, values)


WEIGHT = np.zeros((16, 3, 3, 3, 5), np.float16)
BREAK: list[tuple[str, Callable[[onnx.ModelProto], None]]] = [
    ("SPC001", lambda m: setattr(node(m, "scatter0"), "op_type", "Identity")),
    ("SPC002", _three),
    ("SPC003", _computed_bias),
    ("SPC004", _values("spconv0.weight", WEIGHT.astype(np.float32))),
    ("SPC005", _typed),
    ("SPC005", _external),
    ("SPC006", _values("spconv0.weight", WEIGHT.transpose(1, 2, 3, 4, 0))),
    ("SPC006", _edit("conv0", in_channels=6)),
    ("SPC007", _values("spconv0.bias", np.zeros(15, np.float16))),
    ("SPC008", _edit("conv0", padding=None)),
    ("SPC008", _edit("conv0", stride=[1, 1])),
    ("SPC009", _edit("conv3", subm=None)),
    ("SPC010", _types),
    ("SPC010", _edit("conv0", inverse=1.0)),
    ("SPC011", _edit("conv0", precision="FP16")),
    ("SPC011", _edit("conv0", precision=None)),
    ("SPC012", _edit("conv0", activation="Relu")),
    ("SPC012", _edit("conv0", activation=None)),
    ("SPC013", _edit("conv0", activation="Sigmoid")),
    ("SPC014", _edit("conv2", input_dynamic_range=None)),
    ("SPC014", _edit("conv2", input_dynamic_range=float("nan"))),
    ("SPC015", _edit("conv1", weight_dynamic_ranges=[1.0])),
    ("SPC015", _edit("conv1", weight_dynamic_ranges=None)),
    ("SPC016", _edit("conv1", weight_dynamic_ranges=[1.0] * 15 + [0.0])),
    ("SPC017", _independent),
    ("SPC018", _edit("add0", input0_dynamic_range=5.0)),
    ("SPC019", _no_reader_range),
    ("SPC020", _wide),
    ("SPC021", _infinite),
    ("SPC022", _stray_relu),
    ("SPC023", _not_adjacent),
    ("SPC024", _float_branch),
    ("SPC026", _key),
    ("SPC027", _edit("conv1", dilation=[2, 2, 2])),
    ("SPC028", _inverse),
    ("SPC028", _inverse_of_another_kernel),
    ("SPC029", _edit("conv0", output_bound=None)),
    ("SPC030", _edit("conv3", output_spatial_shape=[8, 8, 4])),
    ("SPC030", _edit("conv3", input_spatial_shape=[15, 15, 9])),
    ("SPC031", _edit("conv0", groups=2)),
    ("SPC032", _edit("conv0", output_bound=0)),
    ("SPC032", _edit("conv0", output_bound=2**31)),
    ("SPC032", _edit("conv0", output_bound=2**32)),
    ("SPC033", _second_input),
    ("SPC034", _output_type),
    ("SPC036", _int8_out),
    ("SPC037", _perm),
    ("SPC038", _edit("transpose0", dims=[0, 1, 2, 4, 3])),
    ("SPC039", _edit("reshape0", dims=[1, 161, 8, 8])),
    ("SPC040", _edit("scatter0", format="xzy")),
    ("SPC041", _edit("scatter0", output_layout="NHWC")),
    ("SPC044", _other_points),
    ("SPC045", _renamed),
    ("SPC048", _edit("scatter0", output_shape=[2, 32, 8, 8, 5])),
]


def test_a_good_file_has_no_finding(tmp_path: Path) -> None:
    onnx.save(good(), tmp_path / "good.onnx")
    assert lint_onnx(tmp_path / "good.onnx", "libspconv") == []


@pytest.mark.parametrize(
    ("rule", "damage"), BREAK, ids=[f"{r}-{i}" for i, (r, _) in enumerate(BREAK)]
)
def test_a_broken_file_is_caught_by_its_rule(
    tmp_path: Path, rule: str, damage: Callable[[onnx.ModelProto], None]
) -> None:
    model = good()
    damage(model)
    onnx.save(model, tmp_path / "bad.onnx")
    found = lint_onnx(tmp_path / "bad.onnx", "libspconv")
    assert {finding.id for finding in found} == {rule}, [str(f) for f in found]


def test_every_rule_has_a_broken_file() -> None:
    assert {rule for rule, _ in BREAK} == {rule.id for rule in RULES if rule.id.startswith("SPC")}


def _chain(path: Path, ranges: list[tuple[float, float]]) -> None:
    """Residual blocks in a row; for each the range of its first conv, and of its Add."""
    grid = ([16, 16, 9],) * 2
    first = _conv(0, (5, 16), "subm1", grid, ("fp16", "int8"), ("0", "b0"))
    nodes, tensors = [first[0]], first[1]
    for i, (conv, added) in enumerate(ranges):
        for place, amax, names in ((1, conv, (f"b{i}", f"m{i}")), (2, 2.0, (f"m{i}", f"n{i}"))):
            activation = "ReLU" if place == 1 else "None"
            node, weights = _conv(
                *(10 * i + place, (16, 16), "subm1", grid, ("int8", "int8"), names, amax),
                activation=activation,
            )
            nodes.append(node)
            tensors += weights
        words: dict[str, object] = {"precision": "int8", "output_precision": "int8"}
        words |= {"input0_dynamic_range": added, "input1_dynamic_range": added}
        nodes.append(helper.make_node("Add", [f"n{i}", f"b{i}"], [f"s{i}"], f"add{i}", **words))
        nodes.append(helper.make_node("Relu", [f"s{i}"], [f"b{i + 1}"], f"relu{i}"))
    last, weights = _conv(
        *(99, (16, 16), "subm1", grid, ("int8", "fp16"), (f"b{len(ranges)}", "y"), 1.0)
    )
    graph = helper.make_graph(
        [*nodes, last],
        "blocks",
        [helper.make_tensor_value_info("0", HALF, [1, 5])],
        [helper.make_tensor_value_info("y", HALF, [1, 16])],
        [*tensors, *weights],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx", 11)]), path)


def test_separate_quantizers_on_one_tensor_disagree_once_for_each_block(tmp_path: Path) -> None:
    # As in NVIDIA's own exporter: the first conv of a block and its Add calibrate for themselves.
    _chain(tmp_path / "own.onnx", [(1.0 + i, 1.5 + i) for i in range(8)])
    assert [f.id for f in lint_onnx(tmp_path / "own.onnx", "libspconv")] == ["SPC017"] * 8
    _chain(tmp_path / "one.onnx", [(1.0 + i, 1.0 + i) for i in range(8)])
    assert lint_onnx(tmp_path / "one.onnx", "libspconv") == []


def test_zyx_files_are_as_good(tmp_path: Path) -> None:
    model = good()
    put(model, "scatter0", format="zyx", output_shape=[1, 32, 5, 8, 8])
    put(model, "transpose0", dims=[0, 1, 2, 4, 3])
    for name in ("conv0", "conv1", "conv2", "conv3"):
        put(model, name, input_spatial_shape=[9, 16, 16], output_spatial_shape=[9, 16, 16])
    put(model, "conv3", output_spatial_shape=[5, 8, 8])
    put(model, "scatter0", input_spatial_shape=[5, 8, 8])
    onnx.save(model, tmp_path / "zyx.onnx")
    assert lint_onnx(tmp_path / "zyx.onnx", "libspconv") == []


def test_a_float_file_needs_no_ranges(tmp_path: Path) -> None:
    model = good()
    for node_ in model.graph.node:
        if node_.op_type in ("SparseConvolution", "Add"):
            put(model, node_.name, precision="fp16", output_precision="fp16")
            kept = [a for a in node_.attribute if "dynamic_range" not in a.name]
            del node_.attribute[:]
            node_.attribute.extend(kept)
    onnx.save(model, tmp_path / "half.onnx")
    assert lint_onnx(tmp_path / "half.onnx", "libspconv") == []

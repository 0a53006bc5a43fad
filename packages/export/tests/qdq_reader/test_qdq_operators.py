"""Operators and patterns of QDQ files one by one, beside ONNX Runtime; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from bevquant_export import load_qdq_onnx

from .qdq_graphs import Graph, run_file

SHAPE = [2, 8, 6, 6]
F32, I64 = np.float32, np.int64
Node = tuple[str, list[Any], dict[str, Any]]
NODES: list[Node] = [
    *((op, [], {}) for op in (
        "Relu Sigmoid Tanh Erf Exp Abs Neg Floor Ceil Round Sign Sin Cos HardSwish Mish Softplus "
        "Softsign Selu Elu LeakyRelu HardSigmoid Softmax LogSoftmax Identity GlobalAveragePool "
        "GlobalMaxPool Flatten Transpose Shape Celu ThresholdedRelu Tan Asin Acos Atan Sinh Cosh "
        "IsNaN IsInf Trilu ReduceSumSquare ReduceLogSum ReduceLogSumExp"
    ).split()),
    *((op, [F32(0.5)], {}) for op in "Add Sub Mul Div Max Min Sum Mean".split()),
    ("Pow", [F32(2)], {}),
    ("Selu", [], {"alpha": 2.0, "gamma": 0.5}),
    ("Dropout", [F32(0.5), np.array(False)], {}),
    ("ReduceProd", [np.array([1, 3], I64)], {"keepdims": 0}),
    ("Slice", [np.array(v, I64) for v in ([0], [-(2**40)], [1])], {}),
    ("Clip", [F32(0), F32(6)], {}),
    ("Clip", [F32(-0.5)], {}),
    ("Gelu", [], {"approximate": "tanh"}),
    ("PRelu", [np.full((8, 1, 1), 0.1, F32)], {}),
    ("LayerNormalization", [np.full(6, 0.5, F32), np.full(6, 0.1, F32)], {}),
    ("GroupNormalization", [np.full(8, 0.5, F32), np.full(8, 0.1, F32)], {"num_groups": 4}),
    ("InstanceNormalization", [np.full(8, 0.5, F32), np.full(8, 0.1, F32)], {}),
    ("BatchNormalization", [np.full(8, v, F32) for v in (0.5, 0.1, 0.2, 2.0)], {}),
    ("Reshape", [np.array([0, 2, -1], I64)], {}),
    ("Flatten", [], {"axis": 2}),
    ("Transpose", [], {"perm": [0, 2, 3, 1]}),
    ("Unsqueeze", [np.array([0, -1], I64)], {}),
    ("Expand", [np.array([3, 1, 1, 1, 1], I64)], {}),
    ("Tile", [np.array([1, 2, 1, 3], I64)], {}),
    ("Slice", [np.array(v, I64) for v in ([1, -3], [2**62, -1], [1, 3], [2, 1])], {}),
    ("Slice", [np.array(v, I64) for v in ([-1], [-(2**62)], [2], [-1])], {}),
    ("Gather", [np.array([3, -1], I64)], {"axis": 1}),
    ("Gather", [np.array(2, I64)], {"axis": 3}),
    ("Gather", [np.array([[0, 1], [-2, 3]], I64)], {"axis": 2}),
    ("Pad", [np.array([0, 0, 1, 0, 0, 0, 2, 1], I64)], {}),
    ("Pad", [np.array([1, 2, 2, 1], I64), F32(0), np.array([2, 3], I64)], {"mode": "reflect"}),
    ("DepthToSpace", [], {"blocksize": 2}),
    ("DepthToSpace", [], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [], {"blocksize": 2}),
    ("ReduceMean", [np.array([2, 3], I64)], {}),
    ("ReduceMean", [np.array([1], I64)], {"keepdims": 0}),
    ("ReduceSum", [], {}),
    ("ReduceMax", [np.array([-1], I64)], {}),
    ("ReduceMin", [np.array([1, 2], I64)], {"keepdims": 0}),
    ("ReduceL2", [np.array([1], I64)], {}),
    ("ReduceL1", [np.array([1], I64)], {}),
    ("Trilu", [np.array(-1, I64)], {"upper": 0}),
    ("Mod", [F32(0.3)], {"fmod": 1}),
    ("GatherND", [np.array([[[3, -1]], [[0, 2]]], I64)], {"batch_dims": 1}),
    ("ScatterND", [np.array([[0, 2], [1, -1]], I64), np.ones((2, 6, 6), F32)], {}),
    ("ScatterND", [np.array([[0, 2], [0, 2]], I64), np.ones((2, 6, 6), F32)],
     {"reduction": "add"}),
    ("ScatterElements", [np.full((1, 1, 2, 1), -2, I64), np.ones((1, 1, 2, 1), F32)], {"axis": 3}),
    ("ScatterElements", [np.zeros((2, 3, 1, 1), I64), np.ones((2, 3, 1, 1), F32)],
     {"axis": 1, "reduction": "max"}),
    ("ArgMin", [], {"axis": -1, "keepdims": 0}),
    ("ArgMax", [], {"axis": 1}),
    ("CumSum", [np.array(1, I64)], {}),
    ("CumSum", [np.array(3, I64)], {"exclusive": 1, "reverse": 1}),
    ("Cast", [], {"to": TensorProto.INT32}),
    ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("MaxPool", [], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("MatMul", [np.linspace(-1, 1, 192, dtype=F32).reshape(8, 6, 4)], {}),
    ("AveragePool", [], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ("AveragePool", [], {"kernel_shape": [3, 2], "pads": [0, 0, 1, 1], "strides": [2, 1]}),
    ("AveragePool", [], {"kernel_shape": [3, 3], "pads": [0, 1, 2, 1], "count_include_pad": 1}),
    ("Resize", [None, np.array([1, 1, 2, 3], F32)], {}),
    ("Resize", [None, np.array([1, 1, 0.5, 2.5], F32)],
     {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ("Resize", [None, np.array([1, 1, 0.7, 1.1], F32)],
     {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ("Resize", [None, None, np.array([2, 8, 9, 4], I64)], {"mode": "linear"}),
    ("Resize", [None, np.array([1, 1, 2, 2], F32)],
     {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("Resize", [None, np.array([1, 1, 2, 2], F32)], {"mode": "cubic"}),
    ("MatMul", [np.linspace(-1, 1, 24, dtype=F32).reshape(6, 4)], {}),
    ("Conv", [np.linspace(-1, 1, 72, dtype=F32).reshape(4, 2, 3, 3)],
     {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 1]}),
    ("ConvTranspose", [np.linspace(-1, 1, 144, dtype=F32).reshape(8, 2, 3, 3)],
     {"group": 2, "strides": [2, 2], "pads": [1, 1, 0, 0]}),
    *(("ConvTranspose", [np.linspace(-1, 1, 144, dtype=F32).reshape(8, 2, 3, 3)],
       {"auto_pad": auto, "strides": [2, 2]}) for auto in ("SAME_UPPER", "SAME_LOWER")),
    ("Gemm", [np.linspace(-1, 1, 288 * 3, dtype=F32).reshape(288, 3), F32(0.5)], {"alpha": 0.5}),
    ("GridSample", [np.linspace(-1.1, 1, 64, dtype=F32).reshape(2, 4, 4, 2)], {}),
    ("Equal", [F32(0)], {}),
    ("GreaterOrEqual", [F32(0)], {}),
]  # fmt: skip


def test_operators_compute_what_onnx_runtime_computes(tmp_path: Path) -> None:
    """Every operator on the same quantized tensor, in one graph."""
    graph = Graph()
    x = graph.pair("x", 0.02, 117, "uint8")
    names = []
    for number, (op, given, attributes) in enumerate(NODES):
        read = [
            "" if value is None else graph.constant(f"c{number}_{i}", value)
            for i, value in enumerate(given)
        ]
        first = graph.node("Flatten", [x]) if op == "Gemm" else x
        names.append(graph.node(op, [first, *read], f"{op}{number}", **attributes))
    parts = [f"part{i}" for i in range(3)]
    sizes = graph.constant("sizes", np.array([3, 3, 2], I64))
    graph.nodes.append(helper.make_node("Split", [x, sizes], parts, "split", axis=1))
    best = [graph.node("Concat", [parts[2], parts[0]], "joined", axis=1)]
    count = graph.constant("count", np.array([2], I64))
    graph.nodes.append(helper.make_node("TopK", [x, count], ["top", "places"], "top"))
    condition = graph.node("Less", [x, graph.constant("half", F32(0.5))])
    best += ["top", graph.node("Where", [condition, x, graph.constant("one", F32(1))], "chosen")]
    left = graph.node("Transpose", [x], perm=[0, 1, 3, 2])
    best += [graph.node("MatMul", [x, left], "product"),
             graph.node("Einsum", [x, left], "einsum", equation="bcij,bcjk->bck")]  # fmt: skip
    sizes = graph.node("Shape", [x])  # sizes from a shape, as exporters write them
    row = graph.node("Gather", [sizes, graph.constant("row", np.array(2, I64))])
    half = graph.node("Div", [row, graph.constant("two", np.array(2, I64))])
    axes = graph.constant("axes", np.array([0], I64))
    ends = [graph.node("Unsqueeze", [value, axes]) for value in (half, row)]
    best.append(
        graph.node("Slice", [x, *ends, graph.constant("along", np.array([2], I64))], "lower")
    )
    shape = graph.node("Concat", [ends[1], ends[1]], axis=0)
    best.append(graph.node("ConstantOfShape", [shape], "zeros"))
    both = graph.node("Concat", ends, axis=0)
    for op in ("ReduceProd", "ReduceMax"):  # of sizes
        count = graph.node("Cast", [graph.node(op, [both])], to=TensorProto.FLOAT)
        best.append(graph.node("Mul", [x, count], f"{op}_of_sizes"))
    deep = graph.node("MatMul", [x, graph.constant("deep", np.ones((8, 6, 4), F32))])
    best.append(graph.node("Add", [deep, graph.constant("shift", np.ones(4, F32))], "shifted"))
    square = graph.node(
        "Gemm",
        [
            graph.node("Reshape", [x, graph.constant("rows", np.array([-1, 6], I64))]),
            graph.constant("gw", np.ones((6, 96), F32)),
            graph.constant("gb", np.arange(96, dtype=F32).reshape(96, 1)),
        ],
        "rows_shifted",
    )
    best.append(square)
    zero, one = (graph.constant(f"n{i}", np.array(i, I64)) for i in (0, 1))
    steps = graph.node("Range", [zero, row, one])
    best.append(graph.node("Mul", [x, graph.node("CastLike", [steps, x])], "scaled"))
    best.append(graph.node("Expand", ["joined", graph.node("Shape", ["joined"])], "wide"))
    table = graph.constant("table", np.linspace(-1, 1, 72 * 36, dtype=F32).reshape(72, 6, 6))
    picked = graph.constant("picked", np.arange(288, dtype=I64).reshape(8, 6, 6) * 5 % 72)
    best.append(graph.node("Add", [x, graph.node("GatherElements", [table, picked])], "tabled"))
    names += [*best, "places"]
    names.remove("Shape" + str([n[0] for n in NODES].index("Shape")))  # no tensor here
    path = graph.save(tmp_path / "operators.onnx", {"x": SHAPE}, names)
    values = np.random.default_rng(0).uniform(-2.2, 2.6, SHAPE).astype(F32)
    made = load_qdq_onnx(path)(torch.from_numpy(values))
    for name, got, wanted in zip(names, made, run_file(path, {"x": values}), strict=True):
        assert got.shape == wanted.shape, name
        assert torch.allclose(
            got.double(),
            torch.from_numpy(np.asarray(wanted)).double(),
            atol=2e-5,
            rtol=1e-5,
            equal_nan=True,
        ), name


def test_arithmetic_of_sizes(tmp_path: Path) -> None:
    """Sizes through functions of one tensor, with constants, in a padding and quantized."""
    graph = Graph()
    x = graph.pair("x", 0.02, 117, "uint8")
    sizes = graph.node("Shape", [x])
    row = graph.node("Gather", [sizes, graph.constant("row", np.array(2, I64))])
    real = graph.node("Cast", [row], to=TensorProto.FLOAT)
    root = graph.node("Sqrt", [real])
    half = graph.node("Mul", [real, graph.constant("half", F32(0.4))])
    whole = graph.node("Cast", [graph.node("Floor", [half])], to=TensorProto.INT64)
    pads = graph.node("Tile", [graph.node("Unsqueeze", [whole, graph.constant("0", [0])]),
                               graph.constant("8", [8])])  # fmt: skip
    pairs = graph.node("Reshape", [pads, graph.constant("pairs", [4, 2])])
    flat = graph.node("Transpose", [pairs], perm=[1, 0])
    ends = graph.node("Reshape", [flat, graph.constant("all", [-1])])
    names = [
        graph.node("Div", [x, root]),
        graph.node("Pad", [x, ends]),
        graph.node("Mul", [x, graph.pair(real, 0.25, 0, "uint8")]),
    ]
    same_as_file(graph.save(tmp_path / "sizes.onnx", {"x": SHAPE}, names))


@pytest.mark.parametrize("height", [14, "height"])
def test_nearest_rows_are_those_of_onnx_runtime(height: Any, tmp_path: Path) -> None:
    """16 / (32 / 14) is below 7 in float32, and torch takes row 7."""
    graph = Graph()
    x = graph.pair("x", 0.02, 117, "uint8")
    if height == 14:
        sizes = graph.constant("sizes", np.array([2, 1, 32, 7], I64))
    else:  # 18 rows more than it has
        more = graph.constant("more", np.array([0, 0, 18, 3], I64))
        sizes = graph.node("Add", [graph.node("Shape", [x]), more])
    settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    y = graph.node("Resize", [x, "", "", sizes], **settings)
    path = graph.save(tmp_path / "rows.onnx", {"x": [2, 1, height, 4]}, [y])
    model = load_qdq_onnx(path, torch.zeros(2, 1, 14, 4))
    for rows in (14,) if height == 14 else (14, 9, 30):
        values = np.random.default_rng(0).uniform(-2.2, 2.6, (2, 1, rows, 4)).astype(F32)
        wanted = run_file(path, {"x": values})[0]
        assert np.array_equal(model(torch.from_numpy(values)).numpy(), wanted)


@pytest.mark.parametrize("names", [("x.y", "x_y"), ("self", "class")])
def test_names_of_inputs(names: tuple[str, str], tmp_path: Path) -> None:
    graph = Graph()
    pairs = [graph.pair(name, 0.125, number, "uint8") for number, name in enumerate(names)]
    sizes = {name: SHAPE for name in names}
    path = graph.save(tmp_path / "names.onnx", sizes, [graph.node("Sub", pairs)])
    rng = np.random.default_rng(0)
    feed = {name: rng.uniform(0, 2, SHAPE).astype(F32) for name in names}
    same_as_file(path, feed)
    load_qdq_onnx(path, {name: torch.from_numpy(value) for name, value in feed.items()})


def test_nodes_in_any_order(tmp_path: Path) -> None:
    """Converters to float16 append their casts, and ONNX Runtime sorts nodes."""
    graph = Graph()
    y = layer(graph, graph.pair("x", 0.02, 117, "uint8"))
    graph.nodes.reverse()
    same_as_file(graph.save(tmp_path / "reversed.onnx", {"x": SHAPE}, [y]))


def test_operators_of_later_sets(tmp_path: Path) -> None:
    graph = Graph(opset=24)
    x = graph.pair("x", 0.02, 117, "uint8")
    few = graph.node(
        "Slice", [x, *(graph.constant(n, [v]) for n, v in (("a", 0), ("b", 4), ("c", 1)))]
    )
    mask = graph.constant("mask", np.triu(np.ones((6, 6), bool)))
    rows = graph.node("Reshape", [x, graph.constant("rows", [2, 6, 48])])
    names = [
        graph.node("Swish", [x], alpha=1.5),
        graph.node("Attention", [x, few, few, mask], scale=0.3),
        graph.node("Attention", [rows, rows, rows], q_num_heads=4, kv_num_heads=4, is_causal=1),
    ]
    path = graph.save(tmp_path / "late.onnx", {"x": SHAPE}, names)
    values = np.random.default_rng(0).uniform(-2.2, 2.6, SHAPE).astype(F32)
    made = load_qdq_onnx(path)(torch.from_numpy(values))
    for got, wanted in zip(made, run_file(path, {"x": values}), strict=True):
        assert np.allclose(got.numpy(), wanted, atol=2e-5)


@pytest.mark.parametrize("opset", [11, 12])
def test_scales_per_channel_in_sets_without_axis(opset: int, tmp_path: Path) -> None:
    """Other tools' files: zero points, one that tensors share, products of (in, out) weights."""
    rng = np.random.default_rng(0)
    scale = np.array([0.5, 0.25, 0.125, 0.5], F32)
    values = rng.integers(-8, 9, SHAPE).astype(F32)
    made = []
    for version in (opset, 13):
        graph = Graph(opset=version)
        axes: Any = [{"axis": a} if version == 13 else {} for a in (0, 1)]
        x = graph.pair("x", 0.125, 128, "uint8")
        zero = graph.constant("zero", np.array(3 if version < 13 else [3] * 4, np.uint8))
        weight = graph.constant("w", rng.integers(0, 9, (4, 8, 3, 3)), "uint8")
        table = graph.constant("t", rng.integers(0, 9, (6, 4)), "uint8")
        steps = graph.constant("steps", scale)
        first = graph.node("DequantizeLinear", [weight, steps, zero], **axes[0])
        second = graph.node("DequantizeLinear", [table, steps, zero], **axes[1])
        names = [graph.node("Conv", [x, first]), graph.node("MatMul", [x, second])]
        path = graph.save(tmp_path / f"set{version}.onnx", {"x": SHAPE}, names)
        rng = np.random.default_rng(0)
        rng.integers(-8, 9, SHAPE)
        made.append(load_qdq_onnx(path)(torch.from_numpy(values)))
    wanted = run_file(path, {"x": values})
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(made[0], wanted, strict=True))


def layer(graph: Graph, x: str, dtype: str = "uint8", zero: int = 117) -> str:
    """A quantized convolution between pairs."""
    w = np.linspace(-127, 127, 4 * 8 * 9).round().reshape(4, 8, 3, 3)
    weight = graph.stored("w", w, 0.004, 0, "int8")
    return graph.pair(graph.node("Conv", [x, weight]), 0.05, zero, dtype)


def same_as_file(path: Path, feed: dict[str, Any] | None = None) -> Any:
    """The integer model, after it gave the file's own results but for a few ties."""
    values = np.random.default_rng(0).uniform(-2.2, 2.6, SHAPE).astype(F32)
    feed = feed or {"x": values}
    model = load_qdq_onnx(path)
    made = model(*(torch.from_numpy(value) for value in feed.values()))
    for got, wanted in zip(
        made if type(made) is tuple else (made,), run_file(path, feed), strict=True
    ):
        different = got.numpy() != wanted
        assert different.mean() < 0.01
        assert got.numpy().dtype == wanted.dtype
    return model


def test_integers_in_and_out(tmp_path: Path) -> None:
    graph = Graph()
    both = graph.parameters("x", 0.02, 117, "uint8")
    x = graph.node("DequantizeLinear", ["x", *both])
    y = layer(graph, x)
    out = graph.node("QuantizeLinear", [y, *graph.parameters("y", 0.05, 117, "uint8")])
    given = helper.make_tensor_value_info("x", TensorProto.UINT8, SHAPE)
    path = graph.save(tmp_path / "integers.onnx", {"x": given}, [out])
    x8 = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    model = same_as_file(path, {"x": x8})
    assert [s.op for s in model.steps if s.op == "conv"] == ["conv"]


def test_clips_and_moves_of_integers_between_a_pair(tmp_path: Path) -> None:
    graph = Graph()
    both = graph.parameters("x", 0.02, 117, "uint8")
    q = graph.node("QuantizeLinear", ["x", *both])
    low, high = graph.constant("low", 40, "uint8"), graph.constant("high", 201, "uint8")
    zero = graph.constant("zero", 117, "uint8")
    q = graph.node("Clip", [graph.node("Transpose", [q], perm=[0, 1, 3, 2]), low, high])
    x = graph.node("DequantizeLinear", [q, *both])
    y = graph.parameters("y", 0.05, 117, "uint8")
    q = graph.node("QuantizeLinear", [graph.node("Neg", [layer(graph, x)]), *y])
    names = [graph.node("DequantizeLinear", [graph.node("Clip", [q, zero, high]), *y])]
    names.append(layer(graph, x))
    path = graph.save(tmp_path / "clips.onnx", {"x": SHAPE}, names)
    model = same_as_file(path)
    assert model(torch.full(SHAPE, 9.0))[0].min() >= 0


def test_weights_through_a_pair_and_turned(tmp_path: Path) -> None:
    """Float weights behind both operators, and a transposition behind them, as exporters write."""
    graph = Graph(opset=17)
    x = graph.pair("x", 0.02, 0, "int8")
    rng = np.random.default_rng(0)
    w = graph.constant("w", rng.normal(size=(5, 6)).astype(F32))
    scale = rng.uniform(0.01, 0.02, 5).astype(F32)
    turned = graph.node("Transpose", [graph.pair(w, scale, 0, "int8", axis=0)], perm=[1, 0])
    b = graph.constant("b", rng.normal(size=5).astype(F32))
    y = graph.node("Add", [graph.node("MatMul", [x, turned]), b])
    path = graph.save(tmp_path / "turned.onnx", {"x": SHAPE}, [graph.pair(y, 0.05, 0, "int8")])
    model = same_as_file(path)
    assert [s.op for s in model.steps] == ["quantize", "linear", "dequantize"]


def test_half_precision_functions_and_shared_weights(tmp_path: Path) -> None:
    graph = Graph()
    x = graph.pair("x", 0.02, 117, "uint8")
    first = layer(graph, x)
    again = graph.node("Conv", [x, "DequantizeLinear_2_out"])
    both = graph.node("Add", [first, graph.pair(again, 0.05, 10, "uint8")])
    names = [graph.pair(graph.node("Relu", [both]), 0.05, 0, "uint8")]
    path = graph.save(tmp_path / "shared.onnx", {"x": SHAPE}, names)
    wanted = same_as_file(path)(torch.ones(SHAPE))
    proto = onnx.load(path)
    for entry in proto.graph.initializer:
        if entry.data_type == TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(entry).astype(np.float16)
            entry.CopyFrom(onnx.numpy_helper.from_array(values, entry.name))
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    half = tmp_path / "half.onnx"
    onnx.save(proto, half)
    got = load_qdq_onnx(half)(torch.ones(SHAPE))
    assert (got - wanted).abs().max() < 0.11  # steps are rounded to float16
    function = helper.make_function(
        "own", "Both", ["a", "s", "z"], ["c"],
        [helper.make_node("QuantizeLinear", ["a", "s", "z"], ["b"]),
         helper.make_node("DequantizeLinear", ["b", "s", "z"], ["c"])],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    proto = onnx.load(path)
    q, dq = proto.graph.node[:2]
    call = helper.make_node("Both", q.input, [dq.output[0]], "call", domain="own")
    del proto.graph.node[:2]
    proto.graph.node.insert(0, call)
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(proto, tmp_path / "function.onnx")
    assert torch.equal(load_qdq_onnx(tmp_path / "function.onnx")(torch.ones(SHAPE)), wanted)


def test_what_has_no_integers_runs_in_float_and_is_named(tmp_path: Path) -> None:
    """Scales per input channel, per block or per channel of an activation, weights of 16 bits."""
    graph = Graph()
    x = graph.pair("x", 0.02, 117, "uint8")
    rng = np.random.default_rng(0)
    w, scale = rng.integers(-127, 128, (4, 8, 3, 3)), rng.uniform(0.001, 0.01, 8).astype(F32)
    by_input = graph.stored("a", w, scale, 0, "int8", axis=1)
    wide = graph.stored("b", w * 99, 0.0001, 0, "int16")
    blocks = graph.stored(
        "c", rng.integers(-7, 8, (6, 4)), np.full((3, 4), 0.02, F32), np.zeros((3, 4)), "int8",
        axis=0, block_size=2,
    )  # fmt: skip
    channels = graph.pair("x", scale * 4, np.arange(8), "uint8", axis=1)
    names = [
        graph.node("Conv", [x, by_input]),
        graph.node("Conv", [x, wide]),
        graph.node("MatMul", [x, blocks]),
        graph.node("Conv", [channels, by_input]),
    ]
    proto_shape = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
    path = graph.save(tmp_path / "floats.onnx", {"x": proto_shape}, names)
    values = np.random.default_rng(0).uniform(-2.2, 2.6, SHAPE).astype(F32)
    model = load_qdq_onnx(path)
    for got, wanted in zip(
        model(torch.from_numpy(values)), run_file(path, {"x": values}), strict=True
    ):
        assert np.allclose(got.numpy(), wanted, atol=1e-3, rtol=1e-4)
    assert {s.op for s in model.steps} == {
        "constant", "quantize", "dequantize", "float",
    }  # fmt: skip
    assert "range per channel" in str(model.float_fallbacks)


REFUSED: dict[str, tuple[Callable[[Graph, str], str], str]] = {
    "operator": (lambda g, x: g.node("NonZero", [x]), r"NonZero_2 .*expected one of ONNX's"),
    "integers": (
        lambda g, x: g.node("MatMulInteger", [x, x]),
        r"MatMulInteger_2 .*quant_format=QuantFormat.QDQ",
    ),
    "training": (
        lambda g, x: g.node(
            "BatchNormalization", [x, *[g.constant(f"b{i}", np.ones(8, F32)) for i in range(4)]],
            training_mode=1,
        ),
        "BatchNormalization_2.*training_mode=1; expected 0",
    ),
    "another scale": (
        lambda g, x: g.node(
            "DequantizeLinear",
            [g.node("QuantizeLinear", [x, *g.parameters("a", 0.1, 0, "int8")]),
             *g.parameters("b", 0.2, 0, "int8")],
        ),
        "another scale, zero point or axis than the QuantizeLinear",
    ),
    "dynamic scale": (
        lambda g, x: g.node("QuantizeLinear", [x, g.node("ReduceMax", [x], keepdims=0)]),
        "its scale or zero point is computed; expected constants",
    ),
    "zero scale": (
        lambda g, x: g.pair(x, 0.0, 0, "int8"), "its smallest scale is 0.0; expected positive",
    ),
    "computing with stored integers": (
        lambda g, x: g.node("Add", [g.node("QuantizeLinear", [x, *g.parameters("a", 1, 0, "int8")]),
                                    g.constant("one", 1, "int8")]),
        "it computes with stored integers; expected DequantizeLinear",
    ),
    "resizing": (
        lambda g, x: g.node("Resize", [x, "", g.constant("r", np.array([1, 1, 1.5, 1.5], F32))]),
        "Resize_2 .*half_pixel, round_prefer_floor; expected nearest",
    ),
    "shape from data": (
        lambda g, x: g.node("Reshape", [x, g.node("Cast", [x], to=TensorProto.INT64)]),
        "shape is computed from data; expected a constant or a size",
    ),
    "transposed padding": (
        lambda g, x: g.node("ConvTranspose", [x, g.constant("w", np.ones((8, 2, 3, 3), F32))],
                            output_shape=[12, 12], strides=[2, 2]),
        r"output_shape=\[12, 12\]; expected explicit pads",
    ),
    "scales": (
        lambda g, x: g.stored("w", np.ones((4, 3)), np.ones(5), np.zeros(5), "int8", axis=0),
        r"5 scales along axis . of a tensor of shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_node(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    graph = Graph()
    y = make(graph, graph.pair("x", 0.02, 117, "uint8"))
    if case == "scales":
        y = graph.node("MatMul", ["DequantizeLinear_1_out", y])
    path = graph.save(tmp_path / "refused.onnx", {"x": SHAPE}, [y])
    with pytest.raises(ValueError, match=rf"(?s)load_qdq_onnx: refused.onnx: node .*{message}"):
        load_qdq_onnx(path)


def test_files_that_are_no_qdq_files(tmp_path: Path) -> None:
    graph = Graph()
    path = graph.save(tmp_path / "float.onnx", {"x": SHAPE}, [graph.node("Relu", ["x"])])
    with pytest.raises(ValueError, match=r"float\.onnx has no QuantizeLinear; .*quantize_static"):
        load_qdq_onnx(path)
    with pytest.raises(ValueError, match="no such file"):
        load_qdq_onnx(tmp_path / "none.onnx")
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"damaged\.onnx"):
        load_qdq_onnx(damaged)
    old = Graph(opset=10)
    old.save(tmp_path / "old.onnx", {"x": SHAPE}, [old.pair("x", 0.1, 0, "int8")])
    with pytest.raises(ValueError, match=r"operator set \[10\]; expected 11 to 26"):
        load_qdq_onnx(tmp_path / "old.onnx")


def test_open_sizes_ask_for_example_inputs(tmp_path: Path) -> None:
    graph = Graph()
    sizes = ["batch", 8, "height", 6]
    y = layer(graph, graph.pair("x", 0.02, 117, "uint8"))
    path = graph.save(tmp_path / "open.onnx", {"x": sizes}, [y])
    with pytest.raises(ValueError, match=r"input 'x' has sizes .*give example_inputs"):
        load_qdq_onnx(path)
    model = load_qdq_onnx(path, {"x": torch.rand(2, 8, 7, 6)})
    x = torch.rand(3, 8, 5, 6)
    assert model(x=x).shape == (3, 4, 3, 4)
    with pytest.raises(ValueError, match="example_inputs have no 'x'"):
        load_qdq_onnx(path, {"y": x})


def test_sizes_that_a_file_fixes(tmp_path: Path) -> None:
    graph = Graph()
    read = graph.pair("x", 0.02, 117, "uint8")
    y = graph.node("Resize", [read, "", "", graph.constant("sizes", [2, 8, 3, 5])], mode="linear")
    path = graph.save(tmp_path / "fixed.onnx", {"x": [2, 8, 7, 6]}, [y])
    model = load_qdq_onnx(path)
    assert model(torch.rand(3, 8, 7, 6)).shape == (3, 8, 3, 5)  # the batch stays open
    with pytest.raises(ValueError, match="input x: expected size 7 in axis 2, which the forward"):
        model(torch.rand(2, 8, 5, 6))  # of a float model, 2 rows and not 3
    with pytest.raises(ValueError, match=r"input 'x': expected the file's sizes \[0, 8, 7, 6\]"):
        load_qdq_onnx(path, torch.rand(2, 8, 5, 6))


def test_a_batch_that_constants_belong_to(tmp_path: Path) -> None:
    graph = Graph()
    read = graph.pair("x", 0.02, 117, "uint8")
    total = graph.node("ReduceSum", [read, graph.constant("axes", [0])], keepdims=1)
    mean = graph.node("Div", [total, graph.constant("rows", np.float32(6))])
    y = graph.node("Sub", [read, mean])
    model = load_qdq_onnx(graph.save(tmp_path / "rows.onnx", {"x": [6, 8]}, [y]))
    assert model(torch.rand(6, 8)).shape == (6, 8)
    with pytest.raises(ValueError, match="input x: expected size 6 in axis 0"):
        model(torch.rand(9, 8))


def test_constants_of_half_precision(tmp_path: Path) -> None:
    graph = Graph()
    cast = graph.node("Cast", [graph.constant("c", F32(0.1))], to=TensorProto.FLOAT16)
    half = graph.node("Div", [cast, graph.constant("d", np.float16(3))])
    read = graph.node("Cast", [graph.pair("x", 0.02, 117, "uint8")], to=TensorProto.FLOAT16)
    y = graph.node("Cast", [graph.node("Mul", [read, half])], to=TensorProto.FLOAT)
    path = graph.save(tmp_path / "half.onnx", {"x": SHAPE}, [y])
    x = torch.rand(SHAPE)
    (wanted,) = run_file(path, {"x": x.numpy()})
    assert np.allclose(load_qdq_onnx(path)(x).numpy(), wanted, rtol=2e-3)

"""Numbers that contradict each other, and numbers that no runtime can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bevquant_export import lint_onnx


def conv_file(
    path: Path, *, weight: Any = (8, 3, 3, 3), dims: Any = (1, 3, 16, 16), opset: int = 13,
    bias: str = "b", nodes: Any = (), **settings: Any,
) -> Path:  # fmt: skip
    tensors = [numpy_helper.from_array(np.full(weight, 0.5, np.float32), "w")]
    if bias == "b":
        tensors.append(numpy_helper.from_array(np.zeros(weight[0], np.float32), "b"))
    conv = helper.make_node("Conv", ["x", "w", bias], ["y"], "conv", **settings)
    graph = helper.make_graph(
        [*nodes, conv],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)
    path.write_bytes(model.SerializeToString())
    return path


def found(path: Path, target: str = "tensorrt") -> dict[str, str]:
    return {f.id: f"{f.node} {f.reason}" for f in lint_onnx(path, target)}


def test_a_plain_file_is_clean(tmp_path: Path) -> None:
    assert found(conv_file(tmp_path / "a.onnx", pads=[1, 1, 1, 1], strides=[2, 2])) == {}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"weight": (8, 5, 3, 3)}, "ONX019"),
        ({"weight": (8, 3, 3, 3), "group": 3}, "ONX018"),
        ({"pads": [1, 1, 1]}, "ONX018"),
        ({"strides": [10**9, 1]}, "ONX018"),
        ({"strides": [1]}, "ONX018"),
        ({"dilations": [1, 10**9]}, "ONX018"),
        ({"dims": (1, 3, 2**62, 16)}, "ONX020"),
        ({"opset": 4321}, "ONX014"),
        ({"opset": 0}, "ONX014"),
    ],
)
def test_each_is_found(tmp_path: Path, settings: dict[str, Any], rule: str) -> None:
    assert rule in found(conv_file(tmp_path / "a.onnx", **settings))


def test_channels_behind_other_operators_and_pairs(tmp_path: Path) -> None:
    ones = np.ones((), np.float32)
    tensors = [
        numpy_helper.from_array(np.ones((8, 3, 1, 1), np.float32), "w"),
        numpy_helper.from_array(np.ones((4, 6, 1, 1), np.int8), "q"),
        numpy_helper.from_array(ones, "s"),
        numpy_helper.from_array(np.zeros((), np.int8), "z"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["dq"], "dq"),
        helper.make_node("Conv", ["b", "dq"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 4, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], tensors,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    path = tmp_path / "a.onnx"
    path.write_bytes(model.SerializeToString())
    assert found(path)["ONX019"].startswith("second ")


def test_a_bias_of_constant_of_shape_is_a_constant(tmp_path: Path) -> None:
    shape = helper.make_node(
        "Constant", [], ["n"], "n", value=numpy_helper.from_array(np.array([8], np.int64))
    )
    zeros = helper.make_node("ConstantOfShape", ["n"], ["zeros"], "zeros")
    assert found(conv_file(tmp_path / "a.onnx", bias="zeros", nodes=[shape, zeros])) == {}


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_half_pairs_in_front_of_gemm(tmp_path: Path, kind: Any) -> None:
    tensors = [
        numpy_helper.from_array(np.full((), 0.5, kind), "s"),
        numpy_helper.from_array(np.zeros((), np.int8), "z"),
        numpy_helper.from_array(np.ones((4, 8), kind), "w"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "d"),
        helper.make_node("Gemm", ["d", "w"], ["y"], "gemm", transB=1),
    ]
    element = TensorProto.FLOAT16 if kind is np.float16 else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", element, (2, 8))],
        [helper.make_tensor_value_info("y", element, (2, 4))], tensors,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    path = tmp_path / "a.onnx"
    onnx.save(model, path)
    assert ("TRT015" in found(path)) == (kind is np.float16)


def test_a_missing_file_names_the_file_and_the_function(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lint_onnx: .*none\.onnx: no such file"):
        lint_onnx(tmp_path / "none.onnx", "tensorrt")

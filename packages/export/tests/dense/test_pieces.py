"""A cut model in pieces: what hangs together, what each piece reads, constants in each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from bevquant_export.dense.verify._pieces import pieces_of  # noqa: E402


def value(name: str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])


def model(nodes: list[Any], inputs: str, outputs: str) -> Any:
    held = [numpy_helper.from_array(np.float32([2.0]), "two")]
    graph = helper.make_graph(
        nodes, "cut", [value(n) for n in inputs], [value(n) for n in outputs.split()], held
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


def names(values: Any) -> list[str]:
    return [value.name for value in values]


def test_nodes_hang_together_by_tensors_and_not_by_constants_or_inputs() -> None:
    proto = model(
        [
            helper.make_node("Neg", ["two"], ["less"]),
            helper.make_node("Mul", ["a", "less"], ["x"]),
            helper.make_node("Mul", ["b", "less"], ["y"]),
            helper.make_node("Add", ["x", "two"], ["p"]),
            helper.make_node("Relu", ["x"], ["q"]),
            helper.make_node("Add", ["y", "b"], ["r"]),
            helper.make_node("Exp", ["b"], ["unread"]),
        ],
        "ab",
        "p q r less",
    )
    pieces = list(pieces_of(ir.from_proto(proto)))
    assert [names(piece.graph.output) for piece in pieces] == [["p", "q"], ["r"], ["less"]]
    assert [names(piece.graph.input) for piece in pieces] == [["a"], ["b"], []]
    assert [[n.op_type for n in piece.graph.node] for piece in pieces] == [
        ["Neg", "Mul", "Add", "Relu"], ["Neg", "Mul", "Add"], ["Neg"],
    ]  # fmt: skip
    given = {"a": np.float32([3.0]), "b": np.float32([5.0])}
    wanted = dict(
        zip(names(proto.graph.output), ReferenceEvaluator(proto).run(None, given), strict=True)
    )
    for piece in pieces:
        onnx.checker.check_model(piece)
        own = {name: given[name] for name in names(piece.graph.input)}
        for name, made in zip(
            names(piece.graph.output), ReferenceEvaluator(piece).run(None, own), strict=True
        ):
            assert made == wanted[name], name


def test_what_a_graph_inside_of_a_node_reads_joins_too() -> None:
    def branch(name: str, read: str) -> Any:
        node = helper.make_node("Mul", [read, "two"], [name])
        return helper.make_graph([node], name, [], [value(name)])

    proto = model(
        [
            helper.make_node("Relu", ["a"], ["x"]),
            helper.make_node("Cast", ["b"], ["choice"], to=TensorProto.BOOL),
            helper.make_node(
                "If", ["choice"], ["made"],
                then_branch=branch("yes", "x"), else_branch=branch("no", "b"),
            ),
        ],
        "ab",
        "made",
    )  # fmt: skip
    (piece,) = pieces_of(ir.from_proto(proto))
    assert names(piece.graph.input) == ["a", "b"]
    assert names(piece.graph.initializer) == ["two"]
    (made,) = ReferenceEvaluator(piece).run(None, {"a": np.float32([3.0]), "b": np.float32([1.0])})
    assert made == 6.0

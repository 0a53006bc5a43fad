"""A graph as bytes of the libspconv dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from bevquant_export._size_guards import note_guards
from bevquant_export.sparse._graph import Conv, Graph
from bevquant_export.sparse._node_attributes import node_attributes, operator_of

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

_OPSET, _IR_VERSION = 11, 7


def proto_bytes(graph: Graph) -> bytes:
    """The file: an ONNX model with one opset import, all weights raw float16.

    Attributes are sorted by name, as by `onnx.helper.make_node`. The module of a node is its
    documentation string.
    """
    from onnx import TensorProto, helper

    half = TensorProto.FLOAT16
    nodes: list[NodeProto] = []
    initializers: list[TensorProto] = []
    convs = 0
    for node in graph.nodes:
        names = [*node.inputs]
        if isinstance(node, Conv):
            weights = {f"spconv{convs}.weight": node.weight, f"spconv{convs}.bias": node.bias}
            initializers += [_initializer(name, value) for name, value in weights.items()]
            names += weights
            convs += 1
        made = helper.make_node(
            operator_of(node),
            names,
            [node.y],
            node.name,
            doc_string=node.path,
            **node_attributes(node),
        )
        nodes.append(made)
    outputs = [
        helper.make_tensor_value_info(name, half, graph.shapes.get(name)) for name in graph.outputs
    ]
    whole = helper.make_graph(
        nodes,
        "scn",
        [helper.make_tensor_value_info(graph.input, half, [1, graph.channels])],
        outputs,
        initializers,
    )
    model = helper.make_model(
        whole,
        opset_imports=[helper.make_operatorsetid("ai.onnx", _OPSET)],
        producer_name="bevquant_export",
        ir_version=_IR_VERSION,
    )
    note_guards(model, graph.guards)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _initializer(name: str, value: Tensor) -> TensorProto:
    from onnx import TensorProto, helper

    raw = value.contiguous().numpy().astype("<f2").tobytes()
    return helper.make_tensor(name, TensorProto.FLOAT16, list(value.shape), raw, raw=True)

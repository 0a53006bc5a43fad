"""A graph as bytes of the libspconv dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from bevquant_export.sparse._graph import (
    Add,
    Concat,
    Conv,
    Fold,
    Graph,
    LayoutOp,
    Node,
    Pool,
    Scatter,
    Select,
    Steps,
)

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

_OPSET, _IR_VERSION = 11, 7


def proto_bytes(graph: Graph) -> bytes:
    """The file: an ONNX model with one opset import, all weights raw float16.

    Attributes stand in the order of their names, as `onnx.helper.make_node` writes them; the
    module that a node comes from is its documentation string.
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
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _initializer(name: str, value: Tensor) -> TensorProto:
    from onnx import TensorProto, helper

    raw = value.contiguous().numpy().astype("<f2").tobytes()
    return helper.make_tensor(name, TensorProto.FLOAT16, list(value.shape), raw, raw=True)


def operator_of(node: Node) -> str:
    """Name of a node's operator in the dialect."""
    if isinstance(node, LayoutOp):
        return node.op
    return {Conv: "SparseConvolution", Scatter: "ScatterDense"}.get(type(node), type(node).__name__)


def node_attributes(node: Node) -> dict[str, Any]:
    """Attributes of a node: the Python type of each is that which the dialect wants."""
    if isinstance(node, Conv):
        return _conv_attributes(node)
    if isinstance(node, Add):
        ranges = {"input0_dynamic_range": node.range_x, "input1_dynamic_range": node.range_other}
        return {
            "precision": node.precision,
            "output_precision": node.output_precision,
            **{name: float(value) for name, value in ranges.items() if value is not None},
        }
    if isinstance(node, Concat):
        ranges = {"input_dynamic_range": node.input_range}
        return {
            "precision": node.precision,
            "output_precision": node.output_precision,
            **{name: float(value) for name, value in ranges.items() if value is not None},
        }
    if isinstance(node, Fold):
        return {"channels": node.channels, "output_precision": node.output_precision}
    if isinstance(node, Select):
        range_ = (
            {} if node.input_range is None else {"input_dynamic_range": float(node.input_range)}
        )
        return {
            "channels": list(node.channels),
            "in_channels": node.in_channels,
            "activation": node.activation,
            "output_precision": node.output_precision,
            **range_,
        }
    if isinstance(node, Pool):
        sizes = ("kernel_size", "stride", "padding", "dilation", "input_spatial_shape",
                 "output_spatial_shape")  # fmt: skip
        return {
            **{name: list(getattr(node, name)) for name in sizes},
            "subm": int(node.subm),
            "rulebook": node.rulebook,
            "output_precision": node.output_precision,
            **({} if node.input_range is None else {"input_dynamic_range": node.input_range}),
        }
    if isinstance(node, Steps):
        return {
            "tensors": len(node.xs),
            **({"input_dynamic_ranges": list(node.ranges)} if node.xs else {}),
            "on": node.on,
            **({"grid": list(node.grid)} if node.grid else {}),
            "channels": node.channels,
            "frames": node.frames,
            "output_precision": node.output_precision,
            "body": node.body,
        }
    if isinstance(node, Scatter):
        return {
            "input_spatial_shape": list(node.input_spatial_shape),
            "format": node.format,
            "output_shape": list(node.output_shape),
        }
    return {"dims": list(node.dims)} if isinstance(node, LayoutOp) else {}


def _conv_attributes(node: Conv) -> dict[str, Any]:
    sizes = (
        "kernel_size stride padding dilation output_padding input_spatial_shape "
        "output_spatial_shape"
    ).split()
    ranges: dict[str, Any] = {}
    if node.input_range is not None:
        ranges["input_dynamic_range"] = float(node.input_range)
    if node.weight_ranges is not None:
        ranges["weight_dynamic_ranges"] = [float(value) for value in node.weight_ranges]
    return {
        **{name: list(getattr(node, name)) for name in sizes},
        "ndim": 3,
        "in_channels": node.in_channels,
        "out_channels": node.out_channels,
        "output_bound": node.output_bound,
        "transposed": 0,
        "inverse": int(node.inverse),
        "groups": 1,
        "subm": int(node.subm),
        "rulebook": node.rulebook,
        "activation": node.activation,
        "input_shape": [node.rows[0], node.in_channels],
        "output_shape": [node.rows[1], node.out_channels],
        "precision": node.precision,
        "output_precision": node.output_precision,
        **ranges,
    }

"""A file in a form that onnxruntime runs, whole or operation by operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["forced", "lifted", "session"]


def lifted(proto: Any) -> Any:
    """A model of operator set 11 in set 13: scales per channel get the axis that they run along.

    Set 11 has no axis, and onnxruntime reads such scales along axis 1. Axes of a sum are a tensor.
    """
    if proto.opset_import[0].version >= 13:
        return proto
    from onnx import helper, numpy_helper

    proto.opset_import[0].version = 13
    values = {c.name: c for c in proto.graph.initializer}
    values |= {n.output[0]: n.attribute[0].t for n in proto.graph.node if n.op_type == "Constant"}
    transposed = {n.input[1] for n in proto.graph.node if n.op_type == "ConvTranspose"}
    makers = {name: node for node in proto.graph.node for name in node.output}
    second = transposed | {makers[name].input[0] for name in transposed if name in makers}
    for node in proto.graph.node:
        if node.op_type == "ReduceSum":
            _with_axes_as_tensor(proto.graph, node)
        quantizes = node.op_type in ("QuantizeLinear", "DequantizeLinear")
        channels = list(values[node.input[1]].dims) if quantizes else []
        if channels and channels != [1]:
            axis = int(node.output[0] in second)
            node.attribute.append(helper.make_attribute("axis", axis))
            zero = values[node.input[2]]
            zero.CopyFrom(numpy_helper.from_array(np.zeros(channels, np.int8), zero.name))
    return proto


def _with_axes_as_tensor(graph: Any, node: Any) -> None:
    from onnx import helper, numpy_helper

    axes = helper.get_node_attr_value(node, "axes")
    name = f"{node.name}.axes"
    graph.initializer.append(numpy_helper.from_array(np.asarray(axes, np.int64), name))
    node.input.append(name)
    kept = [attribute for attribute in node.attribute if attribute.name != "axes"]
    del node.attribute[:]
    node.attribute.extend(kept)


def forced(path: Path, tensors: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
    """The model with these tensors cut: who reads one reads an input of its name.

    Args:
        path: The file.
        tensors: Quantized tensors.

    Returns:
        The model, and for each tensor the output that holds what is made of it.
    """
    import onnx
    from onnx import TensorProto, helper

    proto = lifted(onnx.load(path))
    graph = proto.graph
    made = {name: f"{name}.made" for name in tensors}
    for node in graph.node:
        node.output[:] = [made.get(name, name) for name in node.output]
    unsigned = any(c.data_type == TensorProto.UINT8 for c in graph.initializer)
    dtype = TensorProto.UINT8 if unsigned else TensorProto.INT8
    read = {name for node in graph.node for name in node.input}
    graph.input.extend(
        helper.make_tensor_value_info(name, dtype, None) for name in tensors if name in read
    )
    del graph.output[:]
    graph.output.extend(helper.make_tensor_value_info(name, dtype, None) for name in made.values())
    return proto, made


def session(proto: Any, runner: str) -> Any:
    """A session on the CPU: ONNX Runtime with all its optimisations, or ``"plain"`` without."""
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "compare_qdq_onnx needs onnxruntime: pip install 'bevquant-export[onnxruntime]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if runner == "plain":
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

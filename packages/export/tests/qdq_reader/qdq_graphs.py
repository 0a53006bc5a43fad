"""Graphs in QDQ format, node by node, and what ONNX Runtime makes of a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Array = Any
_KINDS = {"int4": TensorProto.INT4, "uint4": TensorProto.UINT4}


@dataclass
class Graph:
    """Collects nodes and constants."""

    opset: int = 21
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def constant(self, name: str, value: Array, dtype: str = "") -> str:
        array = np.asarray(value)
        if dtype in _KINDS:
            made = helper.make_tensor(name, _KINDS[dtype], array.shape, array.ravel().tolist())
        else:
            made = numpy_helper.from_array(array.astype(dtype or array.dtype), name)
        self.constants.append(made)
        return name

    def node(self, op: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, inputs, [output or f"{name}_out"], name, **attributes)
        )
        return str(self.nodes[-1].output[0])

    def parameters(self, name: str, scale: Array, zero: Array, dtype: str) -> list[str]:
        scale = np.asarray(scale, np.float32)
        zero = np.broadcast_to(np.asarray(zero), scale.shape)
        return [self.constant(f"{name}_s", scale), self.constant(f"{name}_z", zero, dtype)]

    def pair(self, x: str, scale: Array, zero: Array, dtype: str, **attributes: Any) -> str:
        """QuantizeLinear and DequantizeLinear of a tensor."""
        both = self.parameters(f"{x}_{len(self.nodes)}", scale, zero, dtype)
        q = self.node("QuantizeLinear", [x, *both], **attributes)
        return self.node("DequantizeLinear", [q, *both], **attributes)

    def stored(
        self, name: str, value: Array, scale: Array, zero: Array, dtype: str, **attributes: Any
    ) -> str:
        """A constant behind DequantizeLinear."""
        both = self.parameters(name, scale, zero, dtype)
        q = self.constant(f"{name}_quantized", value, dtype)
        return self.node("DequantizeLinear", [q, *both], **attributes)

    def save(self, path: Path, inputs: dict[str, Any], outputs: list[str], **model: Any) -> Path:
        given = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            if isinstance(shape, list)
            else shape
            for name, shape in inputs.items()
        ]
        made = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "graph", given, made, self.constants)
        proto = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10
        )
        onnx.save(proto, path, **model)
        return path


def run_file(path: Path, feed: dict[str, Array]) -> list[Array]:
    """The outputs of a file as it is written, in float, by ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))

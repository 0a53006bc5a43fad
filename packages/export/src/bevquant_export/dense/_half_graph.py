"""A file's graph and the types of its tensors, for the choice of half types."""

from __future__ import annotations

from typing import Any

FLOAT = 1  # TensorProto's number


class FloatGraph:
    """A graph whose floats are float32.

    Args:
        proto: The model; nodes in order, with strict shapes.

    Attributes:
        graph: Its graph.
        floats: Tensors of float32, constants too.
        constants: Those that are initializers, by name.
        makers: Tensor to the node that makes it.
        readers: Tensor to the nodes that read it.
        shapes: Tensor to its sizes, ``None`` for those that are free.
    """

    def __init__(self, proto: Any) -> None:
        import onnx

        self.graph = proto.graph
        self.opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
        values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.floats = {v.name for v in values if v.type.tensor_type.elem_type == FLOAT}
        self.constants = {t.name: t for t in self.graph.initializer if t.data_type == FLOAT}
        self.floats |= set(self.constants)
        self.makers = {name: node for node in self.graph.node for name in node.output}
        self.readers: dict[str, list[Any]] = {}
        for node in self.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.shapes = {
            v.name: [d.dim_value if d.HasField("dim_value") else None for d in dims]
            for v in values
            if (dims := v.type.tensor_type.shape.dim) or v.type.tensor_type.HasField("shape")
        }

    def is_float(self, node: Any) -> bool:
        """Whether a node reads or makes floats."""
        return any(name in self.floats for name in (*node.input, *node.output))

    def makers_of(self, node: Any) -> list[Any]:
        """Producers of a node's float inputs."""
        return [self.makers[n] for n in node.input if n in self.makers and n in self.floats]

    def takes_halves(self, node: Any) -> bool:
        """Whether the operator set has float16 for a node's floats."""
        from onnx import defs

        if node.op_type == "Constant" or node.domain not in ("", "ai.onnx"):
            return True
        schema = defs.get_schema(node.op_type, self.opset, "")
        types = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        ports = [(name, port) for name, port in zip(node.input, schema.inputs, strict=False)]
        ports += [(name, port) for name, port in zip(node.output, schema.outputs, strict=False)]
        return all(
            "tensor(float16)" in types.get(port.type_str, ["tensor(float16)"])
            for name, port in ports
            if name in self.floats
        )

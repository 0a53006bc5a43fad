"""The model under construction: calls of local functions, standard operators, constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.voxels import _functions as voxel
from bevquant_export.voxels._body import DOMAIN, FLOAT, INT8, INT64, OPSET, UINT8

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto, ValueInfoProto

OPEN = "OfAnyGrid"  # ends the names of functions that read the grid from a tensor

_IR_VERSION = 8  # the first with model-local functions
_VERSION = 1
Settings = Mapping[str, int | float | str | tuple[int, ...]]  # a string: a tensor in its place

FUNCTIONS: Mapping[str, Callable[[], FunctionProto]] = {
    "CheckedVoxels": voxel.checked_voxels,
    "DistinctCoords": partial(voxel.distinct, "DistinctCoords", "voxels", INT64),
    "DistinctVoxels": partial(voxel.distinct, "DistinctVoxels", "features", FLOAT),
    "StridedVoxels": voxel.strided_voxels,
    **{f"PillarMap{c}": partial(voxel.pillar_map, c) for c in range(3)},
    **{f"Neighbours{c}": partial(voxel.neighbours, c) for c in range(3)},
    **{f"InverseNeighbours{c}": partial(voxel.neighbours, c, inverse=True) for c in range(3)},
    "Quantize": voxel.quantized,
    "IntegerConvolution": partial(voxel.integer_convolution, "IntegerConvolution", UINT8, 128),
    "SignedConvolution": partial(voxel.integer_convolution, "SignedConvolution", INT8, 0),
    "FloatConvolution": voxel.float_convolution,
    "Requantize": voxel.requantized,
    "Dequantize": voxel.dequantized,
    "DequantizeInt8": voxel.dequantized_int8,
    "Add": voxel.add_requantized,
    "AddEqual": partial(voxel.add_requantized, equal=True),
    "AddDequantize": voxel.add_floats,
    **{voxel.scatter_name(o): partial(voxel.scattered, o) for o in permutations(range(3))},
    "Int8": voxel.signed,
    "MaxPool": voxel.max_pooled,
    "IntegerMaxPool": partial(voxel.max_pooled, integers=True),
}


def opened(function: FunctionProto) -> FunctionProto:
    """The function with the spatial shape that it has as an attribute as its last input."""
    from onnx import helper

    (shape,) = (name for name in function.attribute if name.endswith("spatial_shape"))
    function.attribute.remove(shape)
    function.input.append(shape)
    for node in function.node:
        if any(attribute.ref_attr_name == shape for attribute in node.attribute):
            node.CopyFrom(helper.make_node("Identity", [shape], list(node.output)))
    function.name += OPEN
    return function


class Emitter:
    """Nodes, constants and outputs of the model; functions come along when they are called."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.outputs: list[ValueInfoProto] = []
        self._called: set[str] = set()
        self._own: list[FunctionProto] = []

    def call(
        self,
        function: str,
        inputs: Sequence[str],
        name: str,
        settings: Settings | None = None,
        *,
        made: int = 1,
        path: str = "",
    ) -> list[str]:
        """Call a function of `FUNCTIONS`; its `made` outputs are named after the node."""
        self._called.add(function)
        return self._node(function, inputs, name, made, path, DOMAIN, settings)

    def call_own(
        self, function: FunctionProto, inputs: Sequence[str], name: str, *, made: int, path: str
    ) -> list[str]:
        """Call a function that comes along under the name of its one node."""
        function.name, function.domain = name, DOMAIN
        self._own.append(function)
        return self._node(name, inputs, name, made, path, DOMAIN, None)

    def standard(
        self,
        operator: str,
        inputs: Sequence[str],
        name: str,
        settings: Settings | None = None,
        *,
        path: str = "",
    ) -> str:
        """One operator of ONNX."""
        return self._node(operator, inputs, name, 1, path, "", settings)[0]

    def _node(
        self,
        operator: str,
        inputs: Sequence[str],
        name: str,
        made: int,
        path: str,
        domain: str,
        settings: Settings | None,
    ) -> list[str]:
        from onnx import helper

        outputs = [f"{name}:{i}" for i in range(made)]
        node = helper.make_node(
            operator,
            inputs,
            outputs,
            name,
            doc_string=path or None,
            domain=domain or None,
            **dict[str, Any](settings or {}),
        )
        self.nodes.append(node)
        return outputs

    def constant(self, name: str, values: np.ndarray[Any, Any]) -> str:
        """An initializer."""
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def output(self, made: str, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Give a tensor away under a name."""
        from onnx import helper

        self.nodes.append(helper.make_node("Identity", [made], [name], f"{name} out"))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def model(self, inputs: Sequence[ValueInfoProto], record: Mapping[str, str]) -> ModelProto:
        """The finished model; `record` is its metadata."""
        from onnx import helper

        graph = helper.make_graph(
            self.nodes, "sparse encoder", inputs, self.outputs, list(self.constants.values())
        )
        model = helper.make_model(
            graph,
            functions=[*(FUNCTIONS[name]() for name in sorted(self._called)), *self._own],
            opset_imports=[
                helper.make_operatorsetid("", OPSET),
                helper.make_operatorsetid(DOMAIN, _VERSION),
            ],
            producer_name="bevquant_export",
            ir_version=_IR_VERSION,
        )
        helper.set_model_props(model, dict(record))
        return model

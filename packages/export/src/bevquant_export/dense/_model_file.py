"""The finished graph as a checked file that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bevquant_export.dense._graph import Graph
from bevquant_export.lint._model import VOXELS
from bevquant_export.targets._cpu import CPU_KEY

Shape = tuple[int | str, ...]
_IR_VERSIONS = {11: 6, 13: 7, 16: 8, 18: 8}
# TensorProto's numbers.
_TYPES = {torch.float32: 1, torch.bool: 9, torch.int32: 6, torch.int64: 7, torch.float64: 11}


def assemble(
    graph: Graph,
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    made: Sequence[tuple[str, str]],
    types: Mapping[str, Any],
) -> Any:
    """The model, checked.

    Args:
        graph: Nodes and constants.
        inputs: Name to shape.
        outputs: Likewise.
        made: Tensor and the output that it is, for each output.
        types: Inputs and outputs to their types, as torch's.

    Raises:
        onnx.checker.ValidationError: The file would be invalid.
    """
    import onnx
    from onnx import helper, numpy_helper

    taken = set(inputs) | set(graph.constants)
    renamed: dict[str, str] = {}
    for tensor, name in made:
        if tensor in taken or tensor in renamed:
            unique = graph.unique(f"{name}.Identity")
            graph.nodes.append(helper.make_node("Identity", [tensor], [name], name=unique))
        else:
            renamed[tensor] = name
    for node in graph.nodes:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    if graph.profile.numbered:
        graph.nodes[:] = list(_with_scales(graph))
        for place, node in enumerate(graph.nodes):
            node.name = f"{node.op_type}_{place}"
    used = {name for node in graph.nodes for name in node.input}
    proto = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "model",
            [helper.make_tensor_value_info(n, _TYPES[types[n]], s) for n, s in inputs.items()],
            [helper.make_tensor_value_info(n, _TYPES[types[n]], s) for n, s in outputs.items()],
            [numpy_helper.from_array(a, n) for n, a in graph.constants.items() if n in used],
        ),
        producer_name="bevquant_export",
        functions=_functions(graph),
        opset_imports=[
            helper.make_opsetid("", graph.opset),
            *([helper.make_opsetid(VOXELS, 1)] if graph.functions else []),
        ],
        ir_version=_IR_VERSIONS[graph.opset],
    )
    if graph.profile.weight == "int8":
        helper.set_model_props(proto, {CPU_KEY: "vnni"})
    onnx.checker.check_model(proto, full_check=graph.profile.axis)
    return proto


def _functions(graph: Graph) -> list[Any]:
    """The functions of voxels that the graph calls."""
    from bevquant_export.sparse.portable._emit import FUNCTIONS, OPEN, opened

    found = [
        opened(FUNCTIONS[name.removesuffix(OPEN)]()) if name.endswith(OPEN) else FUNCTIONS[name]()
        for name in sorted(graph.functions)
    ]
    for function in found:
        function.domain = VOXELS
    return found


def _with_scales(graph: Graph) -> Iterator[Any]:
    """The nodes, and before each QuantizeLinear its scale and zero point as nodes.

    One zero is enough for hb_mapper, whatever number of scales there is.
    """
    from onnx import helper, numpy_helper

    made: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op_type == "QuantizeLinear":
            scale, zero = (graph.constants[name] for name in node.input[1:])
            names = [f"{node.name}.scale", f"{node.name}.zero_point"]
            for name, value in zip(names, (scale, zero.reshape(-1)[:1].reshape(())), strict=True):
                tensor = numpy_helper.from_array(value)
                yield helper.make_node("Constant", [], [name], value=tensor)
            made[node.output[0]] = node.input[1:] = names
        if node.op_type == "DequantizeLinear":
            node.input[1:] = made[node.input[0]]
        yield node

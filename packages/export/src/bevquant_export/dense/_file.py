"""The finished graph as a checked model, the names of its ports, and hb_mapper's settings to it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bevquant_export.dense._graph import Graph
from bevquant_export.dense._source import Source
from bevquant_export.floats._ports import checked
from bevquant_export.lint._model import VOXELS
from bevquant_export.targets._cpu import CPU_KEY
from bevquant_int8sim.program import Ref, SparseRef
from bevquant_quantizers import write_whole

MARCHES = ("bernoulli2", "bayes", "bayes-e")
Shape = tuple[int | str, ...]
_IR_VERSIONS = {11: 6, 13: 7, 16: 8, 18: 8}
# TensorProto's numbers.
_TYPES = {torch.float32: 1, torch.bool: 9, torch.int32: 6, torch.int64: 7, torch.float64: 11}


def named_inputs(source: Source, wanted: Sequence[str] | None) -> dict[str, str]:
    """Name in the program to name in the file.

    Raises:
        ValueError: Names that are not as many as the inputs, or not different.
    """
    names = [re.sub(r"\W+", "_", name).strip("_") for name in source.inputs.values()]
    return dict(zip(source.inputs, _named("input_names", names, wanted), strict=True))


def named_outputs(
    source: Source, wanted: Sequence[str] | None, inputs: Collection[str]
) -> list[tuple[str, str]]:
    """Name in the program and name in the file, for every tensor that the model returns.

    One that is called as one of the file's `inputs` gets ``output_`` before its name.

    Raises:
        ValueError: No tensor is returned, or names that are not as many or not different.
    """
    found = list(_members(source, source.program.result, ""))
    if not found:
        raise ValueError("export_qdq_onnx: the model returns no tensor")
    single = len(found) == 1 and not found[0][1]
    names = ["output" if single else name.lstrip("_") or "output" for _, name in found]
    names = [f"output_{n}" if n[0].isdigit() or n in inputs else n for n in names]
    chosen = _named("output_names", names, wanted)
    return [(ref, name) for (ref, _), name in zip(found, chosen, strict=True)]


def _members(source: Source, value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every tensor in what the model returns, and the keys and places that lead to it."""
    if isinstance(value, Ref) and f"{value.name}[0]" in source.shapes:
        for index in range(len(source.shapes[value.name])):
            yield f"{value.name}[{index}]", f"{where}_{index}"
    elif isinstance(value, Ref) and value.name in source.shapes:
        yield value.name, where
    elif isinstance(value, SparseRef):
        yield value.features, f"{where}_features"
        yield f"{value.sites}.indices", f"{where}_indices"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _members(source, item, f"{where}_{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _members(source, item, f"{where}_{index}")


def _named(argument: str, names: list[str], wanted: Sequence[str] | None) -> list[str]:
    given = f"export_qdq_onnx: {argument}"
    return names if wanted is None else checked(given, names, len(names), wanted)


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


def write_settings(onnx_file: Path, march: str, run_on_cpu: Sequence[str]) -> Path:
    """Write ``<file>.yaml``: ranges are those of the file, inputs are floats in NCHW order.

    Args:
        onnx_file: The file, named in the settings.
        march: One of `MARCHES`.
        run_on_cpu: Nodes that stay in float although their inputs are quantized.
    """
    names = [f'  run_on_cpu: "{";".join(run_on_cpu)}"'] if run_on_cpu else []
    lines = [
        "model_parameters:",
        f'  onnx_model: "{onnx_file.name}"',
        f'  march: "{march}"',
        f'  output_model_file_prefix: "{onnx_file.stem}"',
        "input_parameters:",
        '  input_type_rt: "featuremap"',
        '  input_type_train: "featuremap"',
        '  input_layout_train: "NCHW"',
        '  input_layout_rt: "NCHW"',
        '  norm_type: "no_preprocess"',
        "calibration_parameters:",
        '  calibration_type: "load"',
        *names,
        "compiler_parameters:",
        '  compile_mode: "latency"',
        "  debug: false",
        '  optimize_level: "O3"',
    ]
    path = onnx_file.with_suffix(".yaml")
    write_whole(path, ("\n".join(lines) + "\n").encode())
    return path

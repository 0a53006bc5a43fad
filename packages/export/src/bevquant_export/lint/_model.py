"""Rules about the model around its graphs: versions, operators, tensors that leaked into it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export.lint._graph import Graph
from bevquant_export.lint._rule import DENSE, Finding, Rule, quoted
from bevquant_export.lint._tensors import check_tensor

if TYPE_CHECKING:
    import onnx

    from bevquant_export.targets._target import Target

VERSIONS = Rule(
    "ONX014",
    "error",
    "the model states its IR version and imports each domain it uses once, ONNX in a version that "
    "there is",
    "write ir_version and one opset_import for every domain (onnx.helper.make_model does)",
    DENSE,
)
UNKNOWN_OP = Rule(
    "ONX015",
    "error",
    "every operator is in ONNX at the imported opset, or a function of the model",
    "write it with standard operators, or raise the opset if the target takes a later one",
    DENSE,
)
LEAKED = Rule(
    "ONX016",
    "error",
    "no tensor of the file is float64 or bfloat16 (but what rescales exact sums over voxels)",
    "convert the model to float32 before it is exported",
    DENSE,
)
SIZES = Rule(
    "ONX020",
    "error",
    "inputs, outputs and values have dimensions that a machine can hold",
    "write the sizes of the model, or a name for one that is free",
)
UNREAD = Rule(
    "ONX017",
    "warning",
    "every initializer is read (num_batches_tracked and float weights leak into files)",
    "leave it out of the file",
)


VOXELS = "bevquant.voxels"  # domain of functions in files with sparse convolutions


def check_model(
    model: onnx.ModelProto, graphs: list[Graph], target: Target, folder: Path
) -> Iterator[Finding]:
    """Check versions, operators and initializers of all graphs."""
    exact = any(function.domain == VOXELS for function in model.functions)
    read = {name for graph in graphs for name in (*graph.readers, *graph.outputs)}
    for graph in graphs:
        constants = [
            attribute.t
            for node in graph.nodes
            for attribute in node.attributes.values()
            if attribute.type == 4 and not attribute.ref_attr_name
        ]
        for tensor in (*graph.tensors, *constants):
            yield from check_tensor(tensor, folder)
            if target.kind == "dense" and tensor.data_type in ((16,) if exact else (11, 16)):
                kind = "float64" if tensor.data_type == 11 else "bfloat16"
                yield LEAKED.found(tensor.name or "constant", f"the tensor is {kind}")
        for tensor in graph.tensors:
            if tensor.name not in read:
                yield UNREAD.found(tensor.name, "no node reads this initializer")
    yield from _sizes(graphs)
    if target.kind == "dense":
        yield from _versions(model, graphs)
        yield from _operators(model, graphs, target)


def _sizes(graphs: list[Graph]) -> Iterator[Finding]:
    for graph in graphs:
        if graph.is_function:
            continue
        proto = graph.proto
        for value in (*proto.input, *proto.output, *proto.value_info):
            if not value.type.HasField("tensor_type"):
                continue
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim[:65]]
            if any(not 0 <= d < 2**31 for d in dims) or math.prod(d or 1 for d in dims) > 2**40:
                shown = ", ".join(map(str, dims[:8]))
                yield SIZES.found(value.name or "value", f"dimensions [{shown}] are impossible")


def _versions(model: onnx.ModelProto, graphs: list[Graph]) -> Iterator[Finding]:
    if model.ir_version < 1:
        yield VERSIONS.found("file", f"IR version {model.ir_version}")
    imports = Counter("" if e.domain == "ai.onnx" else e.domain for e in model.opset_import)
    for domain, count in imports.items():
        if count > 1:
            yield VERSIONS.found("file", f"domain {quoted(domain or 'ai.onnx')} is imported twice")
    import onnx

    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            known = f"ONNX has 1 to {newest} here"
            yield VERSIONS.found("file", f"operator set {entry.version} is imported; {known}")
    told: set[str] = set()
    for graph in graphs:
        for node in graph.nodes:
            if node.domain not in graph.opsets and node.domain not in told:
                told.add(node.domain)
                domain = quoted(node.domain or "ai.onnx")
                yield VERSIONS.found(node.name, f"its domain {domain} is not imported")


def _operators(model: onnx.ModelProto, graphs: list[Graph], target: Target) -> Iterator[Finding]:
    known: dict[tuple[str, str, int], bool] = {}
    functions = {(f.domain, f.name) for f in model.functions}
    for graph in graphs:
        for node in graph.nodes:
            if (node.domain, node.op) in functions or node.domain in target.domains:
                continue
            # TensorRT looks for a plugin under the operator's name; it has a rule of its own.
            if node.domain and target.family == "tensorrt":
                continue
            version = graph.opsets.get(node.domain)
            if version is None:
                continue
            key = (node.op, node.domain, version)
            if key not in known:
                known[key] = _is_known(*key)
            if not known[key]:
                of = quoted(node.domain) if node.domain else "ONNX"
                yield UNKNOWN_OP.found(
                    node.name, f"operator {quoted(node.op)} is not in {of} at opset {version}"
                )


def _is_known(op: str, domain: str, version: int) -> bool:
    import onnx

    try:
        schema = onnx.defs.get_schema(op, min(version, 2**31 - 1), domain)
    except (onnx.defs.SchemaError, TypeError, ValueError):
        return False
    return not schema.deprecated

"""Rules about the model around its graphs: versions, operators, tensors that leaked into it."""

from __future__ import annotations

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

__all__ = ["LEAKED", "UNKNOWN_OP", "UNREAD", "VERSIONS", "check_model"]

VERSIONS = Rule(
    "ONX014",
    "error",
    "the model states its IR version and imports each domain it uses once",
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
    "no tensor of the file is float64 or bfloat16",
    "convert the model to float32 before it is exported",
    DENSE,
)
UNREAD = Rule(
    "ONX017",
    "warning",
    "every initializer is read (num_batches_tracked and float weights leak into files)",
    "leave it out of the file",
)


def check_model(
    model: onnx.ModelProto, graphs: list[Graph], target: Target, folder: Path
) -> Iterator[Finding]:
    """Check versions, operators and initializers of all graphs."""
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
            if target.kind == "dense" and tensor.data_type in (11, 16):
                kind = "float64" if tensor.data_type == 11 else "bfloat16"
                yield LEAKED.found(tensor.name or "constant", f"the tensor is {kind}")
        for tensor in graph.tensors:
            if tensor.name not in read:
                yield UNREAD.found(tensor.name, "no node reads this initializer")
    if target.kind == "dense":
        yield from _versions(model, graphs)
        yield from _operators(model, graphs, target)


def _versions(model: onnx.ModelProto, graphs: list[Graph]) -> Iterator[Finding]:
    if model.ir_version < 1:
        yield VERSIONS.found("file", f"IR version {model.ir_version}")
    imports = Counter("" if e.domain == "ai.onnx" else e.domain for e in model.opset_import)
    for domain, count in imports.items():
        if count > 1:
            yield VERSIONS.found("file", f"domain {quoted(domain or 'ai.onnx')} is imported twice")
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

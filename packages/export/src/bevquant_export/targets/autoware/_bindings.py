"""The node's bindings in a file by name: inputs, the rulebooks' stages, the columns' order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevquant_export.lint._graph import Finding, Graph, Rules, quoted
from bevquant_export.lint._tensors import values
from bevquant_export.targets.autoware._plugin import MOST_VOXELS, SLOTS

if TYPE_CHECKING:
    import onnx


rule = Rules("AWF", "autoware")

# fmt: off
BOUND = rule(13, f"no layer has more than {MOST_VOXELS:,} voxels, compiled into the plugin",
    "use a coarser grid or a shorter range, or calibrate with fewer points: what is beyond "
    "overruns the plugin's buffers")
ORDER = rule(15, "rulebook_coors_permutation is the order in which the file itself takes the "
    "columns of coors",
    "write the permutation that the encoder was trained with: another one gives a valid grid, "
    "transposed")
STAGES = rule(16, "rulebook inputs come in fours, int32, each with its geometry in "
    "rulebook_stages",
    "write rulebook/<key>/{out_indices, pair_fwd, pair_mask, mask_argsort} and the metadata that "
    "the node computes them from")
PORTS = rule(17, "inputs are voxels float32 [N, points, channels], coors int32 [N, 3], "
    "num_points_per_voxel int32 [N]",
    "name and type them so: the node binds them by name")
# fmt: on
_PORTS = {"voxels": (1, 3), "coors": (6, 2), "num_points_per_voxel": (6, 1)}


def stages_of(model: onnx.ModelProto) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """Stages by the base of their names, and the text's faults."""
    props = _props(model)
    if "rulebook_stages" not in props:
        return {}, []
    try:
        read = json.loads(props["rulebook_stages"])
        names = ("ksize", "stride", "padding", "dilation", "spatial_shape")
        stages = {str(s["onnx_base"]): {n: [int(v) for v in s[n]] for n in names} for s in read}
        wrong = [b for b, s in stages.items() if any(len(v) != 3 for v in s.values())]
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        return {}, [STAGES.found("file", f"rulebook_stages cannot be read: {type(error).__name__}")]
    found = [STAGES.found(base, "its sizes are not three each") for base in wrong]
    return {b: s for b, s in stages.items() if b not in wrong}, found


def check_bindings(model: onnx.ModelProto, graph: Graph, folder: Path) -> Iterator[Finding]:
    """Check the inputs and the metadata of a file, beside its main graph."""
    stages, found = stages_of(model)
    yield from found
    yield from _ports(model, stages)
    yield from _bounds(_props(model))
    yield from _order(_props(model), graph, folder, bool(stages))


def _props(model: onnx.ModelProto) -> dict[str, str]:
    return {p.key: p.value for p in model.metadata_props}


def _ports(model: onnx.ModelProto, stages: Mapping[str, Any]) -> Iterator[Finding]:
    """Inputs, by name, type and rank."""
    ports = {v.name: v.type.tensor_type for v in model.graph.input}
    if "voxels" in ports or "coors" in ports:
        for name, (kind, rank) in _PORTS.items():
            port = ports.get(name)
            if port is None:
                # Of a file whose encoder reads what was encoded elsewhere, only coors is left.
                if name == "coors":
                    yield PORTS.found("file", f"there is no input {name}")
            elif port.elem_type != kind or len(port.shape.dim) != rank:
                yield PORTS.found(name, f"type {port.elem_type}, rank {len(port.shape.dim)}")
    bases: dict[str, set[str]] = {}
    for name, port in ports.items():
        if name.startswith("rulebook/"):
            base, _, slot = name.rpartition("/")
            bases.setdefault(base, set()).add(slot)
            if port.elem_type != 6 or len(port.shape.dim) != (1 if slot == SLOTS[3] else 2):
                yield STAGES.found(name, f"type {port.elem_type}, rank {len(port.shape.dim)}")
    for base, slots in bases.items():
        if slots != set(SLOTS) or base not in stages:
            missing = ", ".join(sorted(set(SLOTS) - slots)) or "its stage in the metadata"
            yield STAGES.found(base, f"{missing} missing")
    for name, port in ports.items():
        rows = [d.dim_value for d in port.shape.dim][1 if name.endswith(SLOTS[1]) else 0 :][:1]
        if (name in _PORTS or name.startswith("rulebook/")) and rows and rows[0] > MOST_VOXELS:
            yield BOUND.found(name, f"it has {rows[0]:,} rows")


def _bounds(props: Mapping[str, str]) -> Iterator[Finding]:
    """Voxels of layers, as far as the file says."""
    try:
        stated = json.loads(props.get("bevquant_voxel_bounds", "{}"))
        large = {str(k): int(v) for k, v in stated.items() if int(v) > MOST_VOXELS}
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return
    for name, count in large.items():
        yield BOUND.found(name, f"it may have {count:,} voxels")


def _order(props: Mapping[str, str], graph: Graph, folder: Path, staged: bool) -> Iterator[Finding]:
    """The permutation in the metadata beside the one that the graph applies."""
    text = props.get("rulebook_coors_permutation")
    if text is None:
        if staged:
            yield ORDER.found("file", "it has rulebook inputs and no permutation")
        return
    columns = text.replace(" ", "").split(",")
    if sorted(columns) != ["0", "1", "2"]:
        yield ORDER.found("file", f"the metadata says {quoted(text)}")
        return
    for node in graph.nodes:
        if node.op == "Gather" and node.input(0) == "coors" and node.integer("axis") == 1:
            taken = values(graph.constant(node.input(1)), folder)
            if taken is not None and taken.size == 3:
                own = [str(int(n)) for n in taken.reshape(-1)]
                if own != columns:
                    yield ORDER.found(
                        node.name, f"the file takes {','.join(own)}, the metadata says {text}"
                    )

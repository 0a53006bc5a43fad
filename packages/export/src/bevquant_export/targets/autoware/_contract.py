"""Requirements on a file so that Autoware's plugin builds it and computes the model.

Read from the plugin's creators and their assertions: fields by number, name and type, inputs by
place, ranks, types, and the conventions of spconv that no assertion guards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.lint._graph import Finding, Graph, Node, quoted
from bevquant_export.lint._tensors import shape_of, values
from bevquant_export.sparse._lint_graph import output_grid
from bevquant_export.targets.autoware._bindings import STAGES, rule, stages_of
from bevquant_export.targets.autoware._plugin import DOMAIN, SLOTS, quantized_weight

if TYPE_CHECKING:
    import onnx


# fmt: off
OPERATOR = rule(1, "operators of the domain autoware are GetIndicePairsImplicitGemm and "
    "ImplicitGemm",
    "write one of these: the plugin of another name is not looked for, or not checked here")
FIELDS = rule(2, "a node has every field of its plugin, of the type and length that the creator "
    "reads",
    "write sizes as INTS of 3, switches as INT, factors as FLOAT: creators count their fields and "
    "refuse other types")
SORT = rule(3, "do_sort is written",
    "write do_sort, 0 or 1: without it the plugin sorts, which takes longer, and warns that it "
    "will refuse such files", "warning")
VALUES = rule(4, "sizes are positive, algo is 1, batch_size 1, transpose and out_padding 0",
    "write what the plugin can do: it splits no masks, makes no transposed pairs and takes one "
    "frame")
VOLUME = rule(5, "a kernel has at most 32 offsets, the bits of a mask",
    "use a smaller kernel, or the native GetIndicePairs and IndiceConv")
INPUTS = rule(6, "an ImplicitGemm has 5 inputs, 6 with a bias, or 7 with precision 1",
    "int8 takes features, filters, three tensors of pairs, channel_scale and bias_scaled; others "
    "at most a bias")
PAIRS = rule(7, "inputs 2, 3, 4 are pair_fwd, pair_mask and mask_argsort of one pair generation",
    "connect outputs 1, 2 and 3 of one GetIndicePairsImplicitGemm (or inputs of one "
    "rulebook/<key>) in this order: all are int32, and no assertion tells them apart")
FILTERS = rule(8, "filters are an initializer [out, k1, k2, k3, in] with the kernel of the pairs "
    "and the channels of the features",
    "permute the weight to KRSC in the order of the coordinates' columns")
TYPES = rule(9, "filters and bias are of the type of the features, float16 or float32; in int8 "
    "float16, and channel_scale and bias_scaled float32",
    "cast them: one type throughout")
SCALES = rule(10, "a bias, channel_scale and bias_scaled are [out] and finite, scales positive, "
    "output_scale 1",
    "write input_scale = amax/127 and channel_scale = input_scale · weight amax/127 for each "
    "output channel; calibrate what has no range")
SUBNORMAL = rule(11, "filters are finite float16 numbers whose integers the plugin finds again",
    "scale the layers around it: below 6e-5 float16 has fewer digits, below 6e-8 none, beyond "
    "65504 no number")
CLIPPED = rule(12, "filters are within ±127 steps of channel_scale/input_scale",
    "take the largest |w| of each output channel as its range: the plugin saturates the rest",
    "warning")
REPEATED = rule(14, "pairs are made once for a set of voxels and a geometry",
    "let all layers of a stage read one GetIndicePairsImplicitGemm: each repetition costs as much "
    "as a convolution", "warning")
SUBM = rule(18, "is_subm is subm of the pairs, and a submanifold kernel has odd sizes and stride "
    "1",
    "write one kind in both nodes")
GRID = rule(19, "spatial_shape is the grid that the strided convolution before leaves",
    "write ⌊(n + 2·padding − dilation·(k − 1) − 1)/stride⌋ + 1 of each axis, in the order of the "
    "coordinates' columns")
ACTIVATION = rule(20, "act_type is 0 (none) or 1 (ReLU)",
    "run another activation as a node of its own: 2 and 3 are sigmoid and leaky ReLU of act_alpha",
    "warning")
UNKNOWN = rule(21, "a node has no field that its plugin does not read",
    "leave it out: the parser drops it in silence (fp32_accum is no field)", "warning")
# fmt: on
RULES = tuple(sorted(rule, key=lambda made: made.id))
_PAIR_OP, _GEMM_OP = "GetIndicePairsImplicitGemm", "ImplicitGemm"
_FLOAT, _INT, _INTS = 1, 2, 7
_GEOMETRY = ("spatial_shape", "ksize", "stride", "padding", "dilation", "out_padding")
_PAIR_FIELDS = {
    **dict.fromkeys(_GEOMETRY, _INTS),
    **dict.fromkeys(("batch_size", "algo", "subm", "transpose", "is_train"), _INT),
}
_GEMM_FIELDS = {
    **dict.fromkeys(("act_alpha", "act_beta", "output_scale", "output_add_scale"), _FLOAT),
    **dict.fromkeys(("is_subm", "is_train"), _INT),
}
_LATER = {"do_sort": _INT, "act_type": _INT, "precision": _INT, "input_scale": _FLOAT}
_NAMES = {_FLOAT: "FLOAT", _INT: "INT", _INTS: "INTS"}
_HALF = 10


def check_contract(model: onnx.ModelProto, graph: Graph, folder: Path) -> Iterator[Finding]:
    """Check the nodes of a file's main graph."""
    contract = _Contract(graph, folder, stages_of(model)[0])
    for node in graph.nodes:
        if node.domain != DOMAIN:
            continue
        if node.op == _PAIR_OP:
            yield from contract.pair_node(node)
        elif node.op == _GEMM_OP:
            yield from contract.gemm(node)
        else:
            yield OPERATOR.found(node.name, f"it is {quoted(node.op)}")


class _Contract:
    """The rules, and their dependencies between nodes."""

    def __init__(self, graph: Graph, folder: Path, stages: dict[str, dict[str, Any]]) -> None:
        self.graph, self.folder, self.stages = graph, folder, stages
        self.made: dict[tuple[str, str], str] = {}
        self.channels: dict[str, int] = {}
        self.reported: set[str] = set()

    def pair_node(self, node: Node) -> Iterator[Finding]:
        """Fields, values and inputs of a pair generation."""
        yield from _fields(node, _PAIR_FIELDS, {"do_sort": _INT})
        if "do_sort" not in node.attributes:
            yield SORT.found(node.name, "do_sort is missing")
        if len(node.inputs) != 1 or len(node.outputs) != 5:
            yield INPUTS.found(node.name, f"{len(node.inputs)} inputs, {len(node.outputs)} outputs")
        geometry = _geometry(node)
        plain = {"algo": 1, "batch_size": 1, "transpose": 0}
        odd = [f"{n} {node.integer(n)}" for n, v in plain.items()
               if n in node.attributes and node.integer(n) != v]  # fmt: skip
        odd += [f"{n} {v}" for n, v in geometry.items()
                if min(v) < (n not in ("padding", "out_padding"))]  # fmt: skip
        if any(geometry.get("out_padding", ())):
            odd.append(f"out_padding {geometry['out_padding']}")
        if odd:
            yield VALUES.found(node.name, ", ".join(odd))
        kernel = geometry.get("ksize", [1])
        if math.prod(kernel) > 32:
            yield VOLUME.found(node.name, f"ksize {kernel} has {math.prod(kernel)} offsets")
        if node.integer("subm"):
            steps = geometry.get("stride", [1])
            if set(steps) != {1} or any(k % 2 == 0 for k in kernel):
                yield SUBM.found(node.name, f"subm with ksize {kernel} and stride {steps}")
        yield from self._again(node, geometry)
        yield from self._chain(node, geometry)

    def _again(self, node: Node, geometry: dict[str, list[int]]) -> Iterator[Finding]:
        subm = node.integer("subm")
        settings = {k: v for k, v in geometry.items() if not (subm and k in ("padding", "stride"))}
        key = self._coords_of(node.input(0)), json.dumps([settings, subm])
        first = self.made.setdefault(key, node.name)
        if first != node.name:
            yield REPEATED.found(node.name, f"{quoted(first)} makes the same pairs")

    def _coords_of(self, name: str) -> str:
        """The tensor that first held these voxels: a submanifold layer hands them on."""
        maker = self.graph.producer(name, _PAIR_OP)
        seen = set()
        while maker is not None and maker.integer("subm") and name not in seen:
            if not maker.outputs or maker.outputs[0] != name:
                break
            seen.add(name)
            name = maker.input(0)
            maker = self.graph.producer(name, _PAIR_OP)
        return name

    def _chain(self, node: Node, geometry: dict[str, list[int]]) -> Iterator[Finding]:
        name = self._coords_of(node.input(0))
        before = self._made_by(name)
        grid = geometry.get("spatial_shape")
        if before is None or grid is None:
            return
        left = _out_grid(before)
        if left is not None and left != grid:
            yield GRID.found(node.name, f"spatial_shape {grid}, and the voxels lie in {left}")

    def _made_by(self, name: str) -> dict[str, list[int]] | None:
        """Geometry of the strided generation, or stage, that a tensor of voxels comes from."""
        maker = self.graph.producer(name, _PAIR_OP)
        if maker is not None:
            return _geometry(maker)
        base, _, slot = name.rpartition("/")
        return self.stages.get(base) if slot == SLOTS[0] else None

    def gemm(self, node: Node) -> Iterator[Finding]:
        """Fields, inputs, constants of a convolution."""
        yield from _fields(node, _GEMM_FIELDS, {k: v for k, v in _LATER.items() if k != "do_sort"})
        integer = node.integer("precision") == 1
        count = len([n for n in node.inputs if n])
        if (count == 7) != integer or count not in (5, 6, 7) or len(node.inputs) != count:
            yield INPUTS.found(
                node.name, f"{count} inputs with precision {node.integer('precision')}"
            )
        if count > 5 and "act_type" not in node.attributes:
            yield FIELDS.found(node.name, "act_type missing: plugins with a bias read it")
        if node.integer("act_type") not in (0, 1):
            yield ACTIVATION.found(node.name, f"act_type is {node.integer('act_type')}")
        kernel, subm, found = self._pairs(node)
        yield from found
        if subm is not None and bool(node.integer("is_subm")) != subm:
            yield SUBM.found(
                node.name, f"is_subm {node.integer('is_subm')}, its pairs have subm {int(subm)}"
            )
        yield from self._constants(node, kernel, integer)

    def _pairs(self, node: Node) -> tuple[list[int] | None, bool | None, list[Finding]]:
        """Kernel and kind of the pairs that a convolution reads, and their faults."""
        names = [node.input(slot) for slot in (2, 3, 4)]
        maker = self.graph.producers.get(names[0])
        if maker is not None and maker.op == _PAIR_OP:
            if maker.outputs[1:4] != names:
                return None, None, [PAIRS.found(node.name, _shown(names, maker.name))]
            return _geometry(maker).get("ksize"), bool(maker.integer("subm")), []
        base = names[0].rpartition("/")[0]
        if base.startswith("rulebook/") and names == [f"{base}/{slot}" for slot in SLOTS[1:]]:
            stage = self.stages.get(base)
            if stage is None:
                return None, None, [STAGES.found(base, "rulebook_stages does not have it")]
            return stage["ksize"], False, []
        return None, None, [PAIRS.found(node.name, _shown(names, "no pair generation"))]

    def _constants(self, node: Node, kernel: list[int] | None, integer: bool) -> Iterator[Finding]:
        tensor = self.graph.constant(node.input(1))
        if tensor is None:
            yield FILTERS.found(node.name, f"filters {quoted(node.input(1))} are no initializer")
            return
        dims = shape_of(tensor)
        came = self._channels_of(node.input(0))
        if (
            len(dims) != 5
            or (kernel and dims[1:4] != kernel)
            or (came is not None and dims[4] != came)
        ):
            known = f"kernel {kernel}, {came if came is not None else '?'} channels"
            yield FILTERS.found(node.name, f"filters {dims[:6]} for {known}")
            return
        for name in node.outputs[:1]:
            self.channels[name] = dims[0]
        kinds = {5: 1 if integer else tensor.data_type, 6: 1}
        if tensor.data_type not in ((_HALF,) if integer else (1, _HALF)):
            yield TYPES.found(node.name, f"filters have data type {tensor.data_type}")
        arrays: dict[int, Any] = {}
        for slot in range(5, len(node.inputs)):
            constant = self.graph.constant(node.input(slot))
            if constant is None:
                yield FILTERS.found(node.name, f"input {slot} is no initializer")
                continue
            if slot in kinds and constant.data_type != kinds[slot]:
                yield TYPES.found(node.name, f"input {slot} has data type {constant.data_type}")
            if shape_of(constant) != dims[:1]:
                yield SCALES.found(node.name, f"input {slot} is {shape_of(constant)[:4]}")
                continue
            arrays[slot] = values(constant, self.folder)
        for slot, array in arrays.items():
            wrong = array is not None and not np.isfinite(array).all()
            if wrong or (integer and slot == 5 and array is not None and (array <= 0).any()):
                what = "not finite" if wrong else "not positive"
                yield SCALES.found(node.name, f"numbers of input {slot} are {what}")
        yield from self._numbers(node, values(tensor, self.folder), arrays.get(5), integer)

    def _numbers(self, node: Node, filters: Any, scale: Any, integer: bool) -> Iterator[Finding]:
        if filters is None or not filters.size:
            return
        if not np.isfinite(filters).all():
            count = int((~np.isfinite(filters)).sum())
            yield SUBNORMAL.found(node.name, f"{count} filters are not finite")
            return
        step = node.number("input_scale")
        if integer:
            output = node.number("output_scale")
            if output not in (None, 1.0):
                yield SCALES.found(node.name, f"output_scale is {output:g}")
            if step is None or not 0 < step < math.inf or not 1 / step < 3e38:
                yield SCALES.found(node.name, f"input_scale is {step}")
                return
        flat = filters.reshape(len(filters), -1)
        largest = np.abs(flat).max(1).astype(np.float64)
        if integer and scale is not None and (scale > 0).all() and np.isfinite(scale).all():
            weight_scale = scale.astype(np.float64) / float(step or 1.0)
            lost = weight_scale < 4 * 2.0**-24  # half a place of float16 is an eighth of a step
            if lost.any():
                channel = int(lost.argmax())
                yield SUBNORMAL.found(
                    node.name, f"channel {channel} has steps of {weight_scale[channel]:.2g}"
                )
            beyond = largest > 127.5 * weight_scale
            if beyond.any():
                channel = int(beyond.argmax())
                q = int(quantized_weight(flat[channel : channel + 1], scale[channel : channel + 1],
                                         float(step or 1.0)).max())  # fmt: skip
                yield CLIPPED.found(
                    node.name,
                    f"{int(beyond.sum())} channels; channel {channel} reaches "
                    f"{largest[channel] / weight_scale[channel]:.0f} steps and is cut at {q}",
                )
        elif filters.dtype == np.float16:
            small = (largest > 0) & (largest < 2.0**-14)
            if small.any():
                channel = int(small.argmax())
                yield SUBNORMAL.found(
                    node.name,
                    f"{int(small.sum())} channels have no filter above 6e-5; channel {channel} "
                    f"reaches {largest[channel]:.2g}",
                )

    def _channels_of(self, name: str) -> int | None:
        """Channels of features, followed back through sums, ReLUs and casts."""
        for _ in range(len(self.graph.nodes) + 1):
            if name in self.channels:
                return self.channels[name]
            maker = self.graph.producer(name, "Relu", "Add", "Cast", "Identity")
            if maker is None:
                return None
            name = maker.input(0)
        return None


def _geometry(node: Node) -> dict[str, list[int]]:
    found = {name: node.integers(name) for name in _GEOMETRY}
    return {name: value for name, value in found.items() if len(value) == 3}


def _out_grid(before: dict[str, list[int]]) -> list[int] | None:
    names = ("spatial_shape", "ksize", "stride", "padding", "dilation")
    if any(name not in before for name in names) or min(before["stride"]) < 1:
        return None
    return output_grid(*(before[name] for name in names))


def _fields(node: Node, wanted: dict[str, int], later: dict[str, int]) -> Iterator[Finding]:
    missing = [name for name in wanted if name not in node.attributes]
    if node.integer("precision") == 1 and "input_scale" not in node.attributes:
        missing.append("input_scale")
    if missing:
        yield FIELDS.found(node.name, f"{', '.join(missing)} missing")
    for name, kind in {**wanted, **later}.items():
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.type != kind:
            came = _NAMES.get(attribute.type, str(attribute.type))
            yield FIELDS.found(node.name, f"{name} is {came}, not {_NAMES[kind]}")
        elif attribute is not None and kind == _INTS and len(attribute.ints) != 3:
            yield FIELDS.found(node.name, f"{name} has {len(attribute.ints)} numbers, not 3")
    extra = [name for name in node.attributes if name not in wanted and name not in later]
    if extra:
        yield UNKNOWN.found(node.name, ", ".join(quoted(name) for name in extra[:4]))


def _shown(names: list[str], source: str) -> str:
    return f"it reads {', '.join(quoted(n) for n in names)} of {quoted(source)}"

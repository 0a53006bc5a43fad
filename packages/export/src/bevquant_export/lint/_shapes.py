"""Shapes and types: operators with incompatible inputs, and sizes without names.

ONNX's own inference, which ONNX Runtime runs when it loads a file, finds most of them. It accepts
some sizes that stop a file at its first run; `_fit` checks these with the inferred shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.lint._graph import DENSE, Finding, Graph, Node, Rule, quoted
from bevquant_export.lint._tensors import numel, values

if TYPE_CHECKING:
    import onnx

    from bevquant_export._target import Target

# fmt: off
SHAPES = Rule("ONX021", "error",
    "the shapes and types of an operator's inputs fit the operator and each other",
    "correct the input that does not fit (its weight, its producer, a Cast) or the attributes",
    DENSE)
FREE = Rule("ONX022", "warning",
    "a free size has a name (dim_param), where some exporters write a negative number",
    "give the size a name, such as 'batch'; engines read a negative size as free, other tools not")
FORM = Rule("ONX023", "error",
    "a node has as many inputs and outputs, and the attributes, as its operator",
    "write the node as its operator's page in the ONNX documentation has it", DENSE)
# fmt: on
_LARGE = 4096  # elements; larger tensors are never a shape, and their numbers are left out
_ERROR = re.compile(r"\(op_type:\S*, node name: #(\d+)\): (.*?)(?=\(op_type:|\Z)", re.DOTALL)
_SHORT_FLOAT = re.compile(r"unsupported type: tensor\((float16|bfloat16|float8\w*|float4\w*)\)")
_KIND = re.compile(r"^\s*\[\w+\] ")


@dataclass(frozen=True)
class Value:
    """Type and shape of a tensor; a size is None where it is free, `shape` None where unknown."""

    kind: int
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return _type(self.kind)
        return f"{_type(self.kind)} [{', '.join('?' if d is None else str(d) for d in self.shape)}]"


def check_forms(
    model: onnx.ModelProto, graphs: Sequence[Graph], target: Target
) -> Iterator[Finding]:
    """Check the numbers of inputs and outputs and the attributes of standard operators."""
    import onnx

    context = onnx.checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = {entry.domain: entry.version for entry in model.opset_import}
    lenient = "onnxruntime" not in target.labels
    for graph in graphs:
        for node, proto in zip(graph.nodes, graph.proto.node, strict=True):
            # A graph inside of a node is checked by itself, a function's where it is called.
            if node.domain or graph.is_function or any(a.type in (5, 10) for a in proto.attribute):
                continue
            try:
                onnx.checker.check_node(proto, context)
            except onnx.checker.ValidationError as error:
                text = str(error).split("\n")[0]
                if not (lenient and "Unrecognized attribute" in text):
                    yield FORM.found(node.name, text)


def check_shapes(
    model: onnx.ModelProto, graphs: Sequence[Graph], target: Target, folder: Path
) -> Iterator[Finding]:
    """Infer all shapes and types, and report the operators that they do not fit."""
    bare, nodes = _bare(model, graphs, folder)
    text = _refused(bare, check_type=True)
    lenient = "onnxruntime" not in target.labels
    if lenient and _SHORT_FLOAT.search(text):
        text = _refused(bare, check_type=False)  # engines take them where the operator set does not
    known = _inferred(bare)
    for number, reason in _ERROR.findall(text):
        reason = _types_in_words(_KIND.sub("", reason).strip())
        if reason and not reason.startswith("Inference error(s)") and "external" not in reason:
            node = nodes[int(number)]
            yield SHAPES.found(node.name, f"{node.op} of {_inputs(node, known)}: {reason}")
    if text and not _ERROR.search(text) and "existing" in text:
        reason = _types_in_words(_KIND.sub("", text))
        yield SHAPES.found("file", f"an initializer and the input of its name differ: {reason}")
    if not text:
        for node in graphs[0].nodes:
            if node.domain or (node.op in _PAIRS and lenient):
                continue
            wrong = next(_fit(node, graphs[0], known, folder), None)
            if wrong is not None:
                yield SHAPES.found(node.name, f"{node.op} of {_inputs(node, known)}: {wrong}")


def inferred_shapes(
    model: onnx.ModelProto, graphs: Sequence[Graph], folder: Path
) -> dict[str, Value]:
    """Types and shapes of the main graph's tensors, as far as ONNX infers them."""
    return _inferred(_bare(model, graphs, folder)[0])


def _inferred(bare: onnx.ModelProto) -> dict[str, Value]:
    import onnx

    try:
        bare = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except Exception:  # a wrong file has no shapes, and findings of its own
        bare.graph.ClearField("value_info")
    return _values(bare.graph)


def free_sizes(graphs: Sequence[Graph]) -> Iterator[Finding]:
    """Report inputs and outputs whose free sizes are negative numbers."""
    for graph in graphs:
        for value in () if graph.is_function else (*graph.proto.input, *graph.proto.output):
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim[:65]]
            if any(d < 0 for d in dims):
                shown = ", ".join(map(str, dims[:8]))
                yield FREE.found(value.name or "value", f"its dimensions are [{shown}]")


def _refused(model: onnx.ModelProto, *, check_type: bool) -> str:
    """Text of the inference's errors; empty without errors."""
    import onnx

    try:
        onnx.shape_inference.infer_shapes(
            model, check_type=check_type, strict_mode=True, data_prop=True
        )
    except onnx.shape_inference.InferenceError as error:
        return str(error)
    except Exception:  # what inference cannot read at all says nothing about shapes
        return ""
    return ""


def _bare(
    model: onnx.ModelProto, graphs: Sequence[Graph], folder: Path
) -> tuple[onnx.ModelProto, list[Node]]:
    """A copy without large tensors and declared shapes, its nodes named by their numbers."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    nodes: list[Node] = []
    # Copies of the graphs, in the order of `graphs_of`: nodes hold their graphs in that order.
    waiting: list[Any] = [bare.graph, *bare.functions]
    for graph in graphs:
        proto = waiting.pop(0)
        opaque = set()
        for node, copy in zip(graph.nodes, proto.node, strict=True):
            copy.name = f"#{len(nodes)}"
            nodes.append(node)
            if not onnx.defs.has(node.op, node.domain):
                opaque.update(node.outputs)
            waiting += [g for a in copy.attribute for g in ([a.g] if a.type == 5 else a.graphs)]
        if not graph.is_function:
            _bare_values(proto, opaque, folder, top=proto is bare.graph)
    return bare, nodes


def _bare_values(proto: Any, opaque: set[str], folder: Path, *, top: bool) -> None:
    import onnx

    # ONNX Runtime takes the inferred shape where the declared one is wrong: not an error.
    for value in (*proto.output, *proto.value_info):
        if value.name not in opaque:
            value.type.tensor_type.ClearField("shape")
    for value in (*proto.input, *proto.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.Clear()
    given = {value.name for value in proto.input}
    for tensor in list(proto.initializer) if top else ():
        if (numel(tensor.dims) or 0) > _LARGE:
            dims, kind, name = list(tensor.dims), tensor.data_type, tensor.name
            proto.initializer.remove(tensor)
            if name not in given:
                proto.input.append(onnx.helper.make_tensor_value_info(name, kind, dims))
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            array = values(tensor, folder)
            if array is not None:
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _values(graph: Any) -> dict[str, Value]:
    found = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            continue
        sizes = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        found[value.name] = Value(kind.elem_type, tuple(sizes) if kind.HasField("shape") else None)
    for tensor in graph.initializer:
        found[tensor.name] = Value(tensor.data_type, tuple(tensor.dims))
    return found


def _inputs(node: Node, known: dict[str, Value]) -> str:
    shown = [f"{quoted(n, plain=True)} {known.get(n, '(unknown)')}" for n in node.inputs if n]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "") or "nothing"


def _type(kind: int) -> str:
    import onnx

    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(kind))
    except (KeyError, TypeError, ValueError):
        return f"type {kind}"


def _types_in_words(text: str) -> str:
    return re.sub(
        r"elem type differs from existing elem type: \((\d+)\) vs \((\d+)\)",
        lambda m: f"type {_type(int(m[1]))} is declared as {_type(int(m[2]))}",
        text,
    )


_PAIRS = ("QuantizeLinear", "DequantizeLinear")  # other engines have rules of their own for them
# Slots of the weight and of the bias.
_CONVS = {"Conv": (1, 2), "ConvInteger": (1, 9), "QLinearConv": (3, 8), "ConvTranspose": (1, 2)}
# Operands that broadcast to the data; those of Gemm to its result.
_BROADCAST = {
    "Gemm": [(2, "the bias")], "PRelu": [(1, "the slope")],
    "LayerNormalization": [(1, "input 1"), (2, "input 2")],
}  # fmt: skip


def _fit(node: Node, graph: Graph, known: dict[str, Value], folder: Path) -> Iterator[str]:
    """Sizes that stop a file at its first run although ONNX's inference accepts them."""

    def shape(slot: int) -> tuple[int | None, ...] | None:
        value = known.get(node.input(slot))
        return None if value is None else value.shape

    data = shape(0)
    if data is None:
        return
    if node.op in _CONVS:
        yield from _fit_conv(node, data, *(shape(slot) for slot in _CONVS[node.op]))
    elif node.op == "Reshape":
        yield from _fit_reshape(node, data, values(graph.constant(node.input(1)), folder))
    elif node.op in _PAIRS:
        yield from _fit_scale(node, data, shape(1), shape(2))
    elif node.op in _BROADCAST:
        made = known.get(node.outputs[0]) if node.outputs and node.op == "Gemm" else None
        whole = (made.shape if made else None) if node.op == "Gemm" else data
        for slot, words in _BROADCAST[node.op]:
            if (part := shape(slot)) and whole is not None and not _broadcasts(part, whole):
                yield f"{words} {list(part)} does not broadcast to {list(whole)}"
    elif node.op == "InstanceNormalization":
        scale = shape(1)
        if scale and len(data) > 1 and _differ(scale[0], data[1]):
            yield f"the scale has {scale[0]} entries for {data[1]} channels"
    elif node.op == "Einsum":
        yield from _fit_einsum(node, [shape(slot) for slot in range(len(node.inputs))])
    elif node.op == "Gather":
        yield from _fit_gather(node, data, values(graph.constant(node.input(1)), folder))
    elif node.op in ("DepthToSpace", "SpaceToDepth"):
        yield from _fit_blocks(node, data)


def _fit_conv(node: Node, data: Sequence[int | None], weight: Any, bias: Any) -> Iterator[str]:
    transposed = node.op == "ConvTranspose"
    if not weight or len(weight) < 2 or len(data) < (2 if transposed else 3):
        return
    grouped = None if weight[1] is None else weight[1] * node.integer("group", 1)
    wants, made = (weight[0], grouped) if transposed else (grouped, weight[0])
    if _differ(data[1], wants):
        yield f"the weight is for {wants} channels, the input has {data[1]}"
    if bias and _differ(bias[0], made):
        yield f"the bias has {bias[0]} entries for {made} channels"
    if not transposed:
        yield from _fit_window(node, data, weight[2:])


def _fit_window(
    node: Node, data: Sequence[int | None], kernel: Sequence[int | None]
) -> Iterator[str]:
    axes = len(kernel)
    if (node.text("auto_pad") or "NOTSET") not in ("NOTSET", "VALID"):
        return
    pads = node.integers("pads") or [0] * 2 * axes
    dilations = node.integers("dilations") or [1] * axes
    if len(pads) != 2 * axes or len(dilations) != axes or len(data) != axes + 2:
        return
    for axis, (size, width) in enumerate(zip(data[2:], kernel, strict=True)):
        if size is None or width is None:
            continue
        padded, window = size + pads[axis] + pads[axis + axes], (width - 1) * dilations[axis] + 1
        if size and window > padded:
            yield f"a window of {window} does not fit into {padded} elements, padding included"


def _fit_reshape(node: Node, data: Sequence[int | None], wanted: Any) -> Iterator[str]:
    if wanted is None or wanted.ndim != 1 or wanted.dtype != np.int64:
        return
    sizes: list[int | None] = [int(d) for d in wanted]
    if not node.integer("allowzero"):
        sizes = [data[i] if d == 0 and i < len(data) else d for i, d in enumerate(sizes)]
    if None in data or None in sizes or -1 in sizes:
        return  # the size of −1 is inferred, and checked there
    if math.prod(map(_sure, data)) != math.prod(map(_sure, sizes)):
        yield f"{math.prod(map(_sure, data))} elements do not fit the shape {sizes}"


def _fit_scale(node: Node, data: Sequence[int | None], scale: Any, zero: Any) -> Iterator[str]:
    if scale is None:
        return
    if len(scale) != 1 or scale[0] in (None, 1):
        return
    axis = node.integer("axis", 1)
    if not -len(data) <= axis < len(data):
        yield f"the scale has {scale[0]} entries, and there is no axis {axis}"
    elif _differ(data[axis], scale[0]):
        yield f"the scale has {scale[0]} entries for {data[axis]} channels on axis {axis}"
    if zero is not None and None not in zero and zero != scale:
        yield f"the scale has the shape {list(scale)}, the zero point {list(zero)}"


def _fit_gather(node: Node, data: Sequence[int | None], indices: Any) -> Iterator[str]:
    axis = node.integer("axis")
    if indices is None or not indices.size or not -len(data) <= axis < len(data):
        return
    size = data[axis]
    if size is not None and not -size <= int(indices.min()) <= int(indices.max()) < size:
        yield f"indices {indices.min()} to {indices.max()} on an axis of {size} elements"


def _fit_einsum(node: Node, shapes: Sequence[tuple[int | None, ...] | None]) -> Iterator[str]:
    terms = (node.text("equation") or "").replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=False):
        if "." in term or shape is None or len(term) != len(shape):
            continue
        for label, size in zip(term, shape, strict=True):
            if size in (None, 1):
                continue
            if sizes.setdefault(label, size) != size:
                yield f"{label!r} of its equation has {sizes[label]} elements here, {size} there"


def _fit_blocks(node: Node, data: Sequence[int | None]) -> Iterator[str]:
    side = node.integer("blocksize")
    if len(data) != 4 or side < 1:
        return
    parts = [(data[1], side**2)] if node.op == "DepthToSpace" else [(d, side) for d in data[2:]]
    for size, by in parts:
        if size is not None and size % by:
            yield f"{size} elements are not a multiple of {by} (blocksize {side})"


def _differ(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other


def _sure(size: int | None) -> int:
    return size or 0


def _broadcasts(part: Sequence[int | None], whole: Sequence[int | None]) -> bool:
    """Whether a shape broadcasts to another one, in its direction alone; free sizes do."""
    if len(part) > len(whole):
        return False
    return all(
        p in (1, None, w) or w is None for p, w in zip(part[::-1], whole[::-1], strict=False)
    )

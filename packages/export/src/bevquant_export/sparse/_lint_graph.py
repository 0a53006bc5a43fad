"""libspconv: connections of the nodes, and their voxels (rulebooks, grids, Adds)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bevquant_export.lint._graph import Finding, Graph, Node, Rules, quoted
from bevquant_export.sparse._lint_convs import is_add, kernel_of, precision, weight_dims

_rule = Rules("SPC", "libspconv")

# fmt: off
OPERATOR = _rule(1, "operators are SparseConvolution, Add, QuantAdd, Relu, ScatterDense, Reshape, "
    "Transpose",
    "end the sparse part before it, fold constants, and export the rest as a dense file")
STRAY_RELU = _rule(22, "a Relu is the tail of an Add and of nothing else",
    'fold it into the conv before it: activation="ReLU"')
APART = _rule(23, "the Relu of an Add stands right after it and alone reads it: else they are not "
    "fused",
    "write the Relu as the next node, and let all others read the Relu", "warning")
BRANCHES = _rule(24, "both inputs of an Add are int8, or both fp16",
    "give the last nodes of both branches one output_precision: the engine asserts it")
INPUTS = _rule(33, "there is one graph input: the features; coordinates are set at run time",
    "leave all but the features out of the graph's inputs")
OFFICIAL = _rule(34, "the input is FLOAT16 [1, channels], outputs are FLOAT16",
    "declare them so: placeholders, which other readers of the file look at", "warning")
LAST = _rule(36, "what leaves the graph is fp16",
    'write output_precision="fp16" at the last conv, or a range at the ScatterDense behind it')
DIMS = _rule(37, "Transpose and Reshape have one input and the attribute dims",
    "write dims: ONNX's perm and shape input are not read")
ORDER = _rule(38, "between ScatterDense and Reshape a Transpose puts the height behind the "
    "channels: it starts [0,1,4] for xyz, [0,1,2] for zyx",
    "write dims [0,1,4,2,3] for xyz and [0,1,2,4,3] for zyx: both give [1, C, Z, X, Y], which is "
    "what files are known to hold", "warning")
ELEMENTS = _rule(39, "Reshape makes four dimensions of as many elements as ScatterDense gives",
    "write dims [1, C*Z, X, Y]")
SCATTER = _rule(40, 'ScatterDense has input_spatial_shape (3), output_shape (5), format "xyz" or '
    '"zyx"',
    "write all three")
LAYOUT = _rule(41, "output_layout is NCHW32, NHWzC or NCHW",
    "write one of the three exactly: every other one is NCHW, in silence", "warning")
BATCH = _rule(48, "the batch is 1", "export for one frame: the engine takes no more")
# fmt: on
_KNOWN = {"SparseConvolution", "Add", "QuantAdd", "Relu", "ScatterDense", "Reshape", "Transpose"}
_HEIGHT_THIRD = {"xyz": [0, 1, 4], "zyx": [0, 1, 2]}


def check_graph(graph: Graph) -> Iterator[Finding]:
    """Check operators, boundary, residual additions and the dense tail."""
    types = _dtypes(graph)
    yield from _boundary(graph, types)
    for node in graph.nodes:
        if node.op not in _KNOWN:
            yield OPERATOR.found(node.name, f"operator {quoted(node.op)} is unknown to the parser")
        elif is_add(node):
            yield from _add(types, node)
        elif node.op == "Relu":
            yield from _relu(graph, node)
        elif node.op == "ScatterDense":
            yield from _scatter(node)
        elif node.op in ("Transpose", "Reshape"):
            yield from _tail(graph, node)


def _boundary(graph: Graph, types: dict[str, str]) -> Iterator[Finding]:
    if len(graph.inputs) != 1:
        shown = ", ".join(quoted(name) for name in graph.inputs[:4])
        yield INPUTS.found("file", f"{len(graph.inputs)} graph inputs: {shown or 'none'}")
    features = graph.inputs[:1]
    first = [n for n in graph.nodes if n.op == "SparseConvolution" and n.inputs[:1] == features]
    weight = weight_dims(graph, first[0]) if first else None
    for value in list(graph.proto.input)[:1]:
        tensor = value.type.tensor_type
        dims = [d.dim_value for d in tensor.shape.dim]
        channels = weight[4] if weight is not None else None
        if tensor.elem_type != 10 or len(dims) != 2 or channels not in (None, dims[1]):
            yield OFFICIAL.found(value.name, f"input of type {tensor.elem_type}, shape {dims[:6]}")
    for value in graph.proto.output:
        if value.type.tensor_type.elem_type != 10:
            kind = value.type.tensor_type.elem_type
            yield OFFICIAL.found(value.name, f"output of type {kind}, not 10")
        if types.get(value.name) == "int8":
            yield LAST.found(value.name, "the graph gives an int8 tensor away")


def _dtypes(graph: Graph) -> dict[str, str]:
    """Runtime type of each feature tensor, where a rule determines it."""
    types = dict.fromkeys(graph.inputs, "fp16")
    for node in graph.nodes:
        if node.op == "SparseConvolution" or is_add(node):
            types.update(dict.fromkeys(node.outputs[:1], precision(node, "output_precision")))
        elif node.op == "Relu" and node.input(0) in types:
            types.update(dict.fromkeys(node.outputs[:1], types[node.input(0)]))
    return types


def _add(types: dict[str, str], node: Node) -> Iterator[Finding]:
    found = [types.get(name) for name in node.inputs[:2]]
    if None not in found and len(set(found)) > 1:
        yield BRANCHES.found(node.name, f"its inputs are {found[0]} and {found[1]}")


def _relu(graph: Graph, node: Node) -> Iterator[Finding]:
    name = node.input(0)
    maker = graph.producers.get(name)
    if maker is None and not graph.sees(name):
        return
    if maker is None or not is_add(maker):
        after = "the graph input" if maker is None else f"{quoted(maker.op)} {quoted(maker.name)}"
        yield STRAY_RELU.found(node.name, f"it follows {after}")
    elif node.index > maker.index + 1 or len(graph.users(maker)) > 1 or name in graph.given_away:
        yield APART.found(node.name, f"it is not fused with {quoted(maker.name)}")


def _scatter(node: Node) -> Iterator[Finding]:
    grid, shape = node.integers("input_spatial_shape"), node.integers("output_shape")
    form = node.text("format")
    good = {
        "input_spatial_shape": len(grid) == 3,
        "output_shape": len(shape) == 5 and min(shape) > 0,
        "format": form in ("xyz", "zyx"),
    }
    came = {"input_spatial_shape": grid[:6], "output_shape": shape[:6], "format": quoted(form)}
    wrong = [name for name, fine in good.items() if not fine and not _of_other_type(node, name)]
    if wrong:
        shown = [f"{n} is {came[n] if n in node.attributes else 'missing'}" for n in wrong]
        yield SCATTER.found(node.name, ", ".join(shown))
    elif shape and shape[0] != 1:
        yield BATCH.found(node.name, f"output_shape {shape[:6]} has batch {shape[0]}")
    layout = node.text("output_layout")
    if layout not in (None, "NCHW32", "NHWzC", "NCHW"):
        yield LAYOUT.found(node.name, f"output_layout is {quoted(layout)}")


def _of_other_type(node: Node, name: str) -> bool:
    """Whether the rule on types reports this attribute already."""
    return name in node.attributes and node.attributes[name].type != (3 if name == "format" else 7)


def _tail(graph: Graph, node: Node) -> Iterator[Finding]:
    dims = node.integers("dims")
    if len(node.inputs) != 1 or "dims" not in node.attributes or "perm" in node.attributes:
        inside = ", ".join(quoted(name) for name in list(node.attributes)[:4])
        yield DIMS.found(node.name, f"{len(node.inputs)} inputs, attributes {inside or 'none'}")
        return
    source = graph.producers.get(node.input(0))
    if node.op == "Transpose":
        wanted = _HEIGHT_THIRD.get((source and source.text("format")) or "")
        folded = any(user.op == "Reshape" for user in graph.users(node))
        if source is not None and source.op == "ScatterDense" and folded and wanted is not None:
            if dims[:3] != wanted:
                yield ORDER.found(node.name, f"dims {dims[:8]} for format {source.text('format')}")
        return
    if dims and dims[0] not in (1, -1):
        yield BATCH.found(node.name, f"dims {dims[:8]} have batch {dims[0]}")
        return
    if source is not None and source.op == "Transpose":
        source = graph.producers.get(source.input(0))
    shape = source.integers("output_shape") if source and source.op == "ScatterDense" else []
    fixed = [d for d in dims if d > 0]
    exact = len(fixed) == len(dims)
    if len(dims) != 4 or (
        len(shape) == 5 and min(shape) > 0 and exact and _product(dims[1:]) != _product(shape[1:])
    ):
        yield ELEMENTS.found(node.name, f"dims {dims[:8]} of {shape or 'an unknown shape'}")


def _product(dims: list[int]) -> int:
    return math.prod(dims[:8])


# fmt: off
FIRST_KEY = _rule(26, "the first conv, if submanifold, carries rulebook `subm1`",
    "write the key of stage 1, subm1, at the first conv")
SHARED_KEY = _rule(27, "convs with one rulebook have the same kernel, stride, padding, dilation, "
    "kind and points",
    "give convs that are not alike different keys, or none")
INVERSE = _rule(28, "an inverse conv has the rulebook and the kernel of a strided conv before it",
    "name the strided conv that it undoes (and try inverse convs in the engine first: some "
    "versions refuse every one)")
GRID = _rule(30, "spatial shapes follow from kernel, stride, padding, dilation, and from conv to "
    "conv",
    "write the shape that the conv before it has made, and what the formula makes of it")
POINTS = _rule(44, "both inputs of an Add have the same points",
    "add only tensors between which no conv strides: the engine asserts their number")
# fmt: on
RULES = tuple(_rule)


def check_places(graph: Graph) -> Iterator[Finding]:
    """Follow grids and sets of voxels from the input on."""
    points: dict[str, object] = {name: "input" for name in graph.inputs}
    grids: dict[str, list[int]] = {}
    keys: dict[str, tuple[object, Node]] = {}
    starts: dict[str, tuple[object, list[int]]] = {}
    numbers: dict[object, int] = {}
    first = next((node for node in graph.nodes if node.op == "SparseConvolution"), None)
    for node in graph.nodes:
        source, made = node.input(0), node.outputs[0] if node.outputs else ""
        if is_add(node):
            yield from _added(node, points)
        elif node.op == "SparseConvolution":
            if node is first:
                yield from _first_key(graph, node)
            yield from _key(node, points.get(source), keys)
            yield from _grid(node, grids.get(source))
            out = node.integers("output_spatial_shape")
            if node.integer("inverse") == 1:
                kernel = node.integers("kernel_size")
                back = starts.get(node.text("rulebook") or "")
                if back is None or back[1] != kernel:
                    yield _nothing_to_invert(node, back is None)
                # Back to the input voxels of the convolution with the same rulebook.
                points[made] = ("inverse", node.index) if back is None else back[0]
                grids[made] = out
                continue
            # A submanifold convolution keeps the voxels; others create new ones.
            if node.integer("subm") == 1:
                points[made] = points.get(source)
            else:
                geometry = tuple(map(tuple, (kernel_of(node) or {}).values()))
                # One number for each way to get here, so that what is compared stays small.
                way = (points.get(source), geometry or node.index)
                points[made] = numbers.setdefault(way, len(numbers))
                key = node.text("rulebook")
                if key:
                    starts.setdefault(key, (points.get(source), node.integers("kernel_size")))
            grids[made] = out
            continue
        if node.op == "Relu" or is_add(node):
            points[made] = points.get(source)
            grids[made] = grids.get(source, [])


def _added(node: Node, points: dict[str, object]) -> Iterator[Finding]:
    sets = [points.get(name) for name in node.inputs[:2]]
    if len(sets) == 2 and None not in sets and sets[0] != sets[1]:
        yield POINTS.found(node.name, "a conv that makes new points lies in one branch alone")


def _nothing_to_invert(node: Node, unknown: bool) -> Finding:
    key = quoted(node.text("rulebook") or "")
    if unknown:
        return INVERSE.found(node.name, f"no strided conv before it has the rulebook {key}")
    return INVERSE.found(node.name, f"the strided conv of rulebook {key} has another kernel")


def _first_key(graph: Graph, node: Node) -> Iterator[Finding]:
    key = node.text("rulebook")
    if node.input(0) in graph.inputs and node.integer("subm") == 1 and key != "subm1":
        came = "missing" if key is None else quoted(key)
        yield FIRST_KEY.found(node.name, f"its rulebook is {came}")


def _key(node: Node, start: object, keys: dict[str, tuple[object, Node]]) -> Iterator[Finding]:
    key = node.text("rulebook")
    geometry = kernel_of(node)
    if not key or geometry is None or node.integer("inverse") == 1:
        return
    # The stride and padding of a submanifold conv are not used.
    subm = node.integer("subm") == 1
    used = ("kernel_size", "dilation") if subm else tuple(geometry)
    description = (subm, tuple(tuple(geometry[name]) for name in used), start)
    known, other = keys.setdefault(key, (description, node))
    if known != description:
        yield SHARED_KEY.found(
            node.name, f"rulebook {quoted(key)} is that of {quoted(other.name)}, which differs"
        )


def _grid(node: Node, before: list[int] | None) -> Iterator[Finding]:
    grid, out = node.integers("input_spatial_shape"), node.integers("output_spatial_shape")
    if len(grid) == 3 and before and before != grid:
        yield GRID.found(node.name, f"its input_spatial_shape is {grid}, its input has {before}")
        return
    geometry = kernel_of(node)
    if len(grid) != 3 or len(out) != 3 or geometry is None or node.integer("inverse") == 1:
        return
    wanted = grid if node.integer("subm") == 1 else output_grid(grid, *geometry.values())
    if out != wanted:
        yield GRID.found(node.name, f"output_spatial_shape is {out}, {wanted} follows")


def output_grid(
    grid: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """``(n + 2·padding − dilation·(kernel − 1) − 1) / stride + 1``, axis by axis, rounded down."""
    axes = zip(grid, kernel, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]

"""libspconv: where the points are (rulebooks, grids, the points of both branches of an Add)."""

from __future__ import annotations

from collections.abc import Iterator

from bevquant_export.lint._graph import Graph, Node
from bevquant_export.lint._rule import Finding, Rule, quoted
from bevquant_export.lint._spconv_convs import kernel_of
from bevquant_export.lint._spconv_numbers import is_add

_ONLY = ("libspconv",)
FIRST_KEY = Rule(
    "SPC026",
    "error",
    "the first conv, if submanifold, carries rulebook `subm1`",
    "write the key of stage 1, subm1, at the first conv",
    _ONLY,
)
SHARED_KEY = Rule(
    "SPC027",
    "error",
    "convs with one rulebook have the same kernel, stride, padding, dilation, kind and points",
    "give convs that are not alike different keys, or none",
    _ONLY,
)
INVERSE = Rule(
    "SPC028",
    "error",
    "an inverse conv has the rulebook and the kernel of a strided conv before it",
    "name the strided conv that it undoes (and try inverse convs in the engine first: some "
    "versions refuse every one)",
    _ONLY,
)
GRID = Rule(
    "SPC030",
    "error",
    "spatial shapes follow from kernel, stride, padding, dilation, and from conv to conv",
    "write the shape that the conv before it has made, and what the formula makes of it",
    _ONLY,
)
POINTS = Rule(
    "SPC044",
    "error",
    "both inputs of an Add have the same points",
    "add only tensors between which no conv strides: the engine asserts their number",
    _ONLY,
)
RULES = (FIRST_KEY, SHARED_KEY, INVERSE, GRID, POINTS)


def check_places(graph: Graph) -> Iterator[Finding]:
    """Follow grids and sets of points from the input on.

    A submanifold conv keeps the points of its input; a strided one makes new ones, which depend on
    the points, kernel, stride, padding and dilation alone; an inverse conv goes back to the points
    that the conv with its rulebook started from.
    """
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
                points[made] = ("inverse", node.index) if back is None else back[0]
                grids[made] = out
                continue
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
    if node.integer("subm") == 1:
        wanted = grid
    else:
        wanted = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(grid, *geometry.values(), strict=True)
        ]
    if out != wanted:
        yield GRID.found(node.name, f"output_spatial_shape is {out}, {wanted} follows")

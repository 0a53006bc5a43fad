"""A file compared with the integer model of its encoder, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_export._differences import TensorDifference, difference
from bevquant_export._inputs import placed
from bevquant_export.sparse._axes import lowered_to, with_three_axes
from bevquant_export.sparse._between import follow, sparse_results
from bevquant_export.sparse._channel_permutations import PERMUTED, permutes_channels
from bevquant_export.sparse._graph import Add, Conv, Node, Relu, Select, Steps
from bevquant_export.sparse._half_precision import with_half_constants
from bevquant_export.sparse._load import SparseOnnxModel
from bevquant_export.sparse._observe import Sparse, reference_of
from bevquant_graph import check_kind, reported_by
from bevquant_int8sim import IntegerModel, SparseOutput, dequantize, simulate
from bevquant_int8sim.program import NumberCall

_FUNCTIONS = 2.0**-18  # of an output's largest magnitude: sums and functions of floats


@reported_by("compare_sparse_onnx")
def compare_sparse_onnx(
    file: SparseOnnxModel,
    model: nn.Module | IntegerModel,
    inputs: Any,
    *,
    reversed_axes: bool = False,
) -> tuple[TensorDifference, ...]:
    """Run a file and ``simulate(with_half_constants(model))`` on one batch and count differences.

    Rows are matched by voxel, so a file with reversed axes can be compared too.

    Args:
        file: Result of `load_sparse_onnx`.
        model: The calibrated model that the file was exported from, or
            `SparseExport.integer_model`.
        inputs: Inputs of the model: features, coordinates and batch size, or one sparse tensor.
        reversed_axes: Whether the file has the coordinate columns in the opposite order.

    Returns:
        One entry per convolution, per sum (after its ReLU) and per output.

    Raises:
        ValueError: The model does not have a module of the file, or has other voxels there.
    """
    check_kind(file, SparseOnnxModel, "what load_sparse_onnx returned")
    if not isinstance(model, IntegerModel):
        model = simulate(with_half_constants(model), inputs, verify=False)
    return compared(file, model, model.inputs_of(inputs), reversed_axes=reversed_axes)[0]


def compared(
    file: SparseOnnxModel, integers: IntegerModel, inputs: Any, *, reversed_axes: bool
) -> tuple[tuple[TensorDifference, ...], Any, dict[str, Tensor | SparseOutput]]:
    """`compare_sparse_onnx` with an integer model of rounded constants, and both results.

    The file's result is its outputs by name.
    """
    grid = file.grid or ()
    features, coords, batch_size = frame_for(grid, integers, inputs, reversed_axes)

    def of_model(indices: Tensor, columns: int, grid: tuple[int, ...]) -> Tensor:
        """Coordinates of the file in the model's columns."""
        kept = lowered_to(columns, indices, grid)
        return _reversed(kept) if reversed_axes else kept

    reference, wanted, places = reference_of(integers, inputs)
    summed = _only_summed(file.nodes)
    for node in file.nodes:
        if isinstance(node, Select | Steps):
            summed.update(node.inputs)
    parted = {node.path.removesuffix(PERMUTED) for node in file.nodes if permutes_channels(node)}
    before_relu = {node.x for node in file.nodes if isinstance(node, Relu)}
    rows: list[TensorDifference] = []
    shown: dict[str, int] = {}

    def is_compared(node: Node) -> bool:
        # Consumers of copied channels are compared instead.
        layer = isinstance(node, Conv | Add | Relu) and node.y not in before_relu
        return layer and not permutes_channels(node)

    grids = {file.graph.input: grid}
    for node in file.nodes:
        stated = node.grid if isinstance(node, Steps) else getattr(node, "output_spatial_shape", ())
        grids[node.y] = stated or next((grids[x] for x in node.inputs if x in grids), ())
    paths = Counter(node.path for node in file.nodes if is_compared(node))
    behind: set[str] = set()
    for node in file.nodes:
        if isinstance(node, Steps) or not behind.isdisjoint(node.inputs):
            behind.add(node.y)

    def see(node: Node, scale: float | None, made: Any, indices: Tensor | None) -> None:
        if is_compared(node):
            assert indices is not None
            turned = partial(of_model, indices, grid=grids[node.y])
            eased = node.y in summed or node.path in parted
            if scale is None and eased and _only_integers(reference.get(node.path)):
                return  # in fp16 for other consumers: its consumer is compared
            shown[node.path] = shown.get(node.path, 0) + 1
            which = shown[node.path], paths[node.path]
            row = _difference(node, Sparse(made(), scale, indices), turned, reference, which)
            rows.append(replace(row, behind_functions=node.y in behind))

    outputs = file.watch(features, coords, batch_size, see)
    computed = {node.y for node in file.nodes if isinstance(node, Steps)}
    results = _results(integers, wanted, places)
    for tensor, made, expected in zip(file.graph.outputs, outputs, results, strict=True):
        slack = _FUNCTIONS if tensor in computed else 0.0
        rows.append(_output(made, *expected, of_model, slack))
    return tuple(rows), wanted, dict(zip(file.graph.outputs, outputs, strict=True))


def _only_summed(nodes: tuple[Node, ...]) -> set[str]:
    """Tensors that only integer additions read."""
    sums = [node for node in nodes if isinstance(node, Add) and node.precision == "int8"]
    others = {name for node in nodes if node not in sums for name in node.inputs}
    return {name for node in sums for name in node.inputs} - others


def _only_integers(made: list[Sparse] | None) -> bool:
    return bool(made) and not any(one.value.is_floating_point() for one in made or ())


def _reversed(coords: Tensor) -> Tensor:
    """The columns after the batch in the opposite order."""
    return torch.cat([coords[:, :1], coords[:, 1:].flip(1)], 1)


def frame_for(
    grid: tuple[int, ...], integers: IntegerModel, inputs: Any, reversed_axes: bool
) -> tuple[Tensor, Tensor, int]:
    """`frame_of`, with coordinates in the columns of a file of this grid."""
    features, coords, batch_size = frame_of(integers, inputs)
    coords = _reversed(coords) if reversed_axes else coords
    return features, with_three_axes(coords, grid), batch_size


def frame_of(integers: IntegerModel, inputs: Any) -> tuple[Tensor, Tensor, int]:
    """Features, coordinates and batch size for a file, from a call's arguments."""
    # The forward may compute them, from a `batch_dict` or several arguments: they are the inputs of
    # its first sparse convolution.
    name = follow(integers).input
    seen: dict[str, Any] = {}
    for step, given, _ in integers.walk(inputs):
        for arg, value in zip(step.args, given, strict=False):
            if getattr(arg, "name", None) == name:
                seen.setdefault("features", value)
            elif hasattr(value, "convolved") and not isinstance(step, NumberCall):
                if "features" in seen:  # voxels of their consumer: a pool in front has others
                    seen.setdefault("coords", value)
        if len(seen) == 2:  # later steps are not run
            break
    features, coords = seen["features"], seen["coords"]
    scale = getattr(integers.program.values[name].form, "scale", None)
    if scale is not None:  # the steps that compute them end in integers
        features = dequantize(features, scale)
    return features, coords.indices, int(coords.batch_size)


def _difference(
    node: Node,
    made: Sparse,
    turned: Callable[[int], Tensor],
    reference: dict[str, list[Sparse]],
    which: tuple[int, int],
) -> TensorDifference:
    """Difference of one layer.

    `turned` gives the voxels in the model's columns; `which` is the node's index among those of
    its module, and their number.
    """
    same = [
        other
        for other in reference.get(node.path, [])
        if other.scale == made.scale and other.value.dtype == made.value.dtype
    ]
    if not same:
        kind = "floats" if made.scale is None else f"int8 of scale {made.scale:g}"
        raise ValueError(
            f"compare_sparse_onnx: {node.name} makes {kind}, and the model has none at "
            f"{node.path!r}; is the file that of this model?"
        )
    # A float layer and its ReLU are two steps; the file holds the result of the later one.
    # A module called twice, or a sum in a convolution's own module, has one tensor per node.
    number, nodes = which
    steps = len(same) // nodes
    place = number * steps - 1 if steps * nodes == len(same) else -1
    wanted = same[place]
    mine = Sparse(made.value, made.scale, turned(wanted.indices.shape[1]))
    return counted(node.name, node.path, mine, wanted)


def counted(
    name: str, path: str, made: Sparse, wanted: Sparse, slack: float = 0.0
) -> TensorDifference:
    mine, other = made, wanted
    if not torch.equal(made.indices, wanted.indices):
        mine, other = _sorted(made), _sorted(wanted)
    if not torch.equal(mine.indices.long(), other.indices.long()):
        raise ValueError(f"compare_sparse_onnx: {name} makes other voxels than {path!r}")
    form = "float" if made.scale is None else "int8"
    return difference(name, mine.value, other.value, path=path, form=form, slack=slack)


def _sorted(made: Sparse) -> Sparse:
    """Rows by batch and coordinates."""
    indices = made.indices.long()
    order = torch.arange(len(indices), device=indices.device)
    for column in reversed(range(indices.shape[1])):
        order = order[torch.argsort(indices[order, column], stable=True)]
    return Sparse(made.value[order], made.scale, made.indices[order])


def _output(
    made: Any, wanted: Tensor, places: Tensor | None, of_model: Callable[..., Tensor], slack: float
) -> TensorDifference:
    """Difference of an output; `places` are its voxels, where any layer says on which it lies."""
    if not isinstance(made, SparseOutput):
        return difference("output", made, wanted, slack=slack)
    if places is None or len(places) != len(wanted):
        raise ValueError(
            "compare_sparse_onnx: the model returns features without their voxels, and none of its "
            "layers says on which they lie, so that rows of the file cannot be told: return the "
            "sparse tensor, or its indices too"
        )
    turned = of_model(made.indices, places.shape[1], tuple(made.spatial_shape))
    mine = Sparse(made.features, None, turned)
    return counted("output", "", mine, Sparse(wanted, None, places), slack)


def _results(
    integers: IntegerModel, returned: Any, places: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor | None]]:
    """Tensors that a file returns and their voxels, each once, without returned inputs."""
    followed, result = follow(integers), integers.program.result
    values = list(placed(result, returned))
    own = {name: dict(values)[coords] for name, coords in sparse_results(result)}
    given = [(v, own.get(n, places.get(n))) for n, v in values if n in followed.results]
    distinct: dict[str, tuple[Tensor, Tensor | None]] = {}
    for reading, pair in zip(followed.outputs, given, strict=True):
        distinct.setdefault(reading.tensor, pair)
    return list(distinct.values())

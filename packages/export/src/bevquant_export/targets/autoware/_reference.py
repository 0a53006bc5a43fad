"""The plugin's operators by their definition, for ONNX's reference evaluator, and the comparison.

Nothing here shares code with the exporter: neighbours are searched in sorted keys, and sums are
float64. float64 holds every sum of int8 products exactly, and every float16 sum to the last place
except ties. A CPU cannot predict the plugin's float16 layers (fp16 or fp32 accumulators, in an
order of their own). In int8 layers the sum is exact on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from bevquant_export._differences import TensorDifference
from bevquant_export.lint._read import load_model
from bevquant_export.sparse._compare import counted
from bevquant_export.sparse._graph import Add, Conv, Graph, Node, Relu
from bevquant_export.sparse._observe import Sparse
from bevquant_export.sparse._run import FrameRun
from bevquant_export.sparse._walk import State
from bevquant_export.targets.autoware._plugin import (
    DOMAIN,
    MOST_VOXELS,
    SLOTS,
    AutowareFile,
    quantized_weight,
)
from bevquant_int8sim import int8_sparse_conv, quantize
from bevquant_int8sim.model import Coords
from bevquant_sparse import Rulebook, WeightLayout, sparse_conv

_ACTIVATIONS = {0: "none", 1: "ReLU", 2: "sigmoid", 3: "leaky ReLU"}
Array = np.ndarray[Any, Any]


class GetIndicePairsImplicitGemm(OpRun):
    """Voxels to pairs: for output o and offset k the input at ``o·stride − padding + k·dilation``.

    Offset k counts the kernel's cells with the last axis fastest, bit k of a mask says that the
    pair is there, −1 that it is not. Output voxels are sorted; the plugin's order is its own.
    """

    op_domain = DOMAIN

    def _run(
        self,
        indices: Array,
        batch_size: int = 1,
        algo: int = 1,
        spatial_shape: Any = (),
        ksize: Any = (),
        stride: Any = (),
        padding: Any = (),
        dilation: Any = (),
        out_padding: Any = (),
        subm: int = 0,
        transpose: int = 0,
        is_train: int = 0,
        do_sort: int = 1,
    ) -> tuple[Array, ...]:
        if algo != 1 or transpose or any(out_padding):
            raise ValueError(f"algo={algo}, transpose={transpose}: expected 1 and 0")
        grid, size, step, pad, spread = (
            np.array(v, np.int64) for v in (spatial_shape, ksize, stride, padding, dilation)
        )
        offsets = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1).reshape(-1, 3)
        rows = indices.astype(np.int64)
        if subm:
            made = rows
        else:
            out_grid = (grid + 2 * pad - spread * (size - 1) - 1) // step + 1
            made = _reached(rows, offsets, out_grid, step, pad, spread)
        if len(made) > MOST_VOXELS:
            raise ValueError(f"{len(made):,} output voxels; the plugin holds {MOST_VOXELS:,}")
        keys = _keys(rows, grid)
        order = np.argsort(keys, kind="stable")
        known = keys[order]
        pairs = np.full((len(offsets), len(made)), -1, np.int32)
        for k, offset in enumerate(offsets):
            seen = made.copy()
            seen[:, 1:] = made[:, 1:] * step - pad + offset * spread
            inside = ((seen[:, 1:] >= 0) & (seen[:, 1:] < grid)).all(1)
            wanted = _keys(seen, grid)
            place = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
            found = inside & (known[place] == wanted) if len(known) else np.zeros(len(made), bool)
            pairs[k, found] = order[place[found]]
        bits = (pairs >= 0).astype(np.uint64) << np.arange(len(offsets), dtype=np.uint64)[:, None]
        mask = bits.sum(0, dtype=np.uint64).astype(np.uint32)
        rank = np.argsort(mask, kind="stable") if do_sort else np.arange(len(made))
        return (
            made.astype(np.int32),
            pairs,
            mask.view(np.int32)[:, None],
            rank.astype(np.int32),
            np.array(len(made), np.int32),
        )


def _keys(rows: Array, grid: Array) -> Array:
    x, y, z = (int(n) for n in grid)
    key: Array = ((rows[:, 0] * x + rows[:, 1]) * y + rows[:, 2]) * z + rows[:, 3]
    return key


def _reached(
    rows: Array, offsets: Array, grid: Array, step: Array, pad: Array, spread: Array
) -> Array:
    """Output voxels that any input reaches, sorted."""
    found = []
    for offset in offsets:
        moved = rows[:, 1:] + pad - offset * spread
        place = moved // step
        good = ((moved % step == 0) & (place >= 0) & (place < grid)).all(1)
        found.append(np.unique(_keys(np.column_stack([rows[good, :1], place[good]]), grid)))
    keys = np.unique(np.concatenate(found))
    columns = []
    for n in reversed(grid.tolist()):
        columns.append(keys % n)
        keys = keys // n
    return np.stack([keys, *reversed(columns)], 1)


class ImplicitGemm(OpRun):
    """Features, filters [out, k1, k2, k3, in] and pairs to features, in float16 or int8."""

    op_domain = DOMAIN

    def _run(
        self,
        features: Array,
        filters: Array,
        pair_fwd: Array,
        pair_mask: Array,
        mask_argsort: Array,
        *more: Array,
        act_alpha: float = 0.0,
        act_beta: float = 0.0,
        output_scale: float = 1.0,
        output_add_scale: float = 0.0,
        is_subm: int = 0,
        is_train: int = 0,
        act_type: int = 0,
        precision: int = 0,
        input_scale: float = 1.0,
    ) -> tuple[Array]:
        if act_type not in (0, 1):
            raise ValueError(
                f"act_type {_ACTIVATIONS.get(act_type, act_type)}: expected none, ReLU"
            )
        if sorted(mask_argsort.tolist()) != list(range(pair_fwd.shape[1])):
            raise ValueError("mask_argsort is no permutation of the output rows")
        scale, bias = None, None
        if precision == 1:
            scale, bias = more
            one = np.float32(1)
            value = features.astype(np.float32) * (one / np.float32(input_scale))
            whole = np.trunc(value)
            x = whole + (np.abs(value - whole) >= np.float32(0.5)) * np.sign(value)
            x = np.clip(x, -128, 127).astype(np.float64)
            w = quantized_weight(filters, scale, input_scale).astype(np.float64)
        else:
            x, w = features.astype(np.float64), filters.astype(np.float64)
            bias = more[0] if more else None
        flat = w.reshape(len(w), -1, w.shape[-1])
        bits = pair_mask[:, 0].view(np.uint32)
        total = np.zeros((pair_fwd.shape[1], len(w)))
        for k, rows in enumerate(pair_fwd):
            there = ((bits >> np.uint32(k)) & 1).astype(bool)
            total[there] += x[rows[there]] @ flat[:, k].T
        if scale is not None:
            assert bias is not None
            made = total.astype(np.float32) * (scale * np.float32(output_scale))
            made = made + bias * np.float32(output_scale)
        else:
            made = total if bias is None else total + bias.astype(np.float64)
        if act_type == 1:
            made = np.maximum(made, 0)
        return (made.astype(features.dtype),)


PLUGIN_OPERATORS = (GetIndicePairsImplicitGemm, ImplicitGemm)


def run_autoware_onnx(
    path: str | os.PathLike[str], voxels: Array, coors: Array, num_points_per_voxel: Array
) -> dict[str, Array]:
    """Run a file in ONNX's reference evaluator, with the plugin's operators as defined here.

    The pairs that a file wants as inputs are made of its metadata, as the node does.

    Args:
        path: The file.
        voxels: float32 ``[N, points, channels]``.
        coors: int32 ``[N, 3]``: z, y, x.
        num_points_per_voxel: int32 ``[N]``.

    Returns:
        Every tensor that the file makes, by name.

    Raises:
        ValueError: It is no file that runs.
    """
    model = load_model(path)
    feeds: dict[str, Array] = {
        "voxels": voxels, "coors": coors, "num_points_per_voxel": num_points_per_voxel,
    }  # fmt: skip
    known = {value.name for value in model.graph.input}
    try:
        feeds |= _rulebooks(model, coors)
        evaluator: Any = ReferenceEvaluator(model, new_ops=list(PLUGIN_OPERATORS))
        found: dict[str, Array] = evaluator.run(
            None, {name: value for name, value in feeds.items() if name in known}, intermediate=True
        )
    except Exception as error:  # whatever the evaluator raises, the file is none that runs
        reason = str(error).split("\n")[0][:200]
        raise ValueError(
            f"{os.fspath(path)} cannot be run: {type(error).__name__}: {reason}"
        ) from error
    return found


def _rulebooks(model: Any, coors: Array) -> dict[str, Array]:
    import json

    from onnx import helper

    properties = {p.key: p.value for p in model.metadata_props}
    if "rulebook_stages" not in properties:
        return {}
    columns = [int(n) for n in properties["rulebook_coors_permutation"].split(",")]
    rows = np.column_stack([np.zeros(len(coors), np.int32), coors[:, columns]]).astype(np.int32)
    feeds: dict[str, Array] = {}
    for stage in json.loads(properties["rulebook_stages"]):
        base = stage.pop("onnx_base")
        node = helper.make_node(
            "GetIndicePairsImplicitGemm", ["i"], [*SLOTS, "n"], domain=DOMAIN,
            **stage, out_padding=[0, 0, 0], subm=0, do_sort=0,
        )  # fmt: skip
        graph = helper.make_graph(
            [node], "g", [helper.make_tensor_value_info("i", 6, None)],
            [helper.make_tensor_value_info(slot, 6, None) for slot in SLOTS],
        )  # fmt: skip
        one = helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1)])
        evaluator: Any = ReferenceEvaluator(one, new_ops=[GetIndicePairsImplicitGemm])
        made: Any = evaluator.run(None, {"i": rows})
        feeds |= {f"{base}/{slot}": value for slot, value in zip(SLOTS, made, strict=True)}
        rows = made[0]
    return feeds


def run_on_frame(
    path: str | os.PathLike[str], inputs: Any, permutation: tuple[int, ...]
) -> dict[str, Tensor]:
    """Every tensor that `run_autoware_onnx` makes of one frame, by name.

    Args:
        path: The file.
        inputs: Features, each the mean of one point, coordinates in the encoder's order and the
            batch size, 1.
        permutation: `AutowareFile.permutation`.

    Raises:
        TypeError: Other inputs.
        ValueError: A batch of several frames, or no file that runs.
    """
    features, coords, batch_size = _frame(inputs, "run_on_frame")
    if int(batch_size) != 1:
        raise ValueError(f"run_on_frame: a batch of {batch_size}; the node gives one")
    made = run_autoware_onnx(
        path,
        features.float().numpy()[:, None],
        coords.numpy()[:, 1:][:, np.argsort(permutation)].astype(np.int32),
        np.ones(len(features), np.int32),
    )
    arrays = {name: value for name, value in made.items() if isinstance(value, np.ndarray)}
    odd = [f"{n} is {array.dtype}" for n, array in arrays.items() if array.dtype.kind not in "biuf"]
    if odd:
        raise ValueError(f"{os.fspath(path)}: no tensors of torch: {', '.join(odd)}")
    return {
        name: torch.from_numpy(np.require(array, requirements=["C", "W"]))
        for name, array in arrays.items()
    }


def _frame(inputs: Any, caller: str) -> tuple[Tensor, Tensor, Any]:
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    if len(given) != 3 or not all(isinstance(value, Tensor) for value in given[:2]):
        kinds = ", ".join(type(value).__name__ for value in given)
        raise TypeError(
            f"{caller}: expected features, coordinates [batch and axes] and the batch size, as "
            f"the encoder's first convolution reads them, got ({kinds}); of a model that computes "
            "these itself, give what its SparseConvTensor holds"
        )
    features, coords, batch_size = given
    return features, coords, batch_size


def compare_autoware_onnx(file: AutowareFile, inputs: Any) -> tuple[TensorDifference, ...]:
    """Run a file by the definition of its operators, and `bevquant_int8sim` in their arithmetic.

    The simulator's kernels and rulebooks compute the encoder that the file was written from, with
    features in float16 between layers, and integers rounded half away from zero. Both sides make
    float32 operations in the same order, so that not one value may differ.

    Args:
        file: From `export_autoware_onnx`.
        inputs: Features, coordinates (batch and the axes in the encoder's order) and the batch
            size, 1.

    Returns:
        One entry for each convolution and sum, and one for each output; differences are in value.
    """
    features, coords, _ = _frame(inputs, "compare_autoware_onnx")
    made = run_on_frame(file.path, inputs, file.permutation)
    wanted = _simulated(file.graph, features.float(), coords, fused=file.fused)
    before_relu = {node.x for node in file.graph.nodes if isinstance(node, Relu)}
    rows = []
    for node in file.graph.nodes:
        tensor = file.tensors[node.y]
        if isinstance(node, Conv | Add | Relu) and node.y not in before_relu:
            place = made[file.coords[node.y]]
            got = Sparse(made[tensor], None, place)
            rows.append(counted(node.path or tensor, node.path, got, wanted[node.y]))
    for output in file.graph.outputs:
        got = Sparse(made[file.tensors[output]], None, torch.empty(0))
        if output not in file.coords:
            want = Sparse(wanted[output].value, None, torch.empty(0))
            rows.append(counted("output", "", got, want))
    return tuple(rows)


class _PluginRun(FrameRun):
    """A graph in the plugin's arithmetic, by the simulator's kernels: float16 between layers."""

    def __init__(self, graph: Graph, *, fused: bool) -> None:
        super().__init__(replace(graph, bounded=False).in_floats(), "auto", self._keep)
        self.fused, self.results = fused, dict[str, Sparse]()
        self.convs = {node.y: node for node in graph.nodes if isinstance(node, Conv)}

    def _keep(self, node: Node, scale: float | None, value: Any, indices: Tensor | None) -> None:
        self.results[node.y] = Sparse(value(), None, torch.empty(0) if indices is None else indices)

    def _convolved(
        self, node: Conv, x: Tensor, rows: Rulebook, amax: float | None
    ) -> State[Tensor]:
        return self._made(node, _convolved(self.convs[node.y], x, rows, self.fused))


@torch.no_grad()
def _simulated(
    graph: Graph, features: Tensor, coords: Tensor, *, fused: bool
) -> Mapping[str, Sparse]:
    """Every tensor of the graph."""
    grid = next(n.input_spatial_shape for n in graph.nodes if isinstance(n, Conv))
    run = _PluginRun(graph, fused=fused)
    run.run(features.half(), Coords(coords.to(torch.int32).contiguous(), grid, 1))
    return run.results


def _convolved(node: Conv, x: Tensor, rulebook: Any, fused: bool) -> Tensor:
    relu = node.activation == "ReLU"
    layout = WeightLayout.KRSC
    if node.precision != "int8":
        bias = node.bias.double() if fused else None
        made = sparse_conv(x.double(), node.weight.double(), bias, rulebook, layout=layout)
        # Rounded once: torch's own way from float64 goes through float32.
        half = torch.from_numpy(made.numpy().astype(np.float16))
        half = half if fused else half + node.bias
        return half.clamp_(min=0) if relu else half
    scale = torch.tensor(float(node.input_range or 0.0) / 127, dtype=torch.float32)
    weight_scale = torch.tensor(node.weight_ranges, dtype=torch.float64) / 127
    # The plugin multiplies by the reciprocal, in float32; what is left is to round.
    q = quantize(x.float() * (1 / scale), 1.0, rounding="half_away", name=node.name)
    integers = quantize(node.weight.double(), weight_scale, axis=0, name=node.name)
    acc = int8_sparse_conv(q, integers, None, rulebook, layout=layout, name=node.path)
    made = acc.float() * (float(scale) * weight_scale).float() + node.bias.float()
    return (made.clamp_(min=0) if relu else made).half()

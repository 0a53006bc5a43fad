r"""Sparse convolutions inside a larger model: rows of voxels and their coordinates.

A tensor of voxels has rows in a file, ``[voxels, channels]``, whose number is free. Operations row
by row are written as for any other tensor. Tables of neighbours are those of the portable sparse
files. Sums of integers are exact and rounded once, in float64, as in the simulator:

.. math:: y_q = \operatorname{clamp}\bigl(\operatorname{round}((\textstyle\sum x_q w_q + b_q)\,
          m)\bigr)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._cpu import stored_weights
from bevquant_export._errors import QdqError
from bevquant_export.dense.nodes._graph import TensorState
from bevquant_export.dense.nodes._numbers import Numbers, refuse
from bevquant_export.voxels._body import DOUBLE, FLOAT, INT16, INT32, UINT8
from bevquant_export.voxels._sets import Surroundings, VoxelSet
from bevquant_export.voxels._window import AXES, Window, with_axes
from bevquant_int8sim.program import Integers, Ref, Requantize, SparseConv, Step, replaced

_PADDING = 2  # place among kernel, stride, padding and dilation


class Voxels:
    """Writes the steps of a program that depend on coordinates of voxels."""

    def __init__(self, numbers: Numbers, inputs: Mapping[str, str]) -> None:
        self.numbers, self.source, self.graph = numbers, numbers.source, numbers.graph
        self.read = numbers.read
        self._voxel_sets: dict[str, VoxelSet] = {}
        # Coordinates, grid and batch size, by their own names.
        self._parts: dict[str, VoxelSet] = {}
        self._missing: dict[str, int] = {}  # axes to three, by what made the voxels
        self._unchecked: set[str] = set()  # who gave voxels that may occur twice
        self._sums: dict[str, str] = {}  # int32, of layers whose readers want several forms
        self._frames: dict[str, Surroundings] = {}  # by the number of frames
        self._around: dict[str, Surroundings] = {}  # by what made the voxels
        for features, voxel_set in self.source.program.sparse_inputs.items():
            grid, frames = self.source.grids[voxel_set]
            coords = inputs[f"{features}.indices"]
            self._given(voxel_set, coords, grid, self.graph.numbers([frames]), features)

    def indices(self, name: str) -> str | None:
        """Coordinates, int32 ``[voxels, 4]``, where a value is the coordinates of voxels."""
        voxel_set = self._parts.get(name) or self._voxel_sets.get(name.removesuffix(".indices"))
        if voxel_set is None or name in self._voxel_sets:
            return None
        coords = self.graph.node("Cast", "coords", [voxel_set.voxels], to=INT32)
        missing = self._missing_axes(voxel_set)
        if not missing:
            return coords
        kept = self.graph.numbers([0, *range(1 + missing, 1 + AXES)])
        return self.graph.node("Gather", "coords", [coords, kept], axis=1)

    def host(self, step: Step) -> None:
        """Record a step that computes coordinates or reads a part of them."""
        made, first = step.outputs[0], step.args[0] if step.args else None
        voxel_set = self._voxel_sets.get(first.name) if isinstance(first, Ref) else None
        if voxel_set is None:
            return
        what = step.called
        if what == "getattr":
            self._parts[made] = voxel_set
        elif what == "convolved_coords":
            self._voxel_sets[made] = self._walked(step, voxel_set, step.args[1], step.args[2:])[1]

    def place(self, step: Step) -> None:
        """Coordinates that a model has as a tensor."""
        indices, shape, batch = step.args
        hosts = self.source.hosts
        example, count = replaced((shape, batch), lambda ref: hosts[ref.name])
        grid, open = tuple(int(size) for size in example), ""
        if any(self.source.varies(size) for size in shape):
            open = self.numbers.shape(step.path, shape)
        frames = self.graph.numbers([int(count)])
        if self.source.varies(batch):
            frames = self.numbers.of(step.path, batch)
        self._given(step.outputs[0], self.read(indices.name), grid, frames, step.path, open)

    def _behind(self, grid: str, window: Any, padding: tuple[int, ...]) -> str:
        """``(n + 2·padding − dilation·(kernel − 1) − 1) / stride + 1``, axis by axis."""
        numbers, node = self.graph.numbers, self.graph.node
        axes = zip(window.kernel_size, padding, window.dilation, strict=True)
        room = numbers([2 * p - d * (k - 1) - 1 for k, p, d in axes])
        made = node("Div", window.name, [node("Add", window.name, [grid, room]),
                                         numbers(window.stride)])  # fmt: skip
        return node("Add", window.name, [made, numbers([1] * AXES)])

    def _given(
        self, name: str, coords: str, grid: tuple[int, ...], frames: str, path: str, open: str = ""
    ) -> None:
        missing = AXES - len(grid)
        if missing < 0:
            refuse(path, f"voxels on a grid of {len(grid)} axes have no form; expected 1…3")
        if missing and open:
            refuse(path, "a grid of fewer than three axes, computed from voxels, has no form")
        coords = self.graph.node("Cast", path, [coords], to=INT32)
        coords = with_axes(self.graph, path, coords, 1 + len(grid), 1)
        if frames not in self._frames:
            self._frames[frames] = Surroundings(self.graph.call, frames, self._behind)
        around = self._frames[frames]
        voxel_set = around.given((1,) * missing + grid, coords, name, open)
        self._missing[voxel_set.maker], self._around[voxel_set.maker] = missing, around
        self._voxel_sets[name] = voxel_set
        self._unchecked.add(voxel_set.maker)

    def convolution(self, step: SparseConv, x: TensorState) -> TensorState | str:
        """A quantized sparse convolution."""
        graph, path = self.graph, step.path
        if len(step.args) > 2 or step.geometry.transposed:
            what = "with a sum in it" if len(step.args) > 2 else "that is transposed"
            refuse(path, f"a sparse convolution {what} has no form")
        if x.form is not None and x.form.bits != 8:
            refuse(path, f"it reads {x.form} from voxels; expected int8: num_bits=8")
        rows = self._walk(step, step.indice_key, step.geometry.numbers())
        weight, bias = step.weight, step.bias
        matrix = weight.to(torch.int32).reshape(-1, weight.shape[-1]).cpu().numpy()
        self._check_sums(step, matrix, bias)
        stored, zero = stored_weights(matrix, graph.profile.weight)
        dtype = stored.dtype.type
        # 128 is the zero point, for neighbours that are absent.
        read = self._gathered(path, x.integers, rows, weight.shape[:2], np.uint8, 128)
        inputs = [
            read,
            graph.constant(f"{path}.weight", stored, dtype),
            graph.zeros(graph.profile.dtype, graph.profile.zero, ()),
            graph.zeros(dtype, zero, ()),
        ]
        sums = graph.node("MatMulInteger", path, inputs)
        if bias is not None:
            constant = graph.constant(f"{path}.bias", bias.cpu().numpy(), np.int32)
            sums = graph.node("Add", path, [sums, constant])
        made = step.outputs[0]
        form = self.source.form(made)
        if form == "int32":
            self._sums[made] = sums
        if not isinstance(form, Integers):
            return self._scaled(path, sums, step.unit)
        return self._rounded(step, sums, form)

    def requantized(self, step: Requantize) -> TensorState | None:
        """One form of a layer that has several."""
        sums, form = self._sums.get(step.args[0].name), self.source.form(step.outputs[0])
        return None if sums is None else self._rounded(step, sums, form)

    def written(self, step: Step) -> str | None:
        """A float step or layout operator on voxels."""
        what = step.called
        if type(step.target).__name__ == "FloatSparseConv":
            return self._float_convolution(step, self.read(step.args[0].name))
        if what == "sparse_max_pool":
            return self._pooled(step, self.read(step.args[0].name))
        if what == "to_dense":
            return self._dense(step, self.read(step.args[0].name))
        return None

    def _float_convolution(self, step: Step, x: str) -> str:
        module: Any = step.target
        if module.activation not in ("None", "ReLU"):
            refuse(step.path, f"a float convolution with its own {module.activation} has no form")
        if module.geometry.transposed:
            refuse(step.path, "a sparse convolution that is transposed has no form")
        rows = self._walk(step, module.key, module.geometry.numbers())
        weight: Tensor = module.weight.detach().float().cpu()
        read = self._gathered(step.path, x, rows, weight.shape[:2], np.float32, 0)
        matrix = self.graph.constant(
            f"{step.path}.weight", weight.reshape(-1, weight.shape[-1]).numpy()
        )
        made = self.graph.node("MatMul", step.path, [read, matrix])
        if module.bias is not None:
            bias = self.graph.constant(f"{step.path}.bias", module.bias.detach().float().numpy())
            made = self.graph.node("Add", step.path, [made, bias])
        return self.graph.node("Relu", step.path, [made]) if module.activation == "ReLU" else made

    def _pooled(self, step: Step, x: str) -> str:
        """The largest features of each window."""
        rows = self._walk(step, step.args[3], step.args[4:])
        channels = self.source.shapes[step.outputs[0]][1]
        if rows is None:
            return x
        # An absent neighbour is never the largest.
        volume, lowest = math.prod(step.args[4]), float(np.finfo(np.float32).min)
        read = self._gathered(step.path, x, rows, (volume, channels), np.float32, lowest)
        windows = self.graph.numbers([-1, volume, channels])
        read = self.graph.node("Reshape", step.path, [read, windows])
        return self.graph.node("ReduceMax", step.path, [read], axes=[1], keepdims=0)

    def _dense(self, step: Step, x: str) -> str:
        """Voxels on their grid, ``[batch, channels, …]``, zero in empty cells."""
        voxel_set = self._parts.get(step.args[1].name)
        if voxel_set is None:
            refuse(step.path, "dense() of coordinates that no sparse tensor has")
        if voxel_set.open:
            refuse(step.path, "dense() on a grid that is computed from voxels has no form")
        frames = self._around[voxel_set.maker].batch_size
        (made,) = self.graph.call(
            "ScatterDense", [x, voxel_set.voxels, frames],
            f"{step.path}.dense" if step.path else "dense", {"spatial_shape": voxel_set.grid},
        )  # fmt: skip
        if not (missing := self._missing_axes(voxel_set)):
            return made
        channels, *grid = self.source.shapes[step.outputs[0]][1:]
        assert len(grid) == AXES - missing
        return self.graph.node(
            "Reshape", step.path, [made, self.graph.numbers([-1, channels, *grid])]
        )

    # Parts

    def _walk(self, step: Step, key: str | None, geometry: tuple[Any, ...]) -> str | None:
        """Table of neighbours of a step on coordinates; its own coordinates become known."""
        voxel_set = self._voxel_sets.get(step.args[1].name)
        if voxel_set is None:
            refuse(step.path, "its voxels are made by something that has no form")
        rows, made = self._walked(step, voxel_set, key, geometry)
        if len(step.outputs) > 1:
            self._voxel_sets[step.outputs[1]] = made
        return rows

    def _walked(
        self, step: Step, voxel_set: VoxelSet, key: str | None, geometry: tuple[Any, ...]
    ) -> tuple[str | None, VoxelSet]:
        *sizes, _, subm, transposed, inverse = geometry
        if transposed:
            refuse(step.path, "a sparse convolution that is transposed has no form")
        name = step.path or step.outputs[0]
        missing = self._missing_axes(voxel_set)
        kernel, stride, padding, dilation = (
            (1 - (i == _PADDING),) * missing + tuple(given) for i, given in enumerate(sizes)
        )
        window = Window(
            kernel_size=kernel, stride=stride, padding=padding, dilation=dilation,
            subm=bool(subm), inverse=bool(inverse), rulebook=key or "", name=name,
        )  # fmt: skip
        if window.geometry.keeps_rows and not inverse:  # each row is its own only neighbour
            return None, voxel_set
        voxel_set = self._distinct(voxel_set)
        around = self._around[voxel_set.maker]
        try:
            rows, made = around.convolved(voxel_set, window)
        except ValueError as error:
            raise QdqError(str(error)) from error
        self._missing[made.maker], self._around[made.maker] = missing, around
        return rows, made

    def _distinct(self, voxel_set: VoxelSet) -> VoxelSet:
        """The coordinates, each input voxel once: a requirement of convolutions alone."""
        if voxel_set.maker not in self._unchecked:
            return voxel_set
        self._unchecked.remove(voxel_set.maker)
        found = self._around[voxel_set.maker].map_of(voxel_set)[2]
        name = f"{voxel_set.maker} checked"
        (once,) = self.graph.call("DistinctCoords", [voxel_set.voxels, found], name)
        checked = replace(voxel_set, voxels=once)
        for known in (self._voxel_sets, self._parts):
            known.update({key: checked for key, value in known.items() if value is voxel_set})
        return checked

    def _missing_axes(self, voxel_set: VoxelSet) -> int:
        """Number of axes that its grid lacks for three."""
        return self._missing[voxel_set.maker]

    def _gathered(
        self, path: str, x: str, rows: str | None, sizes: Sequence[int], dtype: Any, absent: float
    ) -> str:
        """The rows that each voxel reads, side by side; row 0 stands for an absent neighbour."""
        if rows is None:
            return x
        volume, channels = sizes
        name = f"absent_{np.dtype(dtype)}_{absent:g}_{channels}"
        nothing = self.graph.constant(name, np.full((1, channels), absent), dtype)
        padded = self.graph.node("Concat", path, [nothing, x], axis=0)
        read = self.graph.node("Gather", path, [padded, rows], axis=0)
        side_by_side = self.graph.numbers([-1, volume * channels])
        return self.graph.node("Reshape", path, [read, side_by_side])

    def _scaled(self, path: str, sums: str, scale: Tensor) -> str:
        """Sums in float32, multiplied in float64."""
        return self.graph.node("Cast", path, [self._product(path, sums, scale, "scale")], to=FLOAT)

    def _product(self, path: str, sums: str, factor: Tensor, name: str) -> str:
        factors = self.graph.constant(f"{path}.{name}", factor.double().cpu().numpy(), np.float64)
        return self.graph.node(
            "Mul", path, [self.graph.node("Cast", path, [sums], to=DOUBLE), factors]
        )

    def _rounded(self, step: SparseConv | Requantize, sums: str, form: Integers) -> TensorState:
        """Sums as integers of the form, with those of their values."""
        graph, path = self.graph, step.path
        dtype, zero = graph.profile.stored(form)
        low = 0 if step.relu else form.low
        assert step.multiplier is not None
        real = self._product(path, sums, step.multiplier, "multiplier")
        q = graph.node("Round", path, [real])
        ends = [graph.constant(f"float64_{n}", n, np.float64) for n in (low, form.high)]
        q = graph.node("Clip", path, [q, *ends])
        q = graph.node("Add", path, [q, graph.constant(f"float64_{zero}", zero, np.float64)])
        q = graph.node("Cast", path, [q], to=INT16 if dtype == np.int16 else UINT8)
        state = graph.dequantized(path, q, form)
        return TensorState(state.name, state.integers, form, low=low)

    def _check_sums(self, step: Step, matrix: Any, bias: Tensor | None) -> None:
        largest = np.abs(matrix).sum(0, dtype=np.int64) * 256
        if bias is not None:
            largest = largest + np.abs(bias.cpu().numpy().astype(np.int64))
        if largest.max(initial=0) >= 2**31:
            refuse(step.path, "its sums may leave int32; disable() its quantizers")

"""The node of one sparse convolution, and the form of each tensor, which its consumers agree on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export.sparse._axes import three_axes
from bevquant_export.sparse._beginning import is_float_conv
from bevquant_export.sparse._channel_permutations import PERMUTED, row_conv
from bevquant_export.sparse._follow import Draft, Followed, Reading, named
from bevquant_export.sparse._graph import Conv
from bevquant_export.sparse._half_precision import LARGEST_HALF, is_integer_layer, to_half
from bevquant_export.sparse._observe import Seen, bound
from bevquant_export.voxels._window import AXES, Sizes
from bevquant_int8sim.program import SparseConv, Weighted
from bevquant_sparse import WeightLayout, permute_weight

_STEPS = 127


@dataclass(frozen=True)
class TensorForm:
    """Form of a tensor in a file."""

    relu: bool  # After the ReLU of its producer
    precision: str  # ``"int8"`` where every consumer needs integers, else ``"fp16"``
    amax: float | None  # The range, where any consumer needs integers


def agreed_forms(followed: Followed) -> Mapping[str, TensorForm]:
    """Return the form of every tensor."""
    readings: dict[str, list[Reading]] = {followed.input: []}
    readings |= {draft.y: [] for draft in followed.drafts}
    for reading in followed.outputs:
        readings[reading.tensor].append(reading)
    parts: dict[str, list[Reading]] = {}
    for draft in reversed(followed.drafts):
        # Selected channels have the form of the whole, if that is the form of their consumers,
        # and steps between layers read each tensor in the form that they need.
        own = [_stated(r.form) for r in draft.reads]
        passes = draft.kind == "select" and all(_stated(r.form) in own for r in readings[draft.y])
        passes = passes or draft.kind == "steps"
        for reading in draft.reads:
            (parts.setdefault(reading.tensor, []) if passes else readings[reading.tensor]).append(
                reading
            )
    forms = {t: _form(t, found, parts.get(t, [])) for t, found in readings.items()}
    sums = [[r.tensor for r in draft.reads] for draft in followed.drafts if draft.kind == "add"]
    while mixed := [pair for pair in sums if len({forms[t].precision for t in pair}) > 1]:
        # The engine adds two int8 tensors or two of fp16, and rounds the latter to its ranges.
        forms |= {t: replace(forms[t], precision="fp16") for pair in mixed for t in pair}
    return forms


def _stated(form: Any) -> object:
    return "float" if isinstance(form, str) else float(form.scale)


def _form(tensor: str, readings: list[Reading], parts: list[Reading]) -> TensorForm:
    """`parts` read some channels, which have their own ranges."""
    readings = readings[::-1]
    readers = ", ".join(dict.fromkeys(r.by for r in (*readings, *parts)))
    both = (*readings, *parts)
    # A part may have its own ReLU, which the whole tensor does not have.
    relu = bool(both) and all(r.relu for r in both)
    if any(r.relu != relu for r in readings):
        raise ValueError(
            f"export_sparse_onnx: {readers} read the tensor {tensor!r}, some of them before and "
            "some behind its ReLU; the file folds the ReLU into the layer, so all must read behind "
            "it"
        )
    integers = [r for r in readings if not isinstance(r.form, str)]
    for reading in integers:
        _check_integers(reading, relu)
    ranges = sorted({float(r.form.scale) * _STEPS for r in integers})
    if len(ranges) > 1:
        raise ValueError(
            f"export_sparse_onnx: {readers} read the tensor {tensor!r} in different ranges "
            f"{', '.join(f'{r:g}' for r in ranges)}; a file holds one range per tensor. "
            "bevquant_qnn.quantize_model with example_inputs gives all readers one quantizer"
        )
    if ranges and ranges[0] > LARGEST_HALF:
        raise ValueError(
            f"export_sparse_onnx: {readers} read the tensor {tensor!r} with a range of "
            f"{ranges[0]:g}, beyond float16 (largest {LARGEST_HALF:g}), in which the engine's "
            "unquantized layers compute; calibrate again, or scale the layers before it"
        )
    for reading in parts:
        if not isinstance(reading.form, str):
            _check_integers(reading, reading.relu)
    wanted = {_stated(r.form) for r in both}
    whole = len(wanted) == 1 and "float" not in wanted
    if whole and not ranges:
        ranges = [float(parts[0].form.scale) * _STEPS]
    return TensorForm(relu, "int8" if whole else "fp16", ranges[0] if ranges else None)


def _check_integers(reading: Reading, relu: bool) -> None:
    form = reading.form
    if form.bits != 8 or not form.full:
        raise ValueError(
            f"export_sparse_onnx: {reading.by} reads integers of {form.bits} bits, {form.low} to "
            f"{form.high}; the engine has 8, -128 to 127: quantize it with num_bits=8, or "
            "disable() its quantizers"
        )
    if form.low != -128 and not relu:
        raise ValueError(
            f"export_sparse_onnx: {reading.by} reads integers from {form.low} on "
            "(narrow_range=True); the engine's reach down to -128: quantize with "
            "narrow_range=False"
        )


_LARGEST = 2**31
_FILLS = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


@dataclass(frozen=True, eq=False)
class ConvWriter:
    """Writes sparse convolutions, and layers on rows of voxels as 1×1×1 convolutions."""

    forms: Mapping[str, TensorForm]  # Form of every tensor
    seen: Mapping[str, Seen]  # Sizes of each step
    model: nn.Module  # The model, whose modules hold the biases
    order: str  # Order of the coordinate columns: ``"xyz"`` or ``"zyx"``
    head_room: float  # Factor for the bound of voxels
    fewest: int  # Least number of axes; missing ones get one cell

    def _axes(self, sizes: Sizes, fill: int = 1) -> Sizes:
        return three_axes(tuple(sizes), fill, self.order)

    def _conv(self, draft: Draft) -> Conv:
        step, seen, made = draft.step, self.seen[draft.y], self.forms[draft.y]
        is_float = is_float_conv(step)
        found: Any = step.target if is_float else step  # both have a geometry
        axes = len(found.geometry.kernel_size)
        if not self.fewest <= axes <= AXES:
            raise ValueError(
                f"export_sparse_onnx: {named(step)} has {axes} spatial axes; the engine has three"
            )
        if found.geometry.transposed:
            raise ValueError(
                f"export_sparse_onnx: {named(step)} is a transposed convolution, which the engine "
                "takes for a strided one; use SparseInverseConv3d"
            )
        module: Any = self.model.get_submodule(step.path)
        relu, key = made.relu, found.key if is_float else found.indice_key
        if is_float:
            weight, ranges = _float_weight(found, module, step.path)
            fused = getattr(found, "activation", "None")
            if fused not in ("None", "ReLU"):
                raise ValueError(
                    f"export_sparse_onnx: {named(step)} has the activation {fused}; the engine has "
                    '"ReLU" and "None"'
                )
            relu = relu or fused == "ReLU"
        else:
            weight, ranges = _integer_weight(draft)
        bias = getattr(module, "bias", None)
        bias = torch.zeros(len(weight)) if bias is None else bias
        if not seen.voxels:
            raise ValueError(
                f"export_sparse_onnx: {named(step)} made no voxel in the example inputs or "
                "batches; output_bound, beyond which the engine drops voxels, follows from them: "
                "give frames as in use"
            )
        voxels = bound(seen.voxels, self.head_room)
        if voxels >= _LARGEST:
            raise ValueError(
                f"export_sparse_onnx: {step.path} would get output_bound={voxels}, beyond int32, "
                f"which the engine's parser reads as 0; give less head_room than {self.head_room:g}"
            )
        x = draft.reads[0].tensor
        sizes: dict[str, Any] = {
            n: self._axes(getattr(found.geometry, n), fill) for n, fill in _FILLS.items()
        }
        return Conv(
            path=step.path,
            x=x,
            y=draft.y,
            weight=weight.reshape(len(weight), *sizes["kernel_size"], weight.shape[-1]),
            bias=to_half(bias, f"export_sparse_onnx: {step.path}.bias").cpu(),
            **sizes,
            subm=found.geometry.subm,
            inverse=found.geometry.inverse,
            rulebook=key or "",
            activation="ReLU" if relu else "None",
            precision="fp16" if is_float else "int8",
            output_precision=made.precision,
            input_range=_float_range(module, seen) if is_float else self.forms[x].amax,
            weight_ranges=ranges if made.precision == "int8" or not is_float else None,
            output_bound=voxels,
            input_spatial_shape=self._axes(seen.grid),
            output_spatial_shape=self._axes(seen.out_grid),
            rows=(seen.read[0], seen.made[0]),
        )

    def _linear(self, draft: Draft) -> Conv:
        bias: Any = self.model.get_submodule(draft.step.path).bias
        return self._on_rows(draft, *_integer_weight(draft), bias)

    def _affine(self, draft: Draft) -> Conv:
        """``x · factor + shift`` per channel, in fp16."""
        channels = self.seen[draft.y].made[1]
        factor, shift = (number.expand(channels) for number in draft.constants)
        return self._matrix(draft, torch.diag(factor), shift)

    def _matrix(
        self, draft: Draft, matrix: Tensor | None = None, shift: Tensor | None = None
    ) -> Conv:
        """``x matrixᵀ + shift``, in fp16."""
        matrix = draft.constants[0] if matrix is None else matrix
        largest = matrix.abs().amax(1).clamp(min=2.0**-14)
        integer = self.forms[draft.y].precision == "int8"
        ranges = tuple(largest.tolist()) if integer else None
        return self._on_rows(draft, matrix.half().contiguous(), ranges, shift)

    def _on_rows(
        self, draft: Draft, weight: Tensor, ranges: tuple[float, ...] | None, bias: Tensor | None
    ) -> Conv:
        """A 1×1×1 convolution, to which `with_channel_permutations` adds the voxels."""
        path, x, made = draft.step.path, draft.reads[0].tensor, self.forms[draft.y]
        integer = draft.kind == "linear"
        half = None if bias is None else to_half(bias, f"export_sparse_onnx: {path}.bias").cpu()
        largest = 0.0 if integer else self.seen[draft.first or draft.y].largest
        node = row_conv(
            path if integer else path + PERMUTED, x, draft.y, weight, half, ranges,
            input_range=self.forms[x].amax or largest or None,
            output_bound=bound(self.seen[draft.y].voxels, self.head_room),
        )  # fmt: skip
        return replace(
            node,
            activation="ReLU" if made.relu else "None",
            precision="int8" if integer else "fp16",
            output_precision=made.precision,
        )


def _float_range(module: Any, seen: Seen) -> float | None:
    """The disabled quantizer's amax, else the largest value of all frames; None if not usable."""
    # NVIDIA's exporters write a range for fp16 layers as well; the engine ignores it.
    amax = getattr(getattr(module, "_input_quantizer", None), "_amax", None)
    largest = seen.largest if amax is None else float(amax.max())
    return largest if 0 < largest < math.inf else None


def _float_weight(conv: Any, module: Any, path: str) -> tuple[Tensor, tuple[float, ...]]:
    own = [getattr(module, f"_{what}_quantizer", None) for what in ("input", "weight")]
    quantizes = any(q is not None and not q._disabled and q._if_quant for q in own)
    if quantizes and not is_integer_layer(module):
        raise ValueError(
            f"export_sparse_onnx: {path} quantizes its input or its weight, not both; the engine "
            "computes a layer in int8 or in fp16: enable() or disable() both quantizers"
        )
    if quantizes:
        raise ValueError(
            f"export_sparse_onnx: {path} has quantizers without an 8-bit integer form (bits, "
            "sign, activation); quantize it with 8 bits, or disable() both quantizers"
        )
    weight = _krsc(conv.weight, conv.geometry.kernel_size)
    half = to_half(weight, f"export_sparse_onnx: {path}.weight").cpu()
    largest = half.float().reshape(len(half), -1).abs().amax(1)
    ranges = torch.where(largest > 0, largest, largest.max().clamp(min=1.0))
    return half, tuple(ranges.tolist())


def _integer_weight(draft: Draft) -> tuple[Tensor, tuple[float, ...]]:
    """Half-precision weights on the integers' grid, and amax per output channel."""
    step = draft.step
    assert isinstance(step, Weighted)
    scale = step.unit.cpu().double() / draft.reads[0].form.scale
    ranges = (scale * _STEPS).float()
    q = step.weight.cpu()
    if isinstance(step, SparseConv):
        q = _krsc(q, step.geometry.kernel_size)
    grid = ranges.double().view(-1, *(1,) * (q.dim() - 1)) / _STEPS
    half = to_half(q.double() * grid, f"export_sparse_onnx: {step.path}.weight")
    lost = torch.round(half.double() / grid) != q
    if bool(lost.any()):
        channel = int(lost.nonzero()[0, 0])
        raise ValueError(
            f"export_sparse_onnx: {step.path}.weight: channel {channel} has a range of "
            f"{float(ranges[channel]):g}, too small for float16, in which the file stores it; "
            "scale the layers around it, or disable() its quantizers"
        )
    return half, tuple(np.asarray(ranges, np.float32).astype(float).tolist())


def _krsc(weight: Tensor, kernel_size: Any) -> Tensor:
    size = tuple(int(k) for k in kernel_size)
    return permute_weight(weight, WeightLayout.VCK, WeightLayout.KRSC, kernel_size=size)

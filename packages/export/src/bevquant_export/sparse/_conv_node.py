"""The node of one sparse convolution, and the form of each tensor, which its consumers agree on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export.sparse._axes import AXES, three_axes
from bevquant_export.sparse._beginning import is_float_conv
from bevquant_export.sparse._channel_permutations import PERMUTED, row_conv
from bevquant_export.sparse._follow import Draft, Followed, Reading, place
from bevquant_export.sparse._graph import Conv
from bevquant_export.sparse._half_precision import LARGEST_HALF, is_integer_layer, to_half
from bevquant_export.sparse._observe import Seen, bound
from bevquant_int8sim.program import SparseConv, Step, Weighted
from bevquant_sparse import WeightLayout, permute_weight

_STEPS = 127


@dataclass(frozen=True)
class TensorForm:
    """Form of a tensor in a file.

    Attributes:
        relu: After the ReLU of its producer.
        precision: ``"int8"`` where every consumer needs integers, else ``"fp16"``.
        amax: The range, where any consumer needs integers.
    """

    relu: bool
    precision: str
    amax: float | None


def agreed_forms(followed: Followed) -> Mapping[str, TensorForm]:
    """Return the form of every tensor.

    Raises:
        ValueError: Consumers need a tensor with and without a ReLU, in several ranges, or in
            integers that the engine does not have; the message names them.
    """
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


def conv_node(
    draft: Draft,
    forms: Mapping[str, TensorForm],
    seen: Seen,
    model: nn.Module,
    values: Mapping[str, Any],
    head_room: float,
    order: str,
) -> Conv:
    """Return the node; convolutions of fewer than three axes get one cell along the missing ones.

    Args:
        draft: A sparse convolution, or a linear layer on voxels.
        forms: Form of every tensor.
        seen: Sizes of its input and output.
        model: The model, whose module holds the bias.
        values: Value of the program to its form.
        head_room: Factor for the bound of its voxels.
        order: Order of the coordinate columns: ``"xyz"`` or ``"zyx"``.

    Raises:
        ValueError: The dialect has no such convolution, or a constant exceeds float16.
    """
    step = draft.step
    made = forms[draft.y]
    module: Any = model.get_submodule(step.path)
    if draft.kind == "linear":
        voxels = bound(seen.voxels, head_room)
        return _on_rows(draft, made, forms, _integer_weight(draft), module.bias, voxels)
    is_float = is_float_conv(step)
    geometry = _geometry(draft, order)
    if is_float:
        weight, ranges = _float_weight(step.target, module, step.path)
        fused = getattr(step.target, "activation", "None")
        if fused not in ("None", "ReLU"):
            raise ValueError(
                f"export_sparse_onnx: {place(step)} has the activation {fused}; the engine has "
                '"ReLU" and "None"'
            )
        made = TensorForm(made.relu or fused == "ReLU", made.precision, made.amax)
        ranges_wanted = made.precision == "int8"
    else:
        weight, ranges = _integer_weight(draft)
        ranges_wanted = True
    bias = getattr(module, "bias", None)
    if bias is None:
        bias = torch.zeros(weight.shape[0])
    if not seen.voxels:
        raise ValueError(
            f"export_sparse_onnx: {place(step)} made no voxel in the example inputs or batches; "
            "output_bound, beyond which the engine drops voxels, follows from them: give frames as "
            "in use"
        )
    voxels = bound(seen.voxels, head_room)
    if voxels >= _LARGEST:
        raise ValueError(
            f"export_sparse_onnx: {step.path} would get output_bound={voxels}, beyond int32, which "
            f"the engine's parser reads as 0; give less head_room than {head_room:g}"
        )
    return Conv(
        path=step.path,
        x=draft.reads[0].tensor,
        y=draft.y,
        weight=weight.reshape(len(weight), *geometry["kernel_size"], weight.shape[-1]),
        bias=to_half(bias, f"export_sparse_onnx: {step.path}.bias").cpu(),
        **geometry,
        activation="ReLU" if made.relu else "None",
        precision="fp16" if is_float else "int8",
        output_precision=made.precision,
        input_range=_float_range(module, seen) if is_float else forms[draft.reads[0].tensor].amax,
        weight_ranges=ranges if ranges_wanted else None,
        output_bound=voxels,
        input_spatial_shape=three_axes(seen.grid, 1, order),
        output_spatial_shape=three_axes(seen.out_grid, 1, order),
        rows=(seen.read[0], seen.made[0]),
    )


def affine_node(
    draft: Draft, forms: Mapping[str, TensorForm], seen: Seen, read: float, head_room: float
) -> Conv:
    """``x · factor + shift`` per channel, or ``x matrixᵀ``, in fp16; `read` is the largest x."""
    made = forms[draft.y]
    if draft.kind == "matrix":
        (matrix,), shift = draft.constants, None
    else:
        factor, shift = (number.expand(seen.made[1]) for number in draft.constants)
        matrix = torch.diag(factor)
    largest = matrix.abs().amax(1).clamp(min=2.0**-14)
    ranges = tuple(largest.tolist()) if made.precision == "int8" else None
    weight, voxels = (matrix.half().contiguous(), ranges), bound(seen.voxels, head_room)
    return _on_rows(draft, made, forms, weight, shift, voxels, read)


def _on_rows(
    draft: Draft,
    made: TensorForm,
    forms: Mapping[str, TensorForm],
    weight: tuple[Tensor, tuple[float, ...] | None],
    bias: Tensor | None,
    voxels: int,
    largest: float = 0.0,
) -> Conv:
    """A 1×1×1 convolution, to which `with_channel_permutations` adds the voxels."""
    path, x = draft.step.path, draft.reads[0].tensor
    integer = draft.kind == "linear"
    matrix, ranges = weight
    half = None if bias is None else to_half(bias, f"export_sparse_onnx: {path}.bias").cpu()
    amax = forms[x].amax or largest or None
    node = row_conv(
        path if integer else path + PERMUTED, x, draft.y, matrix, half, ranges,
        input_range=amax, output_bound=voxels,
    )  # fmt: skip
    return replace(
        node,
        activation="ReLU" if made.relu else "None",
        precision="int8" if integer else "fp16",
        output_precision=made.precision,
    )


def check_axes(draft: Draft, fewest: int) -> None:
    """Refuse a convolution on more than three axes, or on fewer than `fewest`.

    Raises:
        ValueError: Its module is named.
    """
    step = draft.step
    axes = len(_convolution(step).geometry.kernel_size)
    if not fewest <= axes <= AXES:
        raise ValueError(
            f"export_sparse_onnx: {place(step)} has {axes} spatial axes; the engine has three"
        )


def _convolution(step: Step) -> Any:
    """The step, or the float module that it calls: both have a geometry."""
    return step.target if is_float_conv(step) else step


def _geometry(draft: Draft, order: str) -> dict[str, Any]:
    step = draft.step
    found = _convolution(step)
    key, geometry = found.key if is_float_conv(step) else found.indice_key, found.geometry
    if geometry.transposed:
        raise ValueError(
            f"export_sparse_onnx: {place(step)} is a transposed convolution, which the engine "
            "takes for a strided one; use SparseInverseConv3d"
        )
    sizes = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
    return {
        **{name: three_axes(getattr(geometry, name), n, order) for name, n in sizes.items()},
        "subm": geometry.subm,
        "inverse": geometry.inverse,
        "rulebook": key or "",
    }


def _float_range(module: Any, seen: Seen) -> float | None:
    """Amax of the input of an fp16 layer, as NVIDIA's exporters write it; the engine ignores it.

    The range of its disabled quantizer, else the largest value of all frames.
    """
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

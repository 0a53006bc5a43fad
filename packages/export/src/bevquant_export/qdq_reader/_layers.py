"""Conv, ConvTranspose, Gemm and MatMul with constant weights as modules of torch.

A weight behind DequantizeLinear makes a quantized module that holds the file's very integers or FP8
numbers: the weight is (q − z)·s, and its quantizer rounds it back to q − z. Where q − z leaves int8
(uint8 with another zero point than 128) it is the sum of two int8 weights, whose layers read one
input and are added as accumulators, which is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bevquant_qnn
from bevquant_export.qdq_reader._constants import Array, Grid, Stored, raw, value_of
from bevquant_export.qdq_reader._operators import OPERATORS, numbers, op, tensor
from bevquant_quantizers import AffineQuantizer

# Operators of layers: norms, convolution, pooling, resizing and sampling of grids.
# They are rows of `OPERATORS` once this module is imported.

# Norms

OPERATORS |= {
    "LayerNormalization": lambda x, scale, bias=None, axis=-1, epsilon=1e-5, **_: F.layer_norm(
        x, x.shape[axis % x.dim() :], tensor(scale), tensor(bias), epsilon
    ),
    "RMSNormalization": lambda x, scale, axis=-1, epsilon=1e-5, **_: F.rms_norm(
        x, x.shape[axis % x.dim() :], tensor(scale), epsilon
    ),
    "InstanceNormalization": lambda x, scale, bias, epsilon=1e-5: F.instance_norm(
        x, weight=tensor(scale), bias=tensor(bias), eps=epsilon
    ),
}


@op("GroupNormalization")
def _group_norm(
    x: Tensor, scale: Any, bias: Any, num_groups: int, epsilon: float = 1e-5, **_: Any
) -> Tensor:
    weights = [tensor(v) for v in (scale, bias)]
    # Before opset 21 there is one scale per group.
    gain, shift = (v.repeat_interleave(x.shape[1] // len(v)) for v in weights)
    return F.group_norm(x, num_groups, gain, shift, epsilon)


@op("BatchNormalization")
def _batch_norm(
    x: Tensor, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float = 1e-5,
    training_mode: int = 0, **_: Any,
) -> Tensor:  # fmt: skip
    if training_mode:
        raise ValueError("training_mode=1; expected 0: export the model in evaluation mode")
    scale, bias, mean, var = map(tensor, (scale, bias, mean, var))
    return F.batch_norm(x, mean, var, scale, bias, eps=epsilon)


# Windows


def window_pads(
    sizes: Any, kernel: Any, strides: Any, dilations: Any, auto_pad: str, pads: Any
) -> list[tuple[int, int]]:
    """Padding before and behind each axis of a window's operator."""
    if auto_pad in ("NOTSET", "VALID"):
        half = len(kernel)
        given = list(pads or [0] * 2 * half) if auto_pad == "NOTSET" else [0] * 2 * half
        return list(zip(given[:half], given[half:], strict=True))
    found = []
    for n, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        n = 0 if stride == 1 else int(n)  # of stride 1 the size has no part in it
        total = max((-(-n // stride) - 1) * stride + dilation * (k - 1) + 1 - n, 0)
        found.append((total // 2, total - total // 2))
    return found if auto_pad == "SAME_UPPER" else [pair[::-1] for pair in found]


def padded(x: Tensor, pads: list[tuple[int, int]], value: float = 0.0) -> Tensor:
    """The tensor with its last axes padded."""
    return F.pad(x, [n for pair in reversed(pads) for n in pair], value=value)


@op("MaxPool")
def _max_pool(
    x: Tensor, kernel_shape: Any, strides: Any = None, pads: Any = None, dilations: Any = None,
    ceil_mode: int = 0, auto_pad: str = "NOTSET", storage_order: int = 0,
) -> Tensor:  # fmt: skip
    rank = len(kernel_shape)
    step, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    ends = window_pads(x.shape[2:], kernel_shape, step, spread, auto_pad, pads)
    if any(a != b or 2 * a > k for (a, b), k in zip(ends, kernel_shape, strict=True)):
        x, ends = padded(x, ends, float(torch.finfo(torch.float32).min)), [(0, 0)] * rank
    pool: Any = getattr(F, f"max_pool{rank}d")
    sizes = [a for a, _ in ends]
    made: Tensor = pool(x, list(kernel_shape), step, sizes, spread, bool(ceil_mode))
    return made


@op("AveragePool")
def _average_pool(
    x: Tensor, kernel_shape: Any, strides: Any = None, pads: Any = None, dilations: Any = None,
    ceil_mode: int = 0, count_include_pad: int = 0, auto_pad: str = "NOTSET",
) -> Tensor:  # fmt: skip
    rank = len(kernel_shape)
    step = list(strides or [1] * rank)
    if any(d != 1 for d in dilations or ()):
        raise ValueError(f"dilations={dilations}; expected 1")
    ends = window_pads(x.shape[2:], kernel_shape, step, [1] * rank, auto_pad, pads)
    pool: Any = getattr(F, f"avg_pool{rank}d")

    def pooled(values: Tensor, sizes: list[int], count: bool) -> Tensor:
        made: Tensor = pool(values, list(kernel_shape), step, sizes, bool(ceil_mode), count)
        return made

    if all(a == b and 2 * a <= k for (a, b), k in zip(ends, kernel_shape, strict=True)):
        return pooled(x, [a for a, _ in ends], bool(count_include_pad))
    if ceil_mode:
        raise ValueError(f"pads={pads} with ceil_mode=1; expected pads alike on both sides")
    sums = pooled(padded(x, ends), [0] * rank, True)
    if count_include_pad:
        return sums
    return sums / pooled(padded(torch.ones_like(x[:1, :1]), ends), [0] * rank, True)


@op("Conv")
def _conv(
    x: Tensor, weight: Any, bias: Any = None, kernel_shape: Any = None, strides: Any = None,
    pads: Any = None, dilations: Any = None, group: int = 1, auto_pad: str = "NOTSET",
) -> Tensor:  # fmt: skip
    weight = tensor(weight)
    rank = weight.dim() - 2
    step, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    ends = window_pads(x.shape[2:], weight.shape[2:], step, spread, auto_pad, pads)
    convolve: Any = getattr(F, f"conv{rank}d")
    made: Tensor = convolve(padded(x, ends), weight, tensor(bias), step, 0, spread, group)
    return made


def _nearest(x: Tensor, size: list[Any] | None, factors: list[float] | None) -> Tensor:
    """Rows floor(i / s) of each grid axis, divided in float32 as ONNX Runtime does."""
    axes = list(x.shape[2:])
    if size is not None:
        steps = [out / n for out, n in zip(size, axes, strict=True)]
    else:
        steps = [float(np.float32(factor)) for factor in factors or [1.0] * len(axes)]
        pairs = zip(axes, steps, strict=True)
        # torch has floor(n·s) in float64.
        size = [math.floor(np.float32(n * s) if isinstance(n, int) else n * s) for n, s in pairs]
    if size == axes:
        return x
    for axis, (n, out, step) in enumerate(zip(axes, size, steps, strict=True), 2):
        if isinstance(n, int) and isinstance(out, int):
            # torch multiplies by 1 / s, which gives another row where i / s is nearly whole.
            places = np.floor(np.arange(out, dtype=np.float32) / np.float32(step))
            rows = torch.from_numpy(places.clip(max=n - 1).astype(np.int64))
        else:
            rows = torch.floor(torch.arange(out, dtype=torch.float32) / step).clamp(max=n - 1)
        x = x.index_select(axis, rows.long())
    return x


_COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


@op("Resize")
def _resize(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel", nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75, antialias: int = 0, axes: Any = None,
    keep_aspect_ratio_policy: str = "stretch", exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
) -> Tensor:  # fmt: skip
    rank = x.dim() - 2
    along = [a % x.dim() for a in axes] if axes is not None else list(range(x.dim()))
    size: Any = None
    factors: Any = None
    given = numbers(sizes if sizes is not None else scales, "sizes or scales")
    by_axis = dict(zip(along, given, strict=True))
    if sizes is not None:
        size = [int(n) if not isinstance(n := by_axis.get(a, x.shape[a]), torch.SymInt) else n
                for a in range(2, x.dim())]  # fmt: skip
    else:
        factors = [float(by_axis.get(a, 1.0)) for a in range(2, x.dim())]
    how = coordinate_transformation_mode
    outer = [float(by_axis.get(a, 1.0)) for a in (0, 1)] if factors else [1.0, 1.0]
    whole = factors is not None and all(f == int(f) and f >= 1 for f in factors)
    floor = (how, nearest_mode) == ("asymmetric", "floor")
    # Whole factors: the nearest pixel by half_pixel is that by asymmetric and floor.
    exact = floor or (whole and how in _COORDINATES[:2] and nearest_mode.startswith("round"))
    linear = mode in ("linear", "cubic") and how in _COORDINATES[:3]
    cubic = cubic_coeff_a == -0.75 and not exclude_outside
    fits = exact if mode == "nearest" else linear and (mode == "linear" or cubic)
    if not fits or outer != [1.0, 1.0] or keep_aspect_ratio_policy != "stretch" or rank > 3:
        raise ValueError(
            f"mode={mode}, {how}, {nearest_mode}; expected nearest (asymmetric and floor, or whole "
            "factors), linear or cubic (half_pixel or align_corners) over grid axes. Export the "
            "resizing with one of these"
        )
    if size is not None:
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

        whole = all(
            statically_known_true(m % n == 0) for m, n in zip(size, x.shape[2:], strict=True)
        )
    if mode == "nearest" and not whole:
        return _nearest(x, size, factors)
    names = {"nearest": "nearest", "cubic": "bicubic"}
    name = names.get(mode, {1: "linear", 2: "bilinear", 3: "trilinear"}.get(rank, ""))
    corners = {} if mode == "nearest" else {"align_corners": how == "align_corners"}
    smooth = {"antialias": True} if antialias else {}
    return F.interpolate(x, size, factors, name, **corners, **smooth)


@op("GridSample")
def _grid_sample(
    x: Tensor, grid: Any, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    names = {"linear": "bilinear", "cubic": "bicubic"}
    kind = names.get(mode, mode)
    return F.grid_sample(x, tensor(grid), kind, padding_mode, bool(align_corners))


_BIAS_SCALE = 1e-5  # relative: s_b = s_x·s_w, multiplied in float32 by the tool that wrote the file


@dataclass(frozen=True, eq=False)
class Layer:
    """A product with a constant weight."""

    op: str  # ``"Conv"``, ``"ConvTranspose"`` or ``"Linear"``
    # ``[out, in / groups, *kernel]``, ``[in, out / groups, *kernel]``, ``[out, in]``
    weight: Array | Stored
    bias: Array | Stored | None  # ``[out]``
    settings: dict[str, Any]  # Of the module: stride, padding and the like
    # Settings of a padding before it (`pad_windows`), which the module cannot express
    pads: dict[str, Any] | None = None
    crop: tuple[int, ...] = ()  # Rows at the end of each axis that are no result

    def modules(self, grid: Grid | None) -> list[nn.Module]:
        """One module, or two whose results are to be added; `grid` is the input's one scale."""
        if not isinstance(self.weight, Stored) or grid is None:
            return [self._module(False, _floats(self.weight), self._bias())]
        centred, own = self.weight.centred, self.weight.grid
        floats = own.float_bits is not None
        narrow = centred if floats else np.clip(centred, -128, 127)
        rest = centred - narrow
        mixed = floats != (grid.float_bits is not None)
        # NaN of FP8 is among the rest.
        if mixed or not self._by_output(own) or not (abs(rest) < 128).all():
            return [self._module(False, self.weight.value, self._bias())]
        parts = [narrow, rest] if rest.any() else [centred]
        step = self._step(own)
        of_stored = step[0] if step.dim() > self._ndim else step  # broadcasts to the stored weight
        made = []
        for number, part in enumerate(parts):
            values = torch.from_numpy(part.astype(np.float32)) * of_stored
            module = self._module(True, values.numpy(), None if number else self._bias())
            module._input_quantizer = grid.quantizer(0)
            module._weight_quantizer = AffineQuantizer(step, float_bits=own.float_bits)
            if not number and not floats:
                self._keep_bias(module, grid, step)
            made.append(module)
        return made

    def _module(self, quantized: bool, weight: Array, bias: Array | None) -> Any:
        kind = self.op if self.op == "Linear" else f"{self.op}{weight.ndim - 2}d"
        cls: Any = getattr(bevquant_qnn, f"Quant{kind}") if quantized else getattr(nn, kind)
        groups = self.settings.get("groups", 1)
        sizes = [weight.shape[1], weight.shape[0]]
        if self.op != "Linear":
            sizes[0] *= groups
            sizes = sizes if self.op == "Conv" else [weight.shape[0], weight.shape[1] * groups]
            sizes.append(tuple(weight.shape[2:]))
        module = cls(*sizes, bias=bias is not None, **self.settings)
        module.weight = _parameter(weight)
        if bias is not None:
            module.bias = _parameter(bias)
        return module

    def _bias(self) -> Array | None:
        return None if self.bias is None else _floats(self.bias).reshape(-1)

    def _by_output(self, grid: Grid) -> bool:
        """Whether the scales number output channels."""
        ndim = self.weight.integers.ndim if isinstance(self.weight, Stored) else 0
        axis = int(self.op == "ConvTranspose")
        return grid.single or (not grid.block and grid.axis % ndim == axis)

    def _step(self, grid: Grid) -> Tensor:
        """Scales in the shape that `weight_to_quantize` gives the weight."""
        scale = torch.from_numpy(grid.scale)
        if grid.single:
            return scale.reshape(())
        ones = [1] * (self._ndim - 2)
        if self.op != "ConvTranspose":
            return scale.view(-1, 1, *ones)
        groups = self.settings["groups"]
        if groups == 1:
            return scale.view(1, -1, *ones)
        return scale.view(1, 1, -1, *ones).repeat(groups, 1, *[1] * (self._ndim - 1))

    @property
    def _ndim(self) -> int:
        weight = self.weight.integers if isinstance(self.weight, Stored) else self.weight
        return int(weight.ndim)

    def _keep_bias(self, module: Any, grid: Grid, step: Tensor) -> None:
        """Hold the file's int32 bias, where its scale is s_x·s_w."""
        bias = self.bias
        if not isinstance(bias, Stored) or bias.grid.zero.any():
            return
        channels = bias.integers.size
        factors = step.double().flatten()
        unit = factors.expand(channels) * float(grid.scale.reshape(()))
        own = torch.from_numpy(bias.grid.scale.reshape(-1)).double().expand(channels)
        if bool(((own - unit).abs() <= _BIAS_SCALE * unit).all()):
            kept = torch.from_numpy(bias.integers.reshape(-1).astype(np.int32))
            module.register_buffer("integer_bias", kept)


def layer_of(
    op: str, attributes: dict[str, Any], weight: Array | Stored, bias: Array | Stored | None
) -> Layer | None:
    """The layer that a node is, or None where it is none that a module of torch computes."""
    pads, settings, crop = None, dict[str, Any](), tuple[int, ...]()
    if op in ("Gemm", "MatMul"):
        plain = all(attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        if not plain or attributes.get("transA", 0) or raw(weight).ndim != 2:
            return None
        if op == "MatMul" or not attributes.get("transB", 0):
            turned = weight.transposed([1, 0]) if isinstance(weight, Stored) else weight.T
            weight = value_of(weight).T if turned is None else turned
        channels, op = raw(weight).shape[0], "Linear"
    else:
        settings = {
            "stride": tuple(attributes.get("strides") or [1] * (raw(weight).ndim - 2)),
            "dilation": tuple(attributes.get("dilations") or [1] * (raw(weight).ndim - 2)),
            "groups": attributes.get("group", 1),
        }
        if op == "ConvTranspose":
            crop = _pad_transposed(attributes, raw(weight).shape[2:], settings)
        else:
            pads = _pad(attributes, raw(weight).shape[2:], settings)
        channels = raw(weight).shape[0]
        if op == "ConvTranspose":
            channels = raw(weight).shape[1] * settings["groups"]
    if bias is not None and raw(bias).shape not in ((channels,), (1, channels)):
        if raw(bias).size != 1:
            return None
        bias = np.full(channels, value_of(bias).reshape(()), np.float32)
    return Layer(op, weight, bias, settings, pads, crop)


def _pad(
    attributes: dict[str, Any], kernel: tuple[int, ...], settings: dict[str, Any]
) -> dict[str, Any] | None:
    """Add the padding to a module's settings; those of `pad_windows` where it cannot be."""
    auto, pads = attributes.get("auto_pad", "NOTSET"), attributes.get("pads")
    stride, dilation = settings["stride"], settings["dilation"]
    given = {"kernel": kernel, "strides": stride, "dilations": dilation, "auto_pad": auto,
             "pads": pads}  # fmt: skip
    # Of stride 1 the input's size has no part in SAME_UPPER and SAME_LOWER.
    ends = window_pads([1] * len(kernel), **given)
    if (auto in ("NOTSET", "VALID") or max(stride) == 1) and all(a == b for a, b in ends):
        settings["padding"] = tuple(a for a, _ in ends)
        return None
    return given


def _pad_transposed(
    attributes: dict[str, Any], kernel: tuple[int, ...], settings: dict[str, Any]
) -> tuple[int, ...]:
    """Add the padding of ConvTranspose to a module's settings; returns rows to cut off."""
    auto, pads = attributes.get("auto_pad", "NOTSET"), attributes.get("pads")
    stride, dilation = settings["stride"], settings["dilation"]
    more = attributes.get("output_padding") or [0] * len(kernel)
    open_size = "output_shape" in attributes
    if auto in ("NOTSET", "VALID"):
        ends = window_pads((), kernel, stride, dilation, auto, pads)
    else:  # stride times the input's size; runtimes differ where kernels are narrower
        totals = [(k - 1) * d + 1 - s for k, s, d in zip(kernel, stride, dilation, strict=True)]
        open_size = open_size or min(totals) < 0 or any(more)
        ends = [(n // 2, n - n // 2) for n in totals]
        ends = ends if auto == "SAME_UPPER" else [pair[::-1] for pair in ends]
    # Less padding at the end than at the beginning is output padding.
    added = [n + a - b for n, (a, b) in zip(more, ends, strict=True)]
    wide = any(n >= max(s, d) for n, s, d in zip(added, stride, dilation, strict=True))
    if wide or open_size:
        raise ValueError(
            f"auto_pad={auto}, pads={pads}, output_padding={list(more)}, "
            f"output_shape={attributes.get('output_shape')}; expected explicit pads. Write the "
            "padding as numbers (onnxsim does)"
        )
    settings["padding"] = tuple(a for a, _ in ends)
    settings["output_padding"] = tuple(max(n, 0) for n in added)
    return tuple(max(-n, 0) for n in added)


def cropped(x: Tensor, crop: tuple[int, ...]) -> Tensor:
    """Without so many rows at the end of each axis of the grid."""
    for axis, rows in enumerate(crop, 2):
        x = x.narrow(axis, 0, x.shape[axis] - rows)
    return x


def pad_windows(x: Tensor, **settings: Any) -> Tensor:
    """Zeros around the input of a convolution whose padding is uneven, or follows its size."""
    return padded(x, window_pads(x.shape[2:], **settings))


def _floats(value: Array | Stored) -> Array:
    return np.ascontiguousarray(value_of(value), dtype=np.float32)


def _parameter(value: Array) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.ascontiguousarray(value)), requires_grad=False)

"""Conv, ConvTranspose, Gemm and MatMul with constant weights as modules of torch.

A weight behind DequantizeLinear makes a quantized module that holds the file's very integers or FP8
numbers: the weight is (q − z)·s, and its quantizer rounds it back to q − z. Where q − z leaves int8
(uint8 with another zero point than 128) it is the sum of two int8 weights, whose layers read one
input and are added as accumulators, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export.qdq_reader._constants import Array, Grid, Stored, raw, value_of
from bevquant_export.qdq_reader._grid_operators import padded, window_pads
from bevquant_qnn import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantLinear,
)
from bevquant_quantizers import AffineQuantizer

_CLASSES: dict[tuple[str, int], tuple[type[Any], type[Any]]] = {
    ("Conv", 1): (nn.Conv1d, QuantConv1d),
    ("Conv", 2): (nn.Conv2d, QuantConv2d),
    ("Conv", 3): (nn.Conv3d, QuantConv3d),
    ("ConvTranspose", 1): (nn.ConvTranspose1d, QuantConvTranspose1d),
    ("ConvTranspose", 2): (nn.ConvTranspose2d, QuantConvTranspose2d),
    ("ConvTranspose", 3): (nn.ConvTranspose3d, QuantConvTranspose3d),
    ("Linear", 0): (nn.Linear, QuantLinear),
}
_BIAS_SCALE = 1e-5  # relative: s_b = s_x·s_w, multiplied in float32 by the tool that wrote the file


@dataclass(frozen=True, eq=False)
class Layer:
    """A product with a constant weight.

    Attributes:
        op: ``"Conv"``, ``"ConvTranspose"`` or ``"Linear"``.
        weight: ``[out, in / groups, *kernel]``, ``[in, out / groups, *kernel]``, ``[out, in]``.
        bias: ``[out]``.
        settings: Of the module: stride, padding and the like.
        pads: Settings of a padding before it (`pad_windows`), which the module cannot express.
    """

    op: str
    weight: Array | Stored
    bias: Array | Stored | None
    settings: dict[str, Any]
    pads: dict[str, Any] | None = None

    def modules(self, grid: Grid | None) -> list[nn.Module]:
        """One module, or two whose results are to be added.

        Args:
            grid: Of the input; None where it is not quantized, or not by one scale.
        """
        if not isinstance(self.weight, Stored) or grid is None:
            return [self._module(0, _floats(self.weight), self._bias())]
        centred, own = self.weight.centred, self.weight.grid
        floats = own.float_bits is not None
        narrow = centred if floats else np.clip(centred, -128, 127)
        rest = centred - narrow
        mixed = floats != (grid.float_bits is not None)
        # NaN of FP8 is among the rest.
        if mixed or not self._by_output(own) or not (abs(rest) < 128).all():
            return [self._module(0, self.weight.value, self._bias())]
        parts = [narrow, rest] if rest.any() else [centred]
        step = self._step(own)
        made = []
        for number, part in enumerate(parts):
            values = torch.from_numpy(part.astype(np.float32)) * self._stored_step(step)
            module = self._module(1, values.numpy(), None if number else self._bias())
            module._input_quantizer = grid.quantizer(0)
            module._weight_quantizer = AffineQuantizer(step, float_bits=own.float_bits)
            if not number and not floats:
                self._keep_bias(module, grid, step)
            made.append(module)
        return made

    def _module(self, quantized: int, weight: Array, bias: Array | None) -> Any:
        cls = _CLASSES[self.op, weight.ndim - 2 if self.op != "Linear" else 0][quantized]
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

    def _stored_step(self, step: Tensor) -> Tensor:
        """Scales in a shape that broadcasts to the weight as it is stored."""
        return step[0] if step.dim() > self._ndim else step

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
    """The layer that a node is, or None where it is none that a module of torch computes.

    Raises:
        ValueError: A padding of ConvTranspose that no module expresses.
    """
    pads, settings = None, dict[str, Any]()
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
        pads = _pad(op, attributes, raw(weight).shape[2:], settings)
        channels = raw(weight).shape[0]
        if op == "ConvTranspose":
            channels = raw(weight).shape[1] * settings["groups"]
    if bias is not None and raw(bias).shape not in ((channels,), (1, channels)):
        if raw(bias).size != 1:
            return None
        bias = np.full(channels, value_of(bias).reshape(()), np.float32)
    return Layer(op, weight, bias, settings, pads)


def _pad(
    op: str, attributes: dict[str, Any], kernel: tuple[int, ...], settings: dict[str, Any]
) -> dict[str, Any] | None:
    """Add the padding to a module's settings; those of `pad_windows` where it cannot be."""
    auto, pads = attributes.get("auto_pad", "NOTSET"), attributes.get("pads")
    stride, dilation = settings["stride"], settings["dilation"]
    fixed = auto in ("NOTSET", "VALID")
    if op == "Conv":
        given = {"kernel": kernel, "strides": stride, "dilations": dilation, "auto_pad": auto,
                 "pads": pads}  # fmt: skip
        # Of stride 1 the input's size has no part in SAME_UPPER and SAME_LOWER.
        ends = window_pads([1] * len(kernel), **given)
        if (fixed or max(stride) == 1) and all(a == b for a, b in ends):
            settings["padding"] = tuple(a for a, _ in ends)
            return None
        return given
    ends = window_pads((), kernel, stride, dilation, auto, pads) if fixed else []
    more = attributes.get("output_padding") or [0] * len(kernel)
    # Less padding at the end than at the beginning is output padding.
    added = [n + a - b for n, (a, b) in zip(more, ends, strict=False)]
    wide = any(not 0 <= n < max(s, d) for n, s, d in zip(added, stride, dilation, strict=False))
    if not ends or wide or "output_shape" in attributes:
        raise ValueError(
            f"auto_pad={auto}, pads={pads}, output_padding={list(more)}, "
            f"output_shape={attributes.get('output_shape')}; expected explicit pads, at the end at "
            "most those at the beginning. Write the padding as numbers (onnxsim does)"
        )
    settings |= {"padding": tuple(a for a, _ in ends), "output_padding": tuple(added)}
    return None


def pad_windows(x: Tensor, **settings: Any) -> Tensor:
    """Zeros around the input of a convolution whose padding is uneven, or follows its size."""
    return padded(x, window_pads(x.shape[2:], **settings))


def _floats(value: Array | Stored) -> Array:
    return np.ascontiguousarray(value_of(value), dtype=np.float32)


def _parameter(value: Array) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.ascontiguousarray(value)), requires_grad=False)

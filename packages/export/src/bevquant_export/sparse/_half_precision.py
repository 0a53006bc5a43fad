r"""A model with the constants that a half-precision file holds.

Whether float16 holds the values between the layers of a sparse file, for every frame.

An engine keeps these in float16: outputs of fp16 layers, sums, and outputs of int8 layers that an
fp16 layer, a sum or the end of the file reads. Their interval follows from weights, ranges and
operands,

.. math:: \Bigl[\sum_i \min(x_0 w_i, x_1 w_i) + b,\; \sum_i \max(x_0 w_i, x_1 w_i) + b\Bigr],

limited to the largest value of all calibration frames, where known
(`bevquant_quantizers.float_ranges`), else to twice that of the example and batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_export.half._bounds import HEAD_ROOM
from bevquant_export.half._intervals import UNKNOWN, Bound, joined, weighted
from bevquant_export.sparse._graph import Add, Concat, Conv, Fold, Graph, Node, Relu, Select, Steps
from bevquant_export.sparse._observe import Seen
from bevquant_graph import check_kind, layer_class
from bevquant_qnn import QuantLinear, QuantSparseConvolution
from bevquant_quantizers import TensorQuantizer, float_ranges, format_of
from bevquant_sparse import is_sparse_conv

LARGEST_HALF = 65504.0
LEAST = 2.0**-17  # below it float16, whose step is 2⁻²⁴, is off by more than 2⁻⁸ of the value
_STEPS, _BITS = 127, 17  # 7 and 17 bits make the 24 of float32


def with_half_constants(model: nn.Module) -> nn.Module:
    """Return a copy whose sparse convolutions hold values that a float16 file can hold.

    Files of the libspconv dialect store weights and biases as float16. ``simulate`` of the copy
    computes the file's values, to the last integer; ``simulate(model, inputs)`` has biases that
    differ by up to 2⁻¹¹ of themselves. In the copy

    * biases of sparse convolutions, and weights of those that are not quantized, are rounded to
      float16, half to even;
    * weights of quantized layers are unchanged: the file holds their integers exactly. Steps of
      other than eight bits are rounded to 17 bits (by at most 2⁻¹⁸), as a file states 127 of them
      in float32;
    * biases of quantized linear layers are rounded, which are 1×1×1 convolutions on rows of voxels;
    * a batch norm that is not folded becomes ``x · half(γ/√(σ² + ε)) + half(β − μ·γ/√(σ² + ε))``.

    Args:
        model: Any module; it is not changed.

    Returns:
        The copy, on the model's device, in its dtype.

    Raises:
        ValueError: A constant is not finite or exceeds float16; the message names the layer.

    Example:
        >>> import torch
        >>> with_half_constants(torch.nn.ReLU())
        ReLU()
    """
    check_kind(model, nn.Module, "a torch module")
    return half_constants_of(model, dict(model.named_modules()))


def half_constants_of(model: nn.Module, paths: Container[str]) -> nn.Module:
    """`with_half_constants` for the modules at these paths; the others are unchanged."""
    copied = copy.deepcopy(model)
    sparse = any(map(_is_sparse, copied.modules()))
    for path, module in list(copied.named_modules()):
        if path not in paths:
            continue
        if sparse and path and layer_class(module, nn.BatchNorm1d) and not module.training:
            parent, _, name = path.rpartition(".")
            setattr(copied.get_submodule(parent), name, _Affine(module, path).eval())
        if not _is_sparse(module) and not (sparse and isinstance(module, QuantLinear)):
            continue
        names = ("bias",) if is_integer_layer(module) else ("bias", "weight", "kernel")
        if is_integer_layer(module):
            _round_steps(module._weight_quantizer)
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                with torch.no_grad():
                    half = to_half(value, f"{path}.{name}", factor=name != "bias")
                    value.copy_(half.to(value.dtype))
    return copied


def _round_steps(quantizer: Any) -> None:
    """Steps s for which float32 holds 127·s as well as s times the largest integer."""
    top = format_of(quantizer.num_bits).high
    if top != _STEPS and quantizer.amax is not None:
        mantissa, exponent = torch.frexp(quantizer.amax.double() / top)
        steps = torch.ldexp((mantissa * 2**_BITS).round(), exponent - _BITS)
        quantizer.amax = (steps * top).to(quantizer.amax.dtype)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, QuantSparseConvolution) or is_sparse_conv(module)


class _Affine(nn.BatchNorm1d):
    """A batch norm in evaluation mode as one product and one sum of float16 numbers.

    A forward may call ``functional.batch_norm`` with the norm's own tensors, so all of them are
    kept.
    """

    factor: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm1d, path: str) -> None:
        super().__init__(norm.num_features, norm.eps, affine=norm.affine)
        mean, variance = norm.running_mean, norm.running_var
        if mean is None or variance is None:
            raise ValueError(f"{path}: a batch norm without running statistics: train it with them")
        self.load_state_dict(norm.state_dict())
        factor = (variance.double() + norm.eps).rsqrt()
        if norm.affine:
            factor = factor * norm.weight.detach().double()
        shift = -mean.double() * factor
        if norm.affine:
            shift = shift + norm.bias.detach().double()
        for name, value in (("factor", factor), ("shift", shift)):
            half = to_half(value.float(), f"{path}.{name}", factor=name == "factor")
            self.register_buffer(name, half.to(mean.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Channels are the second axis."""
        ones = (1,) * (x.dim() - 2)
        return x * self.factor.reshape(-1, *ones) + self.shift.reshape(-1, *ones)


def is_integer_layer(module: Any) -> bool:
    """Whether a layer quantizes both its input and its weight."""
    quantizers = [getattr(module, n, None) for n in ("_input_quantizer", "_weight_quantizer")]
    return all(
        isinstance(q, TensorQuantizer) and not q._disabled and q._if_quant for q in quantizers
    )


def to_half(values: Tensor, name: str, *, factor: bool = False) -> Tensor:
    """`values` as float16, half to even.

    NaN, infinity, values beyond ±65504 and factors all below 2⁻¹⁷ are refused.
    """
    values = values.detach()
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name}: a value is NaN or infinite; train or load the model again")
    half = values.to(torch.float16)
    largest = float(values.abs().max()) if values.numel() else 0.0
    if factor and 0 < largest < LEAST:
        raise ValueError(
            f"{name}: the largest value is {largest:g}, of which float16, in which the file stores "
            "it, keeps too few digits; multiply it by a constant, and divide the weights of the "
            "layers that read it by that constant"
        )
    if not bool(half.isfinite().all()):
        raise ValueError(
            f"{name}: the value {largest:g} overflows float16 (largest "
            f"{LARGEST_HALF:g}), in which the file stores it; a batch norm with a tiny variance "
            "was probably folded into this layer: retrain it, or scale the layers around it"
        )
    return half


_OUTPUT = "output"


def check_half_values(graph: Graph, model: nn.Module, seen: Mapping[str, Seen]) -> None:
    """Refuse a file whose float16 values may overflow."""
    largest = _Largest(graph, model, seen)
    of: dict[str, Bound] = {}
    for node in graph.nodes:
        for name in node.inputs:
            of.setdefault(name, largest.cut(name, UNKNOWN))  # the input of the file
        before = largest.made(node, _bound(node, [of[name] for name in node.inputs]))
        bound = largest.cut(node.y, _behind_relu(node, before))
        of[node.y] = bound
        if node.makes_int8 or node.y in largest.before_relu:
            continue  # in front of a ReLU, −∞ equals any negative number
        if math.inf > bound.largest > LARGEST_HALF:
            raise ValueError(
                f"export_sparse_onnx: {node.path or 'the model'}: {largest.how(node, bound)}, "
                f"beyond float16 (largest {LARGEST_HALF:g}), in which the engine holds them; "
                "divide weight and bias of the layers that make them by a constant, multiply the "
                "weights of the layers that read them by it, and calibrate again"
            )


class _Largest:
    """Largest values of tensors, from the calibration or from example and batches."""

    def __init__(self, graph: Graph, model: nn.Module, seen: Mapping[str, Seen]) -> None:
        self._recorded = float_ranges(model)
        self._of: dict[str, float] = {}
        self.before_relu = {node.x for node in graph.nodes if isinstance(node, Relu)}
        for node in graph.nodes:
            if not isinstance(node, Conv):
                continue
            given = [v for k, v in self._recorded.get(node.path, {}).items() if k != _OUTPUT]
            if len(given) == 1:
                self._note(node.x, given[0].largest)
            elif node.y in seen and seen[node.y].largest:
                self._note(node.x, HEAD_ROOM * seen[node.y].largest)

    def _note(self, name: str, largest: float) -> None:
        self._of[name] = min(largest, self._of.get(name, math.inf))

    def cut(self, name: str, bound: Bound) -> Bound:
        """Bound of a tensor, from its consumers."""
        return bound.within(self._of[name], False) if name in self._of else bound

    def made(self, node: Node, bound: Bound) -> Bound:
        """Bound in front of a layer's ReLU, from its module's result."""
        made = self._made(node)
        return bound if made is None else bound.within(made, False)

    def _made(self, node: Node) -> float | None:
        found = self._recorded.get(node.path, {}).get(_OUTPUT)
        return found.largest if isinstance(node, Conv) and found is not None else None

    def how(self, node: Node, bound: Bound) -> str:
        """Magnitude of a node's values, in words."""
        if self._made(node) == bound.largest or self._of.get(node.y) == bound.largest:
            return f"its values reach {bound.largest:g} in a calibration frame"
        return f"its values may reach {bound.largest:g}, by its operands' ranges and weights"


def _bound(node: Node, given: list[Bound]) -> Bound:
    """Bound in front of the node's own ReLU."""
    first = given[0] if given else UNKNOWN
    if isinstance(node, Conv):
        x = _quantized(first, node.input_range if node.precision == "int8" else None)
        made = weighted(x, node.weight.double().numpy(), tuple(range(1, node.weight.dim())))
        bias = node.bias.double()
        low, high = (float(bias.min()), float(bias.max())) if len(bias) else (0.0, 0.0)
        return Bound(made.low + low, made.high + high)
    if isinstance(node, Add):
        ranges = (node.range_x, node.range_other) if node.precision == "int8" else (None, None)
        x, other = (_quantized(b, r) for b, r in zip(given, ranges, strict=True))
        return Bound(x.low + other.low, x.high + other.high)
    if isinstance(node, Concat):
        return joined(given)
    if isinstance(node, Fold):
        return UNKNOWN
    return UNKNOWN if isinstance(node, Steps) else joined([first, Bound(0.0, 0.0)])


def _quantized(bound: Bound, amax: float | None) -> Bound:
    return bound if amax is None else bound.within(amax * (1 + 1 / _STEPS), False)


def _behind_relu(node: Node, bound: Bound) -> Bound:
    relu = isinstance(node, Relu) or (isinstance(node, Conv | Select) and node.activation == "ReLU")
    return Bound(max(bound.low, 0.0), max(bound.high, 0.0)) if relu else bound

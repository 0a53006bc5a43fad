"""Fixing of every range, so that later training or export does not depend on data."""

from __future__ import annotations

from torch import Tensor, nn

from bevquant_graph import check_kind, ordinary_tensors
from bevquant_qnn._conv import QuantWeighted
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_quantizers import TensorQuantizer


@ordinary_tensors()
def freeze(model: nn.Module) -> tuple[str, ...]:
    """Fix the range of every active quantizer of the model, in place.

    Each quantizer that is not disabled then quantizes with a constant `_amax` buffer; calibration
    and learning of ranges are off. A weight quantizer without a range gets the one it has been
    using, the maximum of |w| per channel; a learned range becomes the buffer max(−min, max).
    Disabled quantizers stay disabled. Weights remain trainable. On error nothing is changed.

    Args:
        model: A calibrated model from `quantize_model`.

    Returns:
        The path of every frozen quantizer; a shared one with its first path.

    Raises:
        ValueError: Activations have no usable range (missing, NaN, Inf, negative or zero); the
            message lists these quantizers.

    Example:
        >>> import torch
        >>> from bevquant_qnn import QuantLinear
        >>> layer = QuantLinear(2, 2)
        >>> layer.input_quantizer.amax = 4.0
        >>> freeze(layer)
        ('_input_quantizer', '_weight_quantizer')
        >>> layer.weight_quantizer.amax.shape
        torch.Size([2, 1])
    """
    check_kind(model, nn.Module, "a torch module")
    active = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and not module._disabled
    }
    weights = weights_read(model)
    ranges = {path: range_in_use(quantizer, weights) for path, quantizer in active.items()}
    problems = [f"{path} ({_problem(amax)})" for path, amax in ranges.items() if _problem(amax)]
    if problems:
        msg = (
            f"freeze: {len(problems)} of {len(active)} quantizers have no usable range: "
            f"{', '.join(problems)}. Calibrate with batches that reach them and load the ranges, "
            "or disable() these quantizers."
        )
        raise ValueError(msg)
    for path, quantizer in active.items():
        amax = ranges[path]
        if amax is not None:
            _fix(quantizer, amax)
    return tuple(active)


def weights_read(model: nn.Module) -> dict[nn.Module, Tensor]:
    """Return the weight that each weight quantizer reads."""
    check_kind(model, nn.Module, "a torch module")
    found: dict[nn.Module, Tensor] = {}
    for module in model.modules():
        quantizer = module._modules.get("_weight_quantizer")
        if quantizer is None:
            continue
        if isinstance(module, QuantWeighted | QuantSparseConvolution):
            found[quantizer] = module.weight_to_quantize().detach()
        elif (weight := module._parameters.get("weight")) is not None:
            found[quantizer] = weight.detach()
    return found


def range_in_use(quantizer: TensorQuantizer, weights: dict[nn.Module, Tensor]) -> Tensor | None:
    """Return the range that the quantizer quantizes with; of a bare weight quantizer max |w|."""
    amax = quantizer.amax_in_use
    if amax is not None or quantizer not in weights:
        return amax
    weight, axis = weights[quantizer].abs(), quantizer.axis
    if axis is None:
        return weight.amax()
    kept = {a % weight.dim() for a in ((axis,) if isinstance(axis, int) else axis)}
    return weight.amax([d for d in range(weight.dim()) if d not in kept], keepdim=True)


def _problem(amax: Tensor | None) -> str:
    if amax is None:
        return "not calibrated"
    if not bool(amax.isfinite().all()):
        return "NaN or Inf"
    if bool((amax < 0).any()):
        return "negative"
    # A single zero among channels is a channel of zeros, such as BN weight 0 leaves behind.
    return "" if bool((amax > 0).any()) else "zero"


def _fix(quantizer: TensorQuantizer, amax: Tensor) -> None:
    if quantizer._learn_amax:
        quantizer.disable_clip()
        quantizer._learn_amax = False
    # A range learned as a parameter becomes a constant.
    quantizer._parameters.pop("_amax", None)
    quantizer.register_buffer("_amax", amax)
    quantizer.disable_calib()
    quantizer.enable_quant()

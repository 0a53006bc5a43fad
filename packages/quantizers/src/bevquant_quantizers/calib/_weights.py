"""Ranges of weights, searched channel by channel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from ._search import search_amax


def calibrate_weights(
    model: nn.Module,
    method: str = "percentile",
    perchannel: bool = True,
    percentile: float = 99.99,
    num_bins: int = 2048,
) -> None:
    """Set the range of every weight quantizer in `model` from the weight it quantizes.

    A weight quantizer is the attribute ``weight_quantizer`` of a module that has a ``weight``.
    Each channel's absolute weights are counted in `num_bins` equal bins up to the largest, as
    `numpy.histogram` counts them, and searched as `HistogramCalibrator` searches. The range of a
    channel of zeros is 0.

    Args:
        model: Any module.
        method: ``"mse"``, ``"entropy"``, ``"percentile"`` or ``"max"``.
        perchannel: One range per output channel: axis 1 of a transposed convolution's weight, for
            every other module the axis of its weight quantizer, or 0 where that has none. False:
            one range for the whole weight.
        percentile: Share of values to keep, 0…100.
        num_bins: Bins of the histograms.

    Raises:
        TypeError: An unknown method.
        ValueError: A weight that holds NaN or infinite values, or a percentile out of range.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_quantizers import TensorQuantizer
        >>> layer = nn.Linear(2, 2)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, -2.0], [0.5, 0.25]]))
        >>> layer.weight_quantizer = TensorQuantizer()
        >>> calibrate_weights(layer, method="max")
        >>> layer.weight_quantizer.amax
        tensor([[2.0000],
                [0.5000]])
    """
    for path, module in model.named_modules():
        weight, quantizer = (getattr(module, key, None) for key in ("weight", "weight_quantizer"))
        if weight is None or quantizer is None:
            continue
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"{path or type(module).__name__}.weight holds NaN or infinite values: it cannot "
                "be calibrated"
            )
        axis = _channel_axis(module, quantizer.axis) % weight.dim() if perchannel else None
        rows = weight.detach().abs().float()
        rows = rows.reshape(1, -1) if axis is None else rows.movedim(axis, 0).flatten(1)
        found = [
            _row_amax(row, method, num_bins, quantizer.num_bits, quantizer.unsigned, percentile)
            for row in rows.cpu().numpy()
        ]
        shape = [len(found) if i == axis else 1 for i in range(weight.dim())]
        amax = np.array(found, dtype=np.float32).reshape(() if axis is None else shape)
        quantizer.amax = amax
        quantizer.to(weight.device)


def _channel_axis(module: nn.Module, axis: int | tuple[int, ...] | None) -> int:
    if isinstance(module, _ConvTransposeNd):
        return 1
    if isinstance(axis, tuple):
        return axis[0] if len(axis) == 1 else 0
    return 0 if axis is None else axis


def _row_amax(
    row: npt.NDArray[np.float32],
    method: str,
    num_bins: int,
    num_bits: int,
    unsigned: bool,
    percentile: float,
) -> float:
    largest = float(row.max()) if row.size else 0.0
    if largest == 0.0:
        counts, edges = np.zeros(1, np.int64), np.zeros(2, np.float32)
    else:
        # The range's type decides how numpy rounds: float32, as upstream's.
        counts, edges = np.histogram(row, num_bins, (0, row.max()))
    return search_amax(
        method,
        counts,
        edges.astype(np.float32),
        num_bits=num_bits,
        unsigned=unsigned,
        percentile=percentile,
        largest=largest,
    )

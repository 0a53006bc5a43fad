"""One entry to the searches of a range in a histogram; ranges of weights, channel by channel."""

from __future__ import annotations

import operator
from numbers import Real

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from bevquant_graph import check_kind
from bevquant_quantizers._format import NumBits

from ._entropy import entropy_amax
from ._mse import mse_amax

METHODS = ("max", "mse", "entropy", "percentile")


def search_amax(
    method: str,
    counts: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float32],
    *,
    num_bits: NumBits,
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
    percentile: float = 99.99,
    largest: float | None = None,
) -> float:
    """Return the range that `method` finds in a histogram of absolute values.

    Args:
        method: ``"mse"``, ``"entropy"``, ``"percentile"`` or ``"max"``.
        counts: int64 [bins].
        edges: float32 [bins + 1], ascending from 0 in equal steps.
        num_bits: Bits of the integer, or of FP8.
        unsigned: Whether the integers start at 0.
        stride: Step between candidates, in bins.
        start_bin: First candidate.
        percentile: Share of values to keep, 0…100.
        largest: The largest value counted; None takes the last edge.

    Returns:
        The range; 0.0 where the histogram holds nothing but zeros.

    Raises:
        TypeError: An unknown method.
        ValueError: Entropy of FP8, a percentile outside 0…100, a stride below 1, a negative first
            bin.
    """
    if method not in METHODS:
        raise TypeError(
            f"Unknown calibration method {method!r}: use one of {', '.join(map(repr, METHODS))}"
        )
    if not isinstance(percentile, Real) or not 0 <= percentile <= 100:
        raise ValueError(
            f"Invalid percentile. Must be in range 0 <= percentile <= 100, got {percentile}."
        )
    try:
        wrong = operator.index(stride) < 1 or operator.index(start_bin) < 0
    except TypeError:
        wrong = True
    if wrong:
        raise ValueError(
            f"need integers stride >= 1 and start_bin >= 0, got {stride!r} and {start_bin!r}"
        )
    top = float(edges[-1]) if largest is None else largest
    # Without a candidate the largest value is left.
    # Ranges of block formats follow from each block: NVFP4's is that of the largest.
    follows = method == "max" or isinstance(num_bits, str)
    if top == 0.0 or follows or (method != "percentile" and start_bin >= len(counts)):
        return top
    stride = min(stride, len(counts))
    if method == "percentile":
        return percentile_amax(counts, edges, percentile)
    if isinstance(num_bits, tuple) and method == "entropy":
        raise ValueError(
            "calibration method 'entropy' merges bins into equal steps, which FP8 does not have: "
            "use 'mse' or 'max'"
        )
    if method == "entropy":
        return entropy_amax(counts, edges, num_bits, unsigned, stride, start_bin)
    return mse_amax(counts, edges, num_bits, unsigned, stride, start_bin, top)


def percentile_amax(
    counts: npt.NDArray[np.int64], edges: npt.NDArray[np.float32], percentile: float
) -> float:
    """Return the lower edge of the first bin at which `percentile` of the values is reached.

    The edge that upstream returns. Where that is 0, because the first bin alone holds the share,
    the bin's upper edge is returned: a range of 0 would quantize everything to zero.

    Args:
        counts: int64 [bins], not all zero.
        edges: float32 [bins + 1].
        percentile: Share of values to keep, 0…100.

    Examples:
        >>> import numpy as np
        >>> percentile_amax(np.array([5, 4, 1]), np.array([0, 1, 2, 3], dtype=np.float32), 90.0)
        1.0
    """
    reached = np.cumsum(counts / counts.sum())
    return float(edges[max(int(np.searchsorted(reached, percentile / 100)), 1)])


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
    check_kind(model, nn.Module, "a torch module")
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
    num_bits: NumBits,
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

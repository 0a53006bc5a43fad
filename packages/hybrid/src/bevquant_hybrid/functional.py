"""Functions under their documented path: colours, `argmax` and `filter`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._integer_ops import operator
from bevquant_hybrid._leaf import wrap
from bevquant_hybrid.qtensor import QTensor, as_float

__all__ = [
    "argmax",
    "bgr2centered_gray",
    "bgr2centered_yuv",
    "bgr2gray",
    "bgr2rgb",
    "bgr2yuv",
    "centered_yuv2bgr",
    "centered_yuv2rgb",
    "filter",
    "rgb2bgr",
    "rgb2centered_gray",
    "rgb2centered_yuv",
    "rgb2gray",
    "rgb2yuv",
]

# 256 times the coefficients of BT.601, rounded so that the rows of U and V sum to 0 and full-swing
# Y to 256: white, grey and black have no colour.
_TO_YUV: dict[str, tuple[tuple[int, int, int], ...]] = {
    "studio": ((66, 129, 25), (-38, -74, 112), (112, -94, -18)),
    "full": ((77, 150, 29), (-43, -84, 127), (127, -106, -21)),
}
_OFFSETS = {"studio": (16, 128, 128), "full": (0, 128, 128)}
# Size of a step of Y and of U or V in RGB: 219 and 224 steps span the studio swing.
_GAINS = {"studio": (255 / 219, 255 / 224), "full": (1.0, 1.0)}
_RED, _GREEN, _BLUE = 0.299, 0.587, 0.114  # luma of BT.601
_OF_RED, _OF_BLUE = 2 * (1 - _RED), 2 * (1 - _BLUE)  # 1.402 and 1.772


def _planes(image: Tensor, what: str) -> list[Tensor]:
    """The three channels (third axis from the end) in float."""
    # While torch.jit traces, sizes are tensors.
    if not torch._C._is_tracing() and (image.dim() < 3 or image.shape[-3] != 3):
        raise ValueError(
            f"{what}: expected an image [N, 3, height, width] (or [3, height, width]), got "
            f"{tuple(image.shape)}"
        )
    values = image if image.is_floating_point() else image.float()
    return list(values.unbind(-3))


def _known_swing(swing: str, what: str) -> str:
    if swing not in _TO_YUV:
        raise ValueError(f"{what}: swing={swing!r}: expected 'studio' or 'full'")
    return swing


def _weighted(planes: Sequence[Tensor], weights: Sequence[int], offset: int) -> Tensor:
    r, g, b = planes
    return torch.floor((weights[0] * r + weights[1] * g + weights[2] * b + 128) / 256) + offset


def _to_yuv(image: Tensor, swing: str, reverse: bool, what: str) -> Tensor:
    planes = _planes(image, what)
    rows = _TO_YUV[_known_swing(swing, what)]
    if reverse:
        planes.reverse()
    pairs = zip(rows, _OFFSETS[swing], strict=True)
    return torch.stack([_weighted(planes, row, offset) for row, offset in pairs], -3)


def _to_gray(image: Tensor, reverse: bool, what: str) -> Tensor:
    planes = _planes(image, what)
    if reverse:
        planes.reverse()
    return _weighted(planes, _TO_YUV["full"][0], 0).unsqueeze(-3)


@wrap()
def rgb2yuv(input: Tensor, swing: str = "studio") -> Tensor:
    r"""RGB to YUV444 of BT.601: :math:`\lfloor (M\,rgb + 128)/256 \rfloor + o`.

    ======  ===================================================  =============
    swing   M                                                    o
    ======  ===================================================  =============
    studio  (66 129 25), (−38 −74 112), (112 −94 −18)            16, 128, 128
    full    (77 150 29), (−43 −84 127), (127 −106 −21)           0, 128, 128
    ======  ===================================================  =============

    Args:
        input: ``[N, 3, height, width]``, 0…255.
        swing: ``"studio"`` (Y 16…235, U and V 16…240) or ``"full"`` (0…255), which BPUs take.

    Returns:
        Whole numbers in the input's float type; float32 of integers.

    Raises:
        ValueError: Another shape or swing.

    Example:
        >>> rgb2yuv(torch.tensor([255, 0, 0]).reshape(1, 3, 1, 1), "full").flatten()
        tensor([ 77.,  85., 255.])
    """
    return _to_yuv(input, swing, False, "rgb2yuv")


@wrap()
def bgr2yuv(input: Tensor, swing: str = "studio") -> Tensor:
    """BGR to YUV444 of BT.601; see `rgb2yuv`."""
    return _to_yuv(input, swing, True, "bgr2yuv")


@wrap()
def rgb2centered_yuv(input: Tensor, swing: str = "studio") -> Tensor:
    """RGB to YUV444 minus 128, the output of a BPU's image pyramid; see `rgb2yuv`.

    Example:
        >>> rgb2centered_yuv(torch.full((1, 3, 1, 1), 255.0), "full").flatten()
        tensor([127.,   0.,   0.])
    """
    return _to_yuv(input, swing, False, "rgb2centered_yuv") - 128


@wrap()
def bgr2centered_yuv(input: Tensor, swing: str = "studio") -> Tensor:
    """BGR to YUV444 minus 128; see `rgb2yuv`."""
    return _to_yuv(input, swing, True, "bgr2centered_yuv") - 128


@wrap()
def rgb2gray(input: Tensor) -> Tensor:
    """RGB to grey ``[N, 1, height, width]``, 0…255: full-swing Y of `rgb2yuv`."""
    return _to_gray(input, False, "rgb2gray")


@wrap()
def bgr2gray(input: Tensor) -> Tensor:
    """BGR to grey ``[N, 1, height, width]``, 0…255: full-swing Y of `rgb2yuv`."""
    return _to_gray(input, True, "bgr2gray")


@wrap()
def rgb2centered_gray(input: Tensor) -> Tensor:
    """RGB to grey minus 128."""
    return _to_gray(input, False, "rgb2centered_gray") - 128


@wrap()
def bgr2centered_gray(input: Tensor) -> Tensor:
    """BGR to grey minus 128."""
    return _to_gray(input, True, "bgr2centered_gray") - 128


@wrap()
def rgb2bgr(input: Tensor) -> Tensor:
    """Turn the three channels of ``[N, 3, height, width]`` around."""
    return input.flip(-3)


@wrap()
def bgr2rgb(input: Tensor) -> Tensor:
    """Turn the three channels of ``[N, 3, height, width]`` around."""
    return input.flip(-3)


@operator
def decode_yuv(
    yuv: Tensor,
    swing: str,
    mean: Sequence[float],
    std: Sequence[float],
    q_scale: float,
    bgr: bool,
    rounding: str,
) -> Tensor:
    """Integers of normalized colours; `yuv` is centred, float64 ``[…, 3, height, width]``."""
    luma, chroma = _GAINS[swing]
    y, u, v = yuv.unbind(-3)
    y = (y + (128 - _OFFSETS[swing][0])) * luma
    u, v = u * chroma, v * chroma
    green = y - (_BLUE * _OF_BLUE * u + _RED * _OF_RED * v) / _GREEN
    channels = [y + _OF_RED * v, green, y + _OF_BLUE * u]
    if bgr:
        channels.reverse()
    colours = torch.stack(channels, -3).clamp(0.0, 255.0)
    centre, spread = (yuv.new_tensor(values).reshape(-1, 1, 1) for values in (mean, std))
    scale = yuv.new_tensor(q_scale, dtype=torch.float32)
    return ops.quantize((colours - centre) / spread, scale, -1, 8, rounding)


def _numbers(values: float | Sequence[float] | Tensor, what: str) -> list[float]:
    if isinstance(values, int | float):
        return [float(values)]
    found = values.reshape(-1).tolist() if isinstance(values, Tensor) else list(values)
    if len(found) not in (1, 3):
        raise ValueError(f"{what}: expected one number or three, got {len(found)}")
    return [float(value) for value in found]


def _from_yuv(
    image: Tensor,
    swing: str,
    mean: float | Sequence[float] | Tensor,
    std: float | Sequence[float] | Tensor,
    q_scale: float | Tensor,
    bgr: bool,
    what: str,
) -> QTensor:
    yuv = as_float(image).double()
    _planes(yuv, what)
    centre, spread = _numbers(mean, f"{what}: mean"), _numbers(std, f"{what}: std")
    step = float(q_scale)
    if not step > 0 or not min(spread) > 0:
        raise ValueError(f"{what}: std={std}, q_scale={q_scale}: expected positive numbers")
    rounding = image.rounding if isinstance(image, QTensor) else "half_up"
    q = decode_yuv(yuv, _known_swing(swing, what), centre, spread, step, bgr, rounding)
    scale = yuv.new_full((1,), step, dtype=torch.float32)
    integers = isinstance(image, QTensor) and image.holds_integers
    return QTensor(q if integers else q * scale, scale, "qint8", rounding=rounding)


@wrap()
def centered_yuv2rgb(
    input: Tensor,
    swing: str = "studio",
    mean: float | Sequence[float] | Tensor = (128.0,),
    std: float | Sequence[float] | Tensor = (128.0,),
    q_scale: float | Tensor = 1.0 / 128.0,
) -> QTensor:
    r"""Centred YUV444 to RGB, normalized and quantized as a model's QuantStub did in training.

    For a converted model that was trained on RGB and receives YUV: call it on the QuantStub's
    output, pass the stub's scale as `q_scale`, and set the stub's scale to 1. With y = (Y + 128 −
    o)·255/219 and u, v = U, V·255/224 (studio; both gains are 1 in full swing), BT.601 gives R = y
    + 1.402 v, G = y − 0.344 u − 0.714 v, B = y + 1.772 u, clipped to 0…255; then :math:`q =
    \operatorname{clamp}(\operatorname{round}((rgb - mean)/(std \cdot s)))`, computed in float64.

    Args:
        input: ``[N, 3, height, width]`` from the QuantStub with scale 1, or its float values.
        swing: ``"studio"`` or ``"full"``, which BPUs give.
        mean: Mean of RGB, one number or three, in 0…255.
        std: Standard deviation, likewise.
        q_scale: Scale of the QuantStub in training.

    Returns:
        qint8 of scale `q_scale`.

    Raises:
        ValueError: Another shape or swing, or settings that do not fit.

    Example:
        >>> white = QTensor(torch.tensor([127, 0, 0]).reshape(1, 3, 1, 1), torch.ones(1), "qint8")
        >>> centered_yuv2rgb(white, "full").int_repr().flatten()
        tensor([127, 127, 127], dtype=torch.int8)
    """
    return _from_yuv(input, swing, mean, std, q_scale, False, "centered_yuv2rgb")


@wrap()
def centered_yuv2bgr(
    input: Tensor,
    swing: str = "studio",
    mean: float | Sequence[float] | Tensor = (128.0,),
    std: float | Sequence[float] | Tensor = (128.0,),
    q_scale: float | Tensor = 1.0 / 128.0,
) -> QTensor:
    """Centred YUV444 to BGR; `mean` and `std` are those of BGR. See `centered_yuv2rgb`."""
    return _from_yuv(input, swing, mean, std, q_scale, True, "centered_yuv2bgr")


@wrap()
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index of the largest value along `dim`, as a plain tensor.

    Args:
        input: Float or quantized.
        dim: Axis; None for the flattened tensor.
        keepdim: Keep the axis with length 1.

    Example:
        >>> argmax(torch.tensor([[1.0, 3.0]]), dim=1)
        tensor([1])
    """
    return torch.argmax(as_float(input), dim, keepdim)


@wrap()
def filter(
    *inputs: Tensor, threshold: float, idx_range: tuple[int, int] | None = None
) -> list[list[Tensor]]:
    """Keep the pixels whose largest channel in the first input exceeds a threshold.

    Args:
        *inputs: Float or quantized ``[N, C, H, W]``, of the same N, H and W.
        threshold: Lower limit (exclusive) of the largest value.
        idx_range: First channel and last + 1 of the first input to compare; None for all.

    Returns:
        For each sample: the largest values ``[M]``, their channels ``[M]`` (counted from the first
        compared one), the pixels ``[M, 2]`` as row and column, and each input's values ``[M, C]``.
        All dequantized, in the order of the pixels.

    Raises:
        ValueError: No inputs, or shapes that do not fit.

    Example:
        >>> scores = torch.tensor([[[[0.1, 0.9]]]])
        >>> filter(scores, threshold=0.5)
        [[tensor([0.9000]), tensor([0]), tensor([[0, 1]]), tensor([[0.9000]])]]
    """
    shapes = {(x.shape[0], *x.shape[2:]) for x in inputs}
    if len(shapes) != 1 or any(x.dim() != 4 for x in inputs):
        raise ValueError(
            "filter: expected one or more inputs [N, C, H, W] of the same N, H and W, got "
            f"{[tuple(x.shape) for x in inputs]}"
        )
    floats = [as_float(x) for x in inputs]
    start, end = idx_range or (0, floats[0].shape[1])
    largest, channels = floats[0][:, start:end].max(1)
    result = []
    for sample in range(floats[0].shape[0]):
        pixels = (largest[sample] > threshold).nonzero()
        rows, columns = pixels.unbind(1)
        picked = [x[sample, :, rows, columns].t() for x in floats]
        found = largest[sample, rows, columns], channels[sample, rows, columns]
        result.append([*found, pixels, *picked])
    return result

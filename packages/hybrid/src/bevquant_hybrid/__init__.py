"""CPU/BPU partition and quantization, under horizon_plugin_pytorch's documented names."""

from __future__ import annotations

from bevquant_hybrid import (
    dtype,
    functional,
    fx,
    jit,
    mapper,
    march,
    nn,
    qat_mode,
    qtensor,
    quantization,
    runtime,
    utils,
)
from bevquant_hybrid._qdq import _program as _program  # says how exporters read its models
from bevquant_hybrid._version import __version__
from bevquant_hybrid.functional import (
    argmax,
    bgr2centered_gray,
    bgr2centered_yuv,
    bgr2gray,
    bgr2rgb,
    bgr2yuv,
    centered_yuv2bgr,
    centered_yuv2rgb,
    rgb2bgr,
    rgb2centered_gray,
    rgb2centered_yuv,
    rgb2gray,
    rgb2yuv,
)
from bevquant_hybrid.march import March, get_march, set_march
from bevquant_hybrid.quantization import qconfig

__all__ = [
    "March",
    "__version__",
    "argmax",
    "bgr2centered_gray",
    "bgr2centered_yuv",
    "bgr2gray",
    "bgr2rgb",
    "bgr2yuv",
    "centered_yuv2bgr",
    "centered_yuv2rgb",
    "dtype",
    "functional",
    "fx",
    "get_march",
    "jit",
    "mapper",
    "march",
    "nn",
    "qat_mode",
    "qconfig",
    "qtensor",
    "quantization",
    "rgb2bgr",
    "rgb2centered_gray",
    "rgb2centered_yuv",
    "rgb2gray",
    "rgb2yuv",
    "runtime",
    "set_march",
    "utils",
]

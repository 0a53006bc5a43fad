"""Pooling and resizing, with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bevquant_export._errors import QdqError
from bevquant_export.dense.nodes._at import At


def max_pool(at: At, given: Mapping[str, Any]) -> str:
    """MaxPool."""
    rank, ceil_mode = len(at.shape(at.step.args[0])) - 2, int(given["ceil_mode"])
    windows, dilations = _windows(given, rank), _each(given["dilation"], rank)
    return at.node("MaxPool", at.step.args[0], dilations=dilations, ceil_mode=ceil_mode, **windows)


def average_pool(at: At, x: str, given: Mapping[str, Any]) -> str:
    """AveragePool, GlobalAveragePool or means of slices, by the arguments of torch's function."""
    shapes = [at.source.named(name) for name in (at.step.args[0].name, at.step.outputs[0])]
    rank = len(shapes[0]) - 2
    if given.get("kernel_size") is None:
        return _adaptive(at, x, shapes[0][2:], shapes[1][2:])
    windows, ceil_mode = _windows(given, rank), int(given["ceil_mode"])
    counted = int(given["count_include_pad"] and any(windows["pads"]))
    openvino = at.graph.profile.runner == "openvino"
    if counted and (ceil_mode or openvino):
        # torch counts the padding, ONNX what hangs over it too; OpenVINO counts integers of 0,
        # which stand for less than nothing where the zero point is another.
        counted, pads = 0, windows["pads"][:rank]
        sizes = zip(*(shape[2:] for shape in shapes), *windows.values(), strict=False)
        if ceil_mode and any(
            isinstance(n, str) or -(-(n + 2 * p - k) // s) + 1 != m for n, m, k, s, p in sizes
        ):
            raise QdqError(
                f"{at.path}: an average with ceil_mode whose last window may begin "
                "in the padding is another one in ONNX; set ceil_mode=False or less padding"
            )
        x = at.node("Pad", x, [0, 0, *pads] * 2, mode="constant")
        x = at.graph.held_off(at.path, x) if openvino else x
        windows["pads"] = [0] * 2 * rank
    return at.node("AveragePool", x, ceil_mode=ceil_mode, count_include_pad=counted, **windows)


def _adaptive(at: At, x: str, sizes: tuple[int | str, ...], wanted: tuple[int | str, ...]) -> str:
    if all(n == 1 for n in wanted):
        return at.node("GlobalAveragePool", x)
    window = []
    for axis, (n, out) in enumerate(zip(sizes, wanted, strict=True), 2):
        if not (isinstance(n, str) or isinstance(out, str)):
            x = _uneven(at, x, axis, n, out) if n % out else x
            window.append(1 if n % out else n // out)
            continue
        if out == 1:
            x = at.node("ReduceMean", x, axes=[axis], keepdims=1)
        elif n != out:
            raise QdqError(
                f"{at.path or 'the model'}: the windows of an adaptive average pool "
                f"follow a free size (axis {axis}); expected a fixed size, or an output size of 1. "
                "Give the pool a map of fixed size, or use an average pool with a fixed window"
            )
        window.append(1)
    if all(n == 1 for n in window):
        return x
    return at.node("AveragePool", x, kernel_shape=window, strides=window)


def _uneven(at: At, x: str, axis: int, size: int, wanted: int) -> str:
    """Means along one axis over windows of several sizes, ⌊i·size/wanted⌋ … ⌈(i+1)·size/wanted⌉."""
    # ONNX has no such pooling; a mean over a rectangle is the mean of its rows' means.
    means = []
    for i in range(wanted):
        ends = i * size // wanted, -(-(i + 1) * size // wanted)
        part = at.sliced(x, {axis: (*ends, 1)})
        means.append(at.node("ReduceMean", part, axes=[axis], keepdims=1))
    return at.node("Concat", *means, axis=axis)


def resize(at: At, given: Mapping[str, Any]) -> str:
    """Resize as torch's ``interpolate``, nearest or bilinear."""
    settings: dict[str, Any] = {"mode": "nearest", "nearest_mode": "floor"}
    settings["coordinate_transformation_mode"] = "asymmetric"
    if given["mode"] != "nearest":
        corners = "align_corners" if given["align_corners"] else "half_pixel"
        settings = {"mode": "linear", "coordinate_transformation_mode": corners}
    x, made = at.step.args[0], at.step.outputs[0]
    name, before, after = at.name(x), at.shape(x), at.source.shapes[made]
    modern = at.graph.profile.opset >= 13  # before, what is not given is an empty tensor
    region = "" if modern else at.graph.constant("no_region", np.zeros(0))
    if given["scale_factor"] is None:
        # Sizes, not factors: 3 · float32(7/3) may fall short of 7.
        none = "" if modern else at.graph.constant("no_factors", np.zeros(0))
        sizes = _resized(at, name, at.source.named(made))
        return at.node("Resize", name, region, none, sizes, **settings)
    ratios = _each(given["scale_factor"], len(before) - 2)
    factors = np.array([1.0, 1.0, *ratios], np.float32)
    reached = [int(np.floor(n * f)) for n, f in zip(before[2:], factors[2:], strict=True)]
    if reached != list(after[2:]):
        raise QdqError(
            f"{at.path or 'the model'}: no float32 factor resizes "
            f"{tuple(before[2:])} to {tuple(after[2:])}; give interpolate the size"
        )
    text = "_".join(str(float(f)) for f in factors)
    constant = at.graph.constant(f"factors_{text}", factors)
    return at.node("Resize", name, region, constant, **settings)


def _resized(at: At, x: str, shape: tuple[int | str, ...]) -> str:
    """Sizes of a resized map as a tensor; a free batch is that of `x`."""
    free = [axis for axis, size in enumerate(shape) if isinstance(size, str)]
    if not free:
        return at.graph.numbers(shape)
    if free != [0]:
        raise QdqError(
            f"{at.path or 'the model'}: the size of a resized map follows a free "
            f"size (axes {free}); expected the batch alone. Export with dynamic_batch=False"
        )
    batch = at.node("Gather", at.node("Shape", x), [0], axis=0)
    return at.node("Concat", batch, shape[1:], axis=0)


def _windows(given: Mapping[str, Any], rank: int) -> dict[str, list[int]]:
    kernel = _each(given["kernel_size"], rank)
    stride = _each(given["stride"] or kernel, rank)
    return {"kernel_shape": kernel, "strides": stride, "pads": _each(given["padding"], rank) * 2}


def _each(value: Any, rank: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * rank

"""Pooling and resizing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bevquant_export._errors import QdqError
from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._graph import Graph
from bevquant_export.dense.nodes._layout_ops import sliced


def max_pool(graph: Graph, path: str, x: str, given: Mapping[str, Any], rank: int) -> str:
    """MaxPool, with torch's arguments; `rank` counts the axes of the grid."""
    return graph.node(
        "MaxPool", path, [x],
        dilations=_each(given["dilation"], rank), ceil_mode=int(given["ceil_mode"]),
        **_windows(given, rank),
    )  # fmt: skip


def average_pool(
    graph: Graph, path: str, x: str, given: Mapping[str, Any], shapes: tuple[Any, Any]
) -> str:
    """AveragePool, GlobalAveragePool or means of slices, with torch's arguments.

    Args:
        graph: Receives the nodes.
        path: Module.
        x: Input.
        given: Arguments of torch's function; ``output_size`` for the adaptive one.
        shapes: Of the input and of the output, with names for free sizes.

    Raises:
        ValueError: ONNX has another number of windows (the last one would begin in padding), or the
            windows depend on a free size.
    """
    rank = len(shapes[0]) - 2
    if given.get("kernel_size") is None:
        return _adaptive(graph, path, x, shapes)
    windows, ceil_mode = _windows(given, rank), int(given["ceil_mode"])
    counted = int(given["count_include_pad"] and any(windows["pads"]))
    openvino = graph.profile.runner == "openvino"
    if counted and (ceil_mode or openvino):
        # torch counts the padding, ONNX what hangs over it too; OpenVINO counts integers of 0,
        # which stand for less than nothing where the zero point is another.
        counted, pads = 0, windows["pads"][:rank]
        sizes = zip(*(shape[2:] for shape in shapes), *windows.values(), strict=False)
        if ceil_mode and any(
            isinstance(n, str) or -(-(n + 2 * p - k) // s) + 1 != m for n, m, k, s, p in sizes
        ):
            raise QdqError(
                f"{path}: an average with ceil_mode whose last window may begin "
                "in the padding is another one in ONNX; set ceil_mode=False or less padding"
            )
        ends = [0, 0, *pads]
        x = graph.node("Pad", path, [x, graph.numbers([*ends, *ends])], mode="constant")
        x = graph.held_off(path, x) if openvino else x
        windows["pads"] = [0] * 2 * rank
    return graph.node(
        "AveragePool", path, [x], ceil_mode=ceil_mode, count_include_pad=counted, **windows
    )


def _adaptive(graph: Graph, path: str, x: str, shapes: tuple[Any, Any]) -> str:
    sizes, wanted = shapes[0][2:], shapes[1][2:]
    if all(n == 1 for n in wanted):
        return graph.node("GlobalAveragePool", path, [x])
    window = []
    for axis, (n, out) in enumerate(zip(sizes, wanted, strict=True), 2):
        whole = isinstance(n, str) or isinstance(out, str)
        if whole and out == 1:
            x = graph.node("ReduceMean", path, [x], axes=[axis], keepdims=1)
        elif whole and n != out:
            raise QdqError(
                f"{path or 'the model'}: the windows of an adaptive average pool "
                f"follow a free size (axis {axis}); expected a fixed size, or an output size of 1. "
                "Give the pool a map of fixed size, or use an average pool with a fixed window"
            )
        elif not whole and n % out:
            x = _uneven(graph, path, x, axis, n, out)
        window.append(1 if whole or n % out else n // out)
    if all(n == 1 for n in window):
        return x
    return graph.node("AveragePool", path, [x], kernel_shape=window, strides=window)


def _uneven(graph: Graph, path: str, x: str, axis: int, size: int, wanted: int) -> str:
    """Means along one axis over windows of several sizes, ⌊i·size/wanted⌋ … ⌈(i+1)·size/wanted⌉.

    ONNX has no such pooling; a mean over a rectangle is the mean of its rows' means.
    """
    means = []
    for i in range(wanted):
        ends = i * size // wanted, -(-(i + 1) * size // wanted)
        part = sliced(graph, path, x, {axis: (*ends, 1)})
        means.append(graph.node("ReduceMean", path, [part], axes=[axis], keepdims=1))
    return graph.node("Concat", path, means, axis=axis)


def resize(
    graph: Graph, path: str, x: str, given: Mapping[str, Any], names: tuple[str, str],
    source: Source,
) -> str:  # fmt: skip
    """Resize as torch's ``interpolate``, nearest or bilinear.

    Raises:
        ValueError: No factor gives the sizes, or they follow a free one.
    """
    mode = given["mode"]
    settings: dict[str, Any] = {"mode": "nearest", "nearest_mode": "floor"}
    settings["coordinate_transformation_mode"] = "asymmetric"
    if mode != "nearest":
        corners = "align_corners" if given["align_corners"] else "half_pixel"
        settings = {"mode": "linear", "coordinate_transformation_mode": corners}
    before, after = source.shapes[names[0]], source.shapes[names[1]]
    modern = graph.profile.opset >= 13  # before, what is not given is an empty tensor
    region = "" if modern else graph.constant("no_region", np.zeros(0))
    if given["scale_factor"] is None:
        # Sizes, not factors: 3 · float32(7/3) may fall short of 7.
        none = "" if modern else graph.constant("no_factors", np.zeros(0))
        sizes = _resized(graph, path, x, source.named(names[1]))
        return graph.node("Resize", path, [x, region, none, sizes], **settings)
    ratios = _each(given["scale_factor"], len(before) - 2)
    factors = np.array([1.0, 1.0, *ratios], np.float32)
    reached = [int(np.floor(n * f)) for n, f in zip(before[2:], factors[2:], strict=True)]
    if reached != list(after[2:]):
        raise QdqError(
            f"{path or 'the model'}: no float32 factor resizes "
            f"{tuple(before[2:])} to {tuple(after[2:])}; give interpolate the size"
        )
    text = "_".join(str(float(f)) for f in factors)
    return graph.node(
        "Resize", path, [x, region, graph.constant(f"factors_{text}", factors)], **settings
    )


def _resized(graph: Graph, path: str, x: str, shape: tuple[int | str, ...]) -> str:
    """Sizes of a resized map as a tensor; a free batch is that of `x`."""
    free = [axis for axis, size in enumerate(shape) if isinstance(size, str)]
    if not free:
        return graph.numbers(shape)
    if free != [0]:
        raise QdqError(
            f"{path or 'the model'}: the size of a resized map follows a free "
            f"size (axes {free}); expected the batch alone. Export with dynamic_batch=False"
        )
    batch = graph.node("Gather", path, [graph.node("Shape", path, [x]), graph.numbers([0])], axis=0)
    return graph.node("Concat", path, [batch, graph.numbers(shape[1:])], axis=0)


def _windows(given: Mapping[str, Any], rank: int) -> dict[str, list[int]]:
    kernel = _each(given["kernel_size"], rank)
    stride = _each(given["stride"] or kernel, rank)
    return {
        "kernel_shape": kernel,
        "strides": stride,
        "pads": _each(given["padding"], rank) * 2,
    }


def _each(value: Any, rank: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * rank

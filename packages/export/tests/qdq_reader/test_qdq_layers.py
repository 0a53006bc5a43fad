"""Integers of layers that `load_qdq_onnx` reads, by float64 sums and by QLinearConv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bevquant_export import load_qdq_onnx

from .qdq_graphs import Graph, run_file

_STEP = np.float32(0.0371)  # of the input
_PAD = {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}
LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "conv": ("Conv", (2, 4, 9, 8), (6, 4, 3, 3), 0, {"pads": [1, 1, 1, 1]}),
    "conv, uneven": ("Conv", (2, 4, 9, 8), (6, 2, 3, 2), 0, {**_PAD, "group": 2}),
    "conv, same": ("Conv", (1, 4, 9, 8), (6, 4, 3, 3), 0,
                   {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "depthwise": ("Conv", (2, 4, 9, 8), (4, 1, 3, 3), 0, {"group": 4, "pads": [1, 1, 1, 1]}),
    "conv1d": ("Conv", (2, 4, 9), (6, 4, 3), 0, {"pads": [1, 1]}),
    "conv3d": ("Conv", (1, 2, 4, 5, 6), (3, 2, 3, 3, 3), 0, {}),
    "transposed": ("ConvTranspose", (2, 4, 5, 4), (4, 3, 3, 2), 1,
                   {"strides": [2, 2], "pads": [1, 0, 0, 0], "group": 2}),
    "transposed, cut": ("ConvTranspose", (2, 4, 5, 4), (4, 3, 3, 3), 1,
                        {"strides": [2, 2], "pads": [0, 1, 2, 2]}),
    "gemm": ("Gemm", (5, 12), (7, 12), 0, {"transB": 1}),
    "gemm, turned": ("Gemm", (5, 12), (12, 7), 1, {}),
    "matmul": ("MatMul", (2, 5, 12), (12, 7), 1, {}),
}  # fmt: skip
TYPES = {
    "int8, int8": (("int8", 0), ("int8", 0)),
    "uint8, int8": (("uint8", 117), ("int8", 0)),
    "uint8 from 0, uint8": (("uint8", 0), ("uint8", 128)),
    "int8 with zero point, uint8 with several": (("int8", -7), ("uint8", None)),
    "int16, int8": (("int16", 0), ("int8", 3)),
    "uint16 around 32768, int4": (("uint16", 32768), ("int4", -2)),
    "uint4, uint4": (("uint4", 9), ("uint4", 6)),
}


def convolved(op: str, x: Any, w: Any, attributes: dict[str, Any]) -> Any:
    """Sums of products in float64, which holds them exactly."""
    x, w = torch.from_numpy(x).double(), torch.from_numpy(w).double()
    if op in ("Gemm", "MatMul"):
        return (x @ (w.T if attributes.get("transB") else w)).numpy()
    rank = w.dim() - 2
    stride = attributes.get("strides", [1] * rank)
    spread = attributes.get("dilations", [1] * rank)
    pads = attributes.get("pads", [0] * 2 * rank)
    if attributes.get("auto_pad"):  # SAME_LOWER, 9 × 8 by 3 with stride 2: 2 and 1 zeros
        pads = [1, 1, 1, 0]
    groups = attributes.get("group", 1)
    if op == "ConvTranspose":
        full = F.conv_transpose2d(x, w, stride=stride, groups=groups)
        ends = [slice(pads[i], full.shape[2 + i] - pads[rank + i]) for i in range(rank)]
        return full[(slice(None), slice(None), *ends)].numpy()
    sides = [n for i in reversed(range(rank)) for n in (pads[i], pads[rank + i])]
    function: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    return function(F.pad(x, sides), w, None, stride, 0, spread, groups).numpy()


def draw(rng: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    bits, unsigned = int(dtype.removeprefix("u").removeprefix("int")), dtype.startswith("u")
    low = 0 if unsigned else -(2 ** (bits - 1))
    return rng.integers(low, low + 2**bits, shape), (low, low + 2**bits - 1)


CASES = [
    (layer, types)
    for layer in LAYERS
    for types in TYPES
    if layer in ("conv, uneven", "transposed", "gemm, turned") or types in ("uint8, int8",)
]


@pytest.mark.bits
@pytest.mark.parametrize(("layer", "types"), CASES)
def test_layers_are_integer_exact(layer: str, types: str, tmp_path: Path) -> None:
    op, shape, weight, axis, attributes = LAYERS[layer]
    (kind, zero), (weight_kind, weight_zero) = TYPES[types]
    rng = np.random.default_rng(3)
    stored_x, bounds = draw(rng, kind, shape)
    stored_w, _ = draw(rng, weight_kind, weight)
    channels = weight[axis]
    if weight_zero is None:
        weight_zero = rng.integers(100, 160, channels)
    scale = rng.uniform(0.002, 0.01, channels).astype(np.float32)
    outputs = channels * attributes.get("group", 1) if op == "ConvTranspose" else channels
    total = np.tile(_STEP * scale, outputs // channels)
    along = [1] * len(weight)
    along[axis] = -1
    zeros = np.broadcast_to(np.asarray(weight_zero).reshape(along if np.ndim(weight_zero) else ()),
                            weight)  # fmt: skip
    sums = convolved(op, stored_x - zero, stored_w - zeros, attributes)
    place = [1] * sums.ndim
    place[-1 if op in ("Gemm", "MatMul") else 1] = -1
    unit = np.float64(_STEP) * np.tile(scale, outputs // channels)
    bias = np.rint(rng.standard_normal(outputs) * sums.std()).astype(int)
    sums = sums if op == "MatMul" else sums + bias.reshape(place)
    step = np.float32(6 * (sums * unit.reshape(place)).std() / (bounds[1] - bounds[0]))
    expected = np.clip(np.rint(sums * (unit / np.float64(step)).reshape(place)) + zero, *bounds)

    graph = Graph()
    x = graph.pair("x", _STEP, zero, kind)
    w = graph.stored("w", stored_w, scale, weight_zero, weight_kind, axis=axis)
    b = graph.stored("b", bias, total, 0, "int32", axis=0)
    if op == "MatMul":
        y = graph.node(op, [x, w])
    else:
        y = graph.node(op, [x, w, b], **attributes)
    y = graph.pair(y, step, zero, kind)
    path = graph.save(tmp_path / "layer.onnx", {"x": list(shape)}, [y])

    model = load_qdq_onnx(path, verify=layer == "conv")
    assert not model.float_fallbacks
    given = torch.from_numpy(((stored_x - zero) * _STEP).astype(np.float32))
    got = model(given).double().numpy() / np.float64(step) + zero
    assert np.array_equal(np.rint(got), expected)
    assert len(np.unique(expected)) >= 8


@pytest.mark.parametrize("zero", [0, 131])
def test_qlinearconv_agrees_but_for_ties(zero: int, tmp_path: Path) -> None:
    """ONNX Runtime multiplies by a float32 factor: values near the border of two steps differ."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 256, (1, 16, 40, 40)), rng.integers(-127, 128, (8, 16, 3, 3))
    scale = rng.uniform(0.002, 0.01, 8).astype(np.float32)
    graph = Graph()
    read = graph.pair("x", 0.02, zero, "uint8")
    weight = graph.stored("w", w, scale, 0, "int8", axis=0)
    y = graph.pair(graph.node("Conv", [read, weight], pads=[1, 1, 1, 1]), 0.3, 120, "uint8")
    path = graph.save(tmp_path / "qdq.onnx", {"x": [1, 16, 40, 40]}, [y])
    other = Graph()
    q = other.node("QuantizeLinear", ["x", *other.parameters("x", 0.02, zero, "uint8")])
    other.constant("w", w + 128, "uint8")  # products of two uint8 saturate on no CPU
    parameters = [
        *other.parameters("w", scale, 128, "uint8"),
        *other.parameters("y", 0.3, 120, "uint8"),
    ]
    made = other.node("QLinearConv", [q, "x_s", "x_z", "w", *parameters], "y", pads=[1, 1, 1, 1])
    reference = other.save(tmp_path / "qlinear.onnx", {"x": [1, 16, 40, 40]}, [made])
    given = ((x - zero) * np.float32(0.02)).astype(np.float32)
    expected = run_file(reference, {"x": given})[0].astype(int)
    got = np.rint(load_qdq_onnx(path)(torch.from_numpy(given)).numpy() / np.float32(0.3)) + 120
    sums = convolved("Conv", x - zero, w, {"pads": [1, 1, 1, 1]})
    unit = np.float64(np.float32(0.02)) * scale / np.float64(np.float32(0.3))
    exact = sums * unit.reshape(-1, 1, 1)
    near = np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= 2.0**-21 * np.abs(exact)
    different = got != expected
    assert not (different & ~near).any()
    assert np.abs(got - expected).max() <= 1
    assert len(np.unique(got)) > 100

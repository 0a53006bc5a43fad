"""Oracles in plain int64 and rational arithmetic, and what several test files share."""

from __future__ import annotations

import itertools
import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from bevquant_int8sim import _backends, backend_report

BACKENDS = ("amx", "vnni", "portable", "torch")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend that this machine has."""
    status = next(s for s in backend_report() if s.name == request.param)
    if not status.available:
        pytest.skip(f"{status.name}: {status.detail}")
    return request.param


@pytest.fixture
def forget_backends():
    """Which backends were tried is forgotten before and after; whenever it is called, too."""
    _backends._known.clear()
    yield _backends._known.clear
    _backends._known.clear()


@pytest.fixture(scope="session")
def loop_sparse_conv():
    """Exact sums of a sparse convolution, by loops over voxels and kernel offsets.

    ``(x [n, ci], w [k1…kn, ci, co], bias, in rows, out rows, stride, padding, dilation,
    transposed)``; coordinates are rows of integers, batch first.
    """

    def convolve(x, w, bias, coords, out_coords, stride, padding, dilation, transposed=False):
        x, w = x.astype(np.int64), w.astype(np.int64)
        places = {tuple(c): row for row, c in enumerate(coords)}
        out = np.zeros((len(out_coords), w.shape[-1]), np.int64)
        for o, (batch, *place) in enumerate(out_coords):
            if bias is not None:
                out[o] = bias
            for k in itertools.product(*map(range, w.shape[:-2])):
                seen = []
                for c, kk, s, p, d in zip(place, k, stride, padding, dilation, strict=True):
                    at = (c + p - kk * d) / s if transposed else c * s - p + kk * d
                    seen.append(at)
                row = places.get((batch, *seen))
                if row is not None:
                    out[o] += (x[row][:, None] * w[k]).sum(0)
        return out

    return convolve


@pytest.fixture(scope="session")
def loop_requantize():
    """Requantization number by number; multipliers as Python floats, one per column."""

    def requantize(acc, multiplier, rounding="half_even", low=-128, high=127):
        factors = np.broadcast_to(np.asarray(multiplier, np.float64), acc.shape)
        out = np.empty(acc.shape, np.int64)
        for place in np.ndindex(*acc.shape):
            product = float(int(acc[place])) * float(factors[place])
            if rounding == "half_even":
                value = round(product)
            elif rounding == "half_away" and product < 0:
                value = -math.floor(Fraction(1, 2) - Fraction(product))
            else:
                value = math.floor(Fraction(product) + Fraction(1, 2))
            out[place] = max(low, min(high, value))
        return out

    return requantize


@pytest.fixture(scope="session")
def data_folder():
    """The folder of real data; skips where there is none."""
    folders = [Path(p) / "shared" / "data" for p in Path(__file__).resolve().parents]
    if "BEVQUANT_DATA" in os.environ:
        folders.insert(0, Path(os.environ["BEVQUANT_DATA"]))
    folder = next((f for f in folders if (f / "nvidia_scn").is_dir()), None)
    if folder is None:
        pytest.skip("real data not found: set BEVQUANT_DATA")
    return folder


@pytest.fixture(scope="session")
def real_frame(data_folder):
    """Features float32 [79745, 5] and coordinates int32 [79745, 4] of a nuScenes frame."""

    def read(name):
        raw = (data_folder / "nvidia_scn" / name).read_bytes()
        _, rank, kind = np.frombuffer(raw, "<i4", 3)
        shape = np.frombuffer(raw, "<i4", rank, 12)
        values = np.frombuffer(raw, {1: "<i4", 2: "<f2"}[int(kind)], offset=12 + 4 * rank)
        return torch.from_numpy(values.reshape(shape).copy())

    features = read("in_features.torch.fp16.tensor").float()
    return features, read("in_indices_xyz.torch.int32.tensor")


@pytest.fixture(scope="session")
def random_voxels():
    """``(generator, batch, shape, count)`` to distinct int32 coordinates in random order."""

    def make(generator, batch, shape, count):
        sizes = (batch, *shape)
        chosen = generator.permutation(math.prod(sizes))[:count]
        rows = np.stack(np.unravel_index(chosen, sizes), 1)
        return torch.from_numpy(rows.astype(np.int32))

    return make

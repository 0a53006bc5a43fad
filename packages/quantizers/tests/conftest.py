"""The oracle, and histograms that all tests share."""

from __future__ import annotations

import logging
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings

from bevquant_quantizers import _jit

# The first example may wait for a kernel to be compiled.
settings.register_profile("bevquant", deadline=None)
settings.load_profile("bevquant")


@pytest.fixture(params=["numba", "without numba"])
def with_and_without_numba(request, monkeypatch):
    """Runs a test a second time as where numba is not installed, whatever chooses a backend."""
    if request.param == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
        yield True
        return
    monkeypatch.setitem(sys.modules, "numba", None)  # every import of it fails
    _jit.has_numba.cache_clear()
    yield False
    _jit.has_numba.cache_clear()


@pytest.fixture
def upstream(monkeypatch):
    """pytorch_quantization 2.1.3 on the CPU: its calls of .cuda() do nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("pytorch_quantization", reason="pytorch-quantization is not installed")
        from pytorch_quantization import calib, nn, tensor_quant
        from pytorch_quantization.calib import histogram

        # Its own logger alone: absl's set_verbosity silences every other one too.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    return SimpleNamespace(calib=calib, nn=nn, tensor_quant=tensor_quant, histogram=histogram)


def samples(kind: str, n: int, seed: int = 0) -> np.ndarray:
    """Absolute values of one distribution, float32."""
    rng = np.random.default_rng(seed)
    draw = {
        "relu": lambda: np.maximum(rng.normal(size=n), 0),
        "gaussian": lambda: rng.normal(size=n),
        "heavy": lambda: rng.standard_t(2.5, size=n),
        "uniform": lambda: rng.uniform(size=n),
        "sparse": lambda: np.where(rng.random(n) < 0.9, 0, rng.exponential(size=n)),
        "integers": lambda: rng.integers(0, 30, n),
        "outlier": lambda: np.append(rng.normal(size=n - 1), 40.0),
        "lognormal": lambda: rng.lognormal(size=n),
    }
    return np.abs(draw[kind]()).astype(np.float32)


@pytest.fixture(scope="session")
def draw():
    return samples


@pytest.fixture(scope="session")
def histogram():
    """Counts (int64), edges and largest value of a sample, as upstream collects them."""

    def make(kind: str, bins: int = 2048, n: int = 20_000, seed: int = 0):
        x = torch.from_numpy(samples(kind, n, seed))
        counts = torch.histc(x, bins, 0, x.max()).to(torch.int64).numpy()
        return counts, torch.linspace(0, x.max(), bins + 1).numpy(), float(x.max())

    return make

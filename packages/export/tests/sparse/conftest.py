"""Encoders and a real frame, where spconv and the data are at hand."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

collect_ignore = ["sparse_encoders.py"]  # no tests in it, and it needs spconv


@pytest.fixture(scope="session")
def nets():
    """The module beside this file: its classes come from spconv, whose import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("spconv.pytorch", reason="spconv is not installed")
    path = Path(__file__).with_name("sparse_encoders.py")
    spec = importlib.util.spec_from_file_location("sparse_encoders", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def real_frame():
    """Features float32 [79745, 5] and coordinates int32 [79745, 4] of a nuScenes frame."""
    folders = [Path(p) / "shared" / "data" for p in Path(__file__).resolve().parents]
    if "BEVQUANT_DATA" in os.environ:
        folders.insert(0, Path(os.environ["BEVQUANT_DATA"]))
    folder = next((f for f in folders if (f / "nvidia_scn").is_dir()), None)
    if folder is None:
        pytest.skip("real data not found: set BEVQUANT_DATA")

    def read(name):
        raw = (folder / "nvidia_scn" / name).read_bytes()
        _, rank, kind = np.frombuffer(raw, "<i4", 3)
        shape = np.frombuffer(raw, "<i4", rank, 12)
        values = np.frombuffer(raw, {1: "<i4", 2: "<f2"}[int(kind)], offset=12 + 4 * rank)
        return torch.from_numpy(values.reshape(shape).copy())

    features = read("in_features.torch.fp16.tensor").float()
    return features, read("in_indices_xyz.torch.int32.tensor")

"""Real data, where it is at hand."""

from __future__ import annotations

import _codecs
import os
import pickle
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    said = os.environ.get("BEVQUANT_DATA")
    folder = Path(said) if said else Path(__file__).resolve().parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data: set BEVQUANT_DATA")
    return folder


class _NumbersOnly(pickle.Unpickler):
    """Builds numpy scalars and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        known = {
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "scalar"): np.float64().__reduce__()[0],
            ("_codecs", "encode"): _codecs.encode,
        }
        return known[module, name]


@pytest.fixture(scope="session")
def keyframe_info(real_data: Path) -> dict:
    """mmdetection3d's record of one real nuScenes keyframe, with the folder and the class names."""
    found = sorted((real_data / "mmdet3d_demo/nuscenes").glob("*.pkl"))
    if not found:
        pytest.skip("no nuScenes keyframe among the real data")
    with found[0].open("rb") as file:
        content = _NumbersOnly(file).load()
    (info,) = content["data_list"]
    return {**info, "folder": found[0].parent, "classes": list(content["metainfo"]["categories"])}

"""Files for hb_mapper in a form that onnxruntime runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from bevquant_export import export_qdq_onnx, lift_horizon_onnx
from bevquant_int8sim import simulate


def test_the_lifted_file_makes_what_the_model_makes(
    calibrated: Callable[..., Any], tmp_path: Path
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, stride=2))
    x = torch.randn(1, 3, 9, 9)
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon")
    lifted = lift_horizon_onnx(file.path)
    assert onnx.load(file.path).opset_import[0].version == 11
    session = onnxruntime.InferenceSession(
        lifted.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (made,) = session.run(None, {name: x.numpy() for name in file.inputs})
    wanted = simulate(model, x)(x).numpy()
    # A sum on the border of two steps may fall to either side.
    assert np.mean(np.abs(made - wanted) > 1e-5 * np.abs(wanted).max()) < 0.01


def test_other_files_stay_as_they_are(calibrated: Callable[..., Any], tmp_path: Path) -> None:
    x = torch.randn(1, 3, 5, 5)
    file = export_qdq_onnx(calibrated(nn.Sequential(nn.Conv2d(3, 4, 3)), x), x, tmp_path / "n.onnx")
    assert lift_horizon_onnx(file.path) == onnx.load(file.path)

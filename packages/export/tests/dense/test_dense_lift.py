"""Files for hb_mapper in a form that onnxruntime runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
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


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3])
def test_a_softmax_of_the_mappers_set_flattens(
    operator: str, axis: int | None, tmp_path: Path
) -> None:
    given = {} if axis is None else {"axis": axis}
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3, 4, 5])
    made = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3, 4, 5])
    node = helper.make_node(operator, ["x"], ["y"], **given)
    proto = helper.make_model(
        helper.make_graph([node], "net", [value], [made]),
        opset_imports=[helper.make_opsetid("", 11)],
        ir_version=7,
    )
    onnx.save(proto, tmp_path / "net.onnx")
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)

    def run(model: onnx.ModelProto) -> Any:
        own = onnxruntime.InferenceSession(model.SerializeToString())
        return own.run(None, {"x": x})[0]

    lifted = lift_horizon_onnx(tmp_path / "net.onnx")
    assert lifted.opset_import[0].version == 13
    np.testing.assert_allclose(run(lifted), run(proto), rtol=1e-6)  # which runs set 11 as it is

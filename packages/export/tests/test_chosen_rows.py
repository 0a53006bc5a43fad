"""Files of models that choose rows by values which rounding may move over their bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

pytest.importorskip("onnxruntime")


class Seen(nn.Module):
    """Rows with a depth above a bound, and as many zeros: a size of the chosen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        rows = (depth.exp() > 1.0).nonzero().squeeze(-1)
        values = x.new_zeros(rows.shape[0], 4)
        return x.new_zeros(x.shape).index_add(0, rows, values + self.value(x)[rows])


def test_rounding_that_chooses_other_rows_is_no_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # exp(0) is 1, which rounding of the comparison's operands moves to either side.
    given = torch.randn(16, 4), torch.cat([torch.zeros(8), torch.linspace(-1, 1, 8)])
    quantized = quantize_model(Seen().eval(), example_inputs=given).model
    calibrate(quantized, [given])
    file = export_qdq_onnx(
        quantized, given, tmp_path / "seen.onnx", "onnxruntime", dynamic_batch=False
    )
    assert not any(row.unexplained for row in compare_qdq_onnx(file, quantized, given))

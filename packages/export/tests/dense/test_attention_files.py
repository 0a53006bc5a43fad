"""Attentions whose products are quantized, in files and in the linter's prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, lint_onnx, load_qdq_onnx
from bevquant_export.lint import predict_layers
from bevquant_int8sim import simulate
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate


class Attention(nn.Module):
    """One function, or written out with the scale in front of or behind the first product."""

    def __init__(self, written: str, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.written, self.heads = written, heads
        mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) > 0.3
        mask[3] = False
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the rows of x, [batch, rows, channels]."""
        b, n, c = x.shape
        q, k, v = (
            f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scale = q.shape[-1] ** -0.5
        if self.written == "masked":
            made = F.scaled_dot_product_attention(q, k, v, self.mask)
        elif self.written == "function":
            made = F.scaled_dot_product_attention(q, k, v)
        elif self.written == "einsum":
            scores = torch.einsum("bhnc,bhmc->bhnm", q * scale, k)
            made = torch.einsum("bhnm,bhmc->bhnc", scores.softmax(-1), v)
        elif self.written == "late":
            made = ((q @ k.mT) * scale).softmax(-1) @ v
        else:
            made = ((q * scale) @ k.mT).softmax(-1) @ v
        return self.out(made.transpose(1, 2).reshape(b, n, c))


def _model(written: str, rows: int = 9, dim: int = 32, **settings: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, rows, dim)
    config = QuantConfig(**({"quantize_matmul": True} | settings))
    model = quantize_model(Attention(written, dim).eval(), config, example_inputs=x).model
    calibrate(model, [x], progress=False)
    return model, x


@pytest.mark.parametrize(
    ("written", "target"),
    [
        *((written, "onnxruntime") for written in ("function", "masked", "einsum", "late")),
        *((written, "tensorrt11") for written in ("masked", "einsum")),
        ("einsum", "horizon"),  # whose operator set has no Einsum
        ("function", "openvino"),
    ],
)
def test_files_multiply_the_simulators_integers(written: str, target: str, tmp_path: Path) -> None:
    if target == "openvino":
        pytest.importorskip(target, reason="openvino is not installed")
    model, x = _model(written)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", target)
    for inputs in (x, 3 * torch.randn(2, 9, 32)):  # the second leaves the ranges
        rows = compare_qdq_onnx(file, model, inputs)
        assert sum(row.unexplained for row in rows) == 0
    if target == "onnxruntime":
        loaded, integers = load_qdq_onnx(tmp_path / "net.onnx"), simulate(model, x)
        assert torch.allclose(loaded(x), integers(x), atol=1e-4)
        assert [s.op for s in loaded.steps].count("matmul") == 2


def test_weights_behind_softmax_are_unsigned(tmp_path: Path) -> None:
    model, x = _model("written out", unsigned=True)
    assert model.quant_matmul_1.input_quantizer.unsigned
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    rows = compare_qdq_onnx(file, model, torch.randn(2, 9, 32))
    assert "uint8" in {row.form for row in rows}
    assert sum(row.unexplained for row in rows) == 0


def _predicted(model: Any, x: Tensor, path: Path) -> tuple[set[str], str]:
    """Types of both products, and what the linter says of the first one."""
    export_qdq_onnx(model, x, path, "tensorrt10")
    rows = [row for row in predict_layers(path, "tensorrt10") if row.op == "MatMul"]
    assert len(rows) == 2
    return {row.runs for row in rows}, rows[0].reason


@pytest.mark.parametrize(
    ("change", "runs", "reason"),
    [
        ({}, "int8", "can be one kernel"),
        ({"quantize_matmul": False}, "fp16", "can be one kernel"),
        ({"written": "late"}, "int8", "its scale stands behind the first product"),
        ({"written": "masked"}, "int8", "stands between Softmax and the second product"),
        ({"dim": 24}, "int8", "heads have 12 channels, not 16, 32 or 64"),
        ({"dim": 24, "quantize_matmul": False}, "fp16", "heads have 12 channels, not 16 to 256"),
        ({"dim": 160, "quantize_matmul": False}, "fp16", "can be one kernel"),
        ({"dim": 160}, "int8", "heads have 80 channels"),
        ({"rows": 513}, "int8", "it has 513 queries or keys, above 512 in int8"),
        ({"exclude": ("quant_matmul_1",)}, "int8 fp16", "none behind the Softmax, the values"),
    ],
)
def test_prediction_of_an_attention(
    change: dict[str, Any], runs: str, reason: str, tmp_path: Path
) -> None:
    model, x = _model(**({"written": "written out"} | change))
    found, why = _predicted(model, x, tmp_path / "net.onnx")
    assert found == set(runs.split())
    assert reason in why
    partly = "exclude" in change
    findings = {finding.id for finding in lint_onnx(tmp_path / "net.onnx", "tensorrt10")}
    assert ("TRT022" in findings) == partly


def test_nodes_of_one_kernel(tmp_path: Path) -> None:
    model, x = _model("function")
    export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11")
    rows = {row.name: row for row in predict_layers(tmp_path / "net.onnx", "tensorrt11")}
    first = "quant_attention.scores.MatMul"
    assert rows[first].into == ""
    names = ("quant_attention.Softmax", "quant_attention.values.MatMul")
    assert {rows[name].into for name in names} == {first}
    nodes = onnx.load(tmp_path / "net.onnx").graph.node
    assert {node.op_type for node in nodes} >= {"MatMul", "Softmax", "QuantizeLinear"}


def test_fp8_has_no_conditions_of_int8(tmp_path: Path) -> None:
    model, x = _model("written out", dim=24, num_bits=(4, 3))
    found, why = _predicted(model, x, tmp_path / "net.onnx")
    assert found == {"fp8"}
    assert "can be one kernel" in why


def test_a_long_way_around_a_softmax_is_no_attention(tmp_path: Path) -> None:
    """Each sum reads the one before it twice: 2³⁰⁰ ways lead to the input."""
    nodes = [onnx.helper.make_node("Add", [f"x{i}", f"x{i}"], [f"x{i + 1}"]) for i in range(300)]
    nodes.append(onnx.helper.make_node("Softmax", ["x300"], ["y"]))
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3])
        for name in ("x0", "y")
    ]
    graph = onnx.helper.make_graph(nodes, "g", ports[:1], ports[1:])
    sets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=sets), tmp_path / "net.onnx")
    assert not [f for f in lint_onnx(tmp_path / "net.onnx", "tensorrt11") if f.id == "TRT022"]
    assert {row.runs for row in predict_layers(tmp_path / "net.onnx", "tensorrt11")} == {"float32"}

"""Outcomes of a run for a BPU made up for tests: a small plan, rows, an estimate."""

from __future__ import annotations

from typing import Any

from bevfusion.quantization import QuantizationEvaluation
from bevfusion_quant.bpu import BpuComparison, BpuEstimate, BpuLayer, BpuOutcome, BpuStage
from bevquant_hybrid.partition import Plan, PlanNode, number_segments
from bevquant_hybrid_tools.performance import LayerEstimate, load_chip_figures

__all__ = ["LAYERS", "outcome"]

LAYERS = 40
CAMERA = "encoders.camera.backbone"


def outcome(evil: str = "plain", violations: tuple[str, ...] = ()) -> BpuOutcome:
    """Forty layers on the BPU between a sensor and the CPU; `evil` stands wherever names do."""
    nodes: list[PlanNode] = [PlanNode("images", "input", shape=(6, 3, 96, 256))]

    def follow(name: str, kind: str, place: str, **more: Any) -> None:
        nodes.append(
            PlanNode(name, kind, place, inputs=(nodes[-1].name,), shape=(6, 16, 48, 128), **more)
        )

    follow("quant", "quantize", "CPU", operator="torch.quantization.QuantStub")
    for index in range(LAYERS):
        name = evil if index == 0 else f"backbone.layer{index}.conv"
        path = f"{CAMERA}.{name}"
        follow(name, "operator", "BPU", path=path, operator="Conv2d + ReLU", reason=evil)
    follow("dequant", "dequantize", "CPU", operator="torch.quantization.DeQuantStub")
    follow("head", "operator", "CPU", path="heads.object", operator="Head", reason=evil)
    nodes.append(PlanNode("output", "output", inputs=("head",)))
    names = [node.path for node in nodes if node.place == "BPU"]
    rows = tuple(
        BpuLayer(name, "Conv2d + ReLU", 16, 6144.0, 30.0, 0.999, 29.9, 0.998, i, 0.1, 0.05, 0.0, 2)
        for i, name in enumerate(names)
    )
    stages = (BpuStage("neck", "Camera features", 32, 27.0, 0.999, 26.9, 0.998),)
    evaluation = QuantizationEvaluation([], [], [], [], [], None, [], None)
    layers = tuple(
        LayerEstimate(n, "torch.nn.Conv2d", 2_000_000, 900, 100, 2e-6, 1e-6, "") for n in names
    )
    estimate = BpuEstimate(load_chip_figures("bayes"), 1, layers, violations)
    plan = Plan("bayes", number_segments(nodes))
    return BpuOutcome(plan, BpuComparison(evaluation, rows, stages, (), ()), {"camera": estimate})

"""What was folded, what was quantized and what stays float, as the page's lists take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from bevfusion_quant.bpu._labels import node_labels
from bevfusion_quant.bpu._units import PREFIXES

if TYPE_CHECKING:
    from bevfusion_quant.bpu._prepare import SplitUnits
    from bevfusion_quant.bpu._quantize import Forms
    from bevfusion_quant.results import BpuOutcome

__all__ = ["folding_record", "placement_record"]


def folding_record(units: SplitUnits, change: float) -> dict[str, Any]:
    """Batch norms of the units and the convolutions that took them; `change` of the output."""
    folded, kept = [], []
    for name, unit in units.units.items():
        stem = PREFIXES[name]
        left = dict(units.fused[name].named_modules())
        modules = dict(unit.named_modules())
        for node in fx.symbolic_trace(unit).graph.nodes:
            if node.op != "call_module" or not isinstance(modules[node.target], nn.BatchNorm2d):
                continue
            conv, bn = str(node.args[0].target), str(node.target)
            if isinstance(left.get(bn), nn.BatchNorm2d):
                kept.append({"bn": stem + bn, "reason": f"{conv} did not take it"})
            else:
                folded.append({"conv": stem + conv, "bn": stem + bn, "how": "identity"})
    return {"fused": folded, "skipped": kept, "largest_relative_change": change}


def placement_record(forms: Mapping[str, Forms], outcome: BpuOutcome) -> dict[str, Any]:
    """Modules that were quantized, and what runs on the CPU in float with the reason."""
    quantized = []
    for name, form in forms.items():
        modules = dict(form.fake_graph.named_modules())
        for label in node_labels(name, form.fake_graph).values():
            module = modules.get(label.place)
            if module is not None and hasattr(module, "activation_post_process"):
                kind = type(module).__name__
                quantized.append({"path": label.path, "kind": kind, "was": label.operator})
    skipped = [{"path": node.path, "reason": node.reason} for node in outcome.on_cpu]
    return {"quantized": quantized, "shared": [], "skipped": skipped}

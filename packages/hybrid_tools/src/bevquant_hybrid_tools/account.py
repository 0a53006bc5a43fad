"""Account of a model's conversion for a BPU, as records and as text.

Folded batch norms, quantized modules, placement and estimated cost, for one or several parts of a
model in `bevquant_hybrid_tools.forms`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import fx, nn

from bevquant_hybrid.partition import Plan, PlanNode
from bevquant_hybrid_tools.forms import BpuEstimate, Forms
from bevquant_quantizers.documents import text_table

__all__ = [
    "Folded",
    "QuantizedModule",
    "estimate_record",
    "estimates_text",
    "folded_norms",
    "nodes_on_cpu",
    "plan_segments",
    "quantized_modules",
    "segments_text",
]


class Folded(NamedTuple):
    """A batch norm on a convolution's output, and whether `fuse_fx` folded it."""

    conv: str
    bn: str
    done: bool


def folded_norms(model: nn.Module, fused: nn.Module, prefix: str = "") -> Iterator[Folded]:
    """Record each batch norm on a convolution's output, in order.

    Args:
        model: The model before fusing, traceable by `torch.fx`.
        fused: Result of `fuse_fx`.
        prefix: Prefix of its modules' paths in the whole model.
    """
    left, modules = dict(fused.named_modules()), dict(model.named_modules())
    for node in fx.symbolic_trace(model).graph.nodes:
        if node.op == "call_module" and isinstance(modules[node.target], nn.BatchNorm2d):
            conv, bn = str(node.args[0].target), str(node.target)
            # `fuse_fx` leaves an Identity under the name of a norm that it folds.
            done = not isinstance(left.get(bn), nn.BatchNorm2d)
            yield Folded(prefix + conv, prefix + bn, done)


class QuantizedModule(NamedTuple):
    """A quantized module: its path, its class now, its class before."""

    path: str
    kind: str
    was: str


def quantized_modules(forms: Forms) -> Iterator[QuantizedModule]:
    """The modules of the fake-quantized form that quantize their output."""
    modules = dict(forms.fake_graph.named_modules())
    for label in forms.labels.values():
        module = modules.get(label.place)
        if module is not None and hasattr(module, "activation_post_process"):
            yield QuantizedModule(label.path, type(module).__name__, label.operator)


def nodes_on_cpu(plan: Plan) -> tuple[PlanNode, ...]:
    """Operators that run on the CPU, each with its reason."""
    return tuple(n for n in plan.nodes if n.kind == "operator" and n.place == "CPU")


def plan_segments(plan: Plan) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Place, first and last node, and number of operators of each segment."""
    for segment in plan.segments:
        operators = [name for name in segment.nodes if plan.node(name).kind == "operator"]
        ends = dict.fromkeys((segment.nodes[0], segment.nodes[-1]))
        yield segment.place, tuple(ends), len(operators)


def segments_text(plan: Plan) -> str:
    """Placement, one line per segment."""
    rows = [(" … ".join(ends), place, str(count)) for place, ends, count in plan_segments(plan)]
    return _table(("segment", "runs on", "operators"), rows)


def estimate_record(estimate: BpuEstimate) -> dict[str, Any]:
    """An estimate for JSON, with the seconds and the bound of each layer."""
    return {
        "what": "a roofline estimate from public figures, no measurement",
        "cores": estimate.cores,
        "seconds": estimate.seconds,
        "figures": asdict(estimate.figures),
        "layers": [
            {**asdict(layer), "seconds": layer.seconds, "bound": layer.bound}
            for layer in estimate.layers
        ],
        "violations": estimate.violations,
    }


def estimates_text(estimates: Mapping[str, BpuEstimate]) -> str:
    """Operations, bytes and milliseconds of each part, and their basis.

    Args:
        estimates: By the name of the part; at least one.

    Example:
        >>> import torch
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import DeQuantStub, QuantStub
        >>> from bevquant_hybrid_tools.forms import quantize_dense
        >>> set_march(March.BAYES)
        >>> net = nn.Sequential(QuantStub(), nn.Conv2d(3, 8, 3), DeQuantStub())
        >>> forms = quantize_dense(net, [torch.rand(1, 3, 64, 64)], method="max")
        >>> print(segments_text(forms.plan("bayes", [(1, 3, 64, 64)])))
        segment  runs on  operators
        ───────  ───────  ─────────
        1            BPU          1
        >>> estimates = {"net": forms.estimate("bayes", [(1, 3, 64, 64)])}
        >>> print(estimates_text(estimates).splitlines()[0])
        Estimate for one core of Journey 5: a roofline from public figures, no measurement
    """
    rows = [
        (
            name,
            f"{sum(layer.operations for layer in estimate.layers) / 1e9:,.1f}",
            f"{sum(x.loaded_bytes + x.stored_bytes for x in estimate.layers) / 1e6:,.1f}",
            f"{estimate.seconds * 1e3:,.2f}",
        )
        for name, estimate in estimates.items()
    ]
    first = next(iter(estimates.values()))
    title = (
        f"Estimate for one core of {first.figures.chip}: a roofline from public figures, no "
        "measurement"
    )
    return f"{title}\n\n{_table(('unit', '10⁹ operations', 'MB moved', 'ms'), rows)}"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return text_table([heads, *rows], right=range(1, len(heads)), rule="─")

"""What several commands print, and how they end where something is not right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bevfusion_quant.bpu import BpuResult
    from bevfusion_quant.ptq import EvaluateResult, PoorData, PtqResult


def joined(parts: Iterable[str]) -> str:
    """Paragraphs, after an empty line."""
    return "\n" + "\n\n".join(parts)


def finished_text(parts: Iterable[str], result: Any, warnings: Sequence[str] = ()) -> str:
    """Paragraphs, then of any command's result warnings, seconds, peak memory, what was written."""
    from bevfusion_quant.run import written_text

    steps = ", ".join(f"{name} {spent:.1f} s" for name, spent in result.seconds.items())
    warning_lines = "".join(f"\nwarning: {text}" for text in warnings)
    end = f"{warning_lines}\n{steps}\npeak memory {result.peak_memory_mib:,.0f} MiB"
    return joined([*parts, end, *written_text(result.folder)])


def run_text(result: PtqResult | EvaluateResult, *, allow_poor: bool = False) -> str:
    """A run of `run_ptq` or `run_evaluate`: layers, stages, detections, integers, labels, files.

    Raises:
        VerificationError: Files that the run wrote are not right.
        InputError: The ranges cannot be right, unless `allow_poor`.
    """
    from bev_data.metrics import accuracy_text
    from bevfusion_quant.export import export_text, refuse_wrong_files
    from bevfusion_quant.integer import simulation_text
    from bevfusion_quant.ptq import EvaluateResult, agreement_text, layer_table, stage_table

    accuracy, exported = None, None
    warnings: Sequence[str] = ()
    findings: Sequence[PoorData] = ()
    by_layer = False  # whether the integers' table is what was asked for
    if isinstance(result, EvaluateResult):
        accuracy, by_layer = result.accuracy, result.simulation is not None
    else:
        exported, warnings, findings = result.exported, result.warnings, result.findings
    parts: list[str] = []
    if not by_layer:
        parts += ["Float against fake-quantized, output of each layer", layer_table(result.layers)]
    parts += ["Stages, float against fake-quantized", stage_table(result.stages)]
    if result.agreement:
        found = agreement_text(result.agreement, result.labels_found)
        parts += ["Detections, float against fake-quantized, same class", found]
    if result.simulation is not None:
        text = simulation_text(result.simulation, layers=by_layer, reasons_in="the page")
        parts += ["In integers, against float and fake-quantized", text]
    if accuracy is not None:
        parts += ["Against labels", accuracy_text(accuracy)]
    if exported is not None:
        parts += export_text(exported)
    text = finished_text(parts, result, warnings)
    if exported is not None:
        refuse_wrong_files(exported, text)
    return _calibrated(text, findings, allow_poor=allow_poor)


def bpu_run_text(result: BpuResult, *, allow_poor: bool = False) -> str:
    """A run of `run_bpu` or `run_bpu_evaluate`.

    Raises:
        InputError: The ranges cannot be right, unless `allow_poor`.
    """
    from bevfusion_quant.bpu import bpu_text

    text = finished_text(bpu_text(result.outcome), result, result.warnings)
    return _calibrated(text, result.findings, allow_poor=allow_poor)


def _calibrated(text: str, findings: Sequence[PoorData], *, allow_poor: bool) -> str:
    """The text of a run whose ranges may be right; raises what ends the command where not."""
    from bevfusion_quant.ptq import refuse_poor
    from bevquant_quantizers.ranks import current_ranks

    if not allow_poor and current_ranks().first:
        refuse_poor(findings, text)
    return text

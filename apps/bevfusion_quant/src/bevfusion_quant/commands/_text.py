"""Common output of the commands, and errors for wrong results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevfusion_quant._errors import VerificationError
from bevfusion_quant.options import FrameOptions, RunOptions

if TYPE_CHECKING:
    from bevfusion.evaluation import PoorData
    from bevfusion_quant.bpu import BpuResult
    from bevfusion_quant.ptq import EvaluateResult, PtqResult


def joined(parts: Iterable[str]) -> str:
    """Paragraphs, each after an empty line."""
    return "\n" + "\n\n".join(parts)


def finished_text(
    parts: Iterable[str],
    result: Any,
    options: RunOptions,
    warnings: Sequence[str] = (),
    verdict: Sequence[str] = (),
) -> str:
    """Final output of a command.

    | option | output |
    |---|---|
    | --json | the run's summary |
    | --quiet | the verdict, or else the folder and the page |
    | default | tables, warnings, seconds, peak memory, written files, verdict |
    """
    from bevfusion_quant.run import written_text

    if options.json or options.quiet:
        return shown(result.folder, options, "\n".join(verdict))
    steps = ", ".join(f"{name} {spent:.1f} s" for name, spent in result.seconds.items())
    warning_lines = "".join(f"\nwarning: {text}" for text in warnings)
    end = f"{warning_lines}\n{steps}\npeak memory {result.peak_memory_mib:,.0f} MiB"
    last = verdict if verdict else written_text(result.folder)[1:]
    return joined([*parts, end, *written_text(result.folder)[:1], "\n".join(last)])


def shown(folder: Path, options: RunOptions, text: str) -> str:
    """Output of --json and --quiet: the run's summary, or the text, or else the page."""
    from bevfusion_quant.run import SUMMARY_FILE, written_text
    from bevquant_quantizers.ranks import current_ranks

    # Ranks after the first have no folder and print nothing.
    if not current_ranks().first:
        return ""
    if not options.json:
        return text or written_text(folder)[-1]
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return json.dumps({"folder": str(folder), **summary}, indent=1)


def dry_run_text(command: Any, folder: Path) -> str:
    """Planned reads, computations and writes: each group's options that are set."""
    from bevfusion_quant.frames import frames_of
    from bevfusion_quant.options._help import GROUPS

    defaults = {one.name: one.default for one in fields(command)}
    lines = [f"{type(command).__name__.lower()} --dry-run: nothing was computed or written"]
    for title, names in list(GROUPS.items())[:-1]:
        unsaid = [None, (), False]
        said = [
            f"{name.replace('_', '-')} {_words(getattr(command, name))}"
            for name in names
            if name in defaults
            and getattr(command, name) not in [*unsaid, *[defaults[name]] * (title == "data")]
        ]
        trains = "held_out" in defaults  # which takes other frames of a street than these
        if title == "data" and said and isinstance(command, FrameOptions) and not trains:
            size = getattr(command, "config", "tiny")
            frames = frames_of(replace(command, cameras=()), with_cameras=False, size=size)
            said.append(f"frames {len(frames):,}")
        if said:
            lines.append(f"{title:<12} {', '.join(said)}")
    state = "replaces the folder there" if folder.exists() else "new"
    return "\n".join([*lines, f"{'writes':<12} {folder} ({state})"])


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_text(
    result: PtqResult | EvaluateResult, options: RunOptions, *, allow_poor: bool = False
) -> str:
    """Output of `run_ptq` or `run_evaluate`: layers, stages, detections, integers and so on."""
    from bev_data.metrics import accuracy_text
    from bevfusion_quant.export import export_text, refuse_wrong_files
    from bevfusion_quant.integer import simulation_text
    from bevfusion_quant.ptq import EvaluateResult, agreement_text, layer_table, stage_table
    from bevfusion_quant.verdict import verdict

    accuracy, exported = None, None
    warnings: Sequence[str] = ()
    findings: Sequence[PoorData] = ()
    by_layer = False  # whether the integers' table is what was asked for
    last: Sequence[str] = ()
    refused = ""
    if isinstance(result, EvaluateResult):
        accuracy, by_layer = result.accuracy, result.simulation is not None
    else:
        last = verdict(result, folded=getattr(options, "fold", True))
        exported, warnings, findings = result.exported, result.warnings, result.findings
        refused = result.refused
    parts: list[str] = []
    if not by_layer:
        parts += ["Float against fake-quantized, output of each layer", layer_table(result.layers)]
    if result.stages:
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
    for title, lines in (("About the model", result.notes), ("Left out", result.left_out)):
        if lines:
            parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    text = finished_text(parts, result, options, warnings, last)
    if exported is not None:
        refuse_wrong_files(exported, text)
    if refused:
        raise VerificationError(f"no ONNX files: {refused}; the rest of the run is there", text)
    return _calibrated(text, findings, allow_poor=allow_poor)


def bpu_run_text(result: BpuResult, options: RunOptions, *, allow_poor: bool = False) -> str:
    """Output of `run_bpu` or `run_bpu_evaluate`."""
    from bevfusion_quant.bpu_outcome import bpu_text

    text = finished_text(bpu_text(result.outcome), result, options, result.warnings)
    return _calibrated(text, result.findings, allow_poor=allow_poor)


def _calibrated(text: str, findings: Sequence[PoorData], *, allow_poor: bool) -> str:
    """The text of a run; raises if its ranges cannot be right."""
    from bevfusion_quant.frames import refuse_poor
    from bevquant_quantizers.ranks import current_ranks

    if not allow_poor and current_ranks().first:
        refuse_poor(findings, text)
    return text

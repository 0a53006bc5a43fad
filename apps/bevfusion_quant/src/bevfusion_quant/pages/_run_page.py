"""A run as a page, as pictures and as a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data.metrics import Accuracy, AgreementRow, points, span
from bev_data.tables import finite, or_dash, plural
from bevfusion.deployment import ExportedSet
from bevfusion.detectors import is_foreign
from bevfusion.frameworks import ForeignSizes
from bevfusion.model import Sizes
from bevfusion.model.head import Detections
from bevfusion.quantization import QuantizationEvaluation, short_path
from bevfusion_quant.bpu_outcome import BpuOutcome
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer import Simulation
from bevfusion_quant.pages._content import (
    ReportBoxes,
    ReportContent,
    ReportFigure,
    ReportScene,
    ReportStage,
    check,
    known_levels,
    unusable,
)
from bevfusion_quant.pages._format import decibels, macs, memory, seconds
from bevfusion_quant.pages._page import Section, write_page
from bevfusion_quant.pages._sections import run_sections
from bevfusion_quant.run import PAGE_FILE, RunRecord
from bevfusion_quant.saved_run import ModelSettings
from bevquant_qnn import WeightSize

Figure = dict[str, Any]


def head(content: ReportContent) -> Section:
    """Title, compared models, headline figures, command."""
    about = [sizes_title(content.config)]
    frames = list(content.frames)
    if frames:
        named = ", ".join(frames[:3]) + (" …" if len(frames) > 3 else "")
        about.append(f"{plural(len(frames), 'frame')}: {named}")
    data = {
        "title": content.title,
        "about": " · ".join(a for a in about if a),
        "low": content.low_sqnr_db,
        "stages": [
            {"name": stage.name, "sqnr_db": stage.sqnr_db, "cosine": stage.cosine}
            for stage in content.stages
        ],
        "figures": list(_figures(content)),
        "notes": list(content.notes),
        "left_out": list(content.left_out),
        "unusable": unusable(content.layers, content.agreement, content.remedy),
        "command": content.command,
    }
    return Section("head_run", content.title, data)


def sizes_title(name: str) -> str:
    """Name of the sizes, or of a detector in its own code, with its kind."""
    kind = "model" if is_foreign(name) else "config"
    return f"{kind} {name}" if name else ""


def _figure(label: str, value: str, note: str = "", low: bool = False) -> Figure:
    """A figure with a note below it; the note may end in a link: text `link` to the id `href`."""
    return {"label": label, "value": value, "note": note, "low": low, "href": "", "link": ""}


def _figures(content: ReportContent) -> Iterator[Figure]:
    output = next((row for row in content.layers if row.layer == "output"), None)
    if output is not None:
        known = finite(output.cosine)
        cosine = "" if known is None else f"cosine {known:.5f}"
        # Of other code, whose heads are many.
        of = ", first tensor" * (output.kind == "first tensor")
        yield _figure(f"SQNR of the output{of}", decibels(output.sqnr_db, output.cosine), cosine)
    if content.layers:
        yield _low_layers(content)
    if content.quantizers:
        weights = sum(q.is_weight for q in content.quantizers)
        shared = sum(len(q.paths) > 1 for q in content.quantizers)
        note = f"{weights} of weights, {shared} shared"
        yield _figure("Quantizers", f"{len(content.quantizers):,}", note)
    if content.accuracy is not None:
        yield _mean_ap(content.accuracy)
    if content.integers is not None:
        yield _departure(content.integers)
    if content.bpu is not None:
        yield from _bpu(content.bpu)
    if content.export is not None and content.export.measured:
        taken, _, beside = content.export.measured.partition(", ")
        yield _figure("Measured time of the files", taken, f"on this CPU; {beside}")
    for more in content.figures:
        yield _figure(more.label, more.value, more.note)
    if "total" in content.seconds:
        yield _figure("Time of this run", seconds(content.seconds["total"]))
    if content.peak_memory_mib is not None:
        yield _figure("Peak memory", memory(content.peak_memory_mib))


def _low_layers(content: ReportContent) -> Figure:
    known = known_levels(content.layers)
    low = sum(decibel < content.low_sqnr_db for decibel, _ in known)
    figure = _figure(
        f"Layers below {content.low_sqnr_db:g} dB", f"{low} of {len(content.layers)}", low=bool(low)
    )
    if known:
        decibel, layer = min(known)
        index = next(i for i, row in enumerate(content.layers) if row.layer == layer)
        worst = f"worst {decibels(decibel)} at "
        figure |= {"note": worst, "href": f"layer-{index}", "link": short_path(layer)}
    return figure


def _mean_ap(accuracy: Accuracy) -> Figure:
    first, last = accuracy.models[0], accuracy.models[-1]
    note = f"{first.model} {points(first.metrics.mean_ap)}"
    if last.difference is not None and last.difference.mean_ap is not None:
        note += f"; difference {100 * last.difference.mean_ap:+.2f}"
        if last.difference.interval is not None:
            note += f" ({span(last.difference.interval, signed=True)})"
    return _figure(f"mAP, {last.model}, of 100", points(last.metrics.mean_ap), note)


def _departure(simulation: Simulation) -> Figure:
    first, layers = simulation.first_departure, simulation.layers
    most = max((row.forced_max_steps or 0 for row in layers), default=0)
    title, low = "Integer against fake-quantized, same inputs", bool(simulation.wrong)
    if first is None:
        note = "no layer departs by more than one step"
        return _figure(title, plural(most, "step"), note, low)
    short = short_path(first.path)
    figure = _figure(title, plural(most, "step"), "first beyond one step: ", low)
    after = f", up to {first.max_steps} steps"
    return {**figure, "href": f"integer-{layers.index(first)}", "link": short, "after": after}


def _bpu(outcome: BpuOutcome) -> Iterator[Figure]:
    boundaries = len(outcome.plan.boundaries)
    note = f"of integers in a frame, {boundaries} boundaries"
    size = f"{(outcome.plan.transfer_bytes or 0) / 1e6:.3g}"
    yield _figure("Between BPU and CPU", f"{size} MB", note)
    estimates = outcome.estimates.values()
    total = sum(estimate.seconds for estimate in estimates)
    chip = next(iter(estimates)).figures.chip
    note = f"one core of {chip}; from public figures, no measurement"
    yield _figure("Estimated on the BPU", f"{total * 1e3:,.1f} ms", note)


def write_report(path: Path | str, content: ReportContent) -> Path:
    """Write the page, whole or not at all; the same content gives the same bytes.

    The file holds its style, scripts, pictures and numbers. Its content security policy forbids
    every request and every foreign script. All names are escaped.

    Args:
        path: The file to write; an existing file is replaced.
        content: Content of the page.

    Returns:
        `path`.

    Raises:
        ValueError: Arrays of the wrong shape, maps of one stage with different shapes, or two
            stages of one name. Nothing is written.
    """
    check(content)
    return write_page(path, content.title, head(content), run_sections(content))


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """A run with frame-by-frame results, as drawn and written.

    `records` are `fusion`, `quantization` and `calibration`, if the run did them. `remedy` names
    layers that in float would make a useless result usable.
    """

    record: RunRecord
    batches: FrameBatches
    evaluation: QuantizationEvaluation
    records: Mapping[str, Any] = field(default_factory=dict)
    simulation: Simulation | None = None
    bpu: BpuOutcome | None = None
    accuracy: Accuracy | None = None
    exported: ExportedSet | None = None
    remedy: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a detector in other code."""
        sizes = self.batches.sizes
        return sizes.detector.notes if isinstance(sizes, ForeignSizes) else ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Missing results of a detector in other code, with reasons."""
        if not isinstance(self.batches.sizes, ForeignSizes):
            return ()
        left = ("feature maps of stages: no part of a network in other code is known",)
        if not self.evaluation.float_detections:
            return (*left, "boxes and mAP: the model gives no function that makes boxes")
        if not self.batches.sizes.head.classes:
            return (*left, "mAP and labels found: the model names no classes")
        return left

    def draw(self, stage: str) -> None:
        """Draw layers.png, and bev.png: the frame, and a stage in float, quantized, difference.

        A detector in its own code has no stages, and no bev.png.
        """
        from bevfusion.pictures import bev_picture, layer_picture

        with self.record.step("draw"):
            points, kind = _scene_points(self.batches)
            for maps in self.evaluation.stages:
                if maps.row.stage == stage:
                    lidar = self.batches.sizes.lidar
                    bev_picture(self.record.folder, lidar, points, kind, maps)
            layer_picture(self.record.folder, self.evaluation.layers)

    def write_page(self, settings: Mapping[str, object], size: WeightSize | None = None) -> None:
        """Write report.html. Without `weights` in the settings they were random."""
        evaluation, sizes = self.evaluation, self.batches.sizes
        with self.record.step("page"):
            content = ReportContent(
                title=self.record.path.name,
                config=sizes.name,
                frames=self.batches.frame_names,
                figures=[
                    *cost_figures(size, self.simulation),
                    *_agreement_figures(evaluation.agreement),
                    _weights(settings, sizes),
                ],
                notes=self.notes,
                left_out=self.left_out,
                agreement=evaluation.agreement,
                scene=_scene(self.batches, evaluation, self.simulation),
                stages=_stages(sizes, evaluation),
                layers=evaluation.layers,
                quantizers=evaluation.values,
                integers=self.simulation,
                bpu=self.bpu,
                accuracy=self.accuracy,
                export=self.exported,
                remedy=self.remedy,
                **self.record.on_page(settings),
                **self.records,
            )
            write_report(self.record.folder / PAGE_FILE, content)

    def write_summary(self, entries: Mapping[str, Any]) -> tuple[dict[str, float], float]:
        """Write summary.json: the given fields, then all results.

        Returns:
            Seconds by step, and the peak memory in MiB.
        """
        found: dict[str, Any] = {"integers": self.simulation, "export": self.exported}
        found |= {"bpu": self.bpu, "accuracy": self.accuracy}
        summaries = {name: value.summary() for name, value in found.items() if value is not None}
        tables = {**self.records, **self.evaluation.summary()}
        listed = {"frames": self.batches.listed()}
        return self.record.write_summary({**listed, **entries, **tables, **summaries})


def write_found(
    record: RunRecord,
    settings: Mapping[str, Any],
    ran: ModelSettings,
    run: str | Path,
    batches: FrameBatches,
    **found: Any,
) -> tuple[dict[str, float], float]:
    """Write settings, page and summary of a command that measured one thing of a finished run.

    `found` are its results by field of `ReportContent`; `ran` are the settings of the run in the
    folder `run`. Returns the seconds by step, and the peak memory in MiB.
    """
    record.write_settings({"evaluates": str(run), "run_sha256": ran.sha256, **settings})
    frames = batches.frame_names
    with record.step("page"):
        page = ReportContent(
            title=record.path.name,
            config=ran.sizes_name,
            frames=frames,
            **found,
            **record.on_page(settings),
        )
        write_report(record.folder / PAGE_FILE, page)
    summaries = {name: value.summary() for name, value in found.items()}
    return record.write_summary({**settings, "frames": frames, **summaries})


def _scene_points(batches: FrameBatches) -> tuple[npt.NDArray[np.float32], str]:
    """Points of the first frame in range, float32 [n, 3] in metres, and their kind."""
    frame, limits = batches.first_frame, batches.sizes.lidar.point_cloud_range
    rows, kind = frame.points, "points"
    if rows is None:
        assert frame.voxels is not None  # a frame holds one of the two
        # The means of voxels stand for their points.
        rows, kind = frame.voxels.features, "voxels"
    points = rows[:, :3]
    inside = ((points >= np.array(limits[:3])) & (points < np.array(limits[3:]))).all(axis=1)
    return points[inside], kind


def _scene(
    batches: FrameBatches, evaluation: QuantizationEvaluation, simulation: Simulation | None
) -> ReportScene:
    frame, sizes = batches.first_frame, batches.sizes
    points, kind = _scene_points(batches)
    labels, classes = frame.labels, sizes.head.classes
    integer_boxes = None if simulation is None else simulation.detections
    float_boxes, quantized_boxes = evaluation.detections or (None, None)
    return ReportScene(
        name=frame.name,
        points=points,
        extent=sizes.lidar.extent,
        kind=kind,
        labels=None if labels is None else ReportBoxes(labels.boxes, labels.names),
        float_detections=_boxes(float_boxes, classes),
        quantized_detections=_boxes(quantized_boxes, classes),
        integer_detections=_boxes(integer_boxes, classes),
        cameras=batches.used_cameras(frame),
    )


def _boxes(found: Detections | None, classes: Sequence[str]) -> ReportBoxes | None:
    if found is None:
        return None
    names = [classes[number] if classes else str(number) for number in found.labels]
    return ReportBoxes(found.boxes, names, found.scores)


def _stages(config: Sizes, evaluation: QuantizationEvaluation) -> list[ReportStage]:
    return [
        ReportStage(
            name=maps.row.stage,
            title=maps.row.title,
            float_map=maps.float_map,
            quantized_map=maps.quantized_map,
            difference_map=maps.difference_map,
            extent=None if maps.is_image else config.lidar.extent,
            quantity=maps.quantity,
            difference_quantity=maps.difference_quantity,
            sqnr_db=maps.row.sqnr_db,
            cosine=maps.row.cosine,
        )
        for maps in evaluation.stages
    ]


def _weights(settings: Mapping[str, object], config: Sizes) -> ReportFigure:
    source = settings.get("weights")
    if source is not None:
        return ReportFigure("Weights", "loaded", Path(str(source)).name)
    if is_foreign(config.name):
        return ReportFigure("Weights", "its own", "as the model's code makes them")
    return ReportFigure(
        "Weights", "random", "errors grow from layer to layer as they do in no trained model"
    )


# Dense operations a second of the GPU in Jetson AGX Orin 64 GB, by NVIDIA's technical brief:
# 170 sparse int8 TOPS and 85 sparse float16 TFLOPS, half of them without sparsity.
_INT8_RATE, _FLOAT_RATE, _RATE_OF = 85e12, 42.5e12, "Jetson AGX Orin's GPU"


def cost_figures(size: WeightSize | None, simulation: Simulation | None) -> Iterator[ReportFigure]:
    """Bytes of the parameters, multiply-accumulates of a frame, and their time at a GPU's peak.

    .. math:: t = 2 n_8 / r_8 + 2 n_f / r_f

    with n multiply-accumulates in integers and in float, of two operations each, and the rates r.
    """
    if size is not None:
        before, after = size.texts
        yield ReportFigure("Quantized weights", after, f"from {before} in float32")
    if simulation is not None and simulation.operations:
        count = macs(simulation.operations)
        share = simulation.integer_share
        yield ReportFigure("Operations of a frame", count, f"{100 * share:.1f} % in integers")
        at_peak = 2 * simulation.operations * (share / _INT8_RATE + (1 - share) / _FLOAT_RATE)
        note = (
            f"2 × MAC ÷ peak rate of {_RATE_OF} "
            f"({_INT8_RATE / 1e12:g} TOPS int8, {_FLOAT_RATE / 1e12:g} TFLOPS float16); "
            "not measured, memory and launches come on top"
        )
        yield ReportFigure("Estimated time of a frame", f"≥ {1e3 * at_peak:.2g} ms", note)


def _agreement_figures(rows: Sequence[AgreementRow]) -> list[ReportFigure]:
    return [
        ReportFigure(
            f"Detections within {row.distance:g} m",
            f"{row.matched / row.float_detections:.1%}" if row.float_detections else "–",
            f"{row.matched} of the float model's {row.float_detections}, same class; scores differ "
            f"by {or_dash(row.score_mean, '.4f')} on average",
        )
        for row in rows[-1:]
    ]

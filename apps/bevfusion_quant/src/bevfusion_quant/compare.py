"""Several finished runs of one float model, scored on the same labels in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from bev_data.metrics import Accuracy, Bootstrap, accuracy_notes, model_tables
from bev_data.points import Frame
from bev_data.tables import Cell, CellParts, Table, plain_table
from bevfusion.detectors import build_detector, is_foreign
from bevfusion.evaluation import accumulate_models, accuracy_accumulator
from bevfusion.model import Batch, Detector, Sizes
from bevfusion.quantization import relative_change, whole_output
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer import check_backend, lowered
from bevfusion_quant.options import Place, PtqOptions, TargetOptions
from bevfusion_quant.pages import ReportContent, Section, head, reproduce, setting_text, write_page
from bevfusion_quant.run import PAGE_FILE, Clock, RunRecord, RunSettings, new_run
from bevfusion_quant.saved_run import ModelSettings, load_run, read_model_settings
from bevfusion_quant.stages import sizes_of

__all__ = [
    "CompareResult",
    "ComparedRun",
    "Comparison",
    "comparison_text",
    "names_of",
    "run_compare",
]

# Folding moves a heat map by 1e-5 of its largest value, other weights by as much as it is.
_SAME = 1e-3
_UNFOLDED = "ptq --no-fold left batch norms in place"

# Of a run's settings, what tells it from another run of the same float model.
_SHOWN = {
    "method": "ranges",
    "weight_bits": "weight bits",
    "output_weight_bits": "of head outputs",
    "unsigned": "unsigned",
    "rounding": "weights rounded",
    "bias_correction": "biases corrected",
    "search_ranges": "ranges searched",
    "fold": "batch norms folded",
    "branch": "branch",
    "quantize_head": "head",
    "quantize_first_layer": "first layer",
    "exclude": "left float",
    "plan": "plan",
}
# What else `ptq` can be told beyond any target's options, under its own name.
_SHARED = {option.name for option in fields(TargetOptions)}
_OTHERS = {
    option.name: option.default
    for option in fields(PtqOptions)
    if option.name not in _SHARED | _SHOWN.keys()
}


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs.

    Attributes:
        name: Its name in the tables.
        folder: Its folder.
        settings: Settings from its config.json.
        integers: Whether its integer model runs too.
        why_not: Reason why no integer model runs although it was requested.
    """

    name: str
    folder: str
    settings: RunSettings
    integers: bool
    why_not: str = ""

    @property
    def models(self) -> dict[str, str]:
        """Names of its models in the tables, by kind: "quantized", "integers"."""
        forms = ("quantized", "integers") if self.integers else ("quantized",)
        return {form: f"{self.name} {form}" for form in forms}

    def shown_settings(self) -> dict[str, Any]:
        """Settings in which runs of one model can differ, by title in the tables."""
        shown = {title: getattr(self.settings, name) for name, title in _SHOWN.items()}
        for name, default in _OTHERS.items():
            shown[name.replace("_", " ")] = self.settings.written.get(name, default)
        return {**shown, "trained by qat": self.settings.qat is not None}

    def summary(self) -> dict[str, Any]:
        """Folder, digests and settings, for summary.json and config.json."""
        apart = ("format", "version", "sizes")
        written = self.settings.written
        settings = {key: value for key, value in written.items() if key not in apart}
        return {"run": self.folder, "name": self.name, **settings}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several runs beside each other.

    Attributes:
        runs: In the given order.
        accuracy: Scores of the float model, then of each run's models.
    """

    runs: tuple[ComparedRun, ...]
    accuracy: Accuracy

    def differing(self) -> list[str]:
        """Titles of the settings in which the runs differ; "ranges" for a single run."""
        shown = [run.shown_settings() for run in self.runs]
        differ = [title for title in shown[0] if any(t[title] != shown[0][title] for t in shown)]
        return differ or ["ranges"]

    def left_out(self) -> list[str]:
        """Runs without the requested integer model; one sentence per reason."""
        left: dict[str, list[str]] = {}
        for run in self.runs:
            if run.why_not:
                left.setdefault(run.why_not, []).append(run.name)
        are = {why: "is" if len(names) == 1 else "are" for why, names in left.items()}
        return [
            f"{', '.join(names)} {are[why]} not among the integers: {why}."
            for why, names in left.items()
        ]


def _write_page(record: RunRecord, comparison: Comparison, frames: Sequence[str]) -> Path:
    """Write report.html: the tables, and the command that repeats them."""
    title, settings = record.path.name, comparison.runs[0].settings
    shown = {"runs": ", ".join(run.folder for run in comparison.runs), "weights": settings.weights}
    content = ReportContent(
        title=title, config=settings.sizes_name, frames=frames, **record.on_page(shown)
    )
    data = {
        "notes": _notes(comparison),
        "tables": [table.on_page() for table in _tables(comparison)],
    }
    again = reproduce(content)
    sections = [Section("comparison", "Comparison", data), *([] if again is None else [again])]
    return write_page(record.folder / PAGE_FILE, title, head(content), sections)


def comparison_text(comparison: Comparison) -> tuple[str, ...]:
    """Headline, scores by class, differing settings, notes; one line per model."""
    tables = (table.text() for table in _tables(comparison))
    return (*tables, "\n".join(_notes(comparison)))


def _notes(comparison: Comparison) -> list[str]:
    return [*accuracy_notes(comparison.accuracy), *comparison.left_out()]


def _tables(comparison: Comparison) -> tuple[Table, Table, Table]:
    """Scores of all models by class, and the differing settings."""
    return (*model_tables(comparison.accuracy), _settings(comparison))


def _settings(comparison: Comparison) -> Table:
    titles = comparison.differing()
    heads = ("Run", *map(str.capitalize, titles), "Folder")
    rows: list[Sequence[Cell]] = [
        (
            run.name,
            *(setting_text(run.shown_settings()[title]) for title in titles),
            CellParts(text=run.folder, code=True),
        )
        for run in comparison.runs
    ]
    return plain_table("In what the runs differ", heads, rows, form="wide")


_COMPARED_APART: dict[str, Callable[[ModelSettings], object]] = {
    "model": lambda run: run.model,
    "configuration": lambda run: run.config,
    "set of parts": lambda run: " and ".join(run.parts),
    "list of cameras": lambda run: run.used_cameras,
}


def _check_settings(folders: Sequence[Path]) -> list[ModelSettings]:
    """Read the runs' settings and check that the runs are comparable."""
    if not folders:
        raise InputError("no runs to compare: name finished runs with --run")
    found = [read_model_settings(folder) for folder in folders]
    for folder, settings in zip(folders, found, strict=True):
        if sum(folder.samefile(other) for other in folders) > 1:
            raise InputError(f"--run {folder} is given twice: name each run once")
        if settings.for_bpu:
            raise InputError(
                f"--run {folder} is a run for a BPU, whose model is in other parts: judge it with "
                "bevfusion-quant evaluate"
            )
        if "head" not in settings.parts and not is_foreign(settings.model):
            raise InputError(
                f"--run {folder} holds the {settings.branch} branch alone, without a "
                "head: it detects nothing that labels could judge; compare detectors"
            )
        for what, read in _COMPARED_APART.items():
            one, other = read(settings), read(found[0])
            if one != other:
                raise InputError(
                    f"--run {folder} has another float model than {folders[0]}: its {what} is "
                    f"{one}, not {other}; compare runs of one model"
                )
    return found


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's name, or the whole path where names are equal."""
    often = Counter(folder.resolve().name for folder in folders)
    return [f.resolve().name if often[f.resolve().name] == 1 else str(f) for f in folders]


def _load_alike(folders: Sequence[Path], batch: Batch) -> tuple[Detector, list[Detector]]:
    """One float model, and the models of each run, in eval mode."""
    quantized: list[Detector] = []
    first: tuple[Detector, Tensor] | None = None
    for folder in folders:
        run = load_run(folder)
        with torch.no_grad():
            output = whole_output(run.float_model(*batch))
        first = first or (run.float_model, output)
        # A run may have folded its batch norms and another not: they agree up to rounding.
        change = relative_change(first[1], output)
        if not change <= _SAME:
            raise InputError(
                f"--run {folder} began with other weights than {folders[0]}: on the first frame "
                f"their float models' heat maps differ by {change:.2g} of the largest value; "
                "compare runs of one model"
            )
        quantized.append(run.quantized_model)
    assert first is not None
    return first[0], quantized


def _refuse_without_boxes(model: Detector, sizes: Sizes) -> None:
    """Check that a detector in its own code has boxes to compare with labels."""
    if not model.finds_boxes or not sizes.head.classes:
        lacks = "class names for its boxes" if model.finds_boxes else "boxes"
        raise InputError(
            f"--model {sizes.name} gives no {lacks}, which labels could judge: return a "
            "ForeignDetector with boxes and classes, or compare layers with bevfusion-quant "
            "evaluate"
        )


@dataclass(frozen=True, eq=False)
class CompareResult:
    """Folder, result, seconds by step, peak memory in MiB."""

    folder: Path
    comparison: Comparison
    seconds: dict[str, float]
    peak_memory_mib: float


def run_compare(
    compared: Sequence[str | Path],
    frames: Sequence[Frame],
    *,
    integers: str | None = None,
    cameras: Sequence[str] | None = None,
    bootstrap: Bootstrap | None = None,
    **place: Unpack[Place],
) -> CompareResult:
    """Score several runs of one float model on the labels of the same frames; write `runs/name`.

    Each frame is read once. The float model, each run's fake-quantized model and, on request, its
    integer model run on it; only detections are kept. Confidence intervals of differences to float
    resample the same scenes for both models. All models are in memory at once, the float model
    once. With several ranks, each runs its share of the frames.

    Args:
        compared: Folders of `run_ptq` or `run_qat`, all from the same float weights.
        frames: At least one with labels.
        integers: Kernels of the integer models, such as "auto"; None for no integer models. Runs
            with unfolded batch norms have none; the result says so.
        cameras: Names of the cameras to use. Default: those of the runs.
        bootstrap: Method of the intervals. Default: `Bootstrap()`.
        **place: Where the comparison is written; see `Place`.

    Raises:
        InputError: The runs are not comparable, or the frames are wrong. Nothing is written.
    """
    if integers is not None:
        check_backend(integers)
    folders = [Path(folder) for folder in compared]
    found = _check_settings(folders)
    clock = Clock()
    read_runs = tuple(
        ComparedRun(
            run, str(folder), ran,
            integers=integers is not None and ran.fold,
            why_not="" if integers is None or ran.fold else _UNFOLDED,
        )
        for run, folder, ran in zip(names_of(folders), folders, found, strict=True)
    )  # fmt: skip
    with new_run("compare", clock, keep=folders, **place) as record:
        with clock.step("load the runs"):
            sizes = sizes_of(found[0].model, found[0].config)
            parts = build_detector(sizes, found[0].parts)  # makes the batches, and is not run
            batches = FrameBatches(frames, sizes, parts, cameras or found[0].used_cameras)
            _refuse_without_boxes(parts, sizes)
            float_model, quantized = _load_alike(folders, batches[0])
        with clock.step("lower to integers"):
            models = _models(float_model, quantized, read_runs, batches, integers)
        digests = [run.settings.sha256 for run in read_runs]
        decides = {"compares": digests, "integers": integers, "cameras": cameras}
        shards = record.shards(frames, {**decides, "command": record.command}, float_model)
        accumulator = accuracy_accumulator(batches, bootstrap)
        with clock.step("run all models"):
            for _ in accumulate_models(
                "compare", models, float_model, batches, accumulator, shards
            ):
                pass
        with clock.step("judge by labels"):
            accuracy = accumulator.result()
        if accuracy is None:
            raise InputError(
                "none of the frames has labels, which runs are compared by: give frames of a "
                "labelled data set (--dataset), or compare layers with bevfusion-quant evaluate"
            )
        comparison = Comparison(read_runs, accuracy)
        if not shards.ranks.first:  # the first one writes
            return CompareResult(record.path, comparison, *clock.spent())
        entries = [run.summary() for run in read_runs]
        settings = {"compares": entries, "config": sizes.name, "cameras": cameras}
        record.write_settings({"evaluates": [run.folder for run in read_runs], **settings})
        with clock.step("page"):
            _write_page(record, comparison, batches.frame_names)
        seconds, peak = record.write_summary(
            {
                **settings,
                "frames": batches.frame_names,
                "accuracy": comparison.accuracy.summary(),
                "notes": comparison.left_out(),
            }
        )
    return CompareResult(record.path, comparison, seconds, peak)


def _models(
    float_model: Detector,
    quantized: Sequence[Detector],
    read_runs: Sequence[ComparedRun],
    batches: FrameBatches,
    backend: str | None,
) -> dict[str, Callable[..., Any]]:
    models: dict[str, Callable[..., Any]] = {"float": float_model}
    for run, model in zip(read_runs, quantized, strict=True):
        names = run.models
        models[names["quantized"]] = model
        if "integers" in names:
            models[names["integers"]] = lowered(model, batches[0], backend or "auto")
    return models

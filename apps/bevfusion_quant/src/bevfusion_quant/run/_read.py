"""What finished folders say: config.json and summary.json as one typed form each.

A field that a reader needs is added here alone, with the default that older runs mean by leaving
it out. What a command writes beside these fields is kept, and read by nobody.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from bev_data.metrics import AccuracySummary
from bevfusion.quantization import (
    IntegerLayerSummary,
    SensitivitySummary,
    SimulationSummary,
    StageSummary,
)
from bevfusion_quant.run._folder import CONFIG_FILE, RUN_FORMAT, RUN_VERSIONS
from bevfusion_quant.run._record import SUMMARY_FILE
from bevquant_quantizers.documents import as_form, read_json

Form = TypeVar("Form", bound="RunSettings")


class RunSettings(msgspec.Struct, kw_only=True):
    """config.json of any folder: what decides the result, and what the folder is.

    Attributes:
        written: All of it as it was written, to be copied.
        sha256: Of the model's files, of a run that holds one.
        run_sha256: The same of the run that the folder was made of.
        evaluates: The run, or the runs, that the folder was made of.
        reviews: The run that `report` put on a page.
        compares: The runs of `compare`.
        measures: The run of `sensitivity`.
        exports: The run of `export`.
        qat: How the model was trained, of a run of `qat`.
    """

    version: int = 1
    model: str = "bevfusion"
    config: str = ""
    branch: str = "lidar"
    method: str = "mse"
    exclude: list[str] = []
    fold: bool = True
    quantize_head: bool = False
    quantize_first_layer: bool = True  # runs from before did, and did not say so
    weight_bits: Annotated[int, msgspec.Meta(ge=2, le=16)] = 8
    rounding: str = "nearest"
    bias_correction: bool = False
    plan: str | None = None
    target: str | None = None
    seed: int = 0
    calibration_frames: int = 0
    cameras: list[str] | None = None
    weights: str | None = None
    poor_calibration: list[str] = []
    sha256: dict[str, str] | None = None
    run_sha256: dict[str, str] | None = None
    evaluates: str | list[str] | None = None
    reviews: str | None = None
    compares: list[ComparedSettings] | None = None
    measures: str | None = None
    exports: str | None = None
    qat: dict[str, Any] | None = None
    written: dict[str, Any] = {}

    @property
    def for_bpu(self) -> bool:
        """Whether a BPU is what the model was quantized for."""
        return self.target == "bpu"

    @property
    def sizes_name(self) -> str:
        """The sizes of the model, as pages name them."""
        if ":" in self.model:  # in other code
            return self.model
        return self.config if self.model == "bevfusion" else f"{self.model} {self.config}"

    @property
    def kind(self) -> str:
        """What the folder is.

        "ptq", "qat", "bpu" of runs that hold a model; "evaluation" of what `evaluate` and
        `simulate` wrote; "sensitivity", "export", "comparison", "report".
        """
        for found, kind in (
            (self.reviews, "report"),
            (self.compares, "comparison"),
            (self.measures, "sensitivity"),
            (self.exports, "export"),
            (self.evaluates, "evaluation"),
        ):
            if found is not None:
                return kind
        return "bpu" if self.for_bpu else "ptq" if self.qat is None else "qat"


class ComparedSettings(RunSettings, kw_only=True):
    """Of one of the runs that `compare` judged: its own settings, and its name in the tables."""

    name: str
    run: str = ""


def settings_of(written: dict[str, Any]) -> RunSettings:
    """Settings in their form.

    Raises:
        DocumentError: A field is of another type.
    """
    return as_settings(RunSettings, written)


def as_settings(form: type[Form], written: dict[str, Any]) -> Form:
    """Settings in a narrower form.

    Raises:
        DocumentError: A field is of another type, or missing.
    """
    found: Form = as_form(written, form, where=CONFIG_FILE, what="run's settings")
    found.written = written
    return found


def read_settings(folder: Path) -> RunSettings:
    """The settings of a folder that this program wrote, whatever its version.

    Raises:
        DocumentError: There are none, or they are damaged.
    """
    return settings_of(read_written(folder))


def read_written(folder: Path) -> dict[str, Any]:
    """config.json of any folder as it stands, for whoever looks at its version first.

    Raises:
        DocumentError: There is none.
    """
    return _read(folder / CONFIG_FILE, "run's settings")


def refuse_version(name: str, version: object) -> None:
    """Refuse a schema that this program does not read.

    Raises:
        ValueError: It is none of `RUN_VERSIONS`.
    """
    if version not in RUN_VERSIONS:
        raise ValueError(
            f"{name} version {version!r}, this program reads {RUN_VERSIONS[0]} to "
            f"{RUN_VERSIONS[-1]}"
        )


class _Layer(msgspec.Struct):
    layer: str
    sqnr_db: float | None


class _Quantizer(msgspec.Struct):
    warnings: list[str]


class _Finding(msgspec.Struct):
    tensor: str
    frame: str
    evidence: str
    poor: bool


class _Calibration(msgspec.Struct):
    warnings: list[str]
    quantizers: list[_Quantizer]
    findings: list[_Finding] = []


class _File(msgspec.Struct):
    name: str
    sha256: str
    companions: dict[str, str]


class ExportSummary(msgspec.Struct):
    """A set of files."""

    target: str
    verified: bool
    failures: list[str]
    files: list[_File]


class _Segment(msgspec.Struct):
    place: str
    nodes: list[Any]


class _Estimate(msgspec.Struct):
    violations: list[str]


class BpuSummary(msgspec.Struct):
    """A model split between a BPU and its CPU."""

    march: str
    transfer_bytes: int
    segments: list[_Segment]
    on_cpu: list[Any]
    estimates: dict[str, _Estimate]
    stages: list[StageSummary]
    layers: list[IntegerLayerSummary]


class QatSummary(msgspec.Struct):
    """What a run was trained from, and on."""

    run: str
    training_frames: str


class _Frame(msgspec.Struct):
    name: str


class RunSummary(msgspec.Struct):
    """summary.json of any folder: what was found."""

    version: int = 1
    command: str = ""
    versions: dict[str, str] = {}
    frames: list[str | _Frame] = []
    warnings: list[str] | None = None
    layers: list[_Layer] = []
    stages: list[StageSummary] = []
    accuracy: AccuracySummary | None = None
    calibration: _Calibration | None = None
    integers: SimulationSummary | None = None
    export: ExportSummary | None = None
    sensitivity: SensitivitySummary | None = None
    bpu: BpuSummary | None = None
    qat: QatSummary | None = None

    @property
    def frame_names(self) -> tuple[str, ...]:
        """Names of the frames it was made with."""
        return tuple(frame if isinstance(frame, str) else frame.name for frame in self.frames)


def read_summary(folder: Path) -> RunSummary:
    """What a finished folder found.

    Raises:
        ValueError: There is no summary, it is damaged, or of a schema that is not read here.
    """
    written = _read(folder / SUMMARY_FILE, "summary")
    refuse_version(f"{SUMMARY_FILE} is of", written.get("version", 1))
    found: RunSummary = as_form(written, RunSummary, where=SUMMARY_FILE, what="summary")
    return found


def _read(path: Path, what: str) -> dict[str, Any]:
    content: dict[str, Any] = read_json(
        path, dict[str, Any], what=what, head={"format": RUN_FORMAT}
    )
    return content

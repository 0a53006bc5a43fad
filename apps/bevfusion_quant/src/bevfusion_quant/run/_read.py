"""Content of finished folders: config.json and summary.json as one typed form each.

Add a field that a reader needs here, with the default that older runs imply by its absence. Other
fields that a command writes are kept and not read.
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
    """config.json of any folder: its settings and its kind.

    Attributes:
        written: The whole document as written, to be copied.
        sha256: Digests of the model's files, for a run that holds one.
        run_sha256: The same of the run that this folder evaluates or exports.
        evaluates: The evaluated run, or runs.
        reviews: The run on the page of `report`.
        compares: The runs of `compare`.
        measures: The run of `sensitivity`.
        exports: The run of `export`.
        qat: How the model was trained, for a run of `qat`.
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
    output_weight_bits: int | None = None  # of runs from before: weight_bits
    unsigned: bool = False
    rounding: str = "nearest"
    bias_correction: bool = False
    search_ranges: bool = False
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

    def __post_init__(self) -> None:
        if self.output_weight_bits is None:
            self.output_weight_bits = self.weight_bits

    @property
    def for_bpu(self) -> bool:
        """Whether the model was quantized for a BPU."""
        return self.target == "bpu"

    @property
    def sizes_name(self) -> str:
        """Name of the model's sizes on pages."""
        if ":" in self.model:  # in other code
            return self.model
        return self.config if self.model == "bevfusion" else f"{self.model} {self.config}"

    @property
    def kind(self) -> str:
        """Kind of the folder.

        "ptq", "qat", "bpu" for runs that hold a model; "evaluation" for `evaluate` and `simulate`;
        "sensitivity", "export", "comparison", "report".
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
    """Settings of one of the runs of `compare`, and its name in the tables."""

    name: str
    run: str = ""


def as_settings(form: type[Form], written: dict[str, Any]) -> Form:
    """Settings of a document, as this class.

    Raises:
        DocumentError: A field has another type, or is missing.
    """
    found: Form = as_form(written, form, where=CONFIG_FILE, what="run's settings")
    found.written = written
    return found


def read_settings(folder: Path) -> RunSettings:
    """Settings of a folder of this program, of any version.

    Raises:
        DocumentError: They are missing or damaged.
    """
    return as_settings(RunSettings, read_written(folder))


def read_written(folder: Path) -> dict[str, Any]:
    """config.json of any folder, unchecked, to look at its version first.

    Raises:
        DocumentError: The file is missing.
    """
    return _read(folder / CONFIG_FILE, "run's settings")


def refuse_version(name: str, version: object) -> None:
    """Refuse a schema version that this program does not read.

    Raises:
        ValueError: It is not in `RUN_VERSIONS`.
    """
    if version not in RUN_VERSIONS:
        raise ValueError(
            f"{name} version {version!r}, this program reads {RUN_VERSIONS[0]} to "
            f"{RUN_VERSIONS[-1]}"
        )


class _Layer(msgspec.Struct):
    layer: str
    sqnr_db: float | None
    not_finite: int = 0


class _Quantizer(msgspec.Struct):
    warnings: list[str]


class _Finding(msgspec.Struct):
    tensor: str
    frame: str
    kind: str
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
    """Start and frames of a training run."""

    run: str
    training_frames: str


class _Frame(msgspec.Struct):
    name: str


class RunSummary(msgspec.Struct):
    """summary.json of any folder: its results."""

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
        """Names of its frames."""
        return tuple(frame if isinstance(frame, str) else frame.name for frame in self.frames)


def read_summary(folder: Path) -> RunSummary:
    """Read the results of a finished folder.

    Raises:
        ValueError: The summary is missing, damaged, or of an unknown schema.
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

"""What writing and checking a set of files gave."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bev_data.metrics import AgreementRow
from bevquant_quantizers.documents import write_json

_EXACT = ("int8", "float16")  # forms that are compared value by value


@dataclass(frozen=True)
class FilePort:
    """An input or output of a file: its name, type and shape; a name stands for a free size."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class FileLayer:
    """One tensor that a file makes, held against the model that the file was written from.

    Attributes:
        file: Name of the file.
        path: Module that makes it; of a float file the output's name.
        op: What computes it.
        form: "int8", "float", "float16" of Autoware's plugin, which sums as it does, or "places"
            for the cells that became queries.
        elements: How many values it has.
        different: How many differ, where values are counted; None for floats.
        largest: Largest difference: in steps of int8, for floats relative to the largest value.
        allowed: In words, what may differ.
        is_right: Whether no more than that does.
        fake_sqnr_db: Of the fake-quantized model's output there, against float.
        integer_sqnr_db: Of the integer model's.
        integer_steps: Largest difference of the integer model from the fake-quantized one, in steps
            of the output.
        ties: How many of the different lie on the border of two steps, as near as float32 can tell.
    """

    file: str
    path: str
    op: str
    form: str
    elements: int
    different: int | None
    largest: float
    allowed: str
    is_right: bool
    fake_sqnr_db: float | None = None
    integer_sqnr_db: float | None = None
    integer_steps: int | None = None
    ties: int = 0

    @property
    def difference(self) -> str:
        """How far it is from the model, and what would be allowed."""
        if self.form == "float":
            return f"{self.largest:.2g} of the largest value off; allowed: {self.allowed}"
        if self.form == "places":
            return f"{self.different} of {self.elements} are others; allowed: {self.allowed}"
        steps = f"{self.largest:g} step{'s' * (self.largest != 1)}"
        ties = f", {self.ties:,} of them on the border of two steps" if self.ties else ""
        return (
            f"{self.different:,} of {self.elements:,} values differ, by up to {steps}{ties}; "
            f"allowed: {self.allowed}"
        )


@dataclass(frozen=True)
class ExportedFile:
    """One file of the set.

    Attributes:
        name: With its ending.
        kind: "int8", "sparse", "float", or "bpu".
        runs_on: The engine that takes it.
        build: The command, or the call, that makes an engine of it.
        size: Bytes.
        sha256: Digest.
        companions: Digests of the files that belong to it, by name: hb_mapper's settings.
        opset: Version of the standard operators.
        inputs: In order.
        outputs: In order.
        ranges: Largest magnitude of each quantized tensor, by the quantizer's path.
        voxel_bound: Most voxels that a layer of a sparse file holds; None for others.
        runs_in_float: What in it runs in float, and why.
        notes: What is other than one might expect.
        findings: What the linter finds for the target.
        layers: Each tensor against the model.
        unverified: What nobody could run, one sentence each.
        milliseconds: Fastest run of the file on the CPU at hand; None where it was not measured.
        float_milliseconds: The same of its part in float32, in the same process.
    """

    name: str
    kind: str
    runs_on: str
    build: str
    size: int
    sha256: str
    companions: dict[str, str]
    opset: int
    inputs: tuple[FilePort, ...]
    outputs: tuple[FilePort, ...]
    ranges: dict[str, float]
    voxel_bound: int | None
    runs_in_float: tuple[str, ...]
    notes: tuple[str, ...]
    findings: tuple[str, ...]
    layers: tuple[FileLayer, ...]
    unverified: tuple[str, ...] = ()
    milliseconds: float | None = None
    float_milliseconds: float | None = None

    @property
    def different(self) -> int:
        """Values that differ, of all tensors that are compared value by value."""
        return sum(layer.different or 0 for layer in self.layers if layer.form in _EXACT)

    @property
    def unexplained(self) -> int:
        """Those of them that do not lie on the border of two steps."""
        return self.different - sum(layer.ties for layer in self.layers if layer.form in _EXACT)

    @property
    def largest_steps(self) -> int:
        """Largest difference of an integer tensor."""
        return int(max((v.largest for v in self.layers if v.form == "int8"), default=0))


@dataclass(frozen=True)
class SetStage:
    """The end of one stage when the files run one behind the other, against float.

    Attributes:
        tensor: What lies between the files there.
        title: In words.
        fake_sqnr_db: Of the fake-quantized model; None where equal.
        integer_sqnr_db: Of the integer model.
        onnx_sqnr_db: Of the files.
        is_right: Whether the files are as near to float as the integers are.
    """

    tensor: str
    title: str
    fake_sqnr_db: float | None
    integer_sqnr_db: float | None
    onnx_sqnr_db: float | None
    is_right: bool


@dataclass(frozen=True, eq=False)
class ExportedSet:
    """A set of files, written and checked.

    Attributes:
        target: What it was written for.
        folder: Where it lies.
        files: In the order of execution.
        stages: The files one behind the other on the first frame.
        agreement: Boxes of the integer model against those of the files; empty without a head.
        frame: Name of that frame.
    """

    target: str
    folder: Path
    files: tuple[ExportedFile, ...]
    stages: tuple[SetStage, ...]
    agreement: tuple[AgreementRow, ...]
    frame: str

    @property
    def layers(self) -> tuple[FileLayer, ...]:
        """Of all files."""
        return tuple(layer for file in self.files for layer in file.layers)

    @property
    def measured(self) -> str:
        """How long the files take on the CPU at hand, beside float32; "" where none was timed."""
        timed = [file for file in self.files if file.milliseconds is not None]
        if not timed:
            return ""
        taken = sum(file.milliseconds or 0 for file in timed)
        floats = sum(file.float_milliseconds or 0 for file in timed)
        left = ", ".join(file.name for file in self.files if file not in timed)
        without = f"; {left} not measured" if left else ""
        return f"{taken:.3g} ms, float32 {floats:.3g} ms ({floats / taken:.2f} times){without}"

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong, each line naming file and layer; empty for a set that was proved."""
        lines = [
            f"{file.name}: {text}"
            for file in self.files
            for text in file.findings
            if " error at " in text
        ]
        for layer in self.layers:
            if not layer.is_right:
                lines.append(f"{layer.file}: {layer.path} ({layer.op}): {layer.difference}")
        lines += [
            f"the files one behind the other, {stage.title}: {stage.onnx_sqnr_db:.1f} dB against "
            f"float, where the integer model has {_decibels(stage.integer_sqnr_db)}"
            for stage in self.stages
            if not stage.is_right and stage.onnx_sqnr_db is not None
        ]
        return tuple(lines)

    def summary(self) -> dict[str, Any]:
        """Everything, for summary.json."""
        return {
            "target": self.target,
            "verified": not self.failures,
            "failures": self.failures,
            "frame": self.frame,
            "files": self.files,
            "stages": self.stages,
            "agreement": self.agreement,
        }

    def write_manifest(self, **about: Any) -> Path:
        """Write manifest.json beside the files: what each is, and what checking it gave.

        Args:
            **about: What else it says of the set: "command", "versions", …
        """
        content = {
            "format": "bevfusion-quant export",
            "version": 1,
            "target": self.target,
            **about,
            "verified": not self.failures,
            "failures": self.failures,
            "files": [_in_short(file) for file in self.files],
            "chain": {"frame": self.frame, "stages": self.stages, "boxes": self.agreement},
        }
        return write_json(self.folder / "manifest.json", content)


def _in_short(file: ExportedFile) -> dict[str, Any]:
    """A file with its layers in short: how many are right, and those that are not equal."""
    entry = asdict(file)
    layers = entry.pop("layers")
    entry["checked"] = {
        "tensors": len(layers),
        "wrong": sum(not layer["is_right"] for layer in layers),
        "different": [
            {key: layer[key] for key in ("path", "op", "elements", "different", "ties", "largest")}
            for layer in layers
            if layer["largest"]
        ],
    }
    return entry


def _decibels(value: float | None) -> str:
    return "none: it is equal" if value is None else f"{value:.1f} dB"

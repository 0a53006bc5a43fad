"""Results of writing and checking a set of files, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bev_data.metrics import AgreementRow
from bev_data.tables import CellParts, Column, Columns, Row, Table, or_dash, table_of
from bevquant_export import TensorCheck
from bevquant_quantizers.documents import write_json

_STEPS = ("int8", "fp8_e4m3", "fp8_e5m2")
_EXACT = (*_STEPS, "float16")  # forms compared value by value


@dataclass(frozen=True)
class FilePort:
    """An input or output of a file: its name, type and shape; a name stands for a free size."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class FileLayer(TensorCheck):
    """Verdict on one tensor of a file, beside the figures of the models.

    The path is the output's name in a float file. The form is "places" for the cells that became
    queries, and "float16" for Autoware's plugin, which sums as it does.

    Attributes:
        file: Name of the file.
        fake_sqnr_db: SQNR of the fake-quantized model's tensor against float.
        integer_sqnr_db: Of the integer model's.
        integer_steps: Largest difference between integer and fake-quantized model, in steps of the
            output.
    """

    file: str
    fake_sqnr_db: float | None = None
    integer_sqnr_db: float | None = None
    integer_steps: int | None = None

    @property
    def difference(self) -> str:
        """Difference from the model, and the allowed one."""
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
        name: With its suffix.
        kind: "int8", "sparse", "float", or "bpu".
        runs_on: Its engine.
        build: The command, or the call, that builds an engine from it.
        size: Bytes.
        sha256: Digest.
        companions: Digests of its companion files by name: hb_mapper's settings.
        opset: Version of the standard operators.
        inputs: In order.
        outputs: In order.
        ranges: Largest magnitude of each quantized tensor, by the quantizer's path.
        voxel_bound: Largest number of voxels of a layer in a sparse file; None for others.
        runs_in_float: Layers that run in float, with the reason.
        notes: Facts that a user might not expect.
        findings: The linter's findings for the target.
        layers: Each tensor compared with the model.
        unverified: Parts that could not be run, one sentence each.
        milliseconds: Fastest run of the file on this CPU; None if not measured.
        float_milliseconds: The same for its part in float32, in the same process.
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
        """Largest difference of an 8-bit tensor."""
        return int(max((v.largest for v in self.layers if v.form in _STEPS), default=0))


@dataclass(frozen=True)
class SetStage:
    """The end of one stage with all files in sequence, compared with float.

    Attributes:
        tensor: The tensor between the files.
        title: In words.
        fake_sqnr_db: Of the fake-quantized model; None if equal.
        integer_sqnr_db: Of the integer model.
        onnx_sqnr_db: Of the files.
        is_right: Whether the files are as near to float as the integer model.
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
        target: Its target.
        folder: Its folder.
        files: In the order of execution.
        stages: The stages of all files in sequence on the first frame.
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
        """Times of the files on this CPU beside float32; "" if none was timed."""
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
        """Failures, one line with file and layer each; empty for a verified set."""
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
        """Write manifest.json beside the files: properties and check results of each.

        Args:
            **about: Further facts on the set: "command", "versions", …
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


_SHOWN = 5


def export_text(made: ExportedSet) -> tuple[str, ...]:
    """Files, their differences from the integer model, all files in sequence."""
    parts = [
        f"ONNX files for {made.target}",
        _file_table(made.files),
        "\n".join([set_verdict(made), *_departures(made)]),
    ]
    if made.stages:
        parts += [(stages := file_stage_table(made)).title, stages.text()]
    if made.agreement:
        parts += [(boxes := file_box_table(made)).title, boxes.text()]
    if made.measured:
        parts.append(f"Measured on this CPU: {made.measured}")
    parts.append("\n".join(["Engines", *dict.fromkeys(f"  {file.build}" for file in made.files)]))
    return tuple(parts)


def set_verdict(made: ExportedSet) -> str:
    """A sentence: whether the files compute the integer model."""
    if made.failures:
        return f"Not verified, {len(made.failures)} of the checks failed."
    model = "fake-quantized" if made.target == "bpu" else "integer"
    texts = (
        f"quantized tensors are equal to the {model} model's",
        f"tensors are equal to what the plugin's arithmetic makes of the {model} model",
    )
    notes = [
        _equality([layer for layer in made.layers if layer.form in forms], text, made)
        for forms, text in zip((_STEPS, ("float16",)), texts, strict=True)
    ]
    floats = [layer.largest for layer in made.layers if layer.form == "float"]
    if floats:
        near = f"agree with torch's within {max(floats):.2g}" if max(floats) else "equal torch's"
        notes.append(f"Floats {near}.")
    return "Verified: " + " ".join(filter(None, notes))


def _equality(layers: list[FileLayer], text: str, made: ExportedSet) -> str:
    equal = sum(not layer.different for layer in layers)
    more = ""
    if equal < len(layers):
        values = sum(layer.different or 0 for layer in layers)
        many = sum(layer.elements for layer in layers)
        unexplained = sum(file.unexplained for file in made.files)
        where = "each" if not unexplained else f"all but {unexplained:,}"
        more = (
            f"; in the others {values:,} of all {many:,} values are one step off, {where} on the "
            "border of two steps, where float32 falls to either side"
        )
    return f"{equal} of {len(layers)} {text}{more}." if layers else ""


def _departures(made: ExportedSet) -> list[str]:
    """Every failure; of the rest, the tensors with most differences."""
    lines = [f"FAILED {text}" for text in made.failures]
    if lines:
        return lines
    rows = [layer for layer in made.layers if layer.different and layer.form in _STEPS]
    rows.sort(key=lambda layer: -(layer.different or 0) / layer.elements)
    shown = [
        f"  {layer.path} ({layer.op}): {layer.different:,} of {layer.elements:,}"
        for layer in rows[:_SHOWN]
    ]
    return shown + [f"  and {len(rows) - _SHOWN} more"] * (len(rows) > _SHOWN)


def _file_table(files: Sequence[ExportedFile]) -> str:
    columns: Columns = {
        "file": "{name}",
        "size": lambda file: file_size(file.size),
        "opset": "{opset}",
        "8-bit tensors": lambda file: str(sum(layer.form in _STEPS for layer in file.layers)),
        "differ": "{different:,}",
        "but for ties": "{unexplained:,}",
        "steps": "{largest_steps}",
        "lint": lambda file: str(len(file.findings) or "–"),
        "inputs → outputs": lambda file: f"{_ports(file.inputs)} → {_ports(file.outputs)}",
    }
    return table_of("Files", files, columns).text()


def _ports(ports: Sequence[FilePort]) -> str:
    return ", ".join(port.name for port in ports)


def file_size(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def file_stage_table(made: ExportedSet) -> Table:
    """The files one behind the other, against float, beside both models."""
    columns = {
        "Stage": "{title}",
        "Fake dB": "{fake_sqnr_db:.2f}",
        "Integer dB": "{integer_sqnr_db:.2f}",
        "ONNX dB": "{onnx_sqnr_db:.2f}",
    }
    return table_of("The files one behind the other: SQNR against float", made.stages, columns)


def file_box_table(made: ExportedSet) -> Table:
    """Boxes of the integer model against those of the files."""
    columns = {
        "Within": "{distance:g} m",
        "Integer": "{float_detections}",
        "ONNX": "{quantized_detections}",
        "Matched": "{matched}",
        "Mean |Δscore|": "{score_mean:.4f}",
        "Max |Δscore|": "{score_max:.4f}",
    }
    title = "Boxes of the integer model and of the files, same class"
    return table_of(title, made.agreement, columns)


_LAYERS = (
    Column("Layer"), Column("Operation", "minor text"), Column("File", "minor text"),
    Column("Fake dB"), Column("Integer dB"), Column("Integer steps", "minor"),
    Column("Values", "minor"), Column("ONNX differs"), Column("Ties", "minor"),
    Column("ONNX steps"),
)  # fmt: skip


def file_layer_table(made: ExportedSet) -> Table:
    """Every tensor of the files in four executions, and how far the file's is from the model's."""
    title, rows = "Float, fake-quantized, integer and ONNX", list(map(_row, made.layers))
    return Table(title, _LAYERS, rows, "long", "export-layers", "dense")


def _row(layer: FileLayer) -> Row:
    """A tensor, with the allowed difference if it is exceeded."""
    name = CellParts(path=layer.path)
    if not layer.is_right:
        name["note"] = f"wrong: allowed is {layer.allowed}"
    counted = layer.different is not None
    cells = (
        name,
        layer.op,
        layer.file.removesuffix(".onnx"),
        or_dash(layer.fake_sqnr_db, ".1f"),
        or_dash(layer.integer_sqnr_db, ".1f"),
        or_dash(layer.integer_steps, ",.0f"),
        or_dash(layer.elements, ",.0f"),
        or_dash(layer.different, ",.0f"),
        or_dash(layer.ties if counted else None, ",.0f"),
        or_dash(layer.largest, ".2g" if layer.form == "float" else ",.0f"),
    )
    return Row(cells, kind="" if layer.is_right else "low wrong")

"""A set of files as text for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bev_data.metrics import aligned_table
from bevfusion_quant.ptq._summary import agreement_text, or_dash

if TYPE_CHECKING:
    from bevfusion_quant.export._outcome import ExportedFile, ExportedSet, FilePort

__all__ = ["export_text", "file_size", "set_verdict"]

_SHOWN = 5


def export_text(made: ExportedSet) -> tuple[str, ...]:
    """Files, what in them differs from the integer model, the files one behind the other."""
    parts = [
        f"ONNX files for {made.target}",
        _file_table(made.files),
        "\n".join([set_verdict(made), *_departures(made)]),
    ]
    if made.stages:
        parts += ["The files one behind the other, against float", _stage_table(made)]
    if made.agreement:
        parts += [
            "Boxes of the integer model against those of the files, same class",
            agreement_text(made.agreement, (), "files").replace("float", "integer"),
        ]
    parts.append("\n".join(["Engines", *(f"  {file.build}" for file in made.files)]))
    return tuple(parts)


def set_verdict(made: ExportedSet) -> str:
    """Whether the files compute what the integer model computes, in a sentence."""
    if made.failures:
        return f"Not verified, {len(made.failures)} of the checks failed."
    quantized = [layer for layer in made.layers if layer.form == "int8"]
    equal = sum(not layer.different for layer in quantized)
    more = ""
    if equal < len(quantized):
        values = sum(layer.different or 0 for layer in quantized)
        many = sum(layer.elements for layer in quantized)
        unexplained = sum(file.unexplained for file in made.files)
        where = "each" if not unexplained else f"all but {unexplained:,}"
        more = (
            f"; in the others {values:,} of all {many:,} values are one step off, {where} on the "
            "border of two steps, where float32 falls to either side"
        )
    model = "fake-quantized" if made.target == "bpu" else "integer"
    return (
        f"Verified: {equal} of {len(quantized)} quantized tensors are equal to the {model} model's"
        f"{more}. Floats agree with torch's within {_largest_float(made):.1g}."
    )


def _largest_float(made: ExportedSet) -> float:
    return max((v.largest for v in made.layers if v.form == "float"), default=0.0)


def _departures(made: ExportedSet) -> list[str]:
    """Every failure; of the rest, the tensors with most differences."""
    lines = [f"FAILED {text}" for text in made.failures]
    if lines:
        return lines
    rows = [layer for layer in made.layers if layer.different and layer.form == "int8"]
    rows.sort(key=lambda layer: -(layer.different or 0) / layer.elements)
    shown = [
        f"  {layer.path} ({layer.op}): {layer.different:,} of {layer.elements:,}"
        for layer in rows[:_SHOWN]
    ]
    return shown + [f"  and {len(rows) - _SHOWN} more"] * (len(rows) > _SHOWN)


def _file_table(files: Sequence[ExportedFile]) -> str:
    head = (
        "file", "size", "opset", "int8 tensors", "differ", "but for ties", "steps", "lint",
        "inputs → outputs",
    )  # fmt: skip
    return aligned_table(
        head,
        [
            (
                file.name,
                file_size(file.size),
                str(file.opset),
                str(sum(layer.form == "int8" for layer in file.layers)),
                f"{file.different:,}",
                f"{file.unexplained:,}",
                str(file.largest_steps),
                str(len(file.findings)) if file.findings else "–",
                f"{_ports(file.inputs)} → {_ports(file.outputs)}",
            )
            for file in files
        ],
    )


def _ports(ports: Sequence[FilePort]) -> str:
    return ", ".join(port.name for port in ports)


def file_size(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def _stage_table(made: ExportedSet) -> str:
    head = ("stage", "fake dB", "int dB", "ONNX dB")
    return aligned_table(
        head,
        [
            (
                stage.title,
                or_dash(stage.fake_sqnr_db, ".2f"),
                or_dash(stage.integer_sqnr_db, ".2f"),
                or_dash(stage.onnx_sqnr_db, ".2f"),
            )
            for stage in made.stages
        ],
    )

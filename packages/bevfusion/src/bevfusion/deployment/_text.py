"""What writing and checking a set of files gave, as text."""

from __future__ import annotations

from collections.abc import Sequence

from bev_data.tables import CellParts, Column, Columns, Row, Table, or_dash, table_of
from bevfusion.deployment._result import ExportedFile, ExportedSet, FileLayer, FilePort

_SHOWN = 5
_EXACT = ("int8", "float16")  # forms that are compared value by value


def export_text(made: ExportedSet) -> tuple[str, ...]:
    """Files, what in them differs from the integer model, the files one behind the other."""
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
    """Whether the files compute what the integer model computes, in a sentence."""
    if made.failures:
        return f"Not verified, {len(made.failures)} of the checks failed."
    model = "fake-quantized" if made.target == "bpu" else "integer"
    texts = (
        f"quantized tensors are equal to the {model} model's",
        f"tensors are equal to what the plugin's arithmetic makes of the {model} model",
    )
    notes = [
        _equality([layer for layer in made.layers if layer.form == form], text, made)
        for form, text in zip(_EXACT, texts, strict=True)
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
    rows = [layer for layer in made.layers if layer.different and layer.form == "int8"]
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
        "int8 tensors": lambda file: str(sum(layer.form == "int8" for layer in file.layers)),
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
    """A tensor; what would be allowed, where it is not kept."""
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

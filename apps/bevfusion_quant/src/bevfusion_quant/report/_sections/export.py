"""The ONNX files: what they are, whether they are proved, every tensor in four executions."""

from __future__ import annotations

from typing import Any

from bev_data.tables import CellParts, Column, Row, Table, or_dash
from bevfusion.deployment import (
    ExportedFile,
    FileLayer,
    file_box_table,
    file_size,
    file_stage_table,
    set_verdict,
)
from bevfusion_quant.report._content import ReportContent
from bevfusion_quant.report._page import Section

ORDER = 80
COLUMNS = (
    Column("Layer"), Column("Operation", "minor text"), Column("File", "minor text"),
    Column("Fake dB"), Column("Integer dB"), Column("Integer steps", "minor"),
    Column("Values", "minor"), Column("ONNX differs"), Column("Ties", "minor"),
    Column("ONNX steps"),
)  # fmt: skip


def section(content: ReportContent) -> Section | None:
    """Verdict, files, stages, then every tensor."""
    made = content.export
    if made is None:
        return None
    title, rows = "Float, fake-quantized, integer and ONNX", list(map(_row, made.layers))
    data = {
        "target": made.target,
        "verdict": set_verdict(made),
        "failures": made.failures,
        "files": list(map(_file, made.files)),
        "stages": file_stage_table(made) if made.stages else None,
        "boxes": file_box_table(made) if made.agreement else None,
        "layers": Table(title, COLUMNS, rows, "long", "export-layers", "dense"),
    }
    return Section("export", "ONNX files", data)


def _file(file: ExportedFile) -> dict[str, Any]:
    forms = [layer.form for layer in file.layers]
    exact = forms.count("int8"), forms.count("float16")
    kind = "quantized tensors" if exact[0] else "tensors in the plugin's arithmetic"
    checks = f"{sum(exact):,} {kind}, {file.different:,} values differ"
    if file.different:
        checks += f", {f'{file.unexplained:,}' if file.unexplained else 'none'} but for ties"
    if not any(exact):
        largest = max((layer.largest for layer in file.layers), default=0.0)
        checks = f"float, within {largest:.2g} of torch"
    return {
        "name": file.name,
        "runs_on": file.runs_on,
        "size": file_size(file.size),
        "opset": file.opset,
        "voxel_bound": file.voxel_bound,
        "ports": [[(p.name, "×".join(map(str, p.shape))) for p in ports]
                  for ports in (file.inputs, file.outputs)],
        "checks": checks,
        "build": file.build,
        "findings": file.findings,
        "lists": (("Runs in float", file.runs_in_float), ("Notes", file.notes)),
    }  # fmt: skip


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

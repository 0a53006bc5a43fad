"""The ONNX files: content, result of the checks, every tensor in four executions."""

from __future__ import annotations

from typing import Any

from bev_data.tables import plural
from bevfusion.deployment import (
    ExportedFile,
    file_box_table,
    file_layer_table,
    file_size,
    file_stage_table,
    set_verdict,
)
from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._page import Section

ORDER = 80


def section(content: ReportContent) -> Section | None:
    """Verdict, files, stages, then every tensor."""
    made = content.export
    if made is None:
        return None
    data = {
        "target": made.target,
        "verdict": set_verdict(made),
        "failures": made.failures,
        "files": list(map(_file, made.files)),
        "stages": file_stage_table(made) if made.stages else None,
        "boxes": file_box_table(made) if made.agreement else None,
        "layers": file_layer_table(made),
    }
    return Section("export", "ONNX files", data)


def _file(file: ExportedFile) -> dict[str, Any]:
    forms = [layer.form for layer in file.layers]
    exact = sum(form.startswith(("int8", "fp8")) for form in forms), forms.count("float16")
    kind, where = (
        ("quantized tensor", "") if exact[0] else ("tensor", " in the plugin's arithmetic")
    )
    checks = f"{plural(sum(exact), kind)}{where}, {plural(file.different, 'value')} differ"
    checks += "s" * (file.different == 1)
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

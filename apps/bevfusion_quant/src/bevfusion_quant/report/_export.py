"""The ONNX files: what they are, whether they are proved, every tensor in four executions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bevfusion_quant.report._format import count, fixed, number
from bevfusion_quant.report._html import Content, Html, join, path_name, tag
from bevfusion_quant.report._section import Section
from bevfusion_quant.results import file_size, set_verdict

if TYPE_CHECKING:
    from bevfusion_quant.results import ExportedFile, ExportedSet, FileLayer, FilePort

__all__ = ["export_section"]

HOW_TO_READ = (
    "Each quantized tensor in four executions. Fake and integer dB: SQNR of the fake-quantized and "
    "of the integer model against float, each on its own activations. Integer steps: how far the "
    "integers are from the fake-quantized values, each model on its own. ONNX: values that the "
    "file makes other than the model on the same integers, and by how many steps at most; "
    "of float outputs the largest difference from torch, relative to the largest value. Runtimes "
    "multiply and interpolate in float32, so that a value on the border of two steps may fall to "
    "either side: those are ties, found by computing each differing value again."
)
ENGINES = {
    "tensorrt": "TensorRT and libspconv were not run: files for them run node by node as they are "
    "written, in onnxruntime and in this project's integers.",
    "tensorrt11": "TensorRT 11 and libspconv were not run: files for them run node by node as they "
    "are written, in onnxruntime and in this project's integers.",
    "onnxruntime": "The files ran in onnxruntime as they will in use, with all its optimisations.",
    "openvino": "Dense files ran in OpenVINO as they will in use, the sparse one in onnxruntime.",
    "autoware": "Neither TensorRT nor Autoware's plugin was run: the sparse encoder runs by the "
    "definition of the plugin's operators, beside the simulator in the same arithmetic, and what "
    "follows it in onnxruntime.",
    "bpu": "hb_mapper was not run: its files run node by node as they are written, in onnxruntime.",
}
OTHER_ENGINE = (
    "The engine was not run: its files run node by node as they are written, in onnxruntime."
)
ENGINES["tensorrt10"] = ENGINES["tensorrt"]


def export_section(made: ExportedSet) -> Section:
    """Verdict, files, stages, then every tensor."""
    html = tag(
        "div",
        tag("p", tag("strong", set_verdict(made), class_="low" if made.failures else None)),
        *(tag("p", text, class_="low") for text in made.failures),
        tag("p", ENGINES.get(made.target, OTHER_ENGINE), class_="note about"),
        *map(_file, made.files),
        tag("div", _stages(made), _boxes(made), class_="columns export-part"),
        tag("h3", "Every tensor of the files", class_="export-part"),
        _layers(made.layers),
        tag("p", HOW_TO_READ, class_="note about"),
        class_="export",
    )
    return Section("export", "ONNX files", html)


def _file(file: ExportedFile) -> Html:
    int8 = [layer for layer in file.layers if layer.form == "int8"]
    checks = f"{count(len(int8))} quantized tensors, {count(file.different)} values differ"
    if file.different:
        checks += f", {count(file.unexplained) if file.unexplained else 'none'} but for ties"
    if not int8:
        checks = f"float, within {number(_largest(file), 2)} of torch"
    return tag(
        "div",
        tag("p", tag("strong", file.name), tag("span", _facts(file), class_="note"), class_="name"),
        tag("p", _ports(file.inputs), " → ", _ports(file.outputs), class_="ports"),
        tag("p", checks, ", ", _findings(file), "."),
        tag("p", tag("code", file.build), class_="build"),
        *(tag("p", text, class_="low") for text in file.findings),
        _details("Runs in float", file.runs_in_float),
        _details("Notes", file.notes),
        class_="file",
    )


def _largest(file: ExportedFile) -> float:
    return max((layer.largest for layer in file.layers), default=0.0)


def _facts(file: ExportedFile) -> str:
    bound = f", at most {count(file.voxel_bound)} voxels" if file.voxel_bound else ""
    return f" {file.runs_on}, {file_size(file.size)}, operator set {file.opset}{bound}"


def _findings(file: ExportedFile) -> str:
    many = len(file.findings)
    return "no finding of the linter" if not many else f"{many} finding{'s' * (many != 1)}"


def _ports(ports: Sequence[FilePort]) -> Html:
    pieces: list[Content] = []
    for index, port in enumerate(ports):
        shape = "×".join(map(str, port.shape))
        pieces += [", " if index else "", tag("code", port.name), f" {shape}"]
    return join(*pieces)


def _details(title: str, lines: Sequence[str]) -> Html | None:
    if not lines:
        return None
    shown = tag("summary", tag("span", title), tag("span", str(len(lines)), class_="count"))
    return tag("details", shown, tag("ul", *(tag("li", line) for line in lines)))


def _stages(made: ExportedSet) -> Html | None:
    if not made.stages:
        return None
    rows = [
        (
            stage.title,
            fixed(stage.fake_sqnr_db, 2),
            fixed(stage.integer_sqnr_db, 2),
            fixed(stage.onnx_sqnr_db, 2),
        )
        for stage in made.stages
    ]
    title = "The files one behind the other: SQNR against float"
    return _pairs(title, ("Stage", "Fake dB", "Integer dB", "ONNX dB"), rows)


def _boxes(made: ExportedSet) -> Html | None:
    if not made.agreement:
        return None
    rows = [
        (f"{row.distance:g} m", str(row.float_detections), str(row.quantized_detections),
         str(row.matched), fixed(row.score_mean, 4))
        for row in made.agreement
    ]  # fmt: skip
    heads = ("Within", "Integer", "ONNX", "Matched", "Mean |Δscore|")
    return _pairs("Boxes of the integer model and of the files, same class", heads, rows)


def _pairs(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    body = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", value) for value in rest))
        for first, *rest in rows
    ]
    return tag(
        "table",
        tag("caption", title),
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *body),
        class_="pairs classes",
    )


_HEADS = (
    ("Layer", ""), ("Operation", "minor text"), ("File", "minor text"), ("Fake dB", ""),
    ("Integer dB", ""), ("Integer steps", "minor"), ("Values", "minor"), ("ONNX differs", ""),
    ("Ties", "minor"), ("ONNX steps", ""),
)  # fmt: skip


def _layers(layers: Sequence[FileLayer]) -> Html:
    heads = [tag("th", head, scope="col", class_=kind or None) for head, kind in _HEADS]
    table = tag(
        "table",
        tag("caption", "Float, fake-quantized, integer and ONNX", class_="hidden"),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *map(_row, layers)),
        id="export-layers",
        class_="layer-table dense",
    )
    return tag(
        "div", table, class_="scroll", tabindex=0, role="region", aria_label="Tensors of the files"
    )


def _row(layer: FileLayer) -> Html:
    largest = number(layer.largest, 2) if layer.form == "float" else count(layer.largest)
    return tag(
        "tr",
        tag("th", path_name(layer.path), *_allowed(layer), scope="row"),
        tag("td", layer.op, class_="minor text"),
        tag("td", layer.file.removesuffix(".onnx"), class_="minor text"),
        tag("td", fixed(layer.fake_sqnr_db, 1)),
        tag("td", fixed(layer.integer_sqnr_db, 1)),
        tag("td", "–" if layer.integer_steps is None else count(layer.integer_steps),
            class_="minor"),
        tag("td", count(layer.elements), class_="minor"),
        tag("td", "–" if layer.different is None else count(layer.different)),
        tag("td", "–" if layer.different is None else count(layer.ties), class_="minor"),
        tag("td", largest),
        class_=None if layer.is_right else "low wrong",
    )  # fmt: skip


def _allowed(layer: FileLayer) -> Iterator[Html]:
    """What would be allowed, where it is not kept."""
    if not layer.is_right:
        yield tag("small", f"wrong: allowed is {layer.allowed}", class_="note")

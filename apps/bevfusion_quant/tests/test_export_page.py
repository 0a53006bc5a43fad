"""Sets of files made up for tests: the page's section, the verdict, what the demo does without."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from bev_data.metrics import AgreementRow
from bevfusion.deployment import set_verdict
from bevfusion_quant import VerificationError
from bevfusion_quant.commands.ptq import demo_target
from bevfusion_quant.export import (
    ExportedFile,
    ExportedSet,
    FileLayer,
    FilePort,
    SetStage,
    export_text,
    refuse_wrong_files,
)
from bevfusion_quant.pages import ReportContent, write_report

EVIL = '</script><script>hurt()</script><b title="x">'


def exported(name: str = "fuser.0", *, different: int = 3, right: bool = True) -> ExportedSet:
    """Two files of two layers; the second layer differs."""
    layers = (
        FileLayer(
            name, "conv", "int8", 1000, 0, 0.0, "nothing", True, file="fuser.onnx",
            fake_sqnr_db=30.0, integer_sqnr_db=29.5, integer_steps=2,
        ),
        FileLayer(
            "decoder.1", "resize", "int8", 1000, different, 1.0 if right else 7.0,
            "one step on 50 values", right, file="fuser.onnx",
        ),
    )  # fmt: skip
    port = FilePort("middle", "float32", (1, 64, 40, 40))
    file = ExportedFile(
        "fuser.onnx", "int8", "TensorRT", "trtexec --onnx=fuser.onnx", 2_000_000, "00", {}, 13,
        (port,), (port,), {}, None, (f"softmax: {name}",), (), (), layers,
    )  # fmt: skip
    head = FileLayer(
        "score", "float", "float", 50, None, 2e-6, "0.001", True, file="head.bbox.onnx"
    )
    boxes = replace(file, name="head.bbox.onnx", kind="float", runs_in_float=(), layers=(head,))
    stages = (SetStage("middle", "Decoder", 27.0, 26.9, 26.8, True),)
    agreement = (AgreementRow(0.5, 40, 39, 38, 0.01, 0.05),)
    return ExportedSet("tensorrt", Path("onnx"), (file, boxes), stages, agreement, "street_0")


def test_ties_are_told_apart_from_what_is_wrong(tmp_path: Path) -> None:
    made = exported()
    assert "all but 3 on the border" in set_verdict(made)
    first, resized = made.files[0].layers
    file = replace(made.files[0], layers=(first, replace(resized, ties=3)))
    told = replace(made, files=(file, *made.files[1:]))
    assert file.unexplained == 0
    assert "each on the border of two steps" in set_verdict(told)
    text = page(tmp_path, told)
    assert "3 values differ, none but for ties" in text
    assert "2 quantized tensors, 3 values differ, 3 but for ties" in page(tmp_path, made)
    assert "1 value differs" in page(tmp_path, exported(different=1))
    assert '<td>3</td><td class="minor">3</td><td>1</td>' in text


def page(tmp_path: Path, made: ExportedSet | None) -> str:
    path = write_report(tmp_path / "report.html", ReportContent("run", export=made))
    return path.read_text(encoding="utf-8")


def test_floats_agree_within_what_is_said() -> None:
    made = exported()
    head = replace(made.files[1].layers[0], largest=1.4e-6)
    told = replace(made, files=(made.files[0], replace(made.files[1], layers=(head,))))
    assert "Floats agree with torch's within 1.4e-06." in set_verdict(told)


def test_without_files_nothing_of_them_is_on_the_page(tmp_path: Path) -> None:
    assert "export" not in page(tmp_path, None)


def test_the_section_has_verdict_files_stages_boxes_and_layers(tmp_path: Path) -> None:
    text = page(tmp_path, exported())
    section = text[text.index('<section id="export"') : text.index("</section>")]
    assert "1 of 2 quantized tensors are equal" in section
    assert section.count('class="file"') == 2
    assert "trtexec --onnx=fuser.onnx" in section
    assert "1×64×40×40" in section
    assert "<td>26.80</td>" in section
    assert "<td>38</td>" in section
    rows = section[section.index('id="export-layers"') :]
    assert rows.count("<tr") == 1 + 3
    assert "2e-06" in rows
    assert '<a href="#export">ONNX files</a>' in text


def test_names_are_escaped(tmp_path: Path) -> None:
    text = page(tmp_path, exported(EVIL))
    assert EVIL not in text
    assert "<script>hurt()" not in text


def test_a_wrong_layer_is_named_everywhere(tmp_path: Path) -> None:
    made = exported(right=False)
    told = "fuser.onnx: decoder.1 (resize): 3 of 1,000 values differ, by up to 7 steps"
    assert made.failures[0].startswith(told)
    assert made.summary()["verified"] is False
    assert "Not verified" in set_verdict(made)
    assert f"FAILED {told}" in "\n".join(export_text(made))
    text = page(tmp_path, made)
    assert told in text
    assert "wrong: allowed is one step on 50 values" in text
    with pytest.raises(VerificationError, match=r"decoder\.1 \(resize\).*do not deploy") as caught:
        refuse_wrong_files(made, "what was printed")
    assert caught.value.output == "what was printed"


def test_findings_of_the_linter_that_are_errors_fail() -> None:
    made = exported()
    found = ("TRT004 warning at x: slow; wait", "TRT001 error at y: no importer; replace it")
    files = (replace(made.files[0], findings=found), made.files[1])
    assert replace(made, files=files).failures == (f"fuser.onnx: {found[1]}",)
    refuse_wrong_files(made, "text")


def test_files_further_from_float_than_the_integers_fail() -> None:
    stage = SetStage("middle", "Decoder", 27.0, 26.9, 20.0, False)
    (line,) = replace(exported(), stages=(stage,)).failures
    assert "Decoder: 20.0 dB against float, where the integer model has 26.9 dB" in line


def test_the_demo_goes_on_without_the_libraries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bevfusion_quant.export.missing_libraries", lambda: "onnxscript")
    with caplog.at_level(logging.WARNING):
        assert demo_target("all") is None
    assert "no ONNX files without onnxscript: pip install onnxruntime onnxscript" in caplog.text
    monkeypatch.setattr("bevfusion_quant.export.missing_libraries", lambda: "")
    assert demo_target("all") == "tensorrt"
    assert demo_target("head") is None

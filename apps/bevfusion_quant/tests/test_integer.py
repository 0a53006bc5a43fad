"""What the page and the summary say of a simulation, and kernels that are not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from integer_rows import float_row, layer_row, simulation

from bevfusion_quant import InputError
from bevfusion_quant.integer import FloatPart, SavedPart, check_backend
from bevfusion_quant.pages import ReportContent, write_report
from bevquant_quantizers.documents import write_json

EVIL = 'heads.</script><script>alert("x")</script>'


AGREES = layer_row("encoders.lidar.a")
DEPARTS = layer_row("encoders.lidar.b", max_steps=7, off=0.034)
TOLD = layer_row("fuser.0", max_steps=3, forced_max_steps=3, why="bias rounded to ±2.5 steps")
WRONG = layer_row("fuser.1", max_steps=90, forced_max_steps=80)


def page(folder: Path, *rows: object, **changes: object) -> str:
    content = ReportContent("x", integers=simulation(*rows, **changes))
    return write_report(folder / "report.html", content).read_text(encoding="utf-8")


def test_the_page_says_who_departs_where_and_by_what_kernels(tmp_path: Path) -> None:
    text = page(tmp_path, AGREES, TOLD, WRONG)
    assert '<section id="integers"' in text
    assert 'href="#integer-1"' in text
    assert re.search(r'<tr id="integer-1" class="low".*?±2\.5 steps', text)
    assert re.search(r'<tr id="integer-2" class="low"', text)
    assert not re.search(r'<tr id="integer-0" class="low"', text)
    assert "Wrong on the same input" in text
    assert "portable (AVX2)" in text
    assert "not saved: a file cannot hold splat" in text
    assert "sigmoid has no integer form (1.2 % of the arithmetic)" in text


def test_float_steps_that_are_equal_in_all_three_have_no_row(tmp_path: Path) -> None:
    equal = float_row("encoders.camera.a", fake_sqnr_db=None, integer_sqnr_db=None)
    text = page(tmp_path, equal, float_row("fuser.0"), AGREES)
    assert 'id="integer-0"' not in text
    assert 'id="integer-1"' in text
    assert ">2 operations</output>" in text


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    row = layer_row(EVIL, op=EVIL, form=EVIL, why=EVIL, max_steps=5, forced_max_steps=5)
    text = page(
        tmp_path, row, backend=EVIL, islands=(FloatPart(EVIL, EVIL, EVIL),),
        saved=(SavedPart(EVIL, EVIL, EVIL),),
    )  # fmt: skip
    assert "<script>alert" not in text
    assert text.count("</script>") == 2


def test_kernels_that_are_not_there_are_refused_by_their_option() -> None:
    assert check_backend("torch").startswith("torch (cpu")
    with pytest.raises(InputError, match=r"--backend nope cannot be used here: it is unk.*auto"):
        check_backend("nope")


def test_json_takes_a_whole_simulation(tmp_path: Path) -> None:
    path = write_json(tmp_path / "s.json", simulation(AGREES, DEPARTS, TOLD, WRONG).summary())
    data = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert data["first_departure"] == "encoders.lidar.b"
    assert (data["wrong"], data["explained"]) == (["fuser.1"], ["fuser.0"])
    assert data["layers"][1]["max_steps"] == 7
    assert data["stages"][0]["stage"] == "lidar"
    assert data["saved"][1] == {"part": "fuser", "folder": "integer/fuser", "reason": ""}

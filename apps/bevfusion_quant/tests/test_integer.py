"""What a simulation says of its layers: in integers or not, stages, verdicts, text, the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from integer_rows import float_row, layer_row, simulation

from bevfusion_quant import InputError
from bevfusion_quant.integer import (
    FloatIsland,
    SavedPart,
    check_backend,
    in_integers,
    integer_stages,
    simulation_text,
)
from bevfusion_quant.report import ReportContent, write_report
from bevfusion_quant.run import write_json
from bevquant_int8sim import BackendStatus

EVIL = 'heads.</script><script>alert("x")</script>'


def test_a_layer_whose_output_stays_float_is_still_computed_in_integers() -> None:
    assert in_integers(layer_row("a"))
    assert in_integers(layer_row("a", form="int32", max_steps=None))
    assert in_integers(float_row("a", "conv", peak_bits=17))
    assert not in_integers(float_row("a", "Conv2d"))


def test_stages_take_the_last_step_and_the_widest_gap() -> None:
    rows = [
        layer_row("encoders.camera.neck.x", max_steps=9, forced_max_steps=2),
        float_row("encoders.camera.vtransform", fake_sqnr_db=11.0),
        layer_row("fuser.0", max_steps=3),
        float_row("fuser.1", "conv", peak_bits=16, integer_sqnr_db=17.0),
    ]
    neck, camera, fuser = integer_stages(rows, ("camera", "fuser", "decoder"))
    assert (neck.integers, neck.floats, neck.max_steps, neck.forced_max_steps) == (1, 0, 9, 2)
    assert (camera.integers, camera.floats, camera.fake_sqnr_db) == (0, 1, 11.0)
    assert (camera.max_steps, camera.mean_steps, camera.forced_max_steps) == (None, None, None)
    assert (fuser.layer, fuser.integers, fuser.floats) == ("fuser.1", 2, 0)
    assert (fuser.integer_sqnr_db, fuser.max_steps) == (17.0, 3)
    assert integer_stages(rows, ("lidar",)) == ()


AGREES = layer_row("encoders.lidar.a")
DEPARTS = layer_row("encoders.lidar.b", max_steps=7, off=0.034)
TOLD = layer_row("fuser.0", max_steps=3, forced_max_steps=3, why="bias rounded to ±2.5 steps")
WRONG = layer_row("fuser.1", max_steps=90, forced_max_steps=80)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([AGREES], ["agree within one step everywhere", "every layer agrees within one step"]),
        (
            [AGREES, DEPARTS],
            [r"encoders.lidar.b .*departs first: up to 7 steps.* 3.4 %.*same input up to 1 step\.",
             "every layer agrees within one step"],
        ),
        ([TOLD], ["departs first", r"fuser.0 is 3 steps off: bias rounded to ±2.5 steps"]),
        ([TOLD, WRONG], ["fuser.0.* departs", r"WRONG.*fuser.1 \(80 steps\)", "fuser.0 is"]),
        ([layer_row("heads.object.x", max_steps=9, forced_max_steps=0)],
         ["same input none", "every layer agrees", "choice of queries"]),
    ],
)  # fmt: skip
def test_the_verdict_names_who_departs_and_why(rows: list, said: list[str]) -> None:
    lines = simulation_text(simulation(*rows), layers=False).split("\n\n")[0].splitlines()
    assert len(lines) == len(said)
    for line, expected in zip(lines, said, strict=True):
        assert re.search(expected, line), line


def test_the_text_lists_layers_in_integers_and_counts_the_others() -> None:
    rows = [AGREES, float_row("encoders.camera.vtransform"), float_row("f", "conv", peak_bits=16)]
    text = simulation_text(simulation(*rows, frame_seconds=(0.5,) * 9), layers=True)
    assert "lidar.a" in text
    assert re.search(r"^f +conv", text, re.MULTILINE)
    assert "and 1 step in float with 1.2 % of the operations; the page says why" in text
    assert "portable (AVX2)" in text
    assert "0.50, 0.50 …" in text
    long = layer_row("encoders.lidar." + "deep." * 20 + "conv")
    assert max(map(len, simulation_text(simulation(long), layers=True).splitlines())) <= 125
    assert "lidar.a" not in simulation_text(simulation(AGREES), layers=False).splitlines()[3]


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
    assert "sigmoid has no integer form (1.2 % of the operations)" in text


def test_float_steps_that_are_equal_in_all_three_have_no_row(tmp_path: Path) -> None:
    equal = float_row("encoders.camera.a", fake_sqnr_db=None, integer_sqnr_db=None)
    text = page(tmp_path, equal, float_row("fuser.0"), AGREES)
    assert 'id="integer-0"' not in text
    assert 'id="integer-1"' in text
    assert ">2 steps</output>" in text


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    row = layer_row(EVIL, op=EVIL, form=EVIL, why=EVIL, max_steps=5, forced_max_steps=5)
    text = page(
        tmp_path, row, backend=EVIL, islands=(FloatIsland(EVIL, EVIL, EVIL),),
        saved=(SavedPart(EVIL, EVIL, EVIL),),
    )  # fmt: skip
    assert "<script>alert" not in text
    assert text.count("</script>") == 2


def test_kernels_that_are_not_there_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [BackendStatus("vnni", False, "needs AVX512-VNNI"), BackendStatus("torch", True, "cpu")]
    monkeypatch.setattr(
        "bevquant_int8sim.backend_report", lambda name: [s for s in found if s.name == name]
    )
    monkeypatch.setattr("bevquant_int8sim.choose_backend", lambda *_: "torch")
    assert check_backend("auto") == "torch (cpu)"
    assert check_backend("torch") == "torch (cpu)"
    with pytest.raises(InputError, match=r"vnni cannot be used here: needs AVX512.*auto"):
        check_backend("vnni")


def test_json_takes_a_whole_simulation(tmp_path: Path) -> None:
    path = write_json(tmp_path / "s.json", simulation(AGREES, DEPARTS, TOLD, WRONG).summary())
    data = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert data["first_departure"] == "encoders.lidar.b"
    assert (data["wrong"], data["explained"]) == (["fuser.1"], ["fuser.0"])
    assert data["layers"][1]["max_steps"] == 7
    assert data["stages"][0]["stage"] == "lidar"
    assert data["saved"][1] == {"part": "fuser", "folder": "integer/fuser", "reason": ""}

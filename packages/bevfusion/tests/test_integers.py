"""What a simulation says of its layers: in integers or not, stages, verdicts, text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from bevfusion.model import PARTS
from bevfusion.quantization import (
    FloatPart,
    Simulation,
    in_integers,
    integer_stages,
    simulation_text,
)
from bevquant_int8sim import LayerRow

ROW = LayerRow(
    path="fuser.0", op="conv + ReLU", form="int8", values=1000, fake_sqnr_db=25.0,
    integer_sqnr_db=24.9, fake_cosine=0.998, integer_cosine=0.997, max_steps=1, mean_steps=0.01,
    off=0.01, forced_max_steps=1, forced_mean_steps=0.001, saturated=0.0002, peak_bits=18, why="",
)  # fmt: skip
UNKNOWN = dict.fromkeys(
    "max_steps mean_steps off forced_max_steps forced_mean_steps saturated peak_bits".split()
)


def layer_row(path: str, **changes: Any) -> LayerRow:
    return replace(ROW, path=path, **changes)


def float_row(path: str, op: str = "softmax", **changes: Any) -> LayerRow:
    return replace(ROW, path=path, op=op, form="float", **(UNKNOWN | changes))


def simulation(*rows: LayerRow, frame_seconds: tuple[float, ...] = (0.5,)) -> Simulation:
    left = FloatPart("heads.object", "sigmoid", "sigmoid has no integer form", 0.0125)
    stages = integer_stages(rows, PARTS)
    return Simulation(rows, stages, (left,), (), (), "portable (AVX2)", frame_seconds, ())


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
            [r"lidar.b .*by more than one step: by up to 7 .* 3.4 %.*input by up to 1 step\.",
             "every layer agrees within one step"],
        ),
        ([TOLD], ["departs first", r"fuser.0 is 3 steps off: bias rounded to ±2.5 steps"]),
        ([TOLD, WRONG], ["fuser.0.* departs", r"WRONG.*fuser.1 \(80 steps\)", "fuser.0 is"]),
        ([layer_row("heads.object.x", max_steps=9, forced_max_steps=0)],
         ["same input by no step", "every layer agrees", "choice of queries"]),
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
    assert "and 1 operation in float with 1.2 % of the arithmetic; `islands` says why" in text
    assert "\nmax, mean: steps between integer and fake-quantized output" in text
    assert "portable (AVX2)" in text
    assert "0.50, 0.50 …" in text
    long = layer_row("encoders.lidar." + "deep." * 20 + "conv")
    assert max(map(len, simulation_text(simulation(long), layers=True).splitlines())) <= 125
    assert "lidar.a" not in simulation_text(simulation(AGREES), layers=False).splitlines()[3]

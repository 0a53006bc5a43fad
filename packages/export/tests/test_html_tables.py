"""Results in notebooks: one table each, every text escaped."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch import nn

from bevquant_export._float_file import FloatDifference, FloatFile
from bevquant_export.dense import QdqFile
from bevquant_export.detector import DetectorExport, DetectorMap
from bevquant_export.sparse import SparseExport
from bevquant_fusion import FusionResult
from bevquant_fusion._result import Skipped
from bevquant_graph import HtmlTable, HtmlText
from bevquant_qnn import PrecisionPlan, QuantizeResult, SensitivityRow, SensitivityTable
from bevquant_qnn._precision_plan import PlannedGroup
from bevquant_qnn._result import SkippedModule
from bevquant_qnn._round_weights import RoundedLayer, RoundingResult
from bevquant_quantizers import CalibrationReport, QuantizerReport

ODD = "<b>&'\""
RANGE = QuantizerReport((ODD,), "max", tuple(map(float, range(64))), None, 0.25, 1, 2, 3.0)
ROW = SensitivityRow((ODD,), 1, {"int8": 2.0}, None)
RESULTS = {
    "fusion": FusionResult(nn.Identity(), (), (Skipped(ODD, "reason", ""),), max_error=0.0),
    "quantize": QuantizeResult(nn.Identity(), (), (), (SkippedModule(ODD, "reason"),)),
    "calibration": CalibrationReport((RANGE,), 1, warnings=(ODD,)),
    "sensitivity": SensitivityTable("sqnr", 1.0, None, (ROW,), 1),
    "dense": QdqFile(Path(ODD), "tensorrt", 17, {"x": (1, 3)}, {}, {}, notes=(ODD,)),
    "float": FloatFile(
        Path("f"), 17, {ODD: (1,)}, {}, (FloatDifference(ODD, 8, 0, 0.0, 0.0, 1.0),)
    ),
    "plan": PrecisionPlan((PlannedGroup((ODD,), "int8"),), metric="sqnr"),
    "rounding": RoundingResult((RoundedLayer(ODD, 0.1, 0.05),), (("conv", "reason"),)),
    "sparse": SparseExport(Path(ODD), ()),
    "detector": DetectorExport(Path("d"), "t", None, None, (DetectorMap(ODD, (1, 2), None, "m"),)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_one_table_of_escaped_cells(name: str) -> None:
    result: HtmlTable = RESULTS[name]
    page = ElementTree.fromstring(f"<html>{result._repr_html_()}</html>")
    (table,) = page.iter("table")
    assert not list(page.iter("b"))
    assert ODD in "".join(page.itertext())
    heads, *rows = table.iter("tr")
    assert all(len(row) == len(heads) for row in rows)
    assert len(rows) == (name not in ("dense", "sparse"))


def test_other_results_are_their_escaped_text() -> None:
    class Report(HtmlText):
        def __str__(self) -> str:
            return f"one\n{ODD}"

    page = ElementTree.fromstring(Report()._repr_html_())
    assert (page.tag, page.text) == ("pre", f"one\n{ODD}")


def test_numbers_are_short_and_none_is_a_dash() -> None:
    text = RESULTS["calibration"]._repr_html_()
    assert "<td>0, 1, 2, … (64)</td>" in text
    assert "<td>–</td>" in text
    assert "max_error: 0" in RESULTS["fusion"]._repr_html_()

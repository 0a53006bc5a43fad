"""Tables: one form for the terminal and the page, of records and of judged models."""

from __future__ import annotations

from metric_scenes import random_frames

from bev_data.boxes import NUSCENES_CLASSES
from bev_data.metrics import (
    AccuracyAccumulator,
    AccuracySummary,
    Bootstrap,
    accuracy_text,
    measure_tables,
    model_tables,
)
from bev_data.tables import (
    CellParts,
    Column,
    Row,
    Table,
    finite,
    number_cell,
    or_dash,
    percent,
    share,
)
from bevquant_quantizers.documents import as_form, plain


def test_each_place_shows_its_columns() -> None:
    columns = [
        Column("Layer"),
        Column("Bar", "bars", only="page"),
        Column("Of all", only="terminal"),
    ]
    cells = [CellParts(path="encoders.lidar.a", more=["b", "c"]), CellParts(bars={}), "7 %"]
    table = Table(
        "Loss", columns, [Row(cells), Row(["fuser", "", CellParts(text="9", interval="8 … 10")])]
    )
    assert table.text(without="encoders.").splitlines() == [
        "layer           of all",
        "──────────  ──────────",
        "lidar.a +2         7 %",
        "fuser       9 (8 … 10)",
    ]
    page = table.on_page()
    assert [column.title for column in page.columns] == ["Layer", "Bar"]
    assert [len(row.cells) for row in page.rows] == [2, 2]


def test_judged_models_as_columns_and_as_rows() -> None:
    found, there = random_frames(3, 6)
    accumulator = AccuracyAccumulator(NUSCENES_CLASSES, bootstrap=Bootstrap(50))
    for who in ("float", "quantized"):
        for index, (boxes, labels) in enumerate(zip(found, there, strict=True)):
            accumulator.add(who, index, f"frame_{index}", boxes, labels)
    accuracy = accumulator.result()
    assert accuracy is not None
    measures, classes = measure_tables(accuracy)
    assert [column.title for column in measures.columns] == ["Measure", "Float", "Quantized"]
    beside, across = model_tables(accuracy)
    assert [column.title for column in beside.columns][:3] == ["Model", "mAP, of 100", "Less float"]
    text = accuracy_text(accuracy)
    for index, row in enumerate(classes.rows):
        name, labels, first, second = row.cells
        line = next(line for line in text.splitlines() if line.startswith(str(name)))
        assert line.split()[-3:] == [labels, first, second]
        assert (across.rows[0].cells[index + 1], across.rows[1].cells[index + 1]) == (first, second)
        assert across.columns[index + 1].title == f"{name} ({labels})"
    assert list(measures.rows[0].cells[1:]) == [row.cells[1] for row in beside.rows]
    read = as_form(plain(accuracy.summary()), AccuracySummary, where="", what="summary")
    assert read.labels == accuracy.reference.labels
    for entry in accuracy.models:
        assert read.models[entry.model].interval == entry.metrics.interval
    apart = accuracy.models[1].difference
    assert apart is not None
    assert read.models["quantized"].difference.interval == apart.interval


def test_a_dash_stands_for_what_is_no_number() -> None:
    for none in (None, float("nan"), float("inf")):
        assert (or_dash(none, ".1f"), percent(none), finite(none)) == ("–", "–", None)
    assert number_cell(-0.25, "+.1f") == CellParts(text="-0.2", value=-0.25)
    assert (share(3.0, 2.0), share(-1.0, 2.0), share(1.0, 0.0)) == (100.0, 0.0, None)

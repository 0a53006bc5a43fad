"""The section "Accuracy": its figures, its curves and boxes, escaped, and drawn in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metric_scenes import detections, labels, random_frames

from bev_data.metrics import (
    Accuracy,
    AccuracyAccumulator,
    Bootstrap,
    accuracy_text,
    points,
    span,
)
from bev_data.points import Labels
from bevfusion.model.head import NUSCENES_CLASSES
from bevfusion_quant.pages import ReportContent, write_report

EVIL = "</svg><script>window.hurt=1</script>"
NAMES = ("float", "quantized", "integer")


@pytest.fixture(scope="module")
def accuracy() -> Accuracy:
    """Three models, each a little worse than the one before."""
    found, there = random_frames(5, 8, classes=("car", "bus", "pedestrian"))
    kinds = {0: 0, 1: 3, 2: 8}
    accumulator = AccuracyAccumulator(NUSCENES_CLASSES, bootstrap=Bootstrap(100))
    for worse, name in enumerate(NAMES):
        for index, (seen, real) in enumerate(zip(found, there, strict=True)):
            moved = seen._replace(
                boxes=seen.boxes + np.float32([0.2 * worse, 0, 0, 0, 0, 0, 0]),
                labels=np.array([kinds[int(kind)] for kind in seen.labels], np.int64),
            )
            accumulator.add(name, index, f"frame {index}{EVIL}", moved, real)
    result = accumulator.result()
    assert result is not None
    return result


@pytest.fixture(scope="module")
def page(accuracy: Accuracy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(path, ReportContent("made up", accuracy=accuracy))


def test_every_headline_figure_is_on_the_page(accuracy: Accuracy, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    section = text[text.index('<section id="accuracy"') :]
    for entry in accuracy.models:
        metrics = entry.metrics
        values = [metrics.mean_ap, *metrics.average_precision.values(), metrics.nds]
        values += [*metrics.bev_ap.values()]
        values += [row.mean_ap for row in metrics.classes if row.labels]
        for value in values:
            assert f">{points(value)}<" in section
        assert span(metrics.interval) in section
    for entry in accuracy.models[1:]:
        assert f"{100 * entry.difference.mean_ap:+.2f}<" in section
        assert span(entry.difference.interval, signed=True) in section
    assert "up to the range of their class, 30 to 50 m, and with 1 LiDAR point or more" in section
    assert "No counted labels of" in section
    assert "left out of every mean" in section
    head = text[: text.index('<section id="accuracy"')]
    assert f">{points(accuracy.models[-1].metrics.mean_ap)}<" in head


def test_the_curves_are_those_of_the_metrics(accuracy: Accuracy, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    figures = re.findall(r'<figure class="chart curve-chart">(.*?)</figure>', text)
    assert len(figures) == len(accuracy.rules.distances) + 3
    car = next(f for f in figures if ">car, 2 m<" in f)
    drawn = re.findall(r'<path d="M([^"]*)V[\d.]+" class="curve (\w+)"', car)
    assert [model for _, model in drawn] == list(NAMES)
    for entry, (line, _) in zip(accuracy.models, drawn, strict=True):
        ys = np.array([float(point.split()[1]) for point in line.split("L")])
        precision = entry.metrics.classes[0].precision[2.0]
        shown = (ys.max() - ys) / 120
        wanted = precision[: len(ys)] - precision[: len(ys)].min()
        np.testing.assert_allclose(shown, wanted, atol=2e-3)
        assert len(ys) == np.flatnonzero(precision)[-1] + 1


def test_frames_show_labels_the_first_model_and_the_last(accuracy: Accuracy, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count('<div class="sketch">') == 6
    boxes = re.findall(r'<g class="box (\w+)"', text)
    assert set(boxes) == {"label", "float", "integer"}
    labels = sum(len(sketch.labels.names) for sketch in accuracy.sketches)
    assert boxes.count("label") == labels
    assert boxes.count("integer") == boxes.count("float") == labels


def test_names_are_escaped_and_the_same_content_gives_the_same_bytes(
    accuracy: Accuracy, page: Path, tmp_path: Path
) -> None:
    text = page.read_text(encoding="utf-8")
    assert EVIL not in text
    assert "window.hurt=1&lt;/script&gt;" in text
    again = write_report(tmp_path / "again.html", ReportContent("made up", accuracy=accuracy))
    assert again.read_bytes() == page.read_bytes()
    without = write_report(tmp_path / "without.html", ReportContent("made up"))
    assert "curve-chart" not in without.read_text(encoding="utf-8")


def test_chromium_draws_it_in_both_schemes_and_on_a_phone(
    page: Path, show: Callable[..., Any]
) -> None:
    look = (
        "const c = document.querySelector('.curve-chart .curve.float');"
        "const b = c.getBoundingClientRect();"
        "return [getComputedStyle(c).stroke, b.width, b.height,"
        " document.documentElement.scrollWidth, window.hurt ?? 0]"
    )
    strokes = set()
    for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light")):
        browser = show(page, width, scheme)
        stroke, wide, high, whole, hurt = browser.execute_script(look)
        strokes.add((scheme, stroke))
        assert wide > 20
        assert high > 20
        assert whole <= width
        assert hurt == 0
        assert browser.get_log("browser") == []
    assert len({stroke for _, stroke in strokes}) == 2


@pytest.mark.parametrize("there", [labels(), labels((0, 5, "car"))], ids=["none", "not found"])
def test_nothing_to_show_is_shown_as_nothing(there: Labels, tmp_path: Path) -> None:
    accumulator = AccuracyAccumulator(NUSCENES_CLASSES)
    for name in NAMES:
        accumulator.add(name, 0, "empty", detections(), there)
    result = accumulator.result()
    assert result is not None
    assert "No intervals" in accuracy_text(result)
    page = write_report(tmp_path / "report.html", ReportContent("empty", accuracy=result))
    text = page.read_text(encoding="utf-8")
    assert text.count('<figure class="chart curve-chart">') == 4 + len(there.names)
    assert "nan" not in text[text.index('<section id="accuracy"') : text.index("</main>")]

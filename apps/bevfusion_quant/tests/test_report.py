"""The page as a file: escaped, deterministic, atomic, complete; what does not fit is refused."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bev_data.cameras import Camera
from bev_data.metrics import AgreementRow
from bevfusion_quant.pages import (
    ReportBoxes,
    ReportContent,
    ReportFigure,
    ReportScene,
    ReportStage,
    Section,
    head,
    read_sections,
    write_page,
    write_report,
)
from bevfusion_quant.pages._content import unusable
from bevquant_qnn import LayerRow
from bevquant_quantizers import QuantizerValues

EVIL = '</script><script>alert("x")</script>&amp;'
EXTENT = (-10.0, -10.0, 10.0, 10.0)


class Page(HTMLParser):
    """Elements, ids and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.raw: dict[str, str] = {}
        self.inside = "-"
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        self.inside = f"{tag} {found.get('type', '')}".strip()

    def handle_data(self, data: str) -> None:
        if self.inside.split()[0] in {"script", "style"}:
            self.raw[self.inside] = self.raw.get(self.inside, "") + data
            return
        self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = "-"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self) -> Any:
        return json.loads(self.raw["script application/json"])


def quantizer(*paths: str, amax: tuple[float, ...] = (2.0,), signed: bool = True) -> Any:
    values = np.random.default_rng(0).standard_normal(500) * (1.0 if signed else 0.0)
    seen = QuantizerValues(paths, 8, np.array(amax))
    seen.largest = float(np.abs(values).max())
    seen.total = values.size
    seen.counts = np.histogram(values, seen.edges)[0]
    seen.beyond = int((np.abs(values) > max(amax)).sum())
    return seen


def layer(name: str, decibels: float | None = 30.0) -> LayerRow:
    return LayerRow(name, "QuantConv2d", 8, 100.0, decibels, 0.999, 0.001, 2.0)


def stage(name: str = "lidar", **changes: Any) -> ReportStage:
    wanted = np.arange(12, dtype=np.float32).reshape(3, 4)
    return replace(
        ReportStage(name, f"{name} map", wanted, wanted + 0.5, extent=EXTENT, sqnr_db=25.0),
        **changes,
    )


def camera(name: str) -> Camera:
    image = np.full((90, 160, 3), 99, np.uint8)
    matrix = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
    turned = np.eye(4)
    turned[:3, :3] = [[1, 0, 0], [0, 0, -1], [0, 1, 0]]  # looks along +y
    return Camera(name, image, matrix, turned)


def scene(**changes: Any) -> ReportScene:
    boxes = np.array([[0.0, 8, 0, 4, 2, 1.5, 0.3], [0, -8, 0, 4, 2, 1.5, 0]])
    points = np.random.default_rng(0).uniform(-10, 10, (200, 5))
    labels = ReportBoxes(boxes, ("car", "truck"))
    found = ReportBoxes(boxes + 0.1, ("car", "truck"), np.array([0.9, 0.4]))
    start = ReportScene("street 0", points, EXTENT, "points", labels, found, found, (camera("A"),))
    return replace(start, **changes)


def full() -> ReportContent:
    return ReportContent(
        title="run",
        config="tiny",
        command="bevfusion-quant ptq --name run",
        versions={"torch": "2.13"},
        settings={
            "exclude": (),
            "calibration_frames": 0,
            "augmentation": {"flip": True, "scale": 0.1},
        },
        frames=("a", "b"),
        seconds={"calibrate": 1.5, "total": 3.0},
        peak_memory_mib=500.0,
        figures=(ReportFigure("NDS", "0.4"),),
        scene=scene(),
        stages=(stage(), stage("fuser", difference_map=None)),
        layers=(layer("encoders.lidar.a"), layer("fuser.0", 12.0), layer("output", None)),
        quantizers=(
            quantizer("encoders.lidar.a._input_quantizer", "encoders.lidar.b._input_quantizer"),
            quantizer("encoders.lidar.a._weight_quantizer", amax=(1.0, 3.0)),
        ),
        fusion={"fused": [{"conv": "c", "bn": "n", "how": "removed"}], "skipped": []},
        quantization={
            "quantized": [{"path": "fuser.0", "kind": "QuantConv2d", "was": "Conv2d"}],
            "shared": [{"tensor": "t", "readers": ["a", "b"], "reason": "two readers"}],
            "skipped": [{"path": "heads.object", "reason": "a softmax stays float"}],
        },
        calibration={
            "warnings": ["few frames"],
            "quantizers": [{"names": ["q"], "method": "mse", "warnings": ["saturates"]}],
        },
    )


def written(folder: Path, content: ReportContent) -> Page:
    return Page(write_report(folder / "report.html", content).read_text(encoding="utf-8"))


def test_every_section_of_a_full_report(tmp_path: Path) -> None:
    page = written(tmp_path, full())
    keys = ["scene", "stages", "layers", "decisions", "quantizers", "reproduce"]
    assert [a["id"] for a in page.all("section")] == keys
    assert [a["href"] for a in page.all("a")][1:7] == [f"#{key}" for key in keys]
    text = " ".join(page.text)
    for said in (
        "bevfusion-quant ptq --name run", "25.0 dB", "1 of 3", "worst 12.0 dB", "few frames",
        "flip yes, scale 0.1",
        "saturates", "two readers", "a softmax stays float", "NDS", "500 MiB", "×3 over 2 channels",
        "shared by 2 readers",
    ):  # fmt: skip
        assert said in text, said
    assert "calibration frames all" in re.sub(r"\s+", " ", text)
    page = written(tmp_path, replace(full(), layers=(layer("encoders.camera.a.layer1.0.conv1"),)))
    assert "camera.a.layer1.0.conv1" in "".join(page.text)
    link = '<a href="#layer-0">camera.<wbr>a.<wbr>layer1.<wbr>0.<wbr>conv1</a>'
    assert link in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_ids_are_unique_and_links_lead_somewhere(tmp_path: Path) -> None:
    page = written(tmp_path, full())
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(set(ids)) == len(ids)
    links = [a["href"] or "" for a in page.all("a")]
    assert {link[1:] for link in links} <= set(ids)
    assert "#quantizer-0" in links  # the layer's range leads to its histogram


def test_empty_content_is_a_page_without_sections(tmp_path: Path) -> None:
    page = written(tmp_path, ReportContent("nothing yet"))
    assert not page.all("section")
    assert page.data == {}


def test_nothing_can_be_fetched(tmp_path: Path) -> None:
    page = written(tmp_path, full())
    policies = [a["content"] or "" for a in page.all("meta") if "http-equiv" in a]
    assert policies[0].startswith("default-src 'none'; img-src data:;")
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "poster", "srcset"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:", "#")), (tag, target)
    assert "url(" not in page.raw["style"]
    assert "@import" not in page.raw["style"]


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    content = full()
    records = json.loads(
        json.dumps([content.fusion, content.quantization, content.calibration]).replace(
            '"reason": "', '"reason": ' + json.dumps(EVIL)[:-1]
        )
    )
    evil = replace(
        content,
        title=EVIL, config=EVIL, command=EVIL, frames=(EVIL,),
        versions={EVIL: EVIL}, settings={EVIL: EVIL}, seconds={EVIL: 1.0},
        figures=(ReportFigure(EVIL, EVIL, EVIL),),
        scene=scene(name=EVIL, kind=EVIL, labels=ReportBoxes(np.ones((1, 7)), (EVIL,)),
                    cameras=(camera(EVIL),)),
        stages=(stage(EVIL, title=EVIL, quantity=EVIL, difference_quantity=EVIL),),
        layers=(layer(EVIL), layer(f"encoders.{EVIL}.x")),
        quantizers=(quantizer(f"{EVIL}._input_quantizer", EVIL),),
        fusion=records[0], quantization=records[1], calibration=records[2],
    )  # fmt: skip
    page = written(tmp_path, evil)
    assert len(page.all("script")) == 2
    assert "alert" not in page.raw["script"]
    assert [row[0] for row in page.data["layers"]["layers"]] == [EVIL, f"encoders.{EVIL}.x"]
    assert page.all("tr")  # the tree below is whole: markup after the names still parses
    assert len(page.all("section")) == 6
    assert EVIL in " ".join(page.text)


def test_the_policy_allows_this_script_alone(tmp_path: Path) -> None:
    import hashlib

    page = written(tmp_path, full())
    digest = base64.b64encode(hashlib.sha256(page.raw["script"].encode()).digest()).decode()
    policy = next(a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert f"script-src 'sha256-{digest}'" in str(policy)


def test_same_content_same_bytes(tmp_path: Path) -> None:
    first = write_report(tmp_path / "a.html", full())
    second = write_report(tmp_path / "b.html", full())
    assert first.read_bytes() == second.read_bytes()


def test_a_failed_write_leaves_the_old_page_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report(tmp_path / "report.html", ReportContent("old"))
    before = path.read_bytes()

    def broken(*names: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="no room"):
        write_report(path, ReportContent("new"))
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"report.html", "page.json"}


def unpacked(packed: dict[str, Any]) -> Any:
    """The map as the page's script reads it."""
    levels = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8)
    shape = packed["rows"], packed["columns"]
    high, low = levels.reshape(2, *shape).astype(np.float64)
    level = high * 256 + low
    step = (packed["high"] - packed["low"]) / 4095
    return np.where(level == 0xFFFF, np.nan, packed["low"] + level * step)


def test_maps_come_back_forward_up_within_half_a_level(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((5, 7)).astype(np.float32)
    wanted[2, 3] = np.nan
    got = wanted * 1.01
    shown = stage(float_map=wanted, quantized_map=got)
    page = written(tmp_path, ReportContent("x", stages=(shown,)))
    (data,) = page.data["stages"]
    for packed, values in zip(data["maps"], (wanted, got, got - wanted), strict=True):
        back = unpacked(packed)
        assert back.shape == (7, 5)  # rows are y, the largest y on top; columns are x
        half = np.nanmax(values) - np.nanmin(values)
        np.testing.assert_allclose(back[::-1].T, values, atol=half / 4095 / 2 + 1e-6)


def test_camera_maps_are_laid_out_as_the_pictures(tmp_path: Path) -> None:
    names = ("CAM_BACK", "CAM_FRONT", "CAM_FRONT_LEFT")
    maps = np.stack([np.full((2, 3), value, np.float32) for value in (1.0, 2.0, 3.0)])
    content = ReportContent(
        "x",
        scene=scene(cameras=[camera(name) for name in names]),
        stages=(stage(float_map=maps, quantized_map=maps, extent=None),),
    )
    back = unpacked(written(tmp_path, content).data["stages"][0]["maps"][0])
    assert back.shape == (2, 11)
    wanted = [3, 3, 3, np.nan, 2, 2, 2, np.nan, 1, 1, 1]
    np.testing.assert_allclose(back[0], wanted, atol=1e-3)


def test_a_map_without_any_value_is_drawn_empty(tmp_path: Path) -> None:
    nothing = np.full((3, 4), np.nan, np.float32)
    page = written(tmp_path, ReportContent("x", stages=(stage(float_map=nothing),)))
    assert np.isnan(unpacked(page.data["stages"][0]["maps"][0])).all()
    assert page.data["stages"][0]["scales"][0][0] < page.data["stages"][0]["scales"][0][1]


def test_boxes_are_drawn_where_a_camera_sees_them(tmp_path: Path) -> None:
    page = written(tmp_path, ReportContent("x", scene=scene()))
    shown = [a.get("aria-label") for a in page.all("svg")]
    assert shown[1] == "3 boxes in camera a"  # of each set the box before the lens, not behind it
    assert "2 of label, 2 of float, 2 of quantized" in str(shown[0])


def test_a_box_around_the_camera_is_cut_not_mirrored(tmp_path: Path) -> None:
    around = ReportBoxes(np.array([[0.0, 1, 0, 6, 2, 2, np.pi / 2]]), ("bus",))
    content = ReportContent(
        "x", scene=scene(labels=around, float_detections=None, quantized_detections=None)
    )
    paths = [a["d"] or "" for a in written(tmp_path, content).all("path") if "d" in a]
    drawn = [re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d) for d in paths]
    points = np.array(drawn[-1], float) - (80, 45)
    assert len(points) == 16  # four edges of the far face, four that run out of the picture
    np.testing.assert_allclose(np.unique(np.abs(points).round()), [25, 333])
    long = points.reshape(-1, 2, 2)[np.abs(points).max(1).reshape(-1, 2).max(1) > 100]
    assert (long[:, 0] * long[:, 1] > 0).all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ReportContent("x", stages=(stage(), stage())), "two stages are named 'lidar'"),
        (
            ReportContent("x", stages=(stage(quantized_map=np.zeros((2, 2), np.float32)),)),
            r"quantized_map has shape \(2, 2\), float_map \(3, 4\)",
        ),
        (
            ReportContent("x", stages=(stage(float_map=np.zeros(3, np.float32)),)),
            r"float_map has shape \(3,\), expected \[X, Y\]",
        ),
        (ReportContent("x", stages=(stage(extent=(1, 0, 0, 1)),)), "extent is"),
        (ReportContent("x", scene=scene(points=np.zeros((4, 2)))), r"points has shape \(4, 2\)"),
        (
            ReportContent("x", scene=scene(labels=ReportBoxes(np.zeros((2, 6)), ("a", "b")))),
            r"labels.boxes has shape \(2, 6\), expected \[objects, 7\]",
        ),
        (
            ReportContent("x", scene=scene(labels=ReportBoxes(np.zeros((2, 7)), ("a",)))),
            "2 boxes but 1 names",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, content: ReportContent, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write_report(tmp_path / "report.html", content)
    assert not list(tmp_path.iterdir())


def test_a_model_gone_wrong_still_gets_its_page(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    boxes = np.ones((3, 7))
    boxes[1, 4] = inf
    found = ReportBoxes(boxes, ("car",) * 3, np.array([0.5, 0.5, nan]))
    overflowed = quantizer("a._input_quantizer", amax=(inf,))
    overflowed.largest = inf
    page = written(
        tmp_path,
        ReportContent(
            "x",
            scene=scene(quantized_detections=found),
            stages=(stage(quantized_map=np.full((3, 4), inf, np.float32), sqnr_db=nan),),
            layers=(replace(layer("a", inf), cosine=nan, input_amax=nan), layer("b", nan)),
            quantizers=(overflowed, quantizer("b._weight_quantizer", amax=(nan, 1.0))),
        ),
    )
    text = " ".join(page.text)
    assert "Quantized model (1) and 2 not finite" in text
    assert page.data["layers"]["layers"] == [["a", "a", None], ["b", "b", None]]
    assert "nan" not in text


def test_quantizers_that_saw_nothing_or_zeros(tmp_path: Path) -> None:
    unseen = QuantizerValues(("a._input_quantizer",), 8, np.array([1.0]))
    dead = quantizer("b._input_quantizer", amax=(0.0,), signed=False)
    weights = quantizer("c._weight_quantizer", amax=(0.0, 2.0))
    dead.form = "fp8_e4m3"
    page = written(tmp_path, ReportContent("x", quantizers=(unseen, dead, weights)))
    text = " ".join(page.text)
    assert "FP8 E4M3" in text
    assert "8 bit" in text
    assert [q["range"] for q in page.data["quantizers"]] == [[1, 1], [0, 0], [0, 2]]
    assert len([a for a in page.all("li") if a.get("class") == "card"]) == 3


def test_sections_read_back_make_the_same_page(tmp_path: Path) -> None:
    content = replace(full(), title=EVIL)
    written_page = write_report(tmp_path / "a.html", content)
    sections = read_sections(tmp_path / "page.json")
    assert list(sections) == [
        "scene", "stages", "layers", "decisions", "quantizers", "reproduce",
    ]  # fmt: skip
    assert sections["layers"].title == "Layers"
    again = write_page(tmp_path / "b.html", EVIL, head(content), list(sections.values()))
    assert again.read_bytes() == written_page.read_bytes()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("<p>another page</p>", "not a page's data|is not JSON"),
        ('{"format": "bevfusion-quant page", "version": 99}', "version 99, expected 2"),
    ],
)
def test_pages_of_another_form_are_not_read(tmp_path: Path, written: str, said: str) -> None:
    (tmp_path / "page.json").write_text(written)
    with pytest.raises(ValueError, match=said):
        read_sections(tmp_path / "page.json")


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("layers", {"low": "<b>"}),
        ("base", {}),
        ("macros", {}),
        ("nowhere", {}),
        ("decisions", [1, 2]),
        ("reproduce", "text"),
    ],
)
def test_data_that_fills_no_template_is_refused(tmp_path: Path, key: str, data: Any) -> None:
    write_page(tmp_path / "a.html", "x", head(full()), [])
    page = json.loads((tmp_path / "page.json").read_text())
    page["sections"] = [{"key": key, "title": "t", "data": data}]
    (tmp_path / "page.json").write_text(json.dumps(page))
    with pytest.raises(ValueError, match=f"its data of '{key}' do not fit that section's"):
        read_sections(tmp_path / "page.json")


def test_markup_in_data_is_text_on_the_page(tmp_path: Path) -> None:
    entry = {"search": EVIL, "paths": [EVIL], "text": EVIL}
    one = {"name": EVIL, "title": EVIL, "note": EVIL, "open": True, "entries": [entry]}
    page = Page(str(Section("decisions", "Decisions", [one]).html))
    assert not page.all("script")
    assert "".join(page.text).count(EVIL) == 4


def test_values_that_are_not_finite_make_a_result_useless(tmp_path: Path) -> None:
    layers = [layer("neck"), replace(layer("log", -float("inf")), cosine=None, not_finite=7)]
    assert unusable(layers).startswith("NOT usable: log has infinite or NaN values, which float")
    text = " ".join(written(tmp_path, ReportContent("x", layers=layers)).text)
    assert "7 values are infinite or NaN" in text
    assert "worst −∞ dB at" in text


def test_kept_boxes_make_a_low_layer_unclear() -> None:
    layers = [layer("map", 30.0), layer("background", 2.0)]
    assert unusable(layers).startswith("NOT usable: background has 2.0 dB")
    for matched, words in ((79, "NOT usable"), (80, "unclear"), (0, "NOT usable")):
        kept = AgreementRow(1.0, 100 if matched else 0, 100, matched, 0.0, 0.0)
        said = unusable(layers, [kept])
        assert said.startswith(f"{words}: background has 2.0 dB")
        assert "--exclude background" in said
        assert "try --bias-correction" in said
    assert unusable(layers[:1], [kept]) == ""
    assert unusable(layers, (), "the reason") == "NOT usable: the reason"
    assert unusable(layers, [AgreementRow(1.0, 9, 9, 9, 0.0, 0.0)], "it").endswith("yet it")

"""visualize_model and visualize_partition: the file, what it shows, and showing it."""

import itertools
import re
import shutil
import subprocess
import sys
import threading
import types
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid import march
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    fuse_fx,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
    visualize_model,
    visualize_partition,
)
from bevquant_hybrid_tools.drawing import DrawnNode, draw_partition

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
SVG = "{http://www.w3.org/2000/svg}"
IMAGE = torch.rand(1, 3, 16, 16)


class Five(nn.Module):
    """Five layers, one of which leaves nothing on a BPU."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.Dropout(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
        )

    def forward(self, x):
        return self.dequant(self.body(self.quant(x)))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.add = FloatFunctional()

    def forward(self, x):
        return self.add.add(self.second(self.first(x)), x)


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.act, self.last = nn.Conv2d(3, 2, 1), nn.PReLU(), nn.Conv2d(2, 1, 1)

    def forward(self, x):
        return self.dequant(self.last(F.selu(self.act(self.first(self.quant(x))))))


def drawn(path):
    """Each node's name, second line, class and place on the page; and the edges' classes."""
    tree = ET.fromstring(Path(path).read_text(encoding="utf-8"))
    nodes = {}
    for group in tree.iter(f"{SVG}g"):
        title, shape = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        what = group.find(f"{SVG}text[@class='what']")
        box = tuple(float(shape.get(key)) for key in ("x", "y", "width", "height"))
        second = "" if what is None else what.text
        nodes[title.text.splitlines()[0]] = (second, shape.get("class"), box)
    edges = [p.get("class") for p in tree.iter(f"{SVG}path") if p.get("marker-end")]
    return nodes, edges


def traced(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, x)


def converted(model, x=IMAGE):
    model.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(model)
    qat(x)
    return convert(qat.eval())


def test_layers_with_their_shapes_in_every_form(tmp_path):
    fixed = converted(Five())
    for index, form in enumerate((Five(), fixed, traced(fixed, IMAGE))):
        path = tmp_path / "new" / f"{index}.svg"
        visualize_model(form, [IMAGE], save_path=str(path), show=False)
        nodes, edges = drawn(path)
        assert {name: (second, kind) for name, (second, kind, _) in nodes.items()} == {
            "input": ("1×3×16×16", "card plain"),
            "quant": ("", "quantize"),
            "body.0": ("Conv2d · 1×8×8×8", "card BPU"),
            "body.2": ("MaxPool2d · 1×8×4×4", "card BPU"),
            "body.3": ("Conv2d · 1×4×4×4", "card BPU"),
            "dequant": ("", "dequantize"),
            "output": ("", "card plain"),
        }
        assert sorted(edges) == ["edge"] * 4 + ["edge float"] * 2
        assert "Five for BAYES" in path.read_text(encoding="utf-8")


def test_inputs_and_outputs_are_told_apart(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.add = QuantStub(), QuantStub(), FloatFunctional()
            self.heads = nn.ModuleList(nn.Conv2d(3, 2, 1) for _ in range(2))

        def forward(self, x, y):
            z = self.add.add(self.left(x), self.right(y))
            return [head(z) for head in self.heads]

    visualize_model(Two(), (IMAGE, IMAGE), save_path=tmp_path / "two.svg", show=False)
    nodes, edges = drawn(tmp_path / "two.svg")
    assert set(nodes) == {"input 0", "input 1", "left", "right", "add", "heads.0", "heads.1",
                          "output"}  # fmt: skip
    assert len(edges) == 8


def test_fifty_layers_stay_readable(tmp_path):
    model = nn.Sequential(QuantStub(), *(Residual(3) for _ in range(17)), DeQuantStub())
    visualize_model(model, IMAGE, save_path=tmp_path / "deep.svg", show=False)
    nodes, edges = drawn(tmp_path / "deep.svg")
    assert len(nodes) == 3 * 17 + 4
    assert len(edges) == 4 * 17 + 3
    boxes = [box for _, _, box in nodes.values()]
    for (x, y, width, height), (u, v, w, h) in itertools.combinations(boxes, 2):
        assert x + width <= u or u + w <= x or y + height <= v or v + h <= y
    right, bottom = max(x + w for x, _, w, _ in boxes), max(y + h for _, y, _, h in boxes)
    assert 0.5 < right / bottom < 2.5  # a screen's shape, not one column of fifty


def test_a_hybrid_model_has_its_regions_and_boundaries(tmp_path):
    qconfig = {"": get_default_qat_qconfig()}
    qat = prepare_qat_fx(Hybrid(), qconfig, hybrid=True)
    qat(IMAGE)
    models = [Hybrid(), fuse_fx(Hybrid()), qat, convert_fx(qat)]
    expected = {
        "quant": "quantize", "first": "card BPU", "act_input_dequant_0": "dequantize",
        "act": "card CPU", "selu": "card CPU", "selu_activation_post_process": "quantize",
        "last": "card BPU", "dequant": "dequantize",
    }  # fmt: skip
    for index, model in enumerate(models):
        path = tmp_path / f"{index}.svg"
        plan = visualize_partition(model, IMAGE, save_path=path, show=False)
        nodes, _ = drawn(path)
        found = {name: kind for name, (_, kind, _) in nodes.items() if kind != "card plain"}
        assert found == expected
        assert [s.nodes for s in plan.segments] == [("first",), ("act", "selu"), ("last",)]
        assert "Hybrid: BPU and CPU for BAYES" in path.read_text(encoding="utf-8")
    visualize_model(models[-1], IMAGE, save_path=tmp_path / "model.svg", show=False)
    nodes, _ = drawn(tmp_path / "model.svg")
    assert [name for name, (_, kind, _) in nodes.items() if kind == "card CPU"] == ["act", "selu"]


def test_wishes_move_layers_to_the_cpu():
    wishes = {"module_name": ["last"]}
    plan = visualize_partition(Hybrid(), march="bayes", hybrid_dict=wishes, show=False)
    assert plan.node("last").place == "CPU"


def test_branches_lie_in_one_area():
    branches = [DrawnNode(name, "Conv2d", "BPU", ("a",)) for name in ("b", "c")]
    nodes = [DrawnNode("a", place="BPU"), *branches, DrawnNode("d", "add", "BPU", ("b", "c"))]
    tree = ET.fromstring(draw_partition(nodes))
    areas = [
        tuple(float(r.get(key)) for key in ("x", "y", "width", "height"))
        for r in tree.iter(f"{SVG}rect")
        if r.get("class") == "area BPU" and r.get("y") != "54.2"  # the legend's
    ]
    cards = {
        g.find(f"{SVG}title").text[0]: [float(g.find(f"{SVG}rect").get(k)) for k in ("x", "width")]
        for g in tree.iter(f"{SVG}g")
    }
    middle = (cards["b"][0] + cards["b"][1] + cards["c"][0]) / 2
    covered = [(y, y + h) for x, y, w, h in areas if x <= middle <= x + w]
    top, bottom = min(y for y, _ in covered), max(y for _, y in covered)
    step = 2.0
    for i in range(int((bottom - top) / step)):
        level = top + i * step
        bar = any(y <= level <= end for y, end in covered)
        joint = any(abs(level - y) < 14 for span in covered for y in span)
        assert bar or joint, level


def show_with(monkeypatch, viewer: str | None) -> list[list[str]]:
    """A Linux desktop whose viewer, if any, is only taken note of; the list of what it is given."""
    opened: list[list[str]] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(shutil, "which", lambda name: viewer)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: opened.append(command))
    return opened


def wait_for_viewers() -> None:
    for thread in threading.enumerate():
        if thread.name == "viewer":
            thread.join(10)


def test_without_a_display_the_path_is_printed_and_nothing_opens(tmp_path, monkeypatch, capsys):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("opened"))
    visualize_model(Five(), IMAGE, save_path=tmp_path / "net.svg")
    assert capsys.readouterr().out == f"the picture is {tmp_path / 'net.svg'}\n"


def test_with_a_display_the_viewer_runs_beside(tmp_path, monkeypatch, capsys):
    opened = show_with(monkeypatch, "view")
    visualize_model(Five(), IMAGE, save_path=tmp_path / "net.svg")
    wait_for_viewers()
    assert opened == [["view", str(tmp_path / "net.svg")]]
    assert str(tmp_path / "net.svg") in capsys.readouterr().out


@pytest.mark.parametrize("viewer", ["/no/such/viewer", "/bin/false"])
def test_a_viewer_that_fails_is_no_error(viewer, tmp_path, monkeypatch, capsys):
    run = subprocess.run
    show_with(monkeypatch, viewer)
    monkeypatch.setattr(subprocess, "run", run)
    visualize_model(Five(), IMAGE, save_path=tmp_path / "net.svg")
    wait_for_viewers()
    assert str(tmp_path / "net.svg") in capsys.readouterr().out


def test_a_notebook_shows_the_picture_itself(tmp_path, monkeypatch, capsys):
    displayed: list = []
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = type("ZMQInteractiveShell", (), {})
    display.SVG = lambda filename: Path(filename).read_text(encoding="utf-8")
    display.display = displayed.append
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    visualize_model(Five(), IMAGE, save_path=tmp_path / "net.svg")
    assert displayed == [(tmp_path / "net.svg").read_text(encoding="utf-8")]
    assert capsys.readouterr().out == ""


def test_without_a_path_the_picture_lies_in_a_folder_of_its_own(monkeypatch, capsys, tmp_path):
    show_with(monkeypatch, None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    visualize_model(Five(), IMAGE)
    path = re.fullmatch(r"the picture is (.*Five\.svg)\n", capsys.readouterr().out)[1]
    assert Path(path).is_relative_to(tmp_path)
    assert len(drawn(path)[0]) == 7
    visualize_model(Five(), IMAGE, show=False)
    assert capsys.readouterr().out == ""


def test_what_cannot_be_drawn_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"net\.png.*end it in \.svg"):
        visualize_model(Five(), IMAGE, save_path=str(tmp_path / "net.png"), show=False)
    for draw in (visualize_model, visualize_partition):
        with pytest.raises(TypeError, match=f"{draw.__name__}: expected a module, got int"):
            draw(3, IMAGE)
        with pytest.raises(ValueError, match="march='nash'"):
            draw(Five(), IMAGE, march="nash")
    march._chosen.clear()
    with pytest.raises(ValueError, match="visualize_model: march=None and no march is set"):
        visualize_model(Five(), IMAGE, show=False)
    assert not list(tmp_path.iterdir())

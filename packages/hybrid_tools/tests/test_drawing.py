"""The picture of a partition: what it shows, that nothing overlaps, that it stands alone."""

import itertools
import random
import re
import unicodedata
import xml.etree.ElementTree as ET
from typing import NamedTuple

import pytest

from bevquant_hybrid_tools.drawing import DrawnNode, draw_partition, write_partition
from bevquant_hybrid_tools.drawing._layers import break_columns, place_layer

SVG = "{http://www.w3.org/2000/svg}"


def chain(count, *, cpu=()):
    nodes = [DrawnNode("x"), DrawnNode("quant", "QuantStub", "", ("x",), "quantize")]
    for i in range(count):
        place = "CPU" if i in cpu else "BPU"
        nodes.append(DrawnNode(f"layers.{i}", "Conv2d", place, (nodes[-1].name,)))
    return nodes


def random_graph(seed, count=30):
    rng = random.Random(seed)
    nodes = [DrawnNode("x")]
    for i in range(count):
        known = [node.name for node in nodes[-6:]]
        inputs = tuple(rng.sample(known, min(len(known), rng.choice([1, 1, 2, 3]))))
        kind = rng.choice(["BPU", "CPU", "quantize", "dequantize", ""])
        place, sign = (kind, "") if len(kind) < 4 else ("", kind)
        nodes.append(DrawnNode(f"n{i}.{'long' * rng.randrange(6)}", "op", place, inputs, sign))
    return nodes


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float
    line: str

    @property
    def x(self):
        return round((self.left + self.right) / 2, 1)


def drawn(nodes):
    """Size of the picture, and each node's place in it with its first line of text."""
    root = ET.fromstring(draw_partition(nodes))
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        x, y, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        sign = text.find(f"{SVG}tspan")
        line = text.text if sign is None else sign.tail.strip()
        name = group.find(f"{SVG}title").text.split("\n")[0]
        boxes[name] = Box(x, y, x + width, y + height, line)
    return float(root.get("width")), float(root.get("height")), boxes


def letters(text):
    """Width of a text; characters of East Asian scripts take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_overlaps_and_everything_lies_on_the_page(seed):
    width, height, boxes = drawn(random_graph(seed))
    assert len(boxes) == 31
    for one, other in itertools.combinations(boxes.values(), 2):
        beside = one.right < other.left or other.right < one.left
        assert beside or one.bottom < other.top or other.bottom < one.top
    for box in boxes.values():
        assert box.left > 0
        assert box.right < width
        assert 0 < box.top
        assert box.bottom < height


@pytest.mark.parametrize("seed", range(12))
def test_edges_point_down_or_to_a_later_column(seed):
    nodes = random_graph(seed)
    _, _, boxes = drawn(nodes)
    for node in nodes:
        for source in node.inputs:
            upper, lower = boxes[source], boxes[node.name]
            assert upper.bottom < lower.top or upper.right < lower.left


def test_every_node_and_edge_is_drawn_once():
    nodes = random_graph(3)
    root = ET.fromstring(draw_partition(nodes, title="t"))
    hints = [g.find(f"{SVG}title").text.split("\n")[0] for g in root.iter(f"{SVG}g")]
    assert sorted(hints) == sorted(node.name for node in nodes)
    edges = [p for p in root.iter(f"{SVG}path") if p.get("marker-end")]
    assert len(edges) == sum(len(set(node.inputs)) for node in nodes)
    for place in ("BPU", "CPU"):
        cards = [r for r in root.iter(f"{SVG}rect") if r.get("class") == f"card {place}"]
        assert len(cards) == sum(node.place == place for node in nodes)
    for sign in ("quantize", "dequantize"):
        marks = [r for r in root.iter(f"{SVG}rect") if r.get("class") == sign]
        assert len(marks) == 1 + sum(node.boundary == sign for node in nodes)  # one in the legend


def test_floats_are_dashed_and_integers_are_not():
    nodes = [
        *chain(2, cpu=[1]),
        DrawnNode("back", boundary="dequantize", inputs=("layers.0",)),
        DrawnNode("out", inputs=("back", "layers.1")),
    ]
    styles = re.findall(r'<path class="(edge[ a-z]*)" marker-end', draw_partition(nodes))
    sources = [(s, n.name) for n in nodes for s in n.inputs]
    expected = ["edge float" if s in ("x", "back", "layers.1") else "edge" for s, _ in sources]
    assert styles == expected


def test_the_file_needs_nothing_from_elsewhere_and_has_a_dark_scheme():
    text = draw_partition(random_graph(5))
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    for forbidden in ("<script", "<image", "@import", "href", "url(http", "<foreignObject"):
        assert forbidden not in text
    assert "prefers-color-scheme: dark" in text
    light, dark = re.findall(r"--([a-z-]+):#", text.split("@media")[0]), text.split("@media")[1]
    assert all(f"--{name}:#" in dark for name in light)


NASTY = "a<b>&\"'\x00\x1b</title><script>alert(1)</script>\ud800\n\tz"


def test_text_is_escaped_and_what_xml_cannot_hold_is_replaced():
    nodes = [
        DrawnNode(NASTY, NASTY, "BPU", detail=NASTY, note=NASTY),
        DrawnNode("q" + NASTY, inputs=(NASTY,), boundary="quantize"),
    ]
    text = draw_partition(nodes, title=NASTY)
    root = ET.fromstring(text.encode())
    assert {element.tag for element in root.iter()} <= {
        SVG + tag
        for tag in ("svg", "title", "desc", "style", "defs", "marker", "path", "rect", "text", "g",
                    "tspan")
    }  # fmt: skip
    assert "a<b>&\"'" in root.find(f"{SVG}title").text


def test_hints_give_the_whole_name_and_the_reason():
    name = "backbone." * 20 + "conv"
    text = draw_partition([DrawnNode(name, "Conv2d", "CPU", note="named in hybrid_dict")])
    hint = ET.fromstring(text).find(f"{SVG}g/{SVG}title").text
    assert hint == f"{name}\nConv2d · CPU\nnamed in hybrid_dict"
    names = [t.text for t in ET.fromstring(text).iter(f"{SVG}text") if t.get("class") == "name"]
    assert len(names[0]) <= 32
    assert names[0].startswith("backbone.")
    assert names[0].endswith("conv")


def test_text_fits_into_its_box():
    for seed in range(8):
        nodes = random_graph(seed)
        _, _, boxes = drawn(nodes)
        for node in nodes:
            size = 11 if node.boundary else 12
            signs = 3 if node.boundary else 0
            box = boxes[node.name]
            assert (letters(box.line) + signs) * size * 0.602 < box.right - box.left


def test_fifty_nodes_fit_a_screen_and_a_chain_is_straight():
    nodes = chain(50, cpu=range(20, 26))
    width, height, boxes = drawn(nodes)
    assert 0.6 < width / height < 2.5
    assert 1 < len({box.x for box in boxes.values()}) < 6  # one centre for each column
    places = [(boxes[node.name].x, boxes[node.name].top) for node in nodes]
    assert places == sorted(places)


def test_a_shortcut_bends_around_the_main_path():
    nodes = chain(5)
    nodes.append(DrawnNode("add", "add", "BPU", ("layers.4", "layers.0")))
    _, _, boxes = drawn(nodes)
    assert len({boxes[node.name].x for node in nodes}) == 1
    paths = re.findall(r'marker-end="[^"]*" d="([^"]*)"', draw_partition(nodes))
    points = [
        [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths
    ]
    (around,) = [path for path in points if max(path)[0] > boxes["add"].right]
    passing = [y for x, y in around if x == max(around)[0]]
    assert min(passing) < boxes["layers.1"].bottom
    assert max(passing) > boxes["layers.4"].top


def test_order_within_layers_removes_crossings():
    """Pairs that are handed over crossed: a sweep or two uncross them all."""
    top = [DrawnNode(f"a{i}") for i in range(6)]
    bottom = [DrawnNode(f"b{i}", inputs=(f"a{5 - i}",)) for i in range(6)]
    _, _, boxes = drawn([*top, *bottom])
    across = sorted(bottom, key=lambda node: boxes[node.name].x)
    sources = [boxes[node.inputs[0]].x for node in across]
    assert sources == sorted(sources)


@pytest.mark.parametrize("seed", range(20))
def test_places_in_a_layer_are_the_nearest_that_do_not_overlap(seed):
    """No small move of any pool of neighbours comes nearer to what is wanted."""
    rng = random.Random(seed)
    wanted = [rng.uniform(-50, 50) for _ in range(7)]
    widths = [rng.uniform(5, 30) for _ in range(7)]
    placed = place_layer(wanted, widths, 4.0)
    for i in range(6):
        assert placed[i + 1] - placed[i] >= (widths[i] + widths[i + 1]) / 2 + 4 - 1e-9

    def cost(places):
        return sum((p - w) ** 2 for p, w in zip(places, wanted, strict=True))

    best = cost(placed)
    for first, last in itertools.combinations(range(8), 2):
        for step in (-0.01, 0.01):
            moved = [p + step * (first <= i < last) for i, p in enumerate(placed)]
            apart = all(
                moved[i + 1] - moved[i] >= (widths[i] + widths[i + 1]) / 2 + 4 - 1e-9
                for i in range(6)
            )
            assert not apart or cost(moved) >= best - 1e-9


def test_columns_break_where_few_edges_are_cut():
    cuts = [4] * 40
    cuts[19] = 1
    parts = break_columns(cuts, lambda part: 150.0, 60.0, gutter=50.0)
    assert [part.start for part in parts] == [0, 20]
    assert len(break_columns([9] * 40, lambda part: 150.0, 60.0, gutter=50.0)) == 1


def test_order_of_the_nodes_given_does_not_matter_for_what_is_legal():
    nodes = chain(4)
    _, _, boxes = drawn(nodes[::-1])
    tops = [boxes[node.name].top for node in nodes]
    assert tops == sorted(tops)


def test_picture_is_the_same_every_time():
    nodes = random_graph(7)
    assert draw_partition(nodes) == draw_partition(list(nodes))


def test_empty_and_single_pictures_are_well_formed():
    assert "0 operators on the BPU" in ET.fromstring(draw_partition([])).find(f"{SVG}desc").text
    ET.fromstring(draw_partition([DrawnNode("alone")]))


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([DrawnNode("a"), DrawnNode("a")], "two nodes are called 'a'"),
        ([DrawnNode("a", inputs=("b",))], "a reads 'b', which is no node"),
        ([DrawnNode("a", inputs=("b",)), DrawnNode("b", inputs=("a",))], "in a circle: a, b"),
    ],
)
def test_graphs_that_cannot_be_drawn_are_refused(nodes, reason):
    with pytest.raises(ValueError, match=reason):
        draw_partition(nodes)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"name": ""}, "without a name"),
        ({"name": "a", "place": "GPU"}, "a: place 'GPU'"),
        ({"name": "a", "boundary": "q"}, "a: boundary 'q'"),
    ],
)
def test_nodes_without_a_sign_are_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        DrawnNode(**fields)


def test_file_is_written_whole(tmp_path):
    target = tmp_path / "new" / "plan.svg"
    assert write_partition(chain(3), target) == target
    assert target.read_text(encoding="utf-8") == draw_partition(chain(3))
    assert [p.name for p in target.parent.iterdir()] == ["plan.svg"]


def test_words_are_cut_in_the_middle_by_their_width():
    _, _, boxes = drawn([DrawnNode("short"), DrawnNode("層" * 40), DrawnNode("a  b")])
    assert boxes["short"].line == "short"
    assert letters(boxes["層" * 40].line) <= 32
    assert boxes["a  b"].line == "a b"


def test_boundaries_are_called_after_whom_they_serve():
    said = {
        "blocks_10_p_activation_post_process": "blocks_10_p",
        "blocks_1_p_input_dequant_0": "blocks_1_p",
        "blocks_1_p_input_dequant_12": "blocks_1_p_12",
        "quant": "quant",
        "_input_dequant_0": "_input_dequant_0",
    }
    signs = [DrawnNode(name, boundary="quantize") for name in said]
    _, _, boxes = drawn([DrawnNode("x"), *signs])
    assert {name: boxes[name].line for name in said} == said
    assert all(f"<title>{name}" in draw_partition(signs) for name in said)

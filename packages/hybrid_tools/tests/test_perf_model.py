"""perf_model: the documented keys, figures that add up, files that say what they are."""

import json
import re
import warnings
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from bevquant_hybrid import march, runtime
from bevquant_hybrid.operators import trace_calls
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    get_default_qat_qconfig,
    perf_model,
    prepare_qat,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.performance import estimate_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

# Keys of the documented report that an estimate can fill.
DOCUMENTED = """
BPU OPs per frame (effective)|BPU OPs per run (effective)|BPU core number|BPU march
DDR bytes per frame|DDR bytes per run|DDR bytes per second|DDR megabytes per frame
DDR megabytes per run|DDR megabytes per second|FPS|compiling options|frame per run
frame per second|input features|latency (ms)|latency (us)|loaded bytes per frame
loaded bytes per run|model name|run per second|stored bytes per frame|stored bytes per run
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x):
        return self.dequant(self.body(self.quant(x)))


IMAGE = torch.rand(2, 3, 32, 32)


def converted():
    model = Net()
    model.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(model)
    qat(IMAGE)
    return qat, convert(qat.eval())


def traced(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, IMAGE)


def test_the_documented_keys_hold_figures_that_add_up(tmp_path):
    summary = perf_model(Net(), IMAGE, out_dir=str(tmp_path))["summary"]
    for key in DOCUMENTED.replace("\n", "|").strip("|").split("|"):
        assert key in summary, key
    operations = 2 * 2 * 16 * 16 * (8 * 3 * 9 + 4 * 8)
    loaded = 2 * 3 * 32 * 32 + 8 * 27 + 4 * 8 + 2 * 8 * 16 * 16 + 4 * 8 + 4 * 4
    stored = 2 * 8 * 16 * 16 + 2 * 4 * 16 * 16
    assert summary["BPU OPs per run (effective)"] == operations
    assert summary["BPU OPs per frame (effective)"] == operations // 2
    assert summary["loaded bytes per run"] == loaded
    assert summary["stored bytes per run"] == stored
    assert summary["DDR bytes per run"] == loaded + stored
    assert summary["DDR bytes per frame"] == (loaded + stored) / 2
    assert summary["frame per run"] == 2
    assert summary["FPS"] == pytest.approx(2 / summary["latency (us)"] * 1e6, rel=0.1)
    assert summary["BPU march"] == "BAYES"
    assert summary["input features"] == [["input name", "input size"], ["arg0", "2x32x32x3"]]
    assert "layer details" not in summary


def test_every_form_of_a_model_costs_the_same(tmp_path):
    qat, fixed = converted()
    reports = [
        perf_model(m, [IMAGE], name="net", out_dir=str(tmp_path), layer_details=True)["summary"]
        for m in (Net(), qat, fixed, traced(fixed))
    ]
    for report in reports[1:]:
        rows = [row for row in report["layer details"] if row[0] != "body.1"]  # ReLU stands alone
        assert rows == [row for row in reports[0]["layer details"] if row[0] != "body.1"]
        report["layer details"] = reports[0]["layer details"]
        assert report == reports[0]
    head, *rows = reports[0]["layer details"]
    assert head == ["layer", "ops", "computing cost (no DDR)", "load/store cost"]
    assert [row[0] for row in rows] == ["quant", "body.0", "body.1", "body.2", "dequant"]
    assert rows[1][1] == f"{2 * 2 * 16 * 16 * 8 * 27:,}"
    assert re.fullmatch(r"[\d.]+ us \([\d.]+% of model\)", rows[1][2])


def test_it_says_everywhere_that_it_is_an_estimate(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    result = perf_model(Net(), IMAGE, out_dir=str(folder), name="digits", layer_details=True)
    out = capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == ["digits.html", "digits.json"]
    assert json.loads((folder / "digits.json").read_text(encoding="utf-8")) == result
    assert result["summary"]["estimate"].startswith("An estimate by roofline, not a measurement")
    assert "without effect on an estimate" in result["summary"]["compiling options"]
    assert "An estimate, not a measurement" in (folder / "digits.html").read_text(encoding="utf-8")
    lines = out.splitlines()
    fps, latency = result["summary"]["FPS"], result["summary"]["latency (us)"]
    page = folder / "digits.html"
    assert lines[-3:] == [
        f"FPS={fps}, latency = {latency} us   (see {page})",
        "An estimate from public figures, not a measurement.",
        "HBDK performance estimation SUCCESS",
    ]
    assert lines[0].split()[:2] == ["layer", "operator"]
    for figure in ("peak_tops", "cores", "ddr_gigabytes_per_second"):
        assert result["summary"]["figures"][figure]["source"].startswith("https://")


class Page(HTMLParser):
    """Text of table cells, widths of bars, links to elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.widths, self.loads, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if named.get("class", "").startswith("bar "):
            self.widths.append(float(named["style"].removeprefix("width:").removesuffix("%")))
        self.loads += [named[key] for key in ("src", "data") if key in named]
        if tag == "link":
            self.loads.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(tmp_path):
    model = nn.Sequential(QuantStub(1 / 128), nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
    model.add_module("<b>&", nn.MaxPool2d(2))
    perf_model(model, IMAGE, out_dir=str(tmp_path), name="page")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert page.loads == []
    layers = page.rows[1:5]
    assert [row[0] for row in layers] == ["0", "1", "2", "<b>&"]
    assert layers[2][-1] == "computed with 1"
    conv = estimate_layers(trace_calls(model, IMAGE), "bayes")[1]
    assert layers[1][1:4] == ["Conv2d", f"{conv.operations:,}",
                              f"{conv.loaded_bytes + conv.stored_bytes:,}"]  # fmt: skip
    assert max(page.widths) == 100
    assert min(page.widths) > 0
    assert len(page.widths) == 3  # computing and moving of the convolution, moving of the pool


def test_names_come_from_the_class_that_the_model_had(tmp_path):
    fx = prepare_qat_fx(Net(), {"": get_default_qat_qconfig()})
    _, fixed = converted()
    for model in (Net(), fx, fixed, traced(fixed)):
        assert perf_model(model, IMAGE, out_dir=str(tmp_path))["summary"]["model name"] == "Net"
    for name in ("../net", "a/b", ".net"):
        with pytest.raises(ValueError, match="no folder"):
            perf_model(Net(), IMAGE, out_dir=str(tmp_path), name=name)


def test_the_march_decides_and_compiling_options_do_not(tmp_path):
    def latency(**settings):
        result = perf_model(Net(), IMAGE, out_dir=str(tmp_path), **settings)
        return result["summary"]["latency (us)"], result["summary"]["BPU march"]

    plain = latency()
    assert latency(opt=2, jobs=0, input_source=["pyramid"], input_layout="NHWC",
                   output_layout="NHWC", balance_factor=3, extra_args=["--x"]) == plain  # fmt: skip
    slower, title = latency(march="bernoulli2")
    assert title == "BERNOULLI2"
    assert slower != plain[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"opt": 4}, "opt=4"),
        ({"opt": "O9"}, "opt='O9'"),
        ({"input_layout": "CHWN"}, "input_layout='CHWN'"),
        ({"input_source": ["ddr", "ddr"]}, "2 sources for 1 inputs"),
        ({"march": "nash"}, "march='nash'"),
    ],
)
def test_unknown_options_are_named(settings, reason, tmp_path):
    with pytest.raises(ValueError, match=f"perf_model.*{reason}"):
        perf_model(Net(), IMAGE, out_dir=str(tmp_path), **settings)
    assert not list(tmp_path.iterdir())


def test_float_and_hybrid_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"0 \(torch\.nn\.Conv2d\) reads float32"):
        perf_model(nn.Sequential(nn.Conv2d(3, 1, 1)), IMAGE, out_dir=str(tmp_path))
    model = nn.Sequential(QuantStub(), nn.Conv2d(3, 2, 1), nn.PReLU())
    hybrid = prepare_qat_fx(model, {"": get_default_qat_qconfig()}, hybrid=True)
    with pytest.raises(ValueError, match=r"perf_model takes models that the BPU runs alone.*PReLU"):
        perf_model(hybrid, IMAGE, out_dir=str(tmp_path))
    march._chosen.clear()
    with pytest.raises(ValueError, match="no march is set"):
        perf_model(Net(), IMAGE, out_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_compiled_model_is_written_where_hbm_asks_for_it(tmp_path):
    _, fixed = converted()
    target = tmp_path / "out" / "net.hbm"
    perf_model(fixed, [IMAGE], out_dir=str(tmp_path), hbm=str(target), input_source="pyramid")
    assert torch.equal(runtime.load(target)(IMAGE), fixed(IMAGE))

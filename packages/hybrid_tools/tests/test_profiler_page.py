"""model_profiler: every tool on one page."""

from __future__ import annotations

import copy
import html
import re

import pytest
import torch
from torch import nn

from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import model_profiler

DATA = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(1 / 128), DeQuantStub()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Sigmoid()

    def forward(self, x):
        return self.dequant(self.act(self.bn(self.conv(self.quant(x)))))


def forms(fx: bool) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    model = Net().eval()
    calib, qat = get_default_calib_qconfig(), get_default_qat_qconfig()
    if fx:
        calibration = prepare_calibration_fx(model, {"": calib}).eval()
        calibration(DATA)
        trained = prepare_qat_fx(calibration, {"": qat})
    else:
        model.qconfig = calib
        calibration = prepare_calibration(model).eval()
        calibration(DATA)
        prepared = copy.deepcopy(calibration)
        prepared.qconfig = qat
        trained = prepare_qat(prepared)
    converted = (convert_fx if fx else convert)(trained)
    return {"float": model, "calibration": calibration, "qat": trained, "converted": converted}


FILES = [
    *("model1_statistic.html", "model1_statistic.txt", "model2_statistic.html"),
    *("model2_statistic.txt", "ordered_op_error_similarity.txt", "profiler.html"),
    *("qconfig_info.txt", "similarity.html", "similarity.txt", "weight_comparison.txt"),
]
MODES = [
    *(("FvsQ", "float", "calibration"), ("FvsQ", "float", "qat")),
    *(("QvsQ", "qat", "converted"), ("CvsQ", "calibration", "qat")),
]


@pytest.mark.parametrize("fx", [True, False])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_the_page_holds_what_the_tools_wrote(mode, fx: bool, tmp_path, capsys) -> None:
    models = forms(fx)
    path = model_profiler(models[mode[1]], models[mode[2]], DATA, mode[0], tmp_path / "out")
    assert capsys.readouterr().out == ""
    assert path == tmp_path / "out" / "profiler.html"
    assert sorted(p.name for p in path.parent.iterdir()) == FILES
    page = path.read_text()
    tables = [html.unescape(text) for text in re.findall("<pre>(.*?)</pre>", page, re.DOTALL)]
    for name in FILES:
        if name.endswith(".txt") and name != "ordered_op_error_similarity.txt":
            assert (path.parent / name).read_text() in tables, name
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert len(headings) == len(tables)
    assert ("Unfused operations of model 1" in headings) == (mode[0] == "FvsQ")
    if mode[0] == "FvsQ":
        unfused = tables[headings.index("Unfused operations of model 1")]
        assert [line.split()[0] for line in unfused.splitlines()[2:]] == ["conv", "bn"]
    assert f"Quantization of model {1 if mode[0] == 'QvsQ' else 2}" in headings


def test_the_folder_has_the_documented_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = forms(True)
    model_profiler(models["qat"], models["converted"], DATA, mode="QvsQ")
    assert (tmp_path / "horizon_quant_debug" / "profiler.html").is_file()


def test_arguments_reach_the_tools(tmp_path) -> None:
    models = forms(True)
    more = {
        "featuremap_similarity": {"similarity_func": "SQNR"},
        "get_raw_features": {"prefixes": ("act",)},
        "profile_featuremap": {"out_dir": "/nowhere"},
    }
    path = model_profiler(models["qat"], models["converted"], DATA, "QvsQ", tmp_path, more)
    assert "SQNR" in (tmp_path / "similarity.html").read_text()
    rows = (tmp_path / "model1_statistic.txt").read_text().split("\n\n")[0].splitlines()[3:-1]
    assert {row.split("|")[2].strip() for row in rows} == {"act"}
    assert path.parent == tmp_path


@pytest.mark.parametrize(
    ("mode", "first", "second", "more", "message"),
    [
        ("QvsF", "float", "qat", None, "'QvsF': expected one of FvsQ, QvsQ, CvsQ"),
        ("FvsQ", "qat", "float", None, "model1 is a prepared model, expected a float one"),
        ("FvsQ", "float", "converted", None, "model2 is a converted model, expected a prepared"),
        ("QvsQ", "qat", "qat", None, "model2 is a prepared model, expected a converted one"),
        ("FvsQ", "float", "qat", {"similarity": {}}, "'similarity': expected one of featuremap"),
        ("FvsQ", "float", "qat", {"check_qconfig": {"model": 1}}, "sets model, which is given"),
    ],
)
def test_wrong_calls_are_refused(mode, first, second, more, message: str, tmp_path) -> None:
    models = forms(True)
    with pytest.raises(ValueError, match=message):
        model_profiler(models[first], models[second], DATA, mode, tmp_path, more)
    assert not list(tmp_path.iterdir())

"""Inputs, outputs and parameters as data, and their statistics."""

from __future__ import annotations

import builtins
import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import get_raw_features, profile_featuremap

DATA = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.norm, self.keep = nn.BatchNorm2d(6), nn.Identity()
        self.add, self.head = FloatFunctional(), nn.Conv2d(6, 2, 1, bias=False)

    def forward(self, x):
        x = self.norm(torch.sigmoid(self.up(self.conv(self.quant(x)))))
        return self.dequant(self.head(self.keep(self.add.add(x, x))))


@pytest.fixture
def models() -> dict[str, nn.Module]:
    torch.manual_seed(4)
    model = Net().eval()
    qconfigs = {
        "": get_default_qat_qconfig(),
        "module_name": [("head", get_default_qat_out_qconfig())],
    }
    qat = prepare_qat_fx(model, qconfigs).eval()
    qat(DATA)
    return {"float": model, "qat": qat, "converted": convert_fx(qat)}


def by_name(features: list[dict]) -> dict[tuple[str, str], dict]:
    return {(f["module_name"], f["attr"]): f for f in features}


@pytest.mark.parametrize("form", ["float", "qat", "converted"])
def test_outputs_are_what_the_model_returns(models, form: str) -> None:
    found = by_name(get_raw_features(models[form], DATA))
    assert torch.equal(found["quant", "input"]["data"], DATA)
    assert torch.equal(found["dequant", "output"]["data"], models[form](DATA))
    last = found["dequant", "output"]
    assert (last["scale"], last["ch_axis"], last["dtype"]) == (None, -1, "torch.float32")
    assert found["add", "output"]["ff_method"] == "add"
    assert found["quant", "output"]["dtype"] == ("torch.float32" if form == "float" else "qint8")


@pytest.mark.parametrize("form", ["qat", "converted"])
def test_values_with_a_scale_are_its_multiples(models, form: str) -> None:
    floats = get_raw_features(models[form], DATA)
    integers = get_raw_features(models[form], DATA, preserve_int=True)
    scaled = 0
    for one, other in zip(floats, integers, strict=True):
        if one["scale"] is None:
            assert torch.equal(one["data"], other["data"])
            continue
        scale, axis = one["scale"], one["ch_axis"]
        if axis >= 0:
            shape = [1] * one["data"].dim()
            shape[axis] = -1
            scale = scale.reshape(shape)
        assert not other["data"].is_floating_point()
        torch.testing.assert_close(other["data"] * scale, one["data"], rtol=1e-5, atol=1e-6)
        scaled += 1
    assert scaled > 10


@pytest.mark.parametrize("form", ["qat", "converted"])
def test_weights_are_given_with_their_scales(models, form: str) -> None:
    found = by_name(get_raw_features(models[form], DATA))
    for name, axis, channels in (("conv", 0, 4), ("up", 1, 3), ("head", 0, 2)):
        weight = found[name, "weight"]
        assert (weight["ch_axis"], weight["scale"].numel(), weight["dtype"]) == (
            *(axis, channels),
            "qint8",
        )
        float_weight = models["float"].get_submodule(name).weight
        assert (weight["data"] - float_weight).abs().max() <= weight["scale"].max() * 0.51
    assert ("head", "bias") not in found
    assert torch.equal(found["conv", "bias"]["data"], models["float"].conv.bias)
    head = found["head", "output"]
    assert (head["dtype"], head["ch_axis"]) == ("qint32", 1)


def test_a_selection_of_operators(models) -> None:
    model = models["qat"]
    names = [f["module_name"] for f in get_raw_features(model, DATA, prefixes=("conv", "add"))]
    assert set(names) == {"conv", "add"}
    names = [f["module_name"] for f in get_raw_features(model, DATA, types=nn.ConvTranspose2d)]
    assert set(names) == {"up"}
    names = {f["module_name"] for f in get_raw_features(model, DATA)}
    assert names - {
        f["module_name"] for f in get_raw_features(model, DATA, skip_identity=True)
    } == {"keep"}
    kinds = {f["module_type"] for f in get_raw_features(model, DATA, use_class_name=True)}
    assert {"Conv2d", "SegmentLUT", "Identity"} <= kinds


def test_a_device_gets_a_copy(models) -> None:
    here = get_raw_features(models["qat"], DATA)
    there = get_raw_features(models["qat"], DATA, device=torch.device("cpu"))
    assert all(torch.equal(a["data"], b["data"]) for a, b in zip(here, there, strict=True))


def test_a_calibrating_model_has_no_scales(models) -> None:
    model = prepare_calibration_fx(models["float"], {"": get_default_calib_qconfig()}).eval()
    outputs = [f for f in get_raw_features(model, DATA) if f["attr"] == "output"]
    assert {f["dtype"] for f in outputs} == {"qint8", "torch.float32"}
    assert all(f["scale"] is None for f in outputs)


def test_statistics_are_those_of_numpy(models, tmp_path) -> None:
    features = get_raw_features(models["qat"], DATA)
    for feature, row in zip(features, profile_featuremap(features, out_dir=tmp_path), strict=True):
        data = feature["data"].double().numpy()
        assert row.min == data.min()
        assert row.max == data.max()
        assert row.mean == pytest.approx(data.mean(), abs=1e-12)
        assert row.var == pytest.approx(np.var(data, ddof=1), rel=1e-9)
        assert row.attr == feature["attr"]
        assert row.finite


def test_scales_per_channel_are_printed_on_demand(models, tmp_path) -> None:
    features = get_raw_features(models["qat"], DATA, prefixes=("conv",))
    profile_featuremap(features, out_dir=tmp_path, file_name="without")
    profile_featuremap(features, False, None, True, out_dir=tmp_path, file_name="with.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("with.html", "with.txt", "without.html", "without.txt")
    ]
    told = {}
    for name in ("with", "without"):
        lines = (tmp_path / f"{name}.txt").read_text().splitlines()
        told[name] = next(line.split("|")[9].strip() for line in lines if "| weight " in line)
    assert told["without"] == ""
    scales = next(f["scale"] for f in features if f["attr"] == "weight")
    assert told["with"] == ", ".join(f"{s:.7f}" for s in scales.tolist())


def feature(name: str, data: torch.Tensor, **others) -> dict:
    return {"module_name": name, "attr": "output", "data": data, "scale": None, "ch_axis": -1,
            "ff_method": None, **others}  # fmt: skip


def test_a_feature_needs_the_documented_keys_alone(tmp_path) -> None:
    rows = profile_featuremap([feature("a", torch.tensor([3.0]))], out_dir=tmp_path)
    assert (rows[0].min, rows[0].max, rows[0].mean, rows[0].dtype) == (3, 3, 3, "torch.float32")
    assert math.isnan(rows[0].var)  # of a single value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_told(bad: float, tmp_path, capsys) -> None:
    features = [
        feature("good", torch.tensor([1.0, 5.0])),
        feature("bad", torch.tensor([1.0, bad])),
        feature("empty", torch.empty(0)),
    ]
    rows = profile_featuremap(features, out_dir=tmp_path)
    assert [row.finite for row in rows] == [True, False, True]
    printed = capsys.readouterr().out
    assert "| bad " in printed
    assert "| good " not in printed
    tables = (tmp_path / "statistic.txt").read_text().split("\n\n")
    assert len(tables) == 3
    assert tables[2].strip() == printed.strip()
    # By falling size, what has none first.
    assert tables[1].index("| bad ") < tables[1].index("| good ")


def test_nothing_is_printed_where_all_is_well(models, tmp_path, capsys) -> None:
    profile_featuremap(get_raw_features(models["float"], DATA), out_dir=tmp_path)
    assert capsys.readouterr().out == ""


def test_histograms_need_tensorboard(models, tmp_path, monkeypatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.startswith(("torch.utils.tensorboard", "tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    features = get_raw_features(copy.deepcopy(models["float"]), DATA)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        profile_featuremap(features, with_tensorboard=True, out_dir=tmp_path)

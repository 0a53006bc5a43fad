"""Weights of a float model beside those of what became of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    fuse_fx,
    fuse_modules,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import compare_weights

DATA = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(7))
NAMES = ["stem.0.weight", "add.weight", "up.weight", "slope.weight", "norm.weight"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.conv, self.add = nn.Conv2d(4, 4, 1), FloatFunctional()
        self.up, self.slope = nn.ConvTranspose2d(4, 4, 2, groups=2), nn.PReLU()
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        x = self.stem(self.quant(x))
        x = self.add.add(self.conv(x), x)
        return self.dequant(self.norm(self.slope(self.up(x))))


def forms(fx: bool) -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(6)
    model = Net().eval()
    model.stem[1].running_var.uniform_(0.5, 2)
    if fx:
        fused = fuse_fx(model)
        qat = prepare_qat_fx(fused, {"": get_default_qat_qconfig()})
    else:
        fused = fuse_modules(model, [["stem.0", "stem.1", "stem.2"], ["conv", "add"]])
        fused.qconfig = get_default_qat_qconfig()
        qat = prepare_qat(fused)
    qat.eval()(DATA)
    return fused, qat, (convert_fx if fx else convert)(qat)


@pytest.mark.parametrize("fx", [True, False])
def test_every_weight_is_found_under_its_fused_name(fx: bool, tmp_path, capsys) -> None:
    fused, qat, converted = forms(fx)
    found = compare_weights(fused, qat, out_dir=tmp_path)
    assert list(found) == NAMES
    for pair in found.values():
        assert torch.equal(pair["float"], pair["quantized"])
    text = (tmp_path / "weight_comparison.txt").read_text()
    assert capsys.readouterr().out == text
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[3:-1]]
    assert rows == [[name, "1.0000000", "0.0000000"] for name in NAMES]
    assert text.splitlines()[1].split("|")[1:4] == [
        *(" Weight Name     "[: len(max(NAMES, key=len)) + 2], " Similarity   ", " Atol      "),
    ]
    rounded = compare_weights(fused, converted, out_dir=tmp_path)
    capsys.readouterr()
    assert list(rounded) == [name for name in NAMES if name != "slope.weight"]
    for name in NAMES[:3]:
        weight, integers = rounded[name]["float"], rounded[name]["quantized"]
        axis = 1 if name == "up.weight" else 0
        amax = weight.abs().amax([d for d in range(4) if d != axis], keepdim=True)
        assert ((weight - integers).abs() <= amax / 127.5 * 0.51).all()
        assert not torch.equal(weight, integers)


def test_measures_and_functions(tmp_path, capsys) -> None:
    fused, _, converted = forms(True)
    compare_weights(fused, converted, "SQNR", out_dir=tmp_path)
    lines = (tmp_path / "weight_comparison.txt").read_text().splitlines()[3:-1]
    decibels = [float(line.split("|")[2]) for line in lines]
    assert 35 < min(decibels[:3]) < 70
    compare_weights(fused, converted, lambda x, y: 42, out_dir=tmp_path)
    assert "| 42.0000000 " in capsys.readouterr().out


def test_an_unfused_model_shows_what_folding_changed(tmp_path, capsys) -> None:
    torch.manual_seed(6)
    model = Net().eval()
    model.stem[1].running_var.uniform_(0.5, 2)
    found = compare_weights(model, prepare_qat_fx(model, {"": get_default_qat_qconfig()}),
                            out_dir=tmp_path)  # fmt: skip
    capsys.readouterr()
    assert list(found) == NAMES
    assert torch.equal(found["add.weight"]["float"], model.conv.weight)
    factor = torch.rsqrt(model.stem[1].running_var + 1e-5).reshape(-1, 1, 1, 1)
    torch.testing.assert_close(found["stem.0.weight"]["quantized"], model.stem[0].weight * factor)


def test_models_without_a_weight_in_common_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no weight of the same name and shape"):
        compare_weights(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Conv2d(1, 1, 1)))

"""Comparing forms of a model, operator by operator."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    fuse_fx,
    fuse_modules,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid_tools.quant_profiler import featuremap_similarity

DATA = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(7))
INDEX, NAME, KIND, SIMILARITY, SCALE, ATOL, STEPS, ALONE = range(8)


def numpy_of(name: str, x: np.ndarray, y: np.ndarray) -> float:
    if name == "Cosine":
        return float(x @ y / np.sqrt((x @ x) * (y @ y)))
    if name == "KL":
        p, q = np.exp(x) / np.exp(x).sum(), np.exp(y) / np.exp(y).sum()
        return float((p * np.log(p / q)).sum())
    if name == "SQNR":
        return float(10 * np.log10((x * x).sum() / ((x - y) ** 2).sum()))
    return float(((x - y) ** 2).mean() if name == "MSE" else np.abs(x - y).mean())


class Gives(nn.Module):
    """An operator that makes one tensor, whatever it is given."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value


def similarity(name: str, x: torch.Tensor, y: torch.Tensor, folder: Path) -> float:
    models = (nn.Sequential(Gives(value)) for value in (x, y))
    (row,) = featuremap_similarity(*models, torch.zeros(1), name, out_dir=folder)
    return row[SIMILARITY]


@pytest.mark.parametrize("name", ["Cosine", "MSE", "L1", "KL", "SQNR"])
def test_measures_are_their_formulas(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = numpy_of(name, x.numpy().ravel(), y.numpy().ravel())
    assert similarity(name, x, y, tmp_path) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "same"), [("Cosine", 1.0), ("MSE", 0.0), ("L1", 0.0), ("KL", 0.0), ("SQNR", math.inf)]
)
def test_equal_tensors(name: str, same: float, tmp_path: Path) -> None:
    x = torch.tensor([1.0, -2.0, 0.5])
    assert similarity(name, x, x, tmp_path) == pytest.approx(same, abs=1e-15)


def test_zeros_are_like_nothing(tmp_path: Path) -> None:
    assert similarity("Cosine", torch.zeros(3), torch.zeros(3), tmp_path) == 0.0


class Block(nn.Module):
    """conv, norm, addition, ReLU: fused into the addition."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.add, self.relu, self.second = FloatFunctional(), nn.ReLU(), second

    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.relu(self.add.add(x, y) if self.second else self.add.add(y, x))


class Net(nn.Module):
    def __init__(self, second: bool = False) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.one, self.two = Block(second), Block(second)
        self.drop, self.sigmoid = nn.Identity(), nn.Sigmoid()
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.drop(self.two(self.one(self.stem(self.quant(x)))))
        return self.dequant(self.head(self.sigmoid(x)))

    def fuse_model(self) -> None:
        fuse_modules(self.stem, ["0", "1", "2"], inplace=True)
        for block in (self.one, self.two):
            fuse_modules(block, ["conv", "bn", "add", "relu"], inplace=True)


def settled(model: nn.Module) -> nn.Module:
    """A model whose norms do something."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
    return model.eval()


def forms(fx: bool, second: bool = False) -> dict[str, nn.Module]:
    torch.manual_seed(2)
    model = settled(Net(second))
    out = ("head", get_default_qat_out_qconfig())
    if fx:
        fused = fuse_fx(model)
        qconfigs = {"": get_default_qat_qconfig(), "module_name": [out]}
        qat = prepare_qat_fx(model, qconfigs)
    else:
        fused = copy.deepcopy(model)
        fused.fuse_model()
        prepared = copy.deepcopy(fused)
        prepared.qconfig = get_default_qat_qconfig()
        prepared.head.qconfig = out[1]
        qat = prepare_qat(prepared)
    qat.eval()(DATA)
    converted = (convert_fx if fx else convert)(qat)
    return {"float": model, "fused": fused, "qat": qat, "converted": converted}


OPERATORS = ["quant", "stem.0", "one.add", "two.add", "sigmoid", "head", "dequant"]
PAIRS = [
    *(("float", "fused"), ("float", "qat"), ("float", "converted"), ("fused", "qat")),
    *(("fused", "converted"), ("qat", "converted")),
]


@pytest.mark.parametrize("fx_and_second", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_operators_are_found_in_every_pair_of_forms(pair, fx_and_second, tmp_path) -> None:
    models = forms(*fx_and_second)
    rows = featuremap_similarity(models[pair[0]], models[pair[1]], DATA, out_dir=tmp_path)
    assert "drop(I vs I)" in [row[NAME] for row in rows]
    found = {row[NAME]: row for row in rows if not row[NAME].endswith(("(I)", "(I vs I)"))}
    assert list(found) == OPERATORS
    # A fused operator compares with all that it took in: nothing is far off.
    assert min(row[SIMILARITY] for row in found.values()) > 0.999
    assert [row[INDEX] for row in rows] == list(range(len(rows)))
    if pair == ("float", "fused"):
        assert max(row[ATOL] for row in found.values()) < 1e-5
        assert not any(row[SCALE] for row in rows)
    else:
        scales = {name: found[name][SCALE] for name in OPERATORS}
        assert scales.pop("dequant") is None  # floats
        assert scales.pop("head") is None  # accumulators: a scale per channel
        assert all(scale > 0 for scale in scales.values())
        for name in OPERATORS[:-2]:
            assert found[name][STEPS] == round(found[name][ATOL] / scales[name])
            assert found[name][ALONE] <= 3


@pytest.mark.parametrize("fx", [True, False])
def test_the_order_of_the_models_does_not_matter_to_the_numbers(fx: bool, tmp_path) -> None:
    models = forms(fx)
    one = featuremap_similarity(models["float"], models["qat"], DATA, out_dir=tmp_path)
    other = featuremap_similarity(models["qat"], models["float"], DATA, out_dir=tmp_path)
    assert [row[:2] + row[3:] for row in one] == [row[:2] + row[3:] for row in other]
    kinds = [{row[NAME]: row[KIND] for row in rows}["stem.0"] for rows in (one, other)]
    assert [kind.__name__ for kind in kinds] == ["Conv2d", "ConvReLU2d"]


def test_identities_of_an_eager_model_are_marked(tmp_path) -> None:
    models = forms(False)
    names = [r[NAME] for r in featuremap_similarity(models["float"], models["qat"], DATA,
                                                    out_dir=tmp_path)]  # fmt: skip
    assert {n for n in names if n.endswith("(I)")} == {
        *("stem.1(I)", "stem.2(I)", "one.conv(I)", "one.bn(I)", "one.relu(I)"),
        *("two.conv(I)", "two.bn(I)", "two.relu(I)"),
    }
    assert "drop(I vs I)" in names


class Functions(nn.Module):
    """The same with functions, which fx makes modules of."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = F.relu(self.first(self.quant(x)))
        return self.dequant(F.relu(self.second(x) + x))


def test_functions_that_were_fused_are_followed(tmp_path) -> None:
    model = Functions().eval()
    qat = prepare_qat_fx(model, {"": get_default_qat_qconfig()}).eval()
    qat(DATA)
    rows = featuremap_similarity(model, qat, DATA, out_dir=tmp_path)
    assert [row[NAME] for row in rows] == ["quant", "first", "_generated_add_0", "dequant"]
    assert min(row[SIMILARITY] for row in rows) > 0.999
    assert max(row[ALONE] for row in rows) <= 2


class Broken(nn.Sigmoid):
    def forward(self, x):
        return super().forward(x) + (x > 0.5) * 0.2


def test_the_operator_that_differs_is_found(tmp_path, capsys) -> None:
    models = forms(True)
    wrong = copy.deepcopy(models["float"])
    wrong.sigmoid = Broken()
    rows = featuremap_similarity(wrong, models["qat"], DATA, out_dir=tmp_path)
    alone = {row[NAME]: row[ALONE] for row in rows}
    assert max(alone, key=lambda name: alone[name] or 0) == "sigmoid"
    assert alone["sigmoid"] == round(0.2 / dict((r[NAME], r[SCALE]) for r in rows)["sigmoid"])
    # What comes after is wrong too, but not on its own.
    after = next(row for row in rows if row[NAME] == "dequant")
    assert after[ATOL] > 0.01
    assert after[ALONE] == 0
    ordered = (tmp_path / "ordered_op_error_similarity.txt").read_text()
    assert ordered.split("|---")[1].splitlines()[1].split("|")[2].strip() == "sigmoid"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("func", "threshold", "printed"),
    [
        ("Cosine", None, False),
        ("Cosine", 2.0, True),
        ("SQNR", 1000.0, True),
        ("SQNR", 1.0, False),
        ("MSE", None, False),
        ("MSE", -1.0, True),
        ("L1", 1e-9, True),
        ("KL", 1e9, False),
        (lambda x, y: -(x - y).abs().max(), None, False),
        (lambda x, y: -(x - y).abs().max(), 1.0, True),
    ],
)
def test_what_lies_beyond_the_threshold_is_printed(
    func, threshold, printed: bool, tmp_path, capsys
) -> None:
    models = forms(True)
    featuremap_similarity(models["float"], models["qat"], DATA, func, threshold, None, tmp_path)
    out = capsys.readouterr().out
    assert ("| Index " in out) == printed
    assert out == "" or out.startswith("-" * 63 + "\nNote:\n")


def test_files_are_whole_and_tell_what_was_left_out(tmp_path) -> None:
    class WithMore(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.stem, self.extra = net.stem, nn.Tanh()
            self.quant, self.dequant = net.quant, net.dequant

        def forward(self, x):
            return self.dequant(self.extra(self.stem(self.quant(x))))

    net = settled(Net())
    folder = tmp_path / "made" / "here"
    featuremap_similarity(net, WithMore(net), DATA, out_dir=folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        *("ordered_op_error_similarity.txt", "similarity.html", "similarity.txt"),
    ]
    text = (folder / "similarity.txt").read_text()
    last = text.splitlines()[-1]
    # The last has another shape.
    assert last == "Not compared, for the other model has no such result: extra, dequant"
    page = (folder / "similarity.html").read_text()
    assert page.count("<circle") == 4
    assert "1 stem.0: Cosine 1" in page


def test_a_calibrating_model_compares_like_the_float_one(tmp_path) -> None:
    model = settled(Net())
    calibration = prepare_calibration_fx(model, {"": get_default_calib_qconfig()})
    calibration.eval()(DATA)
    rows = featuremap_similarity(model, calibration, DATA, out_dir=tmp_path)
    assert max(row[ATOL] for row in rows) < 1e-5
    assert {row[SCALE] for row in rows} == {None}
    qat = prepare_qat_fx(calibration, {"": get_default_qat_qconfig()}).eval()
    rows = featuremap_similarity(calibration, qat, DATA, out_dir=tmp_path)
    assert min(row[SIMILARITY] for row in rows) > 0.99
    assert max(row[ALONE] for row in rows if row[ALONE] is not None) <= 3


def test_states_of_one_fake_quantizer_compare(tmp_path) -> None:
    qat = forms(True)["qat"]
    passing = copy.deepcopy(qat)
    set_fake_quantize(passing, FakeQuantState.CALIBRATION)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    rows = featuremap_similarity(passing, qat, DATA, out_dir=tmp_path)
    assert rows[0][STEPS] in (0, 1)
    assert 0 < rows[0][ATOL] <= rows[0][SCALE] / 2 * 1.01
    assert min(row[SIMILARITY] for row in rows) > 0.99


def test_devices_get_copies(tmp_path) -> None:
    models = forms(True)
    device = torch.device("cpu")
    rows = featuremap_similarity(models["float"], models["qat"], DATA, out_dir=tmp_path)
    for devices in (device, (device, "cpu")):
        moved = featuremap_similarity(
            models["float"], models["qat"], DATA, devices=devices, out_dir=tmp_path
        )
        assert moved == rows


def test_errors_name_what_was_expected(tmp_path) -> None:
    models = forms(True)
    with pytest.raises(ValueError, match="'Manhattan': expected one of Cosine, MSE, L1, KL, SQNR"):
        featuremap_similarity(models["float"], models["qat"], DATA, "Manhattan")
    with pytest.raises(ValueError, match="no operator of the same name"):
        featuremap_similarity(models["float"], nn.Sequential(nn.ReLU()), DATA, out_dir=tmp_path)
    assert not list(tmp_path.iterdir())

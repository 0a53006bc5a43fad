"""Results of every operator of converted models: listed, saved, compared."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from bevquant_hybrid import jit, runtime
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    compile_model,
    convert_fx,
    export_hbir,
    get_default_qat_qconfig,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import compare_script_models, script_profile

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantx, self.quanty, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.cat = FloatFunctional()
        self.block = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Sigmoid())

    def forward(self, x, y):
        x = self.cat.cat((self.quantx(x), self.quanty(y)), 1)
        first, second = self.block(self.cat.cat((x, x), 1)).split(3, dim=1)
        return self.dequant(first), self.dequant(second)


INPUTS = torch.linspace(-1, 1, 25).reshape(1, 1, 5, 5), torch.linspace(0, 2, 25).view(1, 1, 5, 5)
NAMES = """arg0 arg1 _quantx_quantize _quanty_quantize _cat_concat _cat_concat_1 _block_0_conv
    _block_0_requantize _block_1_lookup _aten_split.0 _aten_split.1 _dequant_dequantize
    _dequant_dequantize_1""".split()


def converted(rounding: str = "half_up") -> nn.Module:
    torch.manual_seed(0)
    qat = prepare_qat_fx(Net(), {"": get_default_qat_qconfig()})
    qat(*INPUTS)
    return convert_fx(qat, rounding=rounding)


def traced(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, INPUTS)


def test_every_result_is_listed_saved_and_compared(tmp_path, capsys) -> None:
    model = converted()
    results = script_profile(model, INPUTS, out_dir=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "if", "equal"]
    assert [line.split() for line in lines[2:-1]] == [[name, "True"] for name in NAMES]
    assert lines[-1] == "Torch run pt output is same with the program of compile_model."
    first, second = model(*INPUTS)
    assert torch.equal(results["_dequant_dequantize"], first)
    assert torch.equal(results["_dequant_dequantize_1"], second)
    assert torch.equal(results["arg1"], INPUTS[1])
    kinds = [results[name].dtype for name in ("_block_0_conv", "_block_0_requantize")]
    assert kinds == [torch.int32, torch.int8]
    saved = torch.load(tmp_path / "horizon_script_result.pt", weights_only=True)
    assert list(saved) == NAMES
    assert all(torch.equal(saved[name], results[name]) for name in NAMES)


def test_a_traced_model_is_listed_without_a_comparison(tmp_path, capsys) -> None:
    model = converted()
    results = script_profile(
        traced(model), INPUTS, out_dir=tmp_path, march="bayes", compare_with_hbdk_parser=False
    )
    assert capsys.readouterr().out == ""
    ours = script_profile(model, INPUTS, out_dir=tmp_path).values()
    assert all(torch.equal(a, b) for a, b in zip(results.values(), ours, strict=True))


def test_two_models_are_compared_operator_by_operator(capsys) -> None:
    model = converted()
    assert compare_script_models(traced(model), model, INPUTS) == dict.fromkeys(NAMES, True)
    assert capsys.readouterr().out.endswith("All ops in two ScriptModules are same.\n")
    other = converted()
    other.block[0].weight[0] += 1
    equal = compare_script_models(traced(model), traced(other), INPUTS)
    first = next(name for name, same in equal.items() if not same)
    assert list(equal).index(first) == NAMES.index("_block_0_conv")
    assert f"results differ, {first} first." in capsys.readouterr().out


def test_models_of_other_operators_are_compared_by_name() -> None:
    smaller = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1), DeQuantStub())
    qat = prepare_qat_fx(smaller, {"": get_default_qat_qconfig()})
    x = INPUTS[0]
    qat(x)
    longer = prepare_qat_fx(
        nn.Sequential(*smaller[:2], nn.MaxPool2d(2), smaller[2]), {"": get_default_qat_qconfig()}
    )
    longer(x)
    equal = compare_script_models(convert_fx(qat), convert_fx(longer), x)
    assert equal["_1_requantize"]
    assert not equal["_2_max_pool"]


def test_a_function_that_marks_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"script_profile: mark_node_func=<.*expected None"):
        script_profile(converted(), INPUTS, mark_node_func=lambda node: True)
    with pytest.raises(ValueError, match="script_profile: module has no fixed-point module"):
        script_profile(Net(), INPUTS)


def test_a_program_tells_what_each_operator_computes(tmp_path, capsys) -> None:
    model = converted()
    compile_model(model, INPUTS, tmp_path / "net.hbm")
    values = runtime.load(tmp_path / "net.hbm").values(*INPUTS)
    assert torch.equal(values["x"], INPUTS[0])
    assert torch.equal(list(values.values())[-1], model(*INPUTS)[1])


def test_the_intermediate_file_is_the_same_program(tmp_path, capsys) -> None:
    model = converted()
    names = export_hbir(model, INPUTS, tmp_path / "deep" / "net.hbir")
    assert names == (["x", "y"], ["0", "1"])
    assert "no binary for a BPU" in capsys.readouterr().out
    loaded = runtime.load(tmp_path / "deep" / "net.hbir")
    assert all(torch.equal(a, b) for a, b in zip(loaded(*INPUTS), model(*INPUTS), strict=True))
    with pytest.raises(TypeError, match="export_hbir: hbir is a int: expected the path of a file"):
        export_hbir(model, INPUTS, 3)
    with pytest.raises(ValueError, match="export_hbir: module has no fixed-point module"):
        export_hbir(Net(), INPUTS, tmp_path / "net.hbir")


@pytest.mark.parametrize(("bits", "dtype"), [(8, "qint8"), (16, "qint16"), (None, "qint8")])
def test_bits_of_old_scripts(bits, dtype: str) -> None:
    made = get_default_qat_qconfig(bits=bits)
    assert made.activation().dtype == dtype
    assert made.weight().dtype == "qint8"


def test_other_bits() -> None:
    with pytest.raises(ValueError, match="get_default_qat_qconfig: bits=4: expected 8 or 16"):
        get_default_qat_qconfig(bits=4)


def test_a_traced_model_is_copied_to_a_device() -> None:
    model = converted()
    moved = jit.to_device(traced(model), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(moved(*INPUTS), model(*INPUTS), strict=True))
    with pytest.raises(TypeError, match=r"jit\.to_device: m is a Net: expected what torch\.jit"):
        jit.to_device(Net(), "cpu")

"""The documented example of a hybrid model, run from the document itself."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import torch

from bevquant_hybrid.quantization import set_fake_quantize

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def lines(text: str) -> list[str]:
    """Lines with numbers blanked, and the blanks that torch puts where a sign could stand."""
    blank = re.sub(r" *-?\d+\.\d*(?=[,\]])", " #", text.strip())
    return [re.sub(r"tensor\(\[ *", "tensor([", line) for line in blank.splitlines()]


@pytest.fixture(scope="module")
def example(document):
    """Names that the document's script leaves behind, up to the training of the QAT model."""
    text = document("000")
    code = text[text.index("import numpy as np") : text.index("打印calibration模型的结果")]
    code = code[: code.index("# qat模型的推理不要")].replace(
        "horizon_plugin_pytorch", "bevquant_hybrid"
    )
    code = code.replace(
        "calibration_model.eval()", "calibration_model.eval(); printed = str(calibration_model)"
    )
    torch.manual_seed(0)
    found: dict = {}
    exec(code, found)
    listings = [part.strip() for part in re.split("打印(?:calibration|qat)模型的结果。", text)[1:]]
    return found, listings[0], listings[1][: listings[1].index("导出的onnx")]


def test_the_calibration_model_prints_as_documented(example) -> None:
    found, listing, _ = example
    assert lines(found["printed"]) == lines(listing)


def test_the_qat_model_prints_as_documented(example) -> None:
    found, _, listing = example
    assert lines(str(found["qat_model"])) == lines(listing)


def test_forward_graphs_are_the_documented_text(example) -> None:
    found, *listings = example
    for model, listing in zip(
        (found["calibration_model"], found["qat_model"]), listings, strict=True
    ):
        start = listing.index("def forward")
        assert model.code.strip() == listing[start:].strip()


def test_the_layer_that_the_document_shows_alone_prints_as_shown(example, document) -> None:
    found, *_ = example
    text = document("000")
    parts = text.split("    (conv4): Conv2d(")[1:3]
    shown = [part[: part.index("\n    )\n") + len("\n    )")] for part in parts]
    for snippet, model in zip(shown, (found["printed"], str(found["qat_model"])), strict=True):
        wanted = [line.strip() for line in lines("(conv4): Conv2d(" + snippet)]
        printed = [line.strip() for line in lines(model)]
        start = printed.index(wanted[0])
        assert printed[start : start + len(wanted)] == wanted


def test_functions_take_the_arguments_that_the_document_gives_them(document) -> None:
    for home, name in (
        ("quantization", "prepare_qat_fx"),
        ("quantization", "prepare_calibration_fx"),
        ("quantization", "convert_fx"),
        ("utils.onnx_helper", "export_to_onnx"),
    ):
        text = re.search(rf"def {name}\((.*?)\)\s*(->|:)", document("000"), re.DOTALL).group(1)
        documented = [
            (line.split(":")[0].split("=")[0].strip(), line.partition("=")[2].strip(" ,"))
            for line in text.strip().splitlines()
        ]
        documented = [(argument.strip(","), default) for argument, default in documented]
        function = getattr(importlib.import_module(f"bevquant_hybrid.{home}"), name)
        given = inspect.signature(function).parameters
        if name == "convert_fx":  # the newer one, which takes both
            given = {n: p for n, p in given.items() if n != "inplace"}
        names = [argument for argument, _ in documented]
        assert [*given][: len(names)] == names
        for argument, default in documented:
            if default:
                assert str(given[argument].default) in (default, default.rpartition(".")[2])


def test_uniform_inputs_calibrate_to_the_printed_range(example) -> None:
    found, *_ = example
    fake_quant = found["qat_model"].quant.activation_post_process
    assert f"{fake_quant.activation_post_process.max_val.item():.4f}" == "0.9995"
    assert f"{fake_quant.scale.item():.4f}" == "0.0078"


def test_the_whole_example_runs_and_its_integers_are_near(document, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = document("000").replace("horizon_plugin_pytorch", "bevquant_hybrid")
    found: dict = {}
    exec(text[text.index("import numpy as np") : text.index("打印calibration模型的结果")], found)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["qat.onnx", "qat.yaml"]
    set_fake_quantize(found["qat_model"], "validation")
    result = found["qat_model"](found["data"])
    model = found["qat_model"]
    # Two inputs of the last layer that round the other way move its output by two steps each.
    step = model.conv3_activation_post_process.activation_post_process.scale.item()
    gain = model.conv4.weight.abs().sum((1, 2, 3)).max().item()
    assert (found["quantize_model"](found["data"]) - result).abs().max() <= 4 * step * gain


def test_the_float_model_still_gives_what_it_gave(example) -> None:
    found, *_ = example
    assert torch.equal(found["model"](found["data"]), found["float_res"])


def test_scales_that_the_document_prints_follow_from_the_ranges_beside_them(document) -> None:
    number = r"-?\d+\.\d+"
    found = re.findall(
        r"scale=tensor\(\[(.*?)\]\).*?min_val=tensor\(\[(.*?)\]\), max_val=tensor\(\[(.*?)\]",
        document("000"),
        re.DOTALL,
    )
    checked = 0
    for triple in found:
        for scale, low, high in zip(*(re.findall(number, part) for part in triple), strict=True):
            step = max(abs(float(low)), abs(float(high))) * 2 / 255
            assert abs(step - float(scale)) <= 0.5e-4 + 1e-6
            checked += 1
    assert checked >= 17

"""The documented example of a hybrid model, run from the document itself."""

from __future__ import annotations

import re

import pytest
import torch

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


def test_uniform_inputs_calibrate_to_the_printed_range(example) -> None:
    found, *_ = example
    fake_quant = found["qat_model"].quant.activation_post_process
    assert f"{fake_quant.activation_post_process.max_val.item():.4f}" == "0.9995"
    assert f"{fake_quant.scale.item():.4f}" == "0.0078"


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
    assert checked >= 15

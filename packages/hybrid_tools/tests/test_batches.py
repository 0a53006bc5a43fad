"""Batches and example inputs as loaders give them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.operators import trace_calls
from bevquant_hybrid.partition import partition
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    check_model,
    convert,
    fuse_fx,
    get_default_qat_qconfig,
    prepare_qat,
)
from bevquant_hybrid.utils.onnx_helper import export_to_onnx
from bevquant_hybrid_tools.forms import compare_forms, quantize_dense
from bevquant_hybrid_tools.performance import perf_model
from bevquant_hybrid_tools.quant_profiler import get_module_called_count, record_calls

IMAGE, LABEL = torch.linspace(-1, 1, 192).view(1, 3, 8, 8), torch.tensor([3])


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, image: Tensor) -> Any:
        return self.dequant(self.conv(self.quant(image)))


class ByDict(ByName):
    def forward(self, batch_dict: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(batch_dict["image"])


BATCHES = [
    (IMAGE, LABEL), [IMAGE, LABEL], (IMAGE, "cat"), {"image": IMAGE, "label": LABEL},
    {"image": IMAGE}, IMAGE, (IMAGE,), [IMAGE],
]  # fmt: skip


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.BAYES)


@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_forms(batch: Any) -> None:
    torch.manual_seed(0)
    net = ByName()
    forms = quantize_dense(net, [batch], method="max")
    wanted = quantize_dense(net, [(IMAGE,)], method="max")
    assert compare_forms(forms, [batch]) == compare_forms(wanted, [(IMAGE,)])


@pytest.mark.parametrize("wrong", [IMAGE, {"image": IMAGE}, None, "frames"], ids=range(4))
def test_one_batch_is_no_list(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^quantize_dense: batches: expected a list of batches"):
        quantize_dense(ByName(), wrong)


USES: list[Callable[[nn.Module, Any], Any]] = [
    lambda model, batch: record_calls(model, batch),
    lambda model, batch: get_module_called_count(model, batch, print_tabulate=False),
    lambda model, batch: trace_calls(model, batch),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_example_inputs(use: Callable[[nn.Module, Any], Any], batch: Any) -> None:
    model = prepared(ByName())
    assert len(use(model, batch)) == len(use(model, (IMAGE,))) > 0


@pytest.mark.parametrize("use", USES)
def test_a_dictionary_is_the_only_argument(use: Callable[[nn.Module, Any], Any]) -> None:
    model = prepared(ByDict())
    for batch in ({"image": IMAGE, "label": LABEL}, ({"image": IMAGE},)):
        assert len(use(model, batch)) > 0


def test_converted_models(tmp_path: Path) -> None:
    model = prepared(ByName())
    model(IMAGE)
    converted = convert(model.eval())
    for batch in ((IMAGE, LABEL), {"image": IMAGE, "label": LABEL}):
        assert check_model(converted, batch) == 0
        assert perf_model(converted, batch, out_dir=tmp_path)["summary"]
    plan = partition(fuse_fx(ByName().eval()), "bayes", example_inputs=(IMAGE, LABEL))
    wanted = partition(fuse_fx(ByName().eval()), "bayes", example_inputs=IMAGE)
    assert plan.transfer_bytes == wanted.transfer_bytes


@pytest.mark.parametrize("batch", [(IMAGE, LABEL), {"image": IMAGE, "label": LABEL}], ids=range(2))
def test_files(batch: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    model = prepared(ByName())
    model(IMAGE)
    export_to_onnx(model, batch, tmp_path / "a.onnx")
    export_to_onnx(model, IMAGE, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def prepared(model: nn.Module) -> nn.Module:
    model.qconfig = get_default_qat_qconfig()  # type: ignore[assignment]
    return prepare_qat(model)

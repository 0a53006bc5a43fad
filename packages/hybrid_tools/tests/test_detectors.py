"""Detectors from picture to boxes: prepared, converted, checked, timed, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bevquant_hybrid import nn as horizon_nn
from bevquant_hybrid import runtime
from bevquant_hybrid.march import set_march
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    check_model,
    compile_model,
    convert,
    convert_fx,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    perf_model,
    prepare_qat,
    prepare_qat_fx,
    visualize_model,
    visualize_partition,
)
from bevquant_hybrid.utils.onnx_helper import export_to_onnx

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
QAT, OUT = get_default_qat_qconfig(), get_default_qat_out_qconfig()


class Detector(nn.Module):
    """One level, in floats behind two heads of 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        self.scores, self.boxes = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 8, 1)
        self.scores.qconfig = self.boxes.qconfig = OUT
        self.anchors = horizon_nn.AnchorGenerator([2], [2, 4], [1])
        self.post = horizon_nn.DetectionPostProcess(0.05, iou_threshold=0.5, post_nms_top_n=9)

    def forward(self, x: Tensor) -> Any:
        x = self.conv(self.quant(x))
        scores, boxes = self.dequant(self.scores(x)), self.dequant(self.boxes(x))
        return self.post(self.anchors([x]), [scores], [boxes])


class SingleHead(nn.Module):
    """Quantized maps straight into the post-processing."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(), nn.Conv2d(3, 14, 3, 2, 1)
        self.anchors = horizon_nn.AnchorGenerator([2], anchor_wh_groups=[[[6, 4], [3, 3]]])
        self.post = horizon_nn.DetectionPostProcessV1(3, 0.1, [0], True, (16, 16), 0.5, 50, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.conv(self.quant(x))
        first, second = self.post([x], self.anchors([x]))
        return first, second


class Regions(nn.Module):
    """The second stage: one row of features for each region."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.scores, self.boxes = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 12, 3)
        self.post = horizon_nn.RcnnPostProcess((16, 16), 0.3, 0.05, 2, 5)

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        x = self.quant(x)
        scores, deltas = self.dequant(self.scores(x)), self.dequant(self.boxes(x))
        return self.post([boxes], scores, deltas)


def picture() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 16, 16),)


def regions() -> tuple[Tensor, ...]:
    corners = torch.rand(7, 2) * 8
    return torch.randn(7, 3, 3, 3), torch.cat([corners, corners + 1 + torch.rand(7, 2) * 6], 1)


ON_CPU = "post: the CPU runs it, on floats, behind the DeQuantStubs"
Case = tuple[Callable[[], nn.Module], Callable[[], Any], str, str, str]
CASES: dict[str, Case] = {
    "detector": (Detector, picture, "bayes", "", ON_CPU),
    "single head": (
        *(SingleHead, picture, "bernoulli2", "bayes"),
        "post: the chip rescales its input to steps of 1/16",
    ),
    "regions": (Regions, regions, "bayes", "bernoulli2", ON_CPU),
}


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, tree_leaves(a), tree_leaves(b)))


@pytest.mark.parametrize("flow", ["fx", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_a_detector_goes_all_the_way(name: str, flow: str, tmp_path, capsys) -> None:
    kind, inputs, march, elsewhere, said = CASES[name]
    set_march(march)
    model, given, other = kind(), inputs(), inputs()
    if flow == "fx":
        made = prepare_qat_fx(model, {"": QAT})
        made(*given)
        converted = convert_fx(made)
    else:
        model.qconfig = QAT
        made = prepare_qat(model)
        made(*given)
        converted = convert(made.eval())
    for stage in (made, converted):
        assert type(stage.post) is type(model.post)
        assert stage.post.__dict__.keys() == model.post.__dict__.keys()
    assert len(tree_leaves(converted(*given))[0])
    traced = [torch.jit.trace(converted, given)] if flow == "eager" else []
    for number, form in enumerate([converted, *traced]):
        capsys.readouterr()
        assert check_model(form, given) == 0
        assert said in capsys.readouterr().out
        if elsewhere:
            assert check_model(form, given, march=elsewhere) == 1
            assert f"horizon.nn.{type(model.post).__name__}" in capsys.readouterr().out
        layers = perf_model(form, given, out_dir=tmp_path, layer_details=True)["summary"]
        costs = {row[0]: row[3] for row in layers["layer details"]}
        assert costs["post"].startswith("0.0 us") == (said == ON_CPU)
        visualize_model(form, given, save_path=tmp_path / "net.svg", show=False)
        assert compile_model(form, given, hbm=tmp_path / f"{number}.hbm") == 0
        compiled = runtime.load(tmp_path / f"{number}.hbm")
        for values in (given, other):
            assert same(compiled(*values), converted(*values))
            assert same(form(*values), converted(*values))


def test_anchors_and_detections_are_drawn_as_floats(tmp_path) -> None:
    """Into the stub, out of both others, from the anchors, and to the output."""
    path, given = tmp_path / "net.svg", picture()
    visualize_model(Detector(), given, save_path=path, show=False)
    assert path.read_text().count('class="edge float" marker-end') == 5


@pytest.mark.parametrize("name", CASES)
def test_a_hybrid_detector_is_split_before_its_boxes(name: str, tmp_path) -> None:
    kind, inputs, march, *_ = CASES[name]
    set_march(march)
    given = inputs()
    hybrid = prepare_qat_fx(kind(), {"": QAT}, hybrid=True)
    hybrid(*given)
    plan = visualize_partition(hybrid, given, save_path=tmp_path / "net.svg", show=False)
    placed = {node: segment.place for segment in plan.segments for node in segment.nodes}
    assert placed["post"] == "CPU"
    assert placed.get("anchors", "CPU") == "CPU"
    assert placed["scores" if name != "single head" else "conv"] == "BPU"
    assert len(tree_leaves(convert_fx(hybrid)(*given))[0])


def test_files_of_standard_operators_end_before_the_boxes(tmp_path) -> None:
    pytest.importorskip("onnx")
    given, path = picture(), str(tmp_path / "net.onnx")
    made = prepare_qat_fx(Detector(), {"": QAT})
    made(*given)
    with pytest.raises(ValueError, match="post computes what ONNX has no operator for"):
        export_to_onnx(made, given, path, operator_export_type=None)
    export_to_onnx(made, given, path)


def test_a_correlation_is_on_the_cpu_of_a_hybrid_model_and_exported(tmp_path) -> None:
    onnx = pytest.importorskip("onnx")

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv, self.correlation = nn.Conv2d(3, 4, 1), horizon_nn.Correlation(1, 1, 1, 1, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, y = self.conv(self.quant(x)), self.conv(self.quant(y))
            return self.dequant(self.correlation(x, y))

    x, y = torch.randn(2, 1, 3, 6, 6).unbind(0)
    hybrid = prepare_qat_fx(Flow(), {"": QAT}, hybrid=True)
    made = prepare_qat_fx(Flow(), {"": QAT})
    for model in (hybrid, made):
        model(x, y)
        model.eval()
        path = tmp_path / "net.onnx"
        export_to_onnx(model, (x, y), str(path), operator_export_type=None)
        onnx.checker.check_model(onnx.load(path))
    assert "correlation_input_dequant" in hybrid.code
    assert "correlation_input_dequant" not in made.code

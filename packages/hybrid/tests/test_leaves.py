"""What `wrap` makes one node of: functions, classes, builtins by name, methods."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch import Tensor, nn

from bevquant_hybrid.nn import qat
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    fuse_fx,
    get_default_qat_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid.utils.fx_helper import wrap

QAT = get_default_qat_qconfig()
wrap()("len")


@wrap()
def largest(values: list[Tensor]) -> Tensor:
    return max(values, key=lambda v: v.sum())


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return largest([x, -x]) * len(x)


def test_functions_and_builtins_are_nodes() -> None:
    traced = fuse_fx(Counts())
    assert "len" in traced.code
    assert "largest" in traced.code
    for x in (torch.ones(3), -torch.ones(5)):
        assert torch.equal(traced(x), Counts()(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    @wrap()
    def scores(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.halved(y)

    def halved(self, y: Tensor) -> Tensor:
        return y.chunk(2, 1)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)


class Detector(nn.Module):
    """As the documents wrap a model's post-processing: it asks for `training`, which is data."""

    threshold = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.backbone, self.head = nn.Conv2d(3, 3, 1), Head()
        self.scale_of_loss = nn.Parameter(torch.tensor(2.0))

    def forward(self, data: dict[str, Tensor]):
        scores = self.head(self.backbone(self.quant(data["img"])))
        return self._post_process(data, self.dequant(scores))

    @wrap()
    def _post_process(self, data: dict[str, Tensor], scores: Tensor):
        if self.training:
            return self._loss(scores, data["label"])
        if scores.max() > self.threshold:
            return scores
        return torch.zeros_like(scores)

    def _loss(self, scores: Tensor, label: Tensor) -> Tensor:
        return self.scale_of_loss * (scores - label).square().mean()


def data() -> dict[str, Tensor]:
    return {"img": torch.randn(2, 3, 4, 4), "label": torch.ones(2, 1, 4, 4)}


def test_methods_are_nodes_that_see_the_models_state() -> None:
    model, batch = Detector().eval(), data()
    traced = fuse_fx(model).eval()
    assert "self._wrapped__post_process(" in traced.code
    assert "self.head_wrapped_scores(" in traced.code
    torch.testing.assert_close(traced(batch), model(batch))
    loss = traced.train()(batch)
    torch.testing.assert_close(loss, model.train()(batch))
    assert loss.dim() == 0


def test_modules_that_a_method_calls_are_prepared_and_converted() -> None:
    model, batch = Detector(), data()
    made = prepare_qat_fx(model, {"": QAT})
    assert type(made.head.conv) is qat.Conv2d
    assert type(model.head.conv) is nn.Conv2d
    made(batch).backward()
    assert model.scale_of_loss.grad is not None
    set_fake_quantize(made.eval(), "validation")
    result = made(batch)
    step = made.head.conv.activation_post_process.scale.item()
    converted = convert_fx(made)
    assert type(converted.head.conv).__module__.endswith("quantized._weighted")
    assert (converted(batch) - result).abs().max() <= 2.01 * step


def test_each_copy_calls_its_own_modules() -> None:
    made = prepare_qat_fx(Detector(), {"": QAT}).eval()
    batch = data()
    made(batch)
    copied = copy.deepcopy(made)
    with torch.no_grad():
        copied.head.conv.bias += 100
    assert copied(batch).mean() > made(batch).mean() + 0.5  # as far as its scale reaches
    alone = copied._modules["_wrapped__post_process"]
    del copied
    gc.collect()
    with pytest.raises(RuntimeError, match=r"Detector\._post_process: the model .* is gone"):
        alone({}, torch.ones(1))


def test_an_attribute_that_no_one_has_is_still_missing() -> None:
    traced = fuse_fx(Detector())
    assert traced.threshold == 0.25
    with pytest.raises(AttributeError, match="nonsense"):
        traced.nonsense  # noqa: B018


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(TypeError, match=r"wrap: expected a function.*got 3\.14"):
        wrap()(math.pi)


def test_a_method_of_a_part_of_a_sequential_model() -> None:
    class Positive(nn.Module):
        @wrap()
        def chosen(self, x):
            return x if x.sum() > 0 else -x

        def forward(self, x):
            return self.chosen(x)

    model = nn.Sequential(Positive(), QuantStub(), nn.Conv2d(1, 1, 1), DeQuantStub())
    made = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    x = torch.full((1, 1, 2, 2), -1.0)
    assert torch.equal(made(x), made(-x))
    assert [name for name, _ in model.named_children()] == ["0", "1", "2", "3"]

"""What clients do to a model before they prepare it, and to the dictionaries they hand on."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.quantization import DeQuantStub

from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.quantization import (
    PrepareMethod,
    QconfigSetter,
    QuantStub,
    get_default_qat_qconfig,
    get_qconfig,
    prepare,
    prepare_qat_fx,
    qint8,
)
from bevquant_hybrid.quantization.qconfig_setter import ModuleNameTemplate


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.BAYES)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Net(nn.Module):
    """Layers in a list beside the modules, as detectors keep their stages."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.block1, self.block2 = Block(), Block()
        self.stages = [self.block1, self.block2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for stage in self.stages:
            x = stage(x)
        return self.dequant(x)


def prepared(model: nn.Module) -> Any:
    return prepare_qat_fx(model, {"": get_default_qat_qconfig()})


def quantized(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if hasattr(m, "weight_fake_quant")]


def called(model: Any) -> list[str]:
    return [str(node.target) for node in model.graph.nodes if node.op == "call_module"]


def test_a_list_of_layers_leads_to_those_that_were_prepared() -> None:
    model = Net()
    made = prepared(model)
    assert quantized(made) == ["block1.conv", "block2.conv"]
    assert quantized(model) == []
    assert model.stages == [model.block1, model.block2]
    x = torch.rand(1, 3, 4, 4)
    assert (made(x) - model(x)).abs().max() < 0.05


def test_a_layer_that_knows_its_block_still_does() -> None:
    model = Net()
    model.block1.conv.owner = [model.block1]
    prepared(model)
    assert model.block1.conv.owner[0] is model.block1


def test_a_method_put_on_one_module_is_what_that_module_does() -> None:
    def twice(self: Any, x: Tensor) -> Tensor:
        return self.conv(self.conv(x))

    model = Net()
    model.block2.forward = MethodType(twice, model.block2)
    made = prepared(model)
    assert [name for name in called(made) if "conv" in name] == [
        "block1.conv",
        *["block2.conv"] * 2,
    ]
    x = torch.rand(1, 3, 4, 4)
    assert (made(x) - model(x)).abs().max() < 0.05


def test_a_forward_of_the_models_own() -> None:
    def first_alone(self: Any, x: Tensor) -> Tensor:
        return self.dequant(self.block1(self.quant(x)))

    model = Net()
    model.forward = MethodType(first_alone, model)
    made = prepared(model)
    assert [name for name in called(made) if "conv" in name] == ["block1.conv"]
    assert type(model) is Net
    assert model.forward.__func__ is first_alone
    model.forward = lambda x: x
    with pytest.raises(ValueError, match=r"forward was replaced by .* which is no method of it"):
        prepared(model)


class Detector(nn.Module):
    """Parts that hand a dictionary on, and write what they made into it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.neck, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["maps"] = self.neck(self.quant(batch["image"]))
        batch.update(boxes=self.dequant(self.head(batch["maps"])))
        batch.update({"more": batch.get("boxes") + 1})
        return batch


def test_a_dictionary_that_the_forward_writes_into() -> None:
    model = Detector()
    made = prepared(model)
    given = {"image": torch.rand(1, 3, 4, 4)}
    found = made(dict(given))
    assert list(found) == ["image", "maps", "boxes", "more"]
    assert torch.equal(found["image"], given["image"])
    wanted = model(dict(given))
    assert (found["boxes"] - wanted["boxes"]).abs().max() < 0.05
    assert torch.equal(found["more"], found["boxes"] + 1)
    assert list(given) == ["image"]

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[0] = 1
            return x

    with pytest.raises(ValueError, match=r"writes into a part of x"):
        prepared(Writes())


class Taking(Detector):
    """A forward that asks for what it wrote, and takes out what nobody needs any more."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["maps"] = self.neck(self.quant(batch.pop("image")))
        if "maps" in batch and "image" not in batch:
            batch["boxes"] = self.dequant(self.head(batch.pop("maps")))
        batch["none"] = batch.get("maps", 1) + batch.pop("absent", 2)
        del batch["size"]
        return batch


def test_what_a_forward_takes_out_of_a_dictionary_is_gone() -> None:
    model = Taking()
    made = prepared(model)
    given = {"image": torch.rand(1, 3, 4, 4), "size": torch.ones(1), "more": torch.ones(2)}
    found = made(given)
    wanted = model(dict(given))
    assert list(found) == list(wanted) == ["more", "boxes", "none"]
    assert (found["boxes"] - wanted["boxes"]).abs().max() < 0.05
    assert found["none"] == wanted["none"] == 3
    assert list(given) == ["image", "size", "more"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: "other" in b, "whether 'other' is in batch"),
        (lambda b: b.setdefault("other", 1), r"calls setdefault\(\) of batch"),
        (lambda b: (b.pop("image"), b["image"]), "'image' of batch, which it took out"),
    ],
)
def test_what_a_trace_cannot_know_of_a_dictionary_is_refused(change: Any, message: str) -> None:
    class Asks(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Any:
            return change(batch)

    with pytest.raises(ValueError, match=message):
        prepared(Asks())


def test_a_note_in_the_place_of_a_method_is_no_code() -> None:
    model = Net()
    model.block1.conv.type = "convolutional"
    assert quantized(prepared(model)) == ["block1.conv", "block2.conv"]


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.before, self.within, self.behind = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.dequant(self.within(self.quant(self.before(x)))))


@pytest.mark.filterwarnings("ignore:node .* is on the BPU but reads:UserWarning")
def test_stripping_leaves_what_is_outside_of_the_stubs_float() -> None:
    setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8})])
    model, x = Edges(), torch.rand(1, 3, 4, 4)
    made = prepare(model, x, setter)
    assert quantized(made) == ["within"]
    assert torch.equal(made.before.weight, model.before.weight)
    with pytest.raises(TypeError, match=r"before .*put a QuantStub before it"):
        prepare(model, x, setter, PrepareMethod.JIT)


def test_stripping_a_model_without_stubs_is_refused() -> None:
    with pytest.raises(ValueError, match="no QuantStub is called"):
        prepare(nn.Sequential(nn.Conv2d(3, 3, 1)), torch.rand(1, 3, 4, 4))

"""Chains that could be fused, against what fuse_fx fuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    QuantStub,
    fuse_fx,
    get_default_qat_qconfig,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import check_unfused_operations

DATA = torch.rand(2, 3, 6, 6)


class Chain(nn.Module):
    """conv, then any of norm, addition and ReLU; the convolution as either operand."""

    def __init__(self, norm: bool, adds: bool, second: bool, act: type[nn.Module] | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm, self.adds, self.second, self.acts = norm, adds, second, act is not None
        if norm:
            self.bn = nn.BatchNorm2d(3)
        if adds:
            self.add = FloatFunctional()
        if act is not None:
            self.act = act()

    def forward(self, x):
        y = self.conv(x)
        y = self.bn(y) if self.norm else y
        if self.adds:
            y = self.add.add(x, y) if self.second else self.add.add(y, x)
        return self.act(y) if self.acts else y


def called(model: nn.Module) -> set[str]:
    """Names of the parts that a model still has, without those that fx made of functions."""
    return {
        name
        for name, module in model.named_children()
        if type(module) is not nn.Identity and "_generated_" not in name
    }


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("act", [None, nn.ReLU, nn.ReLU6, nn.Sigmoid])
def test_what_is_found_is_what_fuse_fx_fuses(norm, adds, second, act) -> None:
    model = Chain(norm, adds, second, act).eval()
    fused = fuse_fx(model)
    gone = called(model) - called(fused)
    place = next(n for n in ("add", "conv") if n in called(fused))
    groups = check_unfused_operations(model, DATA, print_tabulate=False)
    assert len(groups) == bool(gone)
    assert {name for group in groups for name in group} == (gone | {place} if gone else set())
    assert check_unfused_operations(fused, DATA, print_tabulate=False) == []


class Branches(nn.Module):
    """Each way in which a result has another reader than the next member."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.other, self.add = nn.Conv2d(3, 3, 1), FloatFunctional()

    def forward(self, x):
        y = self.conv(x)
        if self.case == "a function":
            return self.bn(y) + y
        if self.case == "the end":
            return self.bn(y), y
        if self.case == "another module":
            return self.bn(y), self.other(y)
        if self.case == "a view":
            return self.relu(y.flatten(1))
        if self.case == "ReLU first":
            return self.bn(self.relu(y))
        if self.case == "itself":
            return self.add.add(y, y)
        assert self.case == "a number"
        return self.add.add_scalar(y, 1.0)


@pytest.mark.parametrize(
    "case", ["a function", "the end", "another module", "a view", "itself", "a number"]
)
def test_a_result_with_another_reader_is_not_fused(case: str) -> None:
    model = Branches(case).eval()
    assert check_unfused_operations(model, DATA, print_tabulate=False) == []
    assert called(fuse_fx(model)) == called(model)


def test_the_norm_behind_a_relu_stays() -> None:
    groups = check_unfused_operations(Branches("ReLU first"), DATA, print_tabulate=False)
    assert groups == [["conv", "relu"]]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.bn, self.add, self.relu = nn.BatchNorm2d(3), FloatFunctional(), nn.ReLU(inplace=True)
        self.tail = nn.Linear(6, 2)

    def forward(self, x):
        y = self.relu(self.add.add(self.left(x), self.bn(self.right(x))))
        return self.relu(self.tail(y))


def test_of_two_layers_the_first_operand_takes_the_addition() -> None:
    groups = check_unfused_operations(TwoLayers().eval(), DATA, print_tabulate=False)
    assert groups == [
        ["left", "add", "relu(shared)"],
        ["right", "bn"],
        ["tail", "relu(shared)"],
    ]
    fused = fuse_fx(TwoLayers().eval())
    assert type(fused.add).__name__ == "ConvAddReLU2d"
    assert type(fused.left) is nn.Identity
    assert type(fused.right) is nn.Conv2d
    assert type(fused.tail).__name__ == "LinearReLU"


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU()

    def forward(self, x):
        y = self.relu(self.conv(x))
        return y if y.sum() > 0 else F.relu(-y)


def test_models_that_cannot_be_traced_are_checked_too() -> None:
    with pytest.raises(ValueError, match="cannot be traced"):
        fuse_fx(Untraceable())
    assert check_unfused_operations(Untraceable(), DATA, False) == [["conv", "relu"]]


def test_prepared_models_are_refused() -> None:
    model = prepare_qat_fx(nn.Sequential(QuantStub(), nn.ReLU()), {"": get_default_qat_qconfig()})
    with pytest.raises(ValueError, match="prepared or converted"):
        check_unfused_operations(model, DATA)


def test_layers_are_told_by_what_their_classes_compute() -> None:
    class Named(nn.ReLU):
        def extra_repr(self) -> str:
            return "mine"

    class NormAct(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    x = torch.ones(1, 1, 2, 2)
    conv = nn.Conv2d(1, 1, 1)
    assert check_unfused_operations(nn.Sequential(conv, Named()), x) == [["0", "1"]]
    assert check_unfused_operations(nn.Sequential(conv, NormAct(1)).eval(), x) == []

"""A subclass is the layer where it computes nothing else, and only there."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from bevquant_graph import layer_class, own_code

LAYERS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.BatchNorm2d: (4,),
    nn.SyncBatchNorm: (4,),
    nn.Conv2d: (4, 4, 1),
    nn.ConvTranspose2d: (4, 4, 1),
    nn.Linear: (4, 4),
    nn.MaxPool2d: (2,),
    nn.ReLU: (),
    nn.ReLU6: (),
    nn.Dropout: (),
    nn.Identity: (),
    nn.Upsample: (None, 2),
    nn.Softmax: (1,),
    nn.LayerNorm: (4,),
    nn.Flatten: (),
}
every_layer = pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.__name__)


def made(cls: type[nn.Module], **body: Any) -> nn.Module:
    base = next(c for c in cls.__mro__ if c in LAYERS)
    return type(f"My{cls.__name__}", (cls,), body)(*LAYERS[base])


@every_layer
def test_the_class_itself(cls: type[nn.Module]) -> None:
    module = cls(*LAYERS[cls])
    assert layer_class(module) is layer_class(module, cls) is cls
    assert own_code(module) is None


@every_layer
def test_a_subclass_that_adds_nothing_is_the_layer(cls: type[nn.Module]) -> None:
    def init(self: nn.Module, *args: Any) -> None:
        cls.__init__(self, *args)

    module = made(
        cls,
        __init__=init,
        extra_repr=lambda self: "mine",
        flops=lambda self: 1,
        __constants__=["a"],
    )
    assert layer_class(module) is layer_class(module, cls) is cls


@every_layer
@pytest.mark.parametrize("method", ["forward", "__call__", "_call_impl"])
def test_a_subclass_with_a_method_of_its_own_is_not(cls: type[nn.Module], method: str) -> None:
    module = made(cls, **{method: lambda self, x: x})
    assert layer_class(module) is layer_class(module, cls) is None
    assert f"has a {method} of its own" in (own_code(module, cls) or "")


@every_layer
def test_a_forward_replaced_on_the_instance(cls: type[nn.Module]) -> None:
    module = cls(*LAYERS[cls])
    module.forward = types.MethodType(lambda self, x: x, module)
    assert layer_class(module) is layer_class(module, cls) is None
    assert "replaced on the instance" in (own_code(module) or "")


def test_inherited_and_mixed_in_code_counts() -> None:
    class Own(nn.Conv2d):
        def _conv_forward(self, x: Any, weight: Any, bias: Any) -> Any:
            return super()._conv_forward(x, 2 * weight, bias)

    class Heir(Own):
        pass

    class Mixin:
        def forward(self, x: Any) -> Any:
            layer: Any = super()
            return layer.forward(x) + 1

    class Mixed(Mixin, nn.Conv2d):
        pass

    for cls in (Own, Heir, Mixed):
        assert layer_class(cls(1, 1, 1), nn.Conv2d) is None, cls
    assert layer_class(Heir(1, 1, 1), Own) is Own  # asked for by name, it is what it is


def test_a_class_that_says_what_it_computes() -> None:
    class Quant(nn.Conv2d):
        float_class = nn.Conv2d

        def forward(self, x: Any) -> Any:
            return super().forward(x)

    class Own(Quant):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    assert layer_class(Quant(1, 1, 1), nn.Conv2d) is nn.Conv2d
    assert layer_class(Quant(1, 1, 1)) is Quant
    assert layer_class(Own(1, 1, 1), nn.Conv2d) is None


def test_a_second_parent_does_not_hide_behind_one_that_is_known() -> None:
    class Quant(nn.Conv2d):
        float_class = nn.Conv2d

    class Other(nn.Conv2d):
        def forward(self, x: Any) -> Any:
            return x

    class Both(Quant, Other):
        pass

    assert layer_class(Both(1, 1, 1), nn.Conv2d) is None


def test_bases_of_torch_and_order_of_asking() -> None:
    batch_norm = nn.modules.batchnorm._BatchNorm
    assert layer_class(nn.SyncBatchNorm(2), batch_norm) is batch_norm
    assert layer_class(nn.ReLU6(), nn.ReLU, nn.Hardtanh) is nn.Hardtanh
    assert layer_class(nn.ReLU6()) is nn.ReLU6
    assert layer_class(nn.ReLU(), nn.Linear) is None
    assert layer_class(3) is None


def test_computed_weights_are_code() -> None:
    module = parametrizations.weight_norm(nn.Conv2d(1, 1, 1))
    assert layer_class(module, nn.Conv2d) is None


def test_containers_and_networks() -> None:
    class Chain(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.ReLU())

    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    assert layer_class(Chain()) is nn.Sequential
    assert layer_class(Net()) is None


def test_compiled_modules_are_the_same_layer() -> None:
    module = nn.ReLU()
    module._compiled_call_impl = torch.relu  # what Module.compile sets
    assert layer_class(module) is nn.ReLU


def test_registered_sparse_classes_and_what_is_derived_from_them() -> None:
    from bevquant_sparse import WeightLayout, register_layout

    class Sparse(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    class Named(Sparse):
        pass

    class Own(Sparse):
        def forward(self, x: Any) -> Any:
            return x

    register_layout(Sparse, WeightLayout.KRSC)
    assert layer_class(Named()) is layer_class(Sparse()) is Sparse
    assert layer_class(Own()) is None


def test_spconv_1_inside_of_another_package_is_a_library() -> None:
    module = {"__module__": "plugin.ops.spconv.modules"}
    sequential = type("SparseSequential", (nn.Sequential,), {**module, "forward": lambda s, x: x})
    assert layer_class(sequential()) is sequential
    own = type("Backbone", (nn.Sequential,), {"__module__": "plugin.spconv.backbone"})
    assert layer_class(own()) is nn.Sequential


def test_what_runs_on_our_kernels_is_still_its_authors_class() -> None:
    stock = type("SubMConv3d", (nn.Module,), {"__module__": "spconv.pytorch.conv"})
    own = type("Custom1x1", (stock,), {"__module__": "softgroup", "forward": lambda s, x: x})
    mixin = type("_ConvInner", (), {"__module__": "bevquant_sparse._kernels", "_conv_forward": id})
    for written, said in ((stock, None), (own, "softgroup.Custom1x1 has a forward of its own")):
        made = type(written.__name__, (mixin, written), {"stock_class": written})
        assert own_code(made()) == said
        assert layer_class(made()) is (stock if said is None else None)


class Emptied(torch.autograd.Function):
    """What wrappers make of an empty input."""


class Mmcv(nn.Conv2d):
    def forward(self, x):
        """As mmcv.cnn.bricks.wrappers."""
        if x.numel() == 0 and torch.__version__ <= "1.4":
            sizes = [x.shape[0], self.out_channels]
            for size, kernel in zip(x.shape[-2:], self.kernel_size, strict=True):
                sizes.append(size - kernel + 1)
            return Emptied.apply(x, sizes)
        return super().forward(x)


class MmcvTurned(nn.ConvTranspose2d):
    def forward(self, x):
        if torch.__version__ <= "1.4" and 0 == x.shape[0]:
            return Emptied.apply(x)
        return super(MmcvTurned, self).forward(x)  # noqa: UP008


class Benchmark(nn.Linear):
    def forward(self, x):
        if x.numel() > 0:
            return super().forward(x)
        return Emptied.apply(x)


class Pool(nn.MaxPool2d):
    def forward(self, input):
        if not input.numel():
            out = input.new_zeros(0)
            return out
        elif self.training:
            return super().forward(input=input)
        out = super().forward(input)
        return out


class Below(Mmcv):
    def forward(self, x):
        if len(x) < 1:
            raise ValueError("empty")
        return super().forward(x)


class Twice(Mmcv):
    def forward(self, x):
        return super().forward(x) * 2


class Small(nn.Conv2d):
    def forward(self, x):
        if x.numel() <= 1:
            return x
        return super().forward(x)


class Wide(nn.Conv2d):
    def forward(self, x):
        if x.shape[1] == 3:
            return x
        return super().forward(x)


class Other(nn.Conv2d):
    def forward(self, x):
        if x.numel() == 0:
            return x
        return super().forward(x.relu())


class Written(nn.Conv2d):
    def forward(self, x):
        if x.relu_().sum() > 0 or x.numel() == 0:
            return super().forward(x)
        return super().forward(x)


class Bound(nn.Conv2d):
    def forward(self, x):
        if x.numel() == 0 and (x := 2):
            return x
        return super().forward(x)


class Falls(nn.Conv2d):
    def forward(self, x):
        if x.numel() == 0:
            return super().forward(x)


class Mode(nn.Conv2d):
    def forward(self, x):
        if self.training or x.numel() == 0:
            return x
        return super().forward(x)


class Skips(nn.ReLU):
    def forward(self, x, extra):
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "base"),
    [
        (Mmcv(1, 1, 1), nn.Conv2d),
        (MmcvTurned(1, 1, 1), nn.ConvTranspose2d),
        (Benchmark(1, 1), nn.Linear),
        (Pool(2), nn.MaxPool2d),
        (Below(1, 1, 1), nn.Conv2d),
    ],
)
def test_forwards_that_only_guard_empty_inputs_are_their_base_class(module, base):
    assert layer_class(module, base) is base
    assert layer_class(module) is base


@pytest.mark.parametrize(
    "module",
    [kind(1, 1, 1) for kind in (Twice, Small, Wide, Other, Written, Bound, Falls, Mode)]
    + [Skips()],
)
def test_forwards_that_do_more_are_their_own(module):
    assert layer_class(module) is None
    assert layer_class(module, nn.Conv2d, nn.ReLU) is None

"""The table of operators, row by row: what a row promises, the operator itself does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_graph import OPERATORS, OpSpec, op_spec

aten = torch.ops.aten
KEEPING = {"identity", "layout_op", "concat", "max_pool", "sparse_pool", "to_dense", "resize"}
MASK = torch.arange(32).view(1, 4, 2, 4) % 3 == 0
PLACES = torch.tensor([2, 0])

# Every operator that moves or keeps values, on float64 [1, 4, 2, 4]; the others by kind, below.
EXAMPLES: dict[str, Callable[[Tensor], Any]] = {
    **{name: getattr(aten, name) for name in ("clone", "detach", "alias", "lift", "lift_fresh",
                                              "lift_fresh_copy", "squeeze", "flatten")},
    "contiguous": lambda x: x.contiguous(), "data": lambda x: x.data,
    "detach_": lambda x: x.clone().detach_(),
    **{name: lambda x, name=name: getattr(torch, name)(x, 0.5, False)
       for name in ("dropout", "feature_dropout", "alpha_dropout")},
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "reshape": lambda x: x.reshape(4, -1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)), "unsqueeze": lambda x: x.unsqueeze(2),
    "view_as": lambda x: x.view_as(torch.ones(8, 4)),
    "reshape_as": lambda x: x.reshape_as(torch.ones(8, 4)),
    "unsafe_split": lambda x: x.unsafe_split(2, 1), "unbind": lambda x: x.unbind(1),
    "permute": lambda x: x.permute(0, 2, 3, 1), "transpose": lambda x: x.transpose(1, 3),
    "t": lambda x: x[0, :, 0].t(), "movedim": lambda x: x.movedim(1, 3),
    "mT": lambda x: x.mT, "T": lambda x: x[0, 0].T, "numpy_T": lambda x: aten.numpy_T(x[0, 0]),
    "roll": lambda x: x.roll(1, 3), "flip": lambda x: x.flip([1, 3]),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "slice": lambda x: aten.slice(x, 3, 1, 4, 2), "select": lambda x: x.select(1, 2),
    "split": lambda x: x.split(3, 1),
    "chunk": lambda x: x.chunk(2, 3), "tensor_split": lambda x: x.tensor_split(3, 1),
    "expand": lambda x: x.expand(3, -1, -1, -1),
    "expand_as": lambda x: x.expand_as(x.repeat(2, 1, 1, 1)),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1), "tile": lambda x: x.tile(2),
    "narrow": lambda x: x.narrow(3, 1, 2), "index_select": lambda x: x.index_select(1, PLACES),
    "index": lambda x: x[:, PLACES], "gather": lambda x: x.gather(1, PLACES.view(1, 2, 1, 1)),
    "take_along_dim": lambda x: x.take_along_dim(PLACES.view(1, 2, 1, 1), 1),
    "masked_select": lambda x: x.masked_select(MASK), "unfold": lambda x: x.unfold(3, 2, 1),
    "diagonal": lambda x: x.diagonal(1, 2, 3),
    "getitem": lambda x: x[:, 1:, ..., ::2],
    "pad": lambda x: F.pad(x[0], (1, 1), mode="reflect"),
    "constant_pad_nd": lambda x: F.pad(x, (1, 2)),
    "cat": lambda x: torch.cat([x, x], 1), "stack": lambda x: torch.stack([x, x]),
    **{name: lambda x, name=name: getattr(torch, name)([x, x])
       for name in ("hstack", "vstack", "dstack", "column_stack")},
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "add": lambda x: x + x,
    "max_pool1d": lambda x: F.max_pool1d(x[0], 2), "max_pool2d": lambda x: F.max_pool2d(x, 2, 1),
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "max_pool2d_with_indices": lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0],
    "max_pool3d_with_indices": lambda x: aten.max_pool3d_with_indices(x, [2, 2, 2])[0],
    "upsample_nearest1d": lambda x: F.interpolate(x[0], scale_factor=2),
    "upsample_nearest2d": lambda x: F.interpolate(x, scale_factor=2),
    "upsample_nearest3d": lambda x: F.interpolate(x[None], scale_factor=2),
    **{name: lambda x, name=name: getattr(aten, name)(x.sigmoid() + (name == "acosh"))
       for name in ("abs acos acosh asin asinh atan atanh ceil celu cos cosh elu erf erfc exp "
                    "expm1 floor gelu hardshrink hardsigmoid hardswish leaky_relu log log10 log1p "
                    "log2 log_sigmoid mish neg reciprocal round rsqrt selu sigmoid sign silu sin "
                    "sinh softplus sqrt square tan tanh trunc").split()},
    **{name: lambda x, name=name: getattr(aten, name)(x, 2)
       for name in ("clamp", "clamp_max", "clamp_min")},
    "threshold": lambda x: aten.threshold(x, 2, 1),
    **{name: lambda x, name=name: getattr(aten, name)(x, x)
       for name in ("div", "maximum", "minimum", "mul", "pow", "remainder", "sub")},
    **{name: lambda x, name=name: getattr(aten, name)(x, x, x) for name in ("addcdiv", "addcmul")},
    "lerp": lambda x: aten.lerp(x, x, 0.5), "bitwise_not": lambda x: aten.bitwise_not(x.long()),
    **{name: lambda x, name=name: getattr(aten, name)(x.long(), x.long())
       for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "batch_norm": lambda x: F.batch_norm(x, torch.ones(4).double(), 2 * torch.ones(4).double()),
}  # fmt: skip
# Held where these operators are: in the tests of their packages.
ELSEWHERE = {"shadow_copy", *(name for name in OPERATORS if "::" in name)}


def tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def test_every_row_with_a_promise_has_an_example() -> None:
    promising = {n for n, s in OPERATORS.items() if s.values or s.order or s.shape or not s.mixes}
    assert promising - ELSEWHERE == EXAMPLES.keys()
    assert all(spec.name == name for name, spec in OPERATORS.items())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_operator_does_what_its_row_promises(name: str) -> None:
    spec, run = op_spec(name), EXAMPLES[name]
    x = torch.randperm(32, generator=torch.Generator().manual_seed(0)).double().view(1, 4, 2, 4) - 9
    outputs = tensors(run(x))
    values = x.flatten().tolist()
    for made in outputs:
        found = made.flatten().tolist()
        if spec.values:
            assert set(found) <= {*values, 0.0}
        if spec.order:
            rest = iter(values)
            assert all(value in rest for value in found)
        if spec.shape:
            assert made.shape == x.shape
        if spec.alias and name != "detach_":  # whose example writes to a copy
            assert made.untyped_storage()._cdata == x.untyped_storage()._cdata
    if not spec.mixes:
        # Each output value moves with one place of the input at most.
        for slopes in torch.autograd.functional.jacobian(lambda v: tuple(tensors(run(v))), x):
            assert int((slopes.reshape(-1, x.numel()) != 0).sum(1).max()) <= 1


@pytest.mark.parametrize("name", [name for name, spec in OPERATORS.items() if spec.positive])
def test_a_positive_operator_gives_no_negative_value(name: str) -> None:
    call: Any = getattr(F, name, None) or getattr(torch, name)
    made = call(torch.linspace(-9, 9, 33), *[0] * (name == "softmax"))
    assert not bool((made < 0).any())


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=lambda spec: spec.name)
def test_a_kind_means_the_same_in_every_row(spec: OpSpec) -> None:
    nearest = "bilinear" not in spec.name and "avg" not in spec.name
    assert spec.values is (spec.kind in KEEPING and nearest)
    shaped = spec.kind in {"identity", "relu", "add", "norm", "quantize"}
    assert spec.shape >= shaped
    assert spec.shape is shaped or spec.kind == "float"
    assert spec.unary is (spec.shape and not spec.mixes and spec.kind in {"float", "relu"})
    assert bool(spec.layout) is (spec.kind == "layout_op")
    single = {"identity", "layout_op", "concat", "relu", "norm", "quantize", "to_dense"}
    assert spec.mixes is (spec.kind not in single and not spec.unary)
    kept = {"reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
            "unsafe_split", "unbind"}  # fmt: skip
    assert spec.order is (spec.kind == "identity" or spec.name in kept)


@pytest.mark.parametrize(
    ("target", "name", "kind"),
    [
        ("relu_", "relu", "relu"),
        ("__getitem__", "__getitem__", "float"),
        (torch.ops.aten.add_.Tensor, "add", "add"),
        (torch.cumsum, "cumsum", "float"),
        (operator.iadd, "add", "add"),
        ("concat", "cat", "concat"),
        (torch.Tensor.view, "reshape", "layout_op"),
        (torch.ops.aten.swapaxes.default, "transpose", "layout_op"),
        (nn.Conv3d(1, 1, 1), "conv3d", "layer"),
        (nn.Flatten(), "flatten", "layout_op"),
        (nn.Dropout, "dropout", "identity"),
        (nn.BatchNorm2d, "batch_norm", "norm"),
        (nn.Softmax, "Softmax", "float"),
    ],
)
def test_names(target: object, name: str, kind: str) -> None:
    spec = op_spec(target)
    assert spec.kind == kind
    assert spec.name == name
    if kind == "float":
        assert spec == OpSpec(name, "float", False, False, False, True, ())


def test_custom_operators_go_by_their_whole_name() -> None:
    @torch.library.custom_op("bevquant_graph_test::add", mutates_args=())
    def add(x: Tensor) -> Tensor:
        return x.clone()

    assert op_spec(torch.ops.bevquant_graph_test.add.default) == OpSpec("bevquant_graph_test::add")


def test_a_module_is_its_layer_by_what_it_computes_not_by_its_name() -> None:
    class Own(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    class Named(nn.ReLU):
        def extra_repr(self) -> str:
            return "mine"

    assert op_spec(Named()).kind == op_spec(nn.ReLU()).kind == op_spec(nn.ReLU).kind == "relu"
    assert op_spec(Own()).kind == "float"
    for name in ("ReLU", "Upsample", "Flatten"):  # of a user's own
        stranger = type(name, (nn.Module,), {"forward": lambda self, x: x + 1})
        assert op_spec(stranger).kind == op_spec(stranger()).kind == "float"
    Own.__name__ = "ReLU"
    assert op_spec(Own()).kind == op_spec(Own).kind == "float"


@pytest.mark.parametrize("spec", [s for s in OPERATORS.values() if s.neutral is not None])
def test_a_neutral_number_changes_no_bit(spec: OpSpec) -> None:
    x = torch.tensor([-1.5, 0.0, 2.0**-140, 3e38])
    assert torch.equal(getattr(aten, spec.name)(x, spec.neutral), x)


@pytest.mark.parametrize("spec", [s for s in OPERATORS.values() if s.creates])
def test_tensors_of_numbers_need_no_tensor(spec: OpSpec) -> None:
    overloads = [getattr(getattr(aten, spec.name), o) for o in getattr(aten, spec.name).overloads()]
    assert any(all("Tensor" not in str(a.type) for a in o._schema.arguments) for o in overloads)

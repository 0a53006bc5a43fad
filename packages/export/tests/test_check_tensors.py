"""What may differ in a file, tensor by tensor, before and behind floats that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bevquant_export import LayerDifference, TensorDifference, check_tensors
from bevquant_export._differences import difference


@pytest.mark.parametrize(
    ("op", "different", "ties", "largest", "allowed", "right"),
    [
        ("max_pool", 0, 0, 0, "nothing", True),
        ("max_pool", 1, 0, 1, "nothing", False),
        ("linear", 5, 5, 1, "one step on the border of two", True),
        ("linear", 5, 4, 1, "one step on the border of two", False),
        ("softmax", 10, 0, 1, "one step on the border of two, and on 10 values", True),
        ("softmax", 11, 0, 1, "one step on the border of two, and on 10 values", False),
        ("softmax", 1, 0, 2, "one step on the border of two, and on 10 values", False),
        ("quantize", 4, 0, 1, "one step on the border of two, and on 4 values", True),
    ],
)
def test_dense(op: str, different: int, ties: int, largest: int, allowed: str, right: bool) -> None:
    (check,) = check_tensors([TensorDifference("a.b", op, "y", 100_000, different, largest, ties)])
    assert (check.path, check.op, check.form, check.ties) == ("a.b", op, "int8", ties)
    assert (check.allowed, check.is_right) == (allowed, right)


def layer(
    node: str, form: str, different: int, largest: float, size: float = 1.0
) -> LayerDifference:
    return LayerDifference("", "", node, 1000, different, largest, form=form, size=size)


def test_sparse_layers_are_exact_up_to_floats_that_differ() -> None:
    rows = [
        layer("conv0", "int8", 0, 0),
        layer("conv1", "float", 9, 0.0019, size=2.0),
        layer("conv1", "float", 9, 0.0021, size=2.0),
        layer("conv2", "int8", 10, 3),
        layer("relu3", "int8", 11, 1),
        layer("conv4", "int8", 1, 4),
        layer("output", "float", 9, 0.09),
        layer("output", "float", 9, 0.11),
    ]
    checks = check_tensors(rows)
    assert [check.is_right for check in checks] == [
        True,
        True,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    ops = ["sparse_conv"] * 4 + ["add", "sparse_conv", "output", "output"]
    assert [check.op for check in checks] == ops
    assert [check.different for check in checks] == [0, None, None, 10, 11, 1, None, None]
    assert checks[1].largest == pytest.approx(0.00095)  # of the largest value
    told = [checks[index].allowed for index in (0, 2, 3, 6)]
    assert told == [
        "nothing", "0.001 of the largest value", "3 steps on 1 % of the values",
        "0.1 of the largest value",
    ]  # fmt: skip


def test_without_floats_no_integer_may_differ() -> None:
    assert [c.is_right for c in check_tensors([layer("conv0", "int8", 1, 1)])] == [False]


@pytest.mark.parametrize(
    ("different", "largest", "right"), [(10, 3, True), (11, 1, False), (1, 4, False)]
)
def test_behind_functions_of_floats_a_few_integers_may(
    different: int, largest: float, right: bool
) -> None:
    row = layer("conv1", "int8", different, largest)
    rows = [layer("conv0", "int8", 0, 0), replace(row, behind_functions=True), row]
    assert [check.is_right for check in check_tensors(rows)] == [True, right, False]


def test_no_value_may_differ_in_one_arithmetic() -> None:
    rows = [layer("a.conv", "float", 0, 0.0), layer("output", "float", 1, 1e-6)]
    checks = check_tensors(rows, same_arithmetic=True)
    assert [(check.form, check.is_right) for check in checks] == [
        ("float16", True), ("float16", False),
    ]  # fmt: skip


def test_equal_values_and_equal_nans_are_no_difference() -> None:
    wanted = torch.tensor([1.0, torch.nan, 4.0, torch.inf])
    row = difference("y", torch.tensor([1.0, torch.nan, 3.0, torch.inf]), wanted, path="head")
    assert (row.path, row.tensor, row.elements, row.different) == ("head", "y", 4, 1)
    assert (row.largest, row.size, row.relative) == (1.0, 4.0, 0.25)
    assert difference("y", wanted[:1] + 2.0**-20, wanted[:1], slack=2.0**-18).different == 0
    assert difference("y", torch.tensor([torch.nan]), torch.ones(1)).relative == torch.inf
    assert difference("y", torch.ones(1), torch.zeros(1)).relative == torch.inf
    assert difference("y", torch.ones(0, 3), torch.ones(0, 3)).elements == 0

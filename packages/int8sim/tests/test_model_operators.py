"""Programs of a package's own: operators of torch's registry on constants and values."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import (
    OperatorCall,
    Program,
    Ref,
    Step,
    TensorType,
    Value,
    from_document,
    rounded,
    to_document,
)

X = torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int8)


@torch.library.custom_op(
    "bevquant_int8sim_tests::halve", mutates_args=(), schema="(Tensor x, str rounding) -> Tensor"
)
def halve(x: torch.Tensor, rounding: str) -> torch.Tensor:
    half = x.double() / 2
    made = torch.floor(half + 0.5) if rounding == "half_up" else half.round()
    return made.to(x.dtype)


def operator(function: Any, output: str, reads: dict[str, Any], **constants: Any) -> Step:
    return OperatorCall("net", (), (output,), reads, function=function, constants=constants)


def program() -> Program:
    tensor = Value(TensorType(torch.int8, (2, 3)), "")
    joined = Value(TensorType(torch.int8, (4, 3)), "")
    ops = torch.ops
    return Program(
        signature=(([Ref("x")],), {}),
        sparse_inputs={},
        steps=(
            operator(
                ops.bevquant_int8sim_tests.halve.default, "h", {"x": Ref("x")}, rounding="half_even"
            ),
            operator(ops.aten.cat.default, "c", {"tensors": (Ref("h"), Ref("more"))}, dim=0),
        ),
        values={"h": tensor, "c": joined},
        constants={"more": torch.ones(2, 3, dtype=torch.int8)},
        result={"joined": Ref("c"), 1: Ref("h"), "both": (Ref("more"), 7)},
    )


def test_operators_run_on_values_and_constants() -> None:
    made = IntegerModel(program())([X])
    assert made["joined"].tolist() == [[0, -1, 2], [2, 2, -3], [1, 1, 1], [1, 1, 1]]
    assert made[1].tolist() == [[0, -1, 2], [2, 2, -3]]
    assert made["both"][1] == 7
    assert [step.operator for step in program().steps] == [
        "bevquant_int8sim_tests::halve",
        "aten::cat",
    ]
    assert "int8[4, 3]" in repr(IntegerModel(program()))


def test_rounding_is_an_argument_of_operators_too() -> None:
    up = rounded(program(), "half_up", "float64")
    assert [step.constants for step in up.steps] == [{"rounding": "half_up"}, {"dim": 0}]
    assert IntegerModel(up)([X])[1].tolist() == [[1, -1, 2], [2, 3, -3]]


def test_a_document_says_all_of_it() -> None:
    data, tensors = to_document(program())
    again = from_document(json.loads(json.dumps(data)), tensors, ["bevquant_int8sim_tests"])
    made, expected = IntegerModel(again)([X]), IntegerModel(program())([X])
    assert list(made) == ["joined", 1, "both"]
    assert torch.equal(made["joined"], expected["joined"])
    assert again.values == program().values


def test_a_folder_holds_it(tmp_path) -> None:
    IntegerModel(program()).save(tmp_path / "net")
    again = IntegerModel.load(tmp_path / "net", operators=["bevquant_int8sim_tests"])
    assert torch.equal(again([X])["joined"], IntegerModel(program())([X])["joined"])


WRONG = {
    "the tensor 'more' is missing": lambda d, t: t.clear(),
    "tensors that no step uses: x": lambda d, t: t.update(x=X),
    "operator reads 'more', which": lambda d, t: (d["constants"].clear(), t.clear()),
    "net: it calls no operator of torch": lambda d, t: d["steps"][1].update(function="torch.cat"),
    "net: a constant reads 'h'": lambda d, t: d["steps"][1]["constants"]["$dict"].update(
        tensors=[{"$ref": "h"}]
    ),
    "4294967296 among the arguments of aten::cat": lambda d, t: d["steps"][1]["constants"][
        "$dict"
    ].update(dim=2**32),
    "net: operator makes 'h', which is there": lambda d, t: d["steps"][1].update(outputs=["h"]),
    r"is no entry of a dictionary": lambda d, t: d.update(result={"$items": [[None, 1]]}),
    r"form": lambda d, t: d["values"]["c"].update(form=["complex64", [4, 3]]),
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_no_program_says_is_refused(reason: str) -> None:
    data, tensors = to_document(program())
    data = json.loads(json.dumps(data))
    WRONG[reason](data, tensors)
    with pytest.raises(ValueError, match=reason):
        from_document(data, tensors, ["bevquant_int8sim_tests"])


def test_only_the_libraries_that_are_named_are_called() -> None:
    data, tensors = to_document(program())
    with pytest.raises(ValueError, match="an operator of another library than torch"):
        from_document(data, tensors)

"""Written files as functions of named tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
from onnx import TensorProto, helper  # noqa: E402

from bevquant_export import (  # noqa: E402
    compare_qdq_onnx,
    export_qdq_onnx,
    lift_horizon_onnx,
    open_onnx,
)
from bevquant_int8sim import simulate  # noqa: E402
from bevquant_qnn import quantize_model  # noqa: E402
from bevquant_quantizers import calibrate  # noqa: E402

NAMES = {"input_names": ["x"], "output_names": ["y"], "verify": False}


def test_a_file_for_each_engine_makes_what_the_integers_make(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    x = torch.rand(1, 3, 6, 6)
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    wanted = simulate(quantized, x)(x)
    atol = 1e-2 * float(wanted.abs().max())  # a step in the middle, on the border of two
    for target in ("onnxruntime", "horizon"):
        path = tmp_path / f"{target}.onnx"
        export_qdq_onnx(quantized, x, path, target, **NAMES)
        for engine in (target, None):
            made = open_onnx(path, engine)({"x": x, "not read": 7})
            torch.testing.assert_close(made["y"], wanted, rtol=0, atol=atol)


def half_sum(kind: int) -> object:
    a, b, y = (helper.make_tensor_value_info(name, kind, ["n"]) for name in "aby")
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["y"])], "sum", [a, b], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_halves_go_in_and_come_out_as_float32() -> None:
    run = open_onnx(half_sum(TensorProto.FLOAT16))
    made = run({"a": torch.tensor([1.5]), "b": torch.tensor([0.25])})["y"]
    assert made.dtype == torch.float32
    assert made.tolist() == [1.75]


def test_integers_are_arrays_of_one() -> None:
    assert open_onnx(half_sum(TensorProto.INT64))({"a": 2, "b": 3})["y"].tolist() == [5]


def test_a_file_that_is_not_loaded_is_named(tmp_path: Path) -> None:
    model = half_sum(TensorProto.FLOAT)
    model.graph.node[0].op_type = "Sum of sorts"
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ValueError, match=r"plain does not load odd\.onnx"):
        open_onnx(tmp_path / "odd.onnx")


def horizon_file(folder: Path) -> tuple[object, torch.Tensor, object]:
    torch.manual_seed(0)
    x = torch.rand(1, 3, 6, 6)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.Softmax(1))
    model = quantize_model(net.eval(), example_inputs=x).model
    calibrate(model, [x])
    return model, x, export_qdq_onnx(model, x, folder / "net.onnx", "horizon", **NAMES)


def first(proto: object, op: str) -> object:
    return next(node for node in proto.graph.node if node.op_type == op)


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: first(m, "QuantizeLinear").ClearField("input"),
        lambda m: first(m, "QuantizeLinear").input.__delitem__(slice(1, None)),
        lambda m: first(m, "Constant").ClearField("output"),
        lambda m: first(m, "Constant").ClearField("attribute"),
        lambda m: first(m, "Softmax").ClearField("input"),
    ],
    ids=["no inputs", "no scale", "no output", "no value", "no softmax"],
)
def test_every_reader_names_a_damaged_file(tmp_path: Path, damage: object) -> None:
    model, x, file = horizon_file(tmp_path)
    proto = onnx.load(file.path)
    damage(proto)
    onnx.save(proto, file.path)
    for read in (
        lift_horizon_onnx,
        lambda path: open_onnx(path, "horizon"),
        lambda path: compare_qdq_onnx(file, model, x),
    ):
        with pytest.raises(ValueError, match=r"net\.onnx"):
            read(file.path)


def test_other_operator_sets_stay_as_they_are(tmp_path: Path) -> None:
    model = half_sum(TensorProto.FLOAT)
    model.opset_import[0].version = 8
    model.opset_import.insert(0, helper.make_opsetid("ai.onnx.ml", 1))
    onnx.save(model, tmp_path / "old.onnx")
    assert lift_horizon_onnx(tmp_path / "old.onnx") == model


def test_an_input_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="reads a, b; b not given, got a"):
        open_onnx(half_sum(TensorProto.FLOAT))({"a": torch.ones(1)})

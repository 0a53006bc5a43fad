"""A file carries what was found of its calibration, and the linter repeats it."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from bevquant_export import find_target, lift_horizon_onnx, lint_onnx, note_calibration
from bevquant_export.lint import TARGETS
from bevquant_export.targets import autoware
from bevquant_export.targets.autoware import run_autoware_onnx
from bevquant_quantizers import QuantDescriptor, TensorQuantizer, calibrate


def texts(path, target):
    return [f.reason for f in lint_onnx(path, target) if f.id == "CAL001"]


@pytest.fixture
def path(tmp_path):
    ports = [helper.make_tensor_value_info(name, 1, [1]) for name in "ab"]
    graph = helper.make_graph([helper.make_node("Relu", ["a"], ["b"])], "g", ports[:1], ports[1:])
    file = tmp_path / "relu.onnx"
    opset = [helper.make_opsetid("", 13)]
    file.write_bytes(helper.make_model(graph, opset_imports=opset).SerializeToString())
    return file


@pytest.mark.parametrize("target", TARGETS)
def test_trap_49_findings_travel_with_the_file(path, target):
    model = nn.Sequential(TensorQuantizer(QuantDescriptor(calib_method="histogram")))
    report = calibrate(model, [torch.full((1000,), 0.7)])
    before = onnx.load(path)
    note_calibration(path, report.poor)
    (text,) = texts(path, target)
    assert "0: constant: all 1,000 values have one magnitude, 0.7" in text
    found = next(f for f in lint_onnx(path, target) if f.id == "CAL001")
    assert (found.severity, found.node) == ("warning", "file")
    onnx.checker.check_model(str(path))
    assert onnx.load(path).graph == before.graph


def test_without_findings_a_file_is_left_alone(path):
    before = path.read_bytes()
    note_calibration(path, [])
    assert path.read_bytes() == before
    assert texts(path, "tensorrt") == []


def test_several_findings_and_other_metadata(path):
    model = onnx.load(path)
    helper.set_model_props(model, {"author": "somebody"})
    path.write_bytes(model.SerializeToString())
    note_calibration(path, ["conv1: all zero", "conv2: constant"])
    assert texts(path, "onnxruntime") == ["'conv1: all zero'", "'conv2: constant'"]
    assert {e.key for e in onnx.load(path).metadata_props} == {"author", "bevquant.calibration"}


@pytest.mark.parametrize("value", ["no JSON", "[" * 100_000, "{}", '"text"', "[1, null]", ""])
def test_what_somebody_else_wrote_there_is_quoted(path, value):
    model = onnx.load(path)
    helper.set_model_props(model, {"bevquant.calibration": value})
    path.write_bytes(model.SerializeToString())
    assert all(len(text) < 100 for text in texts(path, "tensorrt"))
    assert texts(path, "tensorrt")


def test_what_is_no_file_is_named_by_every_reader(tmp_path):
    whole = tmp_path / "whole.onnx"
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(b"\x08\x0a\x12\xff")
    calls = [
        lambda path: note_calibration(path, ["poor"]),
        lift_horizon_onnx,
        find_target("tensorrt10").commands,
        lambda path: autoware.join_autoware_onnx(path, [], whole),
        lambda path: autoware.behind_encoder(path, "x"),
        lambda path: run_autoware_onnx(path, None, None, None),
    ]
    for call in calls:
        for path in (cut, tmp_path / "none.onnx"):
            with pytest.raises(ValueError, match=path.name):
                call(path)
    assert not whole.exists()

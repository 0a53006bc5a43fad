"""Public functions name themselves and the argument if it is of a wrong kind."""

from __future__ import annotations

import importlib
import inspect
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bevquant_export import (
    compare_float_onnx,
    compare_qdq_onnx,
    compare_sparse_onnx,
    export_float_onnx,
    export_qdq_onnx,
    float_qdq_model,
    lift_horizon_onnx,
    lint_onnx,
    load_qdq_onnx,
    load_sparse_onnx,
    lower_to_portable,
    open_onnx,
)
from bevquant_fusion import fuse_model, fuse_parts
from bevquant_int8sim import IntegerModel, compare
from bevquant_qnn import compare_layers, quantize_model, round_weights, sensitivity
from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    calibrate,
    load_ranges,
    save_ranges,
)

PACKAGES = [
    importlib.import_module(f"bevquant_{name}")
    for name in ("export", "fusion", "int8sim", "qnn", "quantizers")
]
OF_MODELS = {
    name: getattr(package, name)
    for package in PACKAGES
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
    and next(iter(inspect.signature(getattr(package, name)).parameters), "") == "model"
}


def kind(value: object) -> str:
    return type(value).__name__


def entered(result: object) -> None:
    if isinstance(result, AbstractContextManager):
        result.__enter__()


NET = nn.Sequential(nn.Conv2d(3, 2, 1), TensorQuantizer(QuantDescriptor(calib_method="histogram")))
NET.eval()
X = torch.ones(1, 3, 4, 4)


@pytest.mark.parametrize("name", OF_MODELS)
@pytest.mark.parametrize("wrong", ["net.pt", Path("net.pt"), None, [NET], X, nn.Linear], ids=kind)
def test_models(name: str, wrong: Any, tmp_path: Path) -> None:
    function = OF_MODELS[name]
    given: dict[str, Any] = {
        "path": tmp_path / "a",
        "folder": tmp_path,
        "args": X,
        "example_inputs": X,
    }
    given |= {"batches": [X], "run": lambda model: None, "steps": 1, "budget": None}
    required = {
        one.name: given.get(one.name, ())
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    }
    with pytest.raises((TypeError, ValueError), match=rf"^(?s:.)*{name}: .*expected .*got"):
        entered(function(**{**required, "model": wrong}))


@pytest.mark.parametrize(
    "read",
    [
        load_sparse_onnx, load_qdq_onnx, lift_horizon_onnx, IntegerModel.load,
        lambda path: lint_onnx(path, "onnxruntime"),
        lambda path: lower_to_portable(path, "portable.onnx"),
        lambda path: load_qdq_onnx("a.onnx", float_file=path or nn.ReLU()),
        lambda path: save_ranges(NET, path),
        lambda path: load_ranges(NET, path),
        lambda path: calibrate(NET, [X], resume=path or nn.ReLU()),
        lambda path: export_qdq_onnx(NET, X, path, "onnxruntime"),
        lambda path: export_float_onnx(nn.ReLU(), X, path),
        lambda path: open_onnx(path),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrong", [nn.ReLU(), None, 3, ["a.onnx"]], ids=kind)
def test_paths(read: Any, wrong: Any) -> None:
    message = (
        r"^(\w|\.)+: (path|file|folder|source|float_file|resume): expected the path of .*, got"
    )
    with pytest.raises(TypeError, match=message):
        read(wrong)


@pytest.mark.parametrize("wrong", ["a.onnx", Path("a.onnx"), NET, None], ids=kind)
def test_results_of_other_functions(wrong: Any) -> None:
    for function in (compare_float_onnx, compare_qdq_onnx, compare_sparse_onnx):
        message = rf"^{function.__name__}: file: expected what \w+ returned, got"
        with pytest.raises(TypeError, match=message):
            function(wrong, NET, X)
    with pytest.raises(TypeError, match=r"^float_qdq_model: model: expected what load_qdq_onnx"):
        float_qdq_model(wrong)


USES = [
    lambda batches: calibrate(NET, batches),
    lambda batches: compare(NET, NET, batches),
    lambda batches: compare_layers(NET, NET, batches),
    lambda batches: round_weights(NET, batches),
    lambda batches: sensitivity(quantized(), batches),
]


def quantized() -> nn.Module:
    model = quantize_model(nn.Conv2d(3, 2, 1).eval(), example_inputs=X).model
    calibrate(model, [X])
    return model


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("wrong", [None, 3, X, {"image": X}, nn.ReLU(), "frames", Path()], ids=kind)
def test_batches_that_are_none(use: Any, wrong: Any) -> None:
    message = r"^\w+: batches: expected a list of batches, a loader .*, got"
    with pytest.raises(TypeError, match=message):
        use(wrong)


@pytest.mark.parametrize("wrong", ["a.bin", Path("a.bin"), None, NET, 3, X.numpy()], ids=kind)
def test_batches_of_other_things(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^calibrate: expected tensors for the forward of .*, got"):
        calibrate(NET, [wrong])
    with pytest.raises(TypeError, match=r"^fuse_model: expected tensors for the forward of"):
        fuse_model(nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).eval(), [wrong])


def test_arrays_and_whole_dicts_have_a_remedy() -> None:
    with pytest.raises(TypeError, match=r"got a ndarray; convert arrays with torch.as_tensor"):
        calibrate(NET, [X.numpy()])
    with pytest.raises(TypeError) as caught:
        calibrate(NET, [{"image": X, "label": 3}])
    (note,) = (note for note in caught.value.__notes__ if "whole dict" in note)
    assert "keys image, label" in note
    assert note.endswith("forward=lambda m, b: m(b['image'])")


def test_an_error_of_the_forward_itself_is_kept() -> None:
    class Reads(nn.Module):
        def forward(self, frame: object) -> torch.Tensor:
            raise LookupError(f"no frame {frame}")

    for frame in (X, object()):
        with pytest.raises(LookupError, match="no frame"):
            calibrate(nn.Sequential(Reads(), NET), [frame])


@pytest.mark.parametrize("wrong", [X, None, "x"], ids=kind)
def test_a_tuple_of_inputs(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^fuse_parts: example_inputs: expected a tuple of"):
        fuse_parts(NET, wrong, ["0"])


@pytest.mark.parametrize("config", [(X,), X, {"num_bits": 8}, "int8"])
def test_inputs_in_the_place_of_a_configuration(config: Any) -> None:
    place = "quantize_model: config: expected a QuantConfig (inputs go into example_inputs=), got "
    with pytest.raises(TypeError) as raised:
        quantize_model(nn.Conv2d(3, 2, 1), config)
    assert str(raised.value).startswith(place)

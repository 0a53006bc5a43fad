"""No false alarm: files that others wrote and engines take have no error."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bevquant_export import lint_onnx

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
quantization = pytest.importorskip("onnxruntime.quantization")
LIGHT = [
    "light_bvlc_alexnet", "light_densenet121", "light_inception_v1", "light_inception_v2",
    "light_resnet50", "light_shufflenet", "light_squeezenet", "light_vgg19", "light_zfnet512",
]  # fmt: skip
CONVERTED = [
    "test_Conv2d_groups", "test_Conv3d_stride_padding", "test_Conv1d_dilated",
    "test_ConvTranspose2d", "test_BatchNorm2d_eval", "test_MaxPool2d", "test_Linear",
    "test_PReLU_2d", "test_AvgPool2d_stride",
]  # fmt: skip


def errors(path, target):
    return [str(f) for f in lint_onnx(path, target) if f.severity == "error"]


@pytest.mark.parametrize("name", LIGHT)
def test_light_models_of_onnx(name):
    path = DATA / "light" / f"{name}.onnx"
    assert path.is_file()
    assert errors(path, "onnxruntime") == []


@pytest.mark.parametrize("name", CONVERTED)
def test_files_that_pytorch_converted(name):
    path = DATA / "pytorch-converted" / name / "model.onnx"
    assert path.is_file()
    assert errors(path, "tensorrt") == errors(path, "onnxruntime") == []


def float_file(path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.rand(1, 3, 8, 8),), path, dynamo=False, input_names=["x"])
    return path


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_the_exporter_of_pytorch(target, tmp_path):
    assert errors(float_file(tmp_path / "a.onnx"), target) == []


class Reader(quantization.CalibrationDataReader):
    def __init__(self):
        self.rows = iter([{"x": np.random.default_rng(0).random((1, 3, 8, 8), np.float32)}] * 2)

    def get_next(self):
        return next(self.rows, None)


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantize_static_of_onnxruntime(per_channel, tmp_path):
    source, made = float_file(tmp_path / "a.onnx"), tmp_path / "b.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_static(
            source, made, Reader(), per_channel=per_channel,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QUInt8,
        )  # fmt: skip
    assert errors(made, "onnxruntime") == []


@pytest.mark.parametrize("target", ["libspconv", "autoware"])
def test_files_of_our_own(target, files):
    assert [str(finding) for finding in lint_onnx(files[target], target)] == []


def test_the_page_is_made_of_every_exhibit(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import site_hook

    found = site_hook.exhibits()
    threads = [row["thread"] for row in found]
    assert len(threads) >= 50
    assert len(set(threads)) == len(threads)
    page = site_hook.symptoms_page()
    assert [row for row in found if row["thread"] not in page or row["symptom"] not in page] == []
    # What is said is a rule of the linter, or cause and command in the docstring.
    assert [row for row in found if "rule" not in row and not row.get("command")] == []

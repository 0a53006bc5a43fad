"""A file is run before it gets its name, by whatever there is, and a wrong one gets none."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from bevquant_export import TensorDifference, compare_qdq_onnx, export_qdq_onnx
from bevquant_int8sim import IntegerModel, simulate
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate

PROFILES = ["tensorrt", "onnxruntime", "horizon", "openvino"]
NEITHER = ("openvino", "onnxruntime")


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As where libraries are not installed: importing them fails, and no search finds them."""

    def away(*libraries: str) -> None:
        for library in libraries:
            monkeypatch.setitem(sys.modules, library, None)

    return away


def net_of_two() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Sigmoid()).eval()
    net = quantize_model(net, example_inputs=x).model
    calibrate(net, [x], method="max", progress=False)
    return net, x


def note(path: Path) -> str:
    return next(p.value for p in onnx.load(path).metadata_props if p.key == "verified")


def unnoted(path: Path) -> bytes:
    proto = onnx.load(path)
    kept = [p for p in proto.metadata_props if p.key != "verified"]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    return proto.SerializeToString(deterministic=True)


def with_other_weights(content: bytes) -> bytes:
    """The file with one weight tensor turned round: right in form, wrong in numbers."""
    proto = onnx.load_from_string(content)
    # The last of several values: the first layer is not the one to blame.
    tensor = [t for t in proto.graph.initializer if len(t.dims) > 1 or np.prod(t.dims) > 8][-1]
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(-values), tensor.name))
    return proto.SerializeToString()


@pytest.mark.parametrize(
    ("profile", "missing", "runner"),
    [
        ("tensorrt", (), "onnxruntime"),
        ("openvino", ("openvino",), "onnxruntime"),
        *((profile, NEITHER, "onnx.reference") for profile in PROFILES),
    ],
)
def test_whatever_is_installed_runs_a_dense_file(
    hide: Callable[..., None], tmp_path: Path, profile: str, missing: tuple[str, ...],
    runner: str,
) -> None:  # fmt: skip
    pytest.importorskip("onnxruntime")
    model, x = net_of_two()
    export_qdq_onnx(model, x, tmp_path / "all.onnx", profile)
    hide(*missing)
    file = export_qdq_onnx(model, x, tmp_path / "some.onnx", profile)
    assert note(tmp_path / "some.onnx") == file.verified
    assert file.verified.split()[0] == runner
    assert unnoted(tmp_path / "some.onnx") == unnoted(tmp_path / "all.onnx")


@pytest.mark.parametrize(
    ("profile", "missing"),
    [("tensorrt", ()), ("openvino", ("openvino",)), ("horizon", NEITHER), ("onnxruntime", NEITHER)],
)
def test_a_wrong_dense_file_gets_no_name(
    hide: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    profile: str,
    missing: tuple[str, ...],
) -> None:
    export = importlib.import_module("bevquant_export.dense._export")
    real = export.verified
    damaged = lambda file, content, *rest, **more: real(  # noqa: E731
        file, with_other_weights(content), *rest, **more
    )
    monkeypatch.setattr(export, "verified", damaged)
    hide(*missing)
    model, x = net_of_two()
    with pytest.raises(ValueError, match=r"export_qdq_onnx: .*nothing was written"):
        export_qdq_onnx(model, x, tmp_path / "n.onnx", profile)
    assert list(tmp_path.iterdir()) == []
    export_qdq_onnx(model, x, tmp_path / "n.onnx", profile, verify=False)
    assert note(tmp_path / "n.onnx") == "no"


def test_an_integer_model_is_written_as_the_model_it_was_made_of(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    integers = simulate(quantized, x[:1])  # on a smaller example
    files = [
        export_qdq_onnx(model, x, tmp_path / f"{i}.onnx")
        for i, model in enumerate((quantized, integers))
    ]
    assert files[0].path.read_bytes() == files[1].path.read_bytes()
    assert files[1].integer_model is integers
    assert compare_qdq_onnx(files[1], integers, x) == compare_qdq_onnx(files[0], quantized, x)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x)


def test_inputs_of_another_type_or_size_than_the_files_are_refused(tmp_path: Path) -> None:
    net, x = net_of_two()
    file = export_qdq_onnx(net, x, tmp_path / "n.onnx", "onnxruntime", verify=False)
    integers = simulate(net, x)
    starts = r"^compare_qdq_onnx: input input is "
    with pytest.raises(ValueError, match=starts + r"float16, and n\.onnx takes float32"):
        compare_qdq_onnx(file, integers, x.half())
    sizes = list(x.shape)
    taken = re.escape(f", and n.onnx takes {sizes}; export again with a frame like this one")
    for other, remedy in (
        (torch.cat([x, x]), ", or with dynamic_batch=True for every batch"),
        (x[..., 1:], ""),
    ):
        wrong = re.escape(f"of shape {list(other.shape)}")
        with pytest.raises(ValueError, match=f"{starts}{wrong}{taken}{remedy}$"):
            compare_qdq_onnx(file, integers, other)
    free = export_qdq_onnx(net, x, tmp_path / "m.onnx", "onnxruntime", dynamic_batch=True)
    assert not any(row.unexplained for row in compare_qdq_onnx(free, net, torch.cat([x, x])))


def test_an_integer_model_that_no_file_can_be_written_from(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    config = QuantConfig(quantize_add=False)
    quantized = quantize_model(Sum().eval(), config, example_inputs=x).model
    calibrate(quantized, [x])
    integers = simulate(quantized, x)
    with pytest.raises(ValueError, match=r"adds accumulators; .* simulate\(…, integer_sums=True\)"):
        export_qdq_onnx(integers, x, tmp_path / "n.onnx", "onnxruntime", integer_sums=True)
    integers.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="was loaded from a folder; give the calibrated model"):
        export_qdq_onnx(IntegerModel.load(tmp_path / "saved"), x, tmp_path / "n.onnx")
    assert not (tmp_path / "n.onnx").exists()


def test_an_integer_model_without_sums_has_none_to_give_ranges_of(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    quantized = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1)).eval(), example_inputs=x).model
    calibrate(quantized, [x])
    integers = simulate(quantized, x, integer_sums=True)
    file = export_qdq_onnx(integers, x, tmp_path / "n.onnx", "onnxruntime", integer_sums=True)
    assert file.sum_ranges == {}


def test_an_integer_model_that_rounds_otherwise_has_no_file(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    quantized = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1)).eval(), example_inputs=x).model
    calibrate(quantized, [x])
    with pytest.raises(ValueError, match=r"rounds otherwise than files do .*half_up"):
        export_qdq_onnx(simulate(quantized, x, rounding="half_up"), x, tmp_path / "n.onnx")


def test_a_file_says_in_words_what_it_is_and_who_ran_it(
    hide: Callable[..., None], tmp_path: Path
) -> None:
    net, x = net_of_two()
    file = export_qdq_onnx(net, x, tmp_path / "a.onnx")
    first, *floats, last = str(file).splitlines()
    assert (
        first
        == f"{file.path} for tensorrt, operator set 13: {len(file.integers)} quantized tensors"
    )
    assert any("sigmoid" in line for line in floats)
    assert last.startswith(f"run by {file.verified}: 0 of ")
    hide("onnxruntime", "openvino")
    assert str(export_qdq_onnx(net, x, tmp_path / "b.onnx", verify=False)).endswith("is unknown")
    moved = TensorDifference("0", "conv", "t", 1000, 3, 1, 2)
    assert str(replace(file, verified="onnxruntime 1", differences=(moved,))).endswith(
        "run by onnxruntime 1: 3 of 1,000 integers are not the model's, at most 1 step off; 2 "
        "lie between the two"
    )

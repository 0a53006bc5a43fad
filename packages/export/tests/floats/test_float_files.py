"""Float modules through torch's exporter: what the file says, makes and refuses."""

from __future__ import annotations

import importlib.abc
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from bevquant_export import (
    compare_float_onnx,
    export_float_onnx,
    export_qdq_onnx,
    lint_onnx,
    open_onnx,
)
from bevquant_export.floats import _torch_exporter
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Attending(nn.Module):
    """What stays float in a detector: attention, a softmax, a choice of the best."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        cells = self.conv(x).flatten(2)
        best = cells.amax(1).topk(4).indices
        queries = cells.gather(2, best[:, None].expand(-1, 8, -1)).permute(2, 0, 1)
        keys = cells.permute(2, 0, 1)
        made = self.norm(self.attention(queries, keys, keys, need_weights=False)[0])
        return {"best": best, "made": made * weight.softmax(0)}


@pytest.fixture(scope="module", autouse=True)
def _exporter(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The exporter's own imports take seconds: once, and in no test."""
    export_float_onnx(nn.ReLU().eval(), torch.ones(1), tmp_path_factory.mktemp("a") / "net.onnx")


@pytest.fixture
def net() -> Attending:
    torch.manual_seed(0)
    return Attending().eval()


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(1, 3, 6, 6), torch.randn(8)


def test_onnxruntime_makes_what_torch_makes(
    net: Attending, inputs: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    file = export_float_onnx(net, inputs, tmp_path / "net.onnx")
    assert file.inputs == {"x": (1, 3, 6, 6), "weight": (8,)}
    assert file.outputs == {"best": (1, 4), "made": (4, 1, 8)}
    session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    other = torch.randn(1, 3, 6, 6), torch.randn(8)
    best, made = session.run(
        ["best", "made"], {n: t.numpy() for n, t in zip(file.inputs, other, strict=True)}
    )
    with torch.no_grad():
        wanted = net(*other)
    np.testing.assert_array_equal(best, wanted["best"])
    np.testing.assert_allclose(made, wanted["made"], atol=1e-5)
    for difference in compare_float_onnx(file, net, other):
        assert difference.relative < 1e-5


def test_the_file_is_named_after_modules_and_holds_nothing_of_this_host(
    net: Attending, inputs: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    file = export_float_onnx(
        net, inputs, tmp_path / "net.onnx", input_names=["a", "b"], output_names=["p", "q"]
    )
    proto = onnx.load(file.path)
    onnx.checker.check_model(proto, full_check=True)
    assert [port.name for port in proto.graph.input] == ["a", "b"]
    assert [port.name for port in proto.graph.output] == ["p", "q"]
    names = [node.name for node in proto.graph.node]
    assert len(set(names)) == len(names)
    assert {"conv.Conv", "norm.LayerNormalization", "attention.Softmax"} <= set(names)
    assert "conv.weight" in {c.name for c in proto.graph.initializer}
    content = file.path.read_bytes()
    assert b"site-packages" not in content
    assert str(Path(__file__).parent).encode() not in content
    for target in ("tensorrt", "onnxruntime"):
        assert lint_onnx(file.path, target) == []


def test_two_exports_are_the_same_bytes(tmp_path: Path) -> None:
    net, x = nn.LayerNorm(4).eval(), torch.ones(2, 4)
    first, second = (export_float_onnx(net, x, tmp_path / f"{i}.onnx") for i in range(2))
    assert first.path.read_bytes() == second.path.read_bytes()


class Silent(nn.Module):
    """Makes one thing while it is traced, another when it runs."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (1.0 if torch.compiler.is_exporting() else 2.0)


def test_a_file_that_makes_something_else_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(ValueError, match=r"output output of Silent other than torch.*Nothing"):
        export_float_onnx(Silent().eval(), torch.ones(3), path)
    assert list(tmp_path.iterdir()) == []
    file = export_float_onnx(Silent().eval(), torch.ones(3), path, tolerance=None)
    assert file.differences == ()
    (found,) = compare_float_onnx(file, Silent().eval(), torch.ones(3))
    assert found.largest == 1


def test_not_a_number_is_equal_to_itself_alone(tmp_path: Path) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    file = export_float_onnx(Root().eval(), torch.tensor([-1.0, 4.0]), tmp_path / "net.onnx")
    assert file.differences[0].largest == 0


class Modes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mode().values


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x > 2).any() else x


def quantized(x: Tensor) -> nn.Module:
    model = quantize_model(nn.Sequential(nn.Linear(3, 3)).eval(), example_inputs=x).model
    calibrate(model, [x])
    return model.eval()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda x: nn.Linear(3, 3).train(), {}, r"the module is in training mode; call eval"),
        (quantized, {}, r"0\._input_quantizer quantizes.*export_qdq_onnx"),
        (lambda x: Modes().eval(), {}, r"cannot write Modes: aten\.mode has no form"),
        (lambda x: Decides().eval(), {}, r"values of a tensor \(.*\.py:\d+\)\..*torch\.where"),
        (lambda x: nn.ReLU().eval(), {"opset": 13}, r"opset=13: expected 18 or more"),
        (lambda x: nn.ReLU().eval(), {"input_names": []}, r"input_names=\[\]: expected 1"),
        (lambda x: nn.ReLU().eval(), {"output_names": ["a", "a"]}, r"expected 1 different names"),
    ],
)
def test_refusals(make: object, options: dict, message: str, tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=message):
        export_float_onnx(make(x), x, tmp_path / "net.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_module_or_tensor(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a module, got builtin"):
        export_float_onnx(torch.relu, torch.ones(1), tmp_path / "net.onnx")

    class Product(nn.Module):
        def forward(self, x: Tensor, factor: int) -> Tensor:
            return x * factor

    with pytest.raises(ValueError, match=r"argument 1 is int; expected tensors alone"):
        export_float_onnx(Product().eval(), (torch.ones(1), 3), tmp_path / "net.onnx")
    with pytest.raises(ValueError, match=r"there is no folder .*absent; make it first"):
        export_float_onnx(nn.ReLU().eval(), torch.ones(1), tmp_path / "absent" / "net.onnx")


@pytest.mark.parametrize("library", ["onnxscript", "onnxruntime"])
def test_a_missing_library_is_named_with_the_command(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"pip install {library}"):
        export_float_onnx(nn.ReLU().eval(), torch.ones(1), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


class _Scaled(nn.Module):
    """A division by numbers of points that torch's exporter writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.layer(x / n.type_as(x).view(-1, 1))


class _Refused(importlib.abc.MetaPathFinder):
    """Import hooks refuse a package where it is not installed, or not allowed."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.split(".")[0] in ("onnxscript", "onnxruntime"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_library_is_no_missing_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(2, 8), torch.tensor([3, 5])
    model = quantize_model(_Scaled().eval(), example_inputs=x).model
    calibrate(model, [x])
    for library in ("onnxscript", "onnxruntime"):
        for name in [name for name in sys.modules if name.split(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Refused(), *sys.meta_path])
    reason = r"type_as .*'onnxscript'\): pip install onnxscript"
    with pytest.raises(ImportError, match=reason) as told:
        export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert "replace it" not in str(told.value)
    # What torch's exporter does not write is written, and ONNX's reference checks it.
    layer, rows = nn.Sequential(nn.Linear(8, 8)).eval(), torch.rand(2, 8)
    model = quantize_model(layer, example_inputs=rows).model
    calibrate(model, [rows])
    assert export_qdq_onnx(model, rows, tmp_path / "plain.onnx", "onnxruntime").path.exists()


def test_a_package_that_the_exporter_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(*args: object, **kwargs: object) -> None:
        raise RuntimeError("conversion failed") from ModuleNotFoundError(
            "No module named 'onnx_ir'"
        )

    monkeypatch.setattr(torch.onnx, "export", exported)
    with pytest.raises(ImportError, match=r"'onnx_ir'\): pip install onnxscript"):
        export_float_onnx(nn.ReLU().eval(), torch.ones(1), tmp_path / "net.onnx")


def test_torchs_table_is_read_once_and_everybody_gets_a_copy() -> None:
    reads: list[int] = []

    def read(opset: int) -> SimpleNamespace:
        reads.append(opset)
        return SimpleNamespace(functions={"aten::add": ["Add"]})

    _torch_exporter._forms(read, 18).functions["aten::add"].clear()
    assert _torch_exporter._forms(read, 18).functions == {"aten::add": ["Add"]}
    assert _torch_exporter._forms(read, 20).functions
    assert reads == [18, 20]


@pytest.mark.parametrize(
    "guarded",
    [
        lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-9),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-10),
        lambda x: x / (x.abs().amax(-1, keepdim=True) - -1e-12),
        lambda x: (x * 1.000004 - x) * 1e6,
    ],
)
def test_constants_near_zero_and_one_are_written(guarded, tmp_path):
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return guarded(x)

    x = torch.randn(3, 4)
    file = export_float_onnx(Net().eval(), x, tmp_path / "net.onnx")
    x[1] = 0
    (got,) = open_onnx(file.path)({"x": x}).values()
    torch.testing.assert_close(got, guarded(x))


def test_a_file_of_half_precision_is_compared(tmp_path):
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval(), torch.randn(2, 4)
    file = export_float_onnx(net, x, tmp_path / "net.onnx", half=True, frames=[(x,)])
    assert {port.type for port in onnxruntime.InferenceSession(file.path).get_inputs()} == {
        "tensor(float16)"
    }
    (found,) = compare_float_onnx(file, net, -x)
    assert 0 < found.relative < 2**-6
    (wrong,) = compare_float_onnx(file, nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval(), -x)
    assert wrong.relative > 2**-6

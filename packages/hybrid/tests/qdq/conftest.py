"""Prepared models, their files, and what onnxruntime makes of these."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_hybrid.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    get_default_qat_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)

PROFILES = ("tensorrt", "onnxruntime", "horizon")


@pytest.fixture(scope="session")
def export() -> Any:
    """The package that writes the files."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return pytest.importorskip("bevquant_export", reason="bevquant-export is not installed")


class Between(nn.Module):
    """A part of a model between stubs."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.net = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.net(self.quant(x)))


@pytest.fixture(scope="session")
def between() -> Callable[..., nn.Module]:
    """Parts between stubs, with batch norms that have seen something."""

    def make(*parts: nn.Module) -> nn.Module:
        made = Between(*parts).eval()
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.2)
                module.running_var.uniform_(0.5, 2)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
        return made

    return make


@pytest.fixture(scope="session")
def prepared() -> Callable[..., nn.Module]:
    """A model that has seen a few batches, and trains quantized."""

    def make(net: nn.Module, x: Tensor, qconfigs: Any = None, **settings: Any) -> nn.Module:
        qconfigs = {"": get_default_qat_qconfig(), **(qconfigs or {})}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # layers that stay float on purpose
            qat = prepare_qat_fx(net, qconfigs, **settings).eval()
        for batch in (x, torch.randn_like(x)):
            qat(batch)
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        return qat

    return make


@pytest.fixture
def found(export: Any, tmp_path: Path) -> Callable[..., Any]:
    """A file, the mismatches of each operation, and the ids of what the linter finds."""

    def write(
        model: nn.Module, x: Any, profile: str, **settings: Any
    ) -> tuple[Any, dict[str, tuple[int, int, int]], set[str]]:
        path = tmp_path / f"{profile}.onnx"
        file = export.export_qdq_onnx(model, x, path, profile, **settings)
        counted: dict[str, tuple[int, int, int]] = {}
        for d in export.compare_qdq_onnx(file, model, x):
            different, elements, largest = counted.get(d.op, (0, 0, 0))
            counted[d.op] = different + d.different, elements + d.elements, max(largest, d.largest)
        return file, counted, {finding.id for finding in export.lint_onnx(path, profile)}

    return write


@pytest.fixture
def operators(export: Any, tmp_path: Path) -> Callable[[Any], Counter[str]]:
    """What onnxruntime makes of a file, all optimisations on."""

    def count(file: Any) -> Counter[str]:
        import onnx
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        onnxruntime.InferenceSession(str(file.path), options, ["CPUExecutionProvider"])
        return Counter(n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node)

    return count

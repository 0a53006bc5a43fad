"""Calibrated nets, and what onnxruntime makes of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from bevquant_export import QdqFile
from bevquant_fusion import fuse_model
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate

Calibrated = Callable[..., nn.Module]
Run = Callable[..., tuple[list[Tensor], Counter[str]]]


@pytest.fixture
def calibrated() -> Calibrated:
    """Fold, quantize and calibrate a float net on one input."""

    def make(net: nn.Module, *inputs: Tensor, **config: Any) -> nn.Module:
        if any("BatchNorm" in type(module).__name__ for module in net.modules()):
            net = fuse_model(net.eval(), inputs).model
        made = quantize_model(net.eval(), QuantConfig(**config), example_inputs=inputs).model.eval()
        calibrate(made, [inputs], method="max")
        return made

    return make


@pytest.fixture(scope="module")
def once() -> Callable[[str, Callable[[], Any]], Any]:
    """What is made for the first case of a name, such as a calibrated net, serves all its profiles.

    Most of a case's time goes into following its net, which nobody changes.
    """
    kept: dict[str, Any] = {}

    def made(name: str, make: Callable[[], Any]) -> Any:
        if name not in kept:
            kept[name] = make()
        return kept[name]

    return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Outputs of a file, and the operators that onnxruntime makes of it."""

    def execute(
        file: QdqFile, *inputs: Tensor, optimised: bool = True
    ) -> tuple[list[Tensor], Counter[str]]:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(
            str(file.path), options, providers=["CPUExecutionProvider"]
        )
        given = {n: np.asarray(x) for n, x in zip(file.inputs, inputs, strict=True)}
        made = [torch.from_numpy(y) for y in session.run(list(file.outputs), given)]
        graph = onnx.load(tmp_path / "optimised.onnx").graph
        return made, Counter(node.op_type for node in graph.node)

    return execute

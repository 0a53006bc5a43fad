"""How often a run walks through a frame: what costs most of its time at full size."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from bpu_split import small_frame
from torch import Tensor, nn

from bevfusion.quantization import in_integers
from bevfusion_quant.pages import EvaluatedRun
from bevfusion_quant.ptq import PtqConfig, run_evaluate, run_ptq
from bevquant_int8sim.model import _reference

if any(importlib.util.find_spec(name) is None for name in ("spconv", "onnxruntime", "onnxscript")):
    pytest.skip("spconv, onnxruntime or onnxscript is not installed", allow_module_level=True)


class Passes:
    """Counts who runs the first convolution of the images on all cameras of a frame."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cameras: int) -> None:
        self.by_model: Counter[str] = Counter()
        self.computed = 0
        hook = nn.modules.module.register_module_forward_pre_hook
        self._handle = hook(lambda module, args: self._note(module, args, cameras))
        step = _reference.GraphRun._computed

        def computed(run: Any, node: Any, beside: Any) -> Any:
            if run._returned is None and not run.channels_last:
                weights = [run.values.get(n) for n in node.all_input_nodes]
                self.computed += any(_is_stem(w) for w in weights) and "conv" in str(node.target)
            return step(run, node, beside)

        monkeypatch.setattr(_reference.GraphRun, "_computed", computed)

    def _note(self, module: nn.Module, args: Any, cameras: int) -> None:
        weight = getattr(module, "weight", None)
        if torch.compiler.is_compiling():  # a capture would keep the question below as a guard
            return
        if isinstance(module, nn.Conv2d) and _is_stem(weight) and len(args[0]) == cameras:
            self.by_model[type(module).__name__] += 1

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def _is_stem(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.ndim == 4 and weight.shape[1] == 3


def test_a_frame_is_walked_once_for_all_that_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("draw", "write_page"):  # what draws walks no frame
        monkeypatch.setattr(EvaluatedRun, name, lambda *_: None)
    frame = small_frame()
    config = PtqConfig(config="tiny", branch="all", method="max", cameras=names(frame))
    with Passes(monkeypatch, len(frame.cameras)) as passes:
        made = run_ptq(
            [frame], config, runs=tmp_path, name="all", integers="auto", export="tensorrt"
        )
    assert made.exported is not None
    assert not made.exported.failures
    # The random weights' fit, which is also the model before folding, and float beside quantized.
    assert passes.by_model["Conv2d"] == 2
    # Calibration, and quantized: layers, stages, detections, integers and files look at one pass.
    assert passes.by_model["QuantConv2d"] == 2
    assert passes.computed == 0

    frames = [small_frame(seed) for seed in (0, 1)]
    with Passes(monkeypatch, len(frame.cameras)) as passes:
        result = run_evaluate(tmp_path / "all", frames, runs=tmp_path, integers="auto")
    assert passes.by_model == {"Conv2d": 2, "QuantConv2d": 2}
    assert passes.computed == 0
    assert result.simulation is not None
    assert any(in_integers(row) for row in result.simulation.layers)


def names(frame: Any) -> tuple[str, ...]:
    return tuple(camera.name for camera in frame.cameras)

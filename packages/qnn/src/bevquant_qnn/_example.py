"""Running a model on example inputs without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bevquant_graph import called, running
from bevquant_graph import evaluation as in_evaluation
from bevquant_quantizers import TensorQuantizer


def run(model: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the model; a note in an error says whether the model was changed."""
    advice = "It is as it was before; give inputs that it takes."
    with running(model, "quantize_model", advice):
        return called(model, args, kwargs)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, quantizers bypassed; each put back as it was."""
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    disabled = [(quantizer, quantizer._disabled) for quantizer in quantizers]
    try:
        for quantizer in quantizers:
            quantizer.disable()
        # Inference tensors do not count in-place changes, which the analysis has to see.
        with in_evaluation(model), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for quantizer, flag in disabled:
            quantizer._disabled = flag

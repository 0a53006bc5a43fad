"""Running a model on example inputs without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bevquant_graph import evaluation as in_evaluation
from bevquant_graph import is_sparse_tensor, running
from bevquant_qnn._sparse_tensor import with_features
from bevquant_quantizers import TensorQuantizer


def fresh(value: Any) -> Any:
    """Give a sparse input its own rulebook cache: spconv refuses a key that is already there."""
    if not is_sparse_tensor(value):
        return value
    copy = with_features(value, value.features)
    if hasattr(copy, "indice_dict"):
        copy.indice_dict = dict(value.indice_dict)
    return copy


def run(model: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the model; an error says in a note what became of the model."""
    advice = "It is as it was before; give inputs that it takes."
    with running(model, "quantize_model", advice):
        return model(*args, **kwargs)


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

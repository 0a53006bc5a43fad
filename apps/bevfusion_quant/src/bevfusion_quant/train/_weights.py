"""Trained weights as a file that `--weights` takes, with where they come from inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_quantizers.documents import write_tensors

__all__ = ["WEIGHTS", "stored_weights", "write_weights"]

WEIGHTS = "weights.safetensors"
_KEY = "bevfusion-quant"


def stored_weights(model: nn.Module, *, half: bool) -> dict[str, Tensor]:
    """The model's state dict as it is stored.

    Args:
        model: On the CPU.
        half: Weights with more than one axis become float16. Norms, biases and the view transform's
            geometry stay as they are: they are few, a variance may exceed 65504, and the geometry
            must be exact.
    """
    learned = {n for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1}
    return {
        name: value.to(torch.float16) if half and name in learned else value.clone()
        for name, value in model.state_dict().items()
    }


def write_weights(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write safetensors whole, with `about` as JSON in the file's metadata."""
    write_tensors(path, tensors, {_KEY: json.dumps(about)})

"""Where a run computes."""

from __future__ import annotations

from typing import Any

import torch

from bevfusion.model import Batch
from bevfusion_quant._errors import InputError
from bevfusion_quant.ranks import current_ranks

__all__ = ["moved", "usable_device"]


def usable_device(name: str) -> torch.device:
    """The device, tried; "cuda" is each rank's own GPU, where it has one.

    Raises:
        InputError: torch does not know it, or cannot use it here.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and current_ranks().gpu is not None:
            device = torch.device("cuda", current_ranks().gpu)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}): use cpu, or "
            "install a torch that drives the device"
        ) from error
    return device


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device."""
    tensors: dict[str, Any] = {
        n: v.to(device) for n, v in batch._asdict().items() if isinstance(v, torch.Tensor)
    }
    return batch._replace(**tensors)

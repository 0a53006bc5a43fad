"""Histograms of tensors for TensorBoard, where it is installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["write_histograms"]


def write_histograms(
    titles: Sequence[str],
    tensors: Sequence[tuple[Tensor, int]],
    folder: str | os.PathLike[str] | None,
    per_channel: bool = False,
) -> None:
    """Write one histogram per tensor, or one per channel of it.

    Args:
        titles: One for each tensor.
        tensors: Values, and the axis of their channels; −1 for axis 1.
        folder: Of the log; None for TensorBoard's own choice.
        per_channel: One histogram per channel.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "with_tensorboard=True needs TensorBoard: pip install tensorboard"
        ) from error
    make: Any = SummaryWriter
    with make(None if folder is None else os.fspath(folder)) as writer:
        for title, (tensor, axis) in zip(titles, tensors, strict=True):
            values = tensor.detach().double()
            if values.numel() == 0 or not bool(values.isfinite().all()):
                continue
            if not per_channel or values.dim() < 2:
                writer.add_histogram(title, values)
                continue
            for channel, part in enumerate(values.unbind(axis if axis >= 0 else 1)):
                writer.add_histogram(f"{title}/{channel}", part)

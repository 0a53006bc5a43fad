"""How far the model in training is from the float model, on the frame at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bevquant_qnn import distillation_loss

if TYPE_CHECKING:
    from bevfusion.model import Batch, BEVFusion

__all__ = ["Distiller"]


class Distiller:
    """Compares the decoder's map and the heat map, in which cells mean the same in both models.

    Behind them each model looks at queries of its own choice, so their boxes cannot be compared
    one by one.

    Args:
        student: In training.
        teacher: The float model; put in eval mode.
        weight: Of the distance in the loss.
    """

    def __init__(self, student: BEVFusion, teacher: BEVFusion, weight: float) -> None:
        self._teacher, self._weight = teacher.eval(), weight
        self._maps: dict[str, Any] = {}
        self._handles = []
        for name, model in (("student", student), ("teacher", teacher)):
            decoder = model.decoder
            assert decoder is not None
            self._handles.append(decoder["neck"].register_forward_hook(self._keeper(name)))

    def loss(self, batch: Batch, outputs: dict[str, Tensor]) -> Tensor:
        """Weight · mean of Σ(q − f)²/Σf² of both maps, for what the student just answered.

        Args:
            batch: What it was called with.
            outputs: What it answered, with gradient.
        """
        with torch.no_grad():
            wanted = self._teacher(*batch)
        pairs = [(self._maps[name], found["dense_heatmap"])
                 for name, found in (("student", outputs), ("teacher", wanted))]  # fmt: skip
        self._maps.clear()
        return self._weight * distillation_loss(*pairs)

    def stop(self) -> None:
        """Keep no more maps."""
        for handle in self._handles:
            handle.remove()

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._maps[name] = output

        return keep

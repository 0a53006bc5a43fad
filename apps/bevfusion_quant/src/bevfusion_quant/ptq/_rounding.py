"""Weights rounded by what their layers compute, and biases corrected, on the frames of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bevfusion_quant.ptq._stages import run_batch

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevfusion_quant.ptq._batches import FrameBatches
    from bevfusion_quant.ptq._config import PtqConfig
    from bevquant_qnn import RoundingResult

__all__ = ["ROUNDING_FRAMES", "round_branch", "rounding_record"]

ROUNDING_FRAMES = 16
"""Most frames that rounding reads: it holds all of them, and runs each of them for each layer."""


def round_branch(model: BEVFusion, batches: FrameBatches, config: PtqConfig) -> RoundingResult:
    """Round the weights of a calibrated model and correct its biases, in place.

    `bevquant_qnn.round_weights` on the first 16 frames at most.

    Args:
        model: Calibrated, batch norms folded.
        batches: The calibration frames.
        config: Says which of the two.

    Raises:
        ValueError: A layer's input is NaN or infinite.
    """
    from bevquant_qnn import round_weights

    return round_weights(
        model,
        batches.head(min(len(batches), ROUNDING_FRAMES)),
        rounding=config.rounding,
        correct_bias=config.bias_correction,
        forward=run_batch,
    )


def rounding_record(result: RoundingResult) -> dict[str, Any]:
    """Each layer's relative output error, rounded to the nearest and now; what was left and why."""
    return {
        "layers": [
            {"path": layer.path, "nearest": layer.nearest, "error": layer.error}
            for layer in result.layers
        ],
        "skipped": [{"path": path, "reason": reason} for path, reason in result.skipped],
    }

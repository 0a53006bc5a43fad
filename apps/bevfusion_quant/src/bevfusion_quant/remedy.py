"""Layers that would make a useless result usable if they stayed in float."""

from __future__ import annotations

from pathlib import Path

from bevfusion.evaluation import FrameBatches
from bevfusion.model import Detector
from bevfusion_quant.options import PtqConfig
from bevfusion_quant.pages._content import known_levels
from bevquant_qnn import USELESS_DB, LayerRow, PlannedGroup, PrecisionPlan, float_remedy

REMEDY_FILE = "remedy.json"
_FRAMES = 4


def find_remedy(
    model: Detector,
    layers: list[LayerRow],
    batches: FrameBatches,
    config: PtqConfig,
    plan: PrecisionPlan | None,
    folder: Path,
) -> str:
    """Text with the layers, their gain and the option that leaves them in float; or empty."""
    # The search runs the model on the first frames many times: for useless results alone.
    if not any(layer == "output" and level < USELESS_DB for level, layer in known_levels(layers)):
        return ""
    remedy = float_remedy(model, batches.head(min(_FRAMES, len(batches))))
    if remedy is None or not remedy.helps:
        return ""
    if config.weight_bits != 8:  # a plan says the bits of all weights
        return f"{remedy.finding}: --exclude {' '.join(remedy.layers)}"
    base = plan or PrecisionPlan.by_hand(model, {})
    in_float = frozenset(remedy.layers)
    groups = [
        PlannedGroup(group.modules, "float") if in_float.intersection(group.modules) else group
        for group in base
    ]
    # Other layers keep the run's precisions.
    PrecisionPlan(tuple(groups)).save(folder / REMEDY_FILE)
    return f"{remedy.finding}: quantize again with --plan {REMEDY_FILE} of this run's folder"

"""A small model split for a BPU, for tests that look at its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bev_scenes import street_frame
from bevfusion.deployment import SplitModel
from bevfusion.model import CONFIGS, Batch, BEVFusion, build_model, random_weights
from bevfusion_quant.bpu import BpuConfig, Models, SplitUnits, for_march
from bevfusion_quant.ptq import FrameBatches
from bevfusion_quant.stages import built_parts
from bevquant_hybrid_tools.forms import Forms

__all__ = ["TINY", "Split", "small_frame", "split"]

TINY = CONFIGS["tiny"]


@cache
def small_frame(seed: int = 0) -> Any:
    """A street seen by few beams: the model is the tiny one, the scan is quick to make."""
    return street_frame(seed, size="tiny", beams=8, sweeps=1, azimuth_steps=200, cameras="tiny")


@dataclass(eq=False)
class Split:
    """Model, its units' forms and the batches they were calibrated on."""

    model: BEVFusion
    units: SplitUnits
    forms: dict[str, Forms]
    models: Models
    batches: FrameBatches

    def values(self, form: SplitModel, batch: Batch | None = None) -> dict[str, Any]:
        """Every value that the model tells of on one batch."""
        told: dict[str, Any] = {}

        def note(name: str, value: Tensor) -> None:
            told.setdefault(name, value)

        with torch.no_grad():
            told["output"] = form(*(batch or self.batches[0]), note=note)
        return told


def split(seeds: tuple[int, ...] = (0,), **settings: Any) -> Split:
    """Build, calibrate on streets of these seeds, and convert."""
    config = BpuConfig(config="tiny", **settings)
    model = build_model(TINY, built_parts(config.branch))
    batches = FrameBatches([small_frame(seed) for seed in seeds], TINY, model)
    random_weights(model, *batches[0], seed=0)
    with for_march(config.march):
        units = SplitUnits(model, config)
        calibrated = units.calibrating()
        units.run(calibrated, batches)
        forms = units.finished(calibrated)
    return Split(model, units, forms, units.models(forms), batches)

"""Each group of layers alone quantized, and alone in float, on frames."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, get_args

from torch import nn

from bevfusion import quantization
from bevfusion.model import Batch, BEVFusion, BEVFusionConfig
from bevfusion.quantization import KeptScores
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import SensitivityMetric, SensitivityOutput
from bevfusion_quant.options import precisions as plan_precisions
from bevfusion_quant.run import return_freed_memory
from bevfusion_quant.steps import run_batch
from bevquant_qnn import SensitivityTable, estimate_sensitivity, sensitivity
from bevquant_quantizers import TensorQuantizer, calibrate
from bevquant_quantizers.ranks import Shards

LOG = logging.getLogger(__name__)


class FramesInTurn(Sequence["Batch"]):
    """The frames, with memory given back before each is made.

    Args:
        batches: All of them.
        told: Say of each when it is made.
    """

    def __init__(self, batches: FrameBatches, *, told: bool = True) -> None:
        self._batches, self._told = batches, told

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]
        # What a recorded run held is of no use to frames with other numbers of voxels.
        return_freed_memory()
        if self._told:
            LOG.info("frame %d of %d", index + 1, len(self))
        return self._batches[index]


class MeanAp(quantization.MeanAp):
    """`bevfusion.quantization.MeanAp` whose errors name the options of the command."""

    advice = MappingProxyType(
        {
            "no head": "--metric mAP: the run's model is {} alone and finds no boxes: measure with "
            "--metric sqnr",
            "no labels": "--metric mAP: none of the frames has labels: give frames that have "
            "(street, pandaset, kitti, nuscenes), or measure with --metric sqnr",
            "none counts": "--metric mAP: no label of these frames counts (too far away, or "
            "without a point): give other frames, or more of them",
        }
    )


METRICS = get_args(SensitivityMetric)
OUTPUTS = get_args(SensitivityOutput)
_HEATMAP = "heads.object.heatmap_head"


def sensitivity_output(model: BEVFusion, metric: str = "sqnr", output: str | None = None) -> str:
    """The path of the module whose output is scored; "" for the model's own.

    Args:
        model: The quantized model.
        metric: "sqnr", "kl" or "mAP".
        output: "map": the last bird's-eye view before the head; "heatmap": the head's. By default
            the heat map for "kl" and where the head is quantized, else the map.

    Raises:
        InputError: An unknown metric or output, or one that the model does not have.
    """
    if metric not in METRICS:
        raise InputError(f"--metric {metric}: expected one of {', '.join(METRICS)}")
    if output not in (None, *OUTPUTS):
        raise InputError(f"--output {output}: expected {' or '.join(OUTPUTS)}")
    if metric == "mAP":
        if output is not None:
            raise InputError(f"--output {output}: mAP judges the boxes; leave it out")
        return ""
    has_head = "head" in model.parts
    if metric == "kl" and output == "map":
        raise InputError(
            "--metric kl compares the classes of the heat map; the map has none: leave --output "
            "out, or measure with --metric sqnr"
        )
    if not has_head and (metric == "kl" or output == "heatmap"):
        what = "--metric kl" if metric == "kl" else "--output heatmap"
        raise InputError(
            f"{what}: the run's model is {' and '.join(model.parts)} alone and has no heat map: "
            "measure with --metric sqnr on its own map"
        )
    if not has_head:
        return ""
    if metric == "kl" or output == "heatmap":
        return _HEATMAP
    return _HEATMAP if output is None and _is_quantized(model.head) else "decoder.neck"


def measure_sensitivity(
    model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    *,
    metric: str = "sqnr",
    output: str | None = None,
    precisions: Sequence[str] = ("int8",),
    without: bool = True,
    estimate: bool = False,
    shards: Shards | None = None,
) -> SensitivityTable:
    """Measure what every group of layers loses: `bevquant_qnn.sensitivity` of the detector.

    Frames are run one by one; of each, the activations of one run are held. With "int16" the
    frames are run once before, for the largest values of 16-bit ranges.

    Args:
        model: Calibrated; it is left as it was.
        batches: At least one frame.
        config: Sizes.
        metric: "sqnr", 10·log₁₀(Σf²/Σ(f − q)²) in dB; "kl", minus the divergence of the classes'
            softmax in nats, per cell of the heat map; neither reads labels. "mAP", nuScenes' in
            points of 100, over the frames that have labels.
        output: What "sqnr" and "kl" look at; see `sensitivity_output`.
        precisions: At which each group is measured alone: "int4", "int8", "int16".
        without: Measure each group alone in float, too: half of the time.
        estimate: `bevquant_qnn.estimate_sensitivity` instead, without that half.
        shards: Keeps what is finished while several ranks share the frames.

    Raises:
        InputError: A metric, an output or precisions that cannot be measured, or no labels.
    """
    path = sensitivity_output(model, metric, output)
    check_precisions(precisions)
    task = MeanAp(model, batches, config, shards) if metric == "mAP" else None
    if "int16" in precisions:
        _collect(model, batches)
    frames = FramesInTurn(batches)
    options: dict[str, Any] = {
        "outputs": (path,) if path else (),
        "precisions": tuple(dict.fromkeys(precisions)),
        "kept": None if shards is None else KeptScores(shards),
    }
    if estimate:
        return estimate_sensitivity(model, frames, **options)
    options["reduce"] = None if task is None else task.reduce
    return sensitivity(model, frames, task or metric, without=without, **options)


def check_precisions(precisions: Sequence[str]) -> None:
    """Refuse what is not measured here.

    Raises:
        InputError: Nothing, or something unknown.
    """
    known = plan_precisions()
    unknown = [name for name in precisions if name not in known]
    if unknown or not precisions:
        raise InputError(
            f"--precisions {' '.join(unknown)}: name one or more of {', '.join(known)}; float "
            "is what they are compared with"
        )


def _collect(model: BEVFusion, batches: FrameBatches) -> None:
    """Let the calibrators see the frames; ranges stay what they are."""
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    ranges = {q: q.amax.clone() for q in quantizers if q.amax is not None}
    calibrate(model, batches, forward=run_batch, method="max")
    for quantizer, amax in ranges.items():
        quantizer.amax = amax


def _is_quantized(part: nn.Module) -> bool:
    return any(isinstance(m, TensorQuantizer) and not m._disabled for m in part.modules())

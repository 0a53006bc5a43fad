"""The calibrated model lowered to integers, run on frames, and compared layer by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

import bevquant_int8sim
from bev_data.metrics import AccuracyTally, AgreementRow, FoundRow
from bevfusion.evaluation import ModelTallies, detections_of, detections_record
from bevfusion.model import PART_PATHS, Batch, BEVFusion, BEVFusionConfig, example_like
from bevfusion.model.head import Detections
from bevfusion.quantization import IntegerStage, Judgement, integer_stages, lies_below
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import Branch
from bevfusion_quant.run import Clock
from bevfusion_quant.steps import quantized_parts, why_float
from bevquant_int8sim import IntegerModel, Island, LayerComparison, LayerRow, LayerTable, simulate
from bevquant_quantizers.ranks import Shards, current_ranks, in_order
from bevquant_sparse import is_sparse_conv


@dataclass(frozen=True)
class SavedPart:
    """An integer model on disk.

    Attributes:
        part: Path of the module, or "model" for all of it.
        folder: Where `IntegerModel.load` finds it, below the run's folder; empty where it is not
            saved.
        reason: Why not.
    """

    part: str
    folder: str
    reason: str = ""


@dataclass(frozen=True)
class FloatIsland:
    """Something computed in float: the module, its class or the function's name, and why.

    `share` is that of the model's operations, 0 to 1; None where they were not counted.
    """

    path: str
    what: str
    reason: str
    share: float | None = None


@dataclass(frozen=True, eq=False)
class Simulation:
    """What running in integers gave.

    Attributes:
        layers: One row for each step that computes, in the order of execution.
        stages: The same for each stage of the model.
        islands: What was computed in float, and why.
        agreement: Detections of the float model against those of the integer model; empty without
            a head.
        found: Labelled objects that both find; empty without a head or labels.
        backend: The kernels that ran, and the instructions they use.
        frame_seconds: Of the integer model alone, frame by frame; the first one warms up.
        saved: The integer model in the run folder, or why it is not there.
        detections: Of the integer model on the first frame; None without a head.
    """

    layers: tuple[LayerRow, ...]
    stages: tuple[IntegerStage, ...]
    islands: tuple[FloatIsland, ...]
    agreement: tuple[AgreementRow, ...]
    found: tuple[FoundRow, ...]
    backend: str
    frame_seconds: tuple[float, ...]
    saved: tuple[SavedPart, ...]
    detections: Detections | None = None

    @property
    def _table(self) -> LayerTable:
        return LayerTable(self.layers)

    @property
    def first_departure(self) -> LayerRow | None:
        """The first layer whose integers leave the fake-quantized ones by more than one step."""
        return self._table.first_departure

    @property
    def wrong(self) -> tuple[LayerRow, ...]:
        """Layers more than one step apart on the same inputs, without a known reason."""
        return self._table.wrong

    @property
    def explained(self) -> tuple[LayerRow, ...]:
        """Layers more than one step apart on the same inputs, whose row says why."""
        return tuple(r for r in self.layers if (r.forced_max_steps or 0) > 1 and r.why)

    def summary(self) -> dict[str, Any]:
        """Everything, for summary.json."""
        first = self.first_departure
        return {
            "backend": self.backend,
            "first_departure": None if first is None else first.path,
            "wrong": [row.path for row in self.wrong],
            "explained": [row.path for row in self.explained],
            "frame_seconds": self.frame_seconds,
            "stages": self.stages,
            "layers": self.layers,
            "islands": self.islands,
            "agreement": self.agreement,
            "labels_found": self.found,
            "saved": self.saved,
        }


def check_backend(backend: str) -> str:
    """Which kernels `backend` means on this machine, as text.

    Raises:
        InputError: It cannot be used here.
    """
    name = backend
    if backend == "auto":
        name = bevquant_int8sim.choose_backend(
            "auto", torch.device("cpu"), torch.int8, "--backend auto"
        )
    try:
        (status,) = bevquant_int8sim.backend_report(name)
    except ValueError:
        why = "it is unknown"
    else:
        if status.available:
            return f"{status.name} ({status.detail})"
        why = status.detail
    raise InputError(f"--backend {backend} cannot be used here: {why}: choose --backend auto")


@dataclass(frozen=True, eq=False)
class Lowered:
    """The calibrated model in integers, and what compares its layers.

    Attributes:
        model: The integer model.
        backend: Its kernels, and the instructions they use.
        layers: With the float and the fake-quantized model; `judge` gives it the frames.
    """

    model: IntegerModel
    backend: str
    layers: LayerComparison


def lower_model(
    float_model: BEVFusion,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    clock: Clock,
    backend: str | None,
) -> Lowered | None:
    """Lower the calibrated model for `simulate_model`; nothing where `backend` is None.

    Raises:
        InputError: No layer of the model is quantized, one has no range, or the backend is not
            there.
    """
    if backend is None:
        return None
    used = check_backend(backend)
    with clock.step("lower to integers"):
        # Every frame is compared behind this, step by step.
        model = lowered(quantized_model, example_like(config, batches[0]), backend)
        return Lowered(model, used, bevquant_int8sim.LayerComparison(float_model, model))


def simulate_model(
    made: Lowered,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    judgement: Judgement,
    clock: Clock,
    folder: Path,
    *,
    branch: str,
    accuracy: AccuracyTally | None = None,
    shards: Shards | None = None,
) -> Simulation:
    """Run the integer model, and save it below `folder`.

    Several ranks share the frames, and the first one saves.

    Args:
        made: From `lower_model`, its layers compared by `judge`.
        quantized_model: The calibrated model.
        batches: At least one.
        config: Sizes.
        judgement: Of the same models on the same batches.
        clock: Times the steps.
        folder: Where `integer/` is written.
        branch: What the run quantized; says why the rest is float.
        accuracy: Is handed the integer model's detections, as "integer".
        shards: Keeps what is finished while several ranks work.
    """
    model = made.model
    with clock.step("run in integers", blame="the integer model cannot run on these frames"):
        agreement, found, detections, seconds = _run(
            model, batches, config, judgement, accuracy, shards, quantized_model
        )
    layers = made.layers.table().rows
    saved: tuple[SavedPart, ...] = ()
    if current_ranks().first:
        with clock.step("save integers"):
            saved = (_saved(model, folder),)
    return Simulation(
        layers,
        integer_stages(layers, quantized_model.parts),
        float_islands(model.islands, quantized_model, branch),
        agreement,
        found,
        made.backend,
        seconds,
        saved,
        detections,
    )


def lowered(quantized_model: BEVFusion, batch: Batch, backend: str) -> IntegerModel:
    """The whole model in integers.

    Raises:
        InputError: Nothing in it computes in integers, or ranges are missing.
    """
    try:
        model = simulate(quantized_model, tuple(batch), backend=backend)
    except ValueError as error:
        raise InputError(
            f"the run cannot be simulated in integers: {error}: calibrate again with "
            "bevfusion-quant ptq"
        ) from error
    if not any(step.op in _LAYERS for step in model.steps):
        raise InputError(
            "the run cannot be simulated in integers: none of its layers is quantized: quantize "
            "with bevfusion-quant ptq and fewer --exclude"
        )
    return model


def _saved(model: IntegerModel, folder: Path) -> SavedPart:
    (folder / "integer").mkdir()
    try:
        model.save(folder / "integer" / "model")
    except ValueError as error:
        return SavedPart("model", "", str(error))
    return SavedPart("model", "integer/model")


_LAYERS = frozenset({"sparse_conv", "conv", "conv_transpose", "linear"})


def _run(
    model: IntegerModel,
    batches: FrameBatches,
    config: BEVFusionConfig,
    judgement: Judgement,
    accuracy: AccuracyTally | None,
    shards: Shards | None,
    decoder: BEVFusion,
) -> tuple[
    tuple[AgreementRow, ...], tuple[FoundRow, ...], Detections | None, tuple[float, ...]
]:  # fmt: skip
    """Run every frame and judge its detections at once: outputs of many frames are too large.

    Returns:
        How well the integer model's detections agree with the float model's, and what both find;
        empty without a head. Detections of the first frame, seconds of each.
    """
    tallies, seconds = ModelTallies(config), []

    def run(index: int) -> dict[str, Any]:
        batch = batches[index]
        start = time.perf_counter()
        output = model(*batch)
        record = {"seconds": np.array(time.perf_counter() - start)}
        if judgement.float_detections:
            record |= detections_record("integer", decoder.head.decode(output)[0])
        return record

    for index, record in in_order("integers", len(batches), run, shards):
        seconds.append(round(float(record["seconds"]), 3))
        if judgement.float_detections:
            found = {"float": judgement.float_detections[index]}
            found["integer"] = detections_of("integer", record)
            labels = batches.frame_labels(index)
            tallies.add(index, batches.names[index][0], found, labels)
            if accuracy is not None:
                accuracy.add("integer", index, batches.names[index][0], found["integer"], labels)
    agreement, both = tallies.rows("integer")
    return tuple(agreement), tuple(both), tallies.first.get("integer"), tuple(seconds)


def float_islands(
    islands: Sequence[Island], model: BEVFusion, branch: str
) -> tuple[FloatIsland, ...]:
    """The islands with the reason that lies furthest back.

    Of a part without any quantizer that is the choice not to quantize it; of a convolution or
    linear layer in a quantized part, that it was left out.
    """
    chosen = cast(Branch, branch)
    with_head = any("_quantizer" in path for path, _ in _modules(model, PART_PATHS["head"]))
    quantized = quantized_parts(chosen, with_head=with_head)
    left = {
        PART_PATHS[part]: why_float(part, chosen) for part in model.parts if part not in quantized
    }
    known = dict(model.named_modules())
    found = []
    for island in islands:
        reason = island.reason
        part = next((path for path in left if lies_below(island.path, path)), None)
        if part is not None:
            reason = left[part]
        elif _could_be_quantized(known.get(island.path), island.what):
            reason = "it was left without quantizers, as --exclude said"
        found.append(FloatIsland(island.path, island.what, reason, island.share))
    return tuple(found)


def _modules(model: BEVFusion, below: str) -> list[tuple[str, object]]:
    return [(path, module) for path, module in model.named_modules() if lies_below(path, below)]


def _could_be_quantized(module: nn.Module | None, what: str) -> bool:
    """Whether the island is the module itself, of a kind that gets quantizers."""
    if module is None or hasattr(module, "_input_quantizer"):
        return False
    kinds = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    return type(module).__name__ == what and (isinstance(module, kinds) or is_sparse_conv(module))

"""Float, fake-quantized and integer model on the same frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bev_data.metrics import AccuracyTally
from bevfusion.deployment import SplitModel
from bevfusion.evaluation import ModelTallies
from bevfusion.model import Batch, BEVFusionConfig
from bevfusion.quantization import STAGE_TITLES, Judgement, StageProbe, whole_output
from bevfusion_quant.bpu._prepare import Models
from bevfusion_quant.bpu_outcome import BpuComparison, BpuStage
from bevfusion_quant.frames import FrameBatches
from bevquant_hybrid.qtensor import as_float
from bevquant_hybrid_tools.forms import Forms, FormsComparison, Note
from bevquant_qnn import LayerRow, PairSums


class _Stage:
    """The end of one stage, in all three models."""

    def __init__(self, name: str) -> None:
        self.fake, self.integers = StageProbe(name, ""), PairSums()

    def judge(self, wanted: Tensor, fake: Tensor, got: Tensor) -> None:
        self.fake.add(wanted, as_float(fake))
        self.integers.add(wanted, as_float(got))

    def row(self) -> BpuStage:
        row, integers = self.fake.result().row, self.integers
        return BpuStage(
            *(row.stage, row.title, row.channels, row.sqnr_db, row.cosine),
            *(integers.sqnr_db, integers.cosine),
        )


def compare_forms(
    models: Models,
    forms: Mapping[str, Forms],
    batches: FrameBatches,
    config: BEVFusionConfig,
    accuracy: AccuracyTally | None = None,
) -> BpuComparison:
    """Run the three models side by side on every batch.

    Args:
        models: Float, fake-quantized, integers.
        forms: Of the units in them.
        batches: At least one.
        config: Sizes.
        accuracy: Is handed the models' detections, as "float", "quantized" and "integer".
    """
    stages = {name: _Stage(name) for name in STAGE_TITLES}
    comparison = FormsComparison(forms, {name: stage.judge for name, stage in stages.items()})
    tallies, model = ModelTallies(config, accuracy), models.real.model
    whole, first, shape = PairSums(), None, torch.Size()
    for index, batch in enumerate(batches):
        wanted, fake, got = comparison.run([_on(batch, split) for split in models])
        whole.add(whole_output(wanted), whole_output(fake))
        shape = whole_output(wanted).shape
        if model.heads is not None:
            outputs = {"float": wanted, "quantized": fake, "integer": got}
            found = {who: model.head.decode(output)[0] for who, output in outputs.items()}
            name, labels = batches.names[index][0], batches.frame_labels(index)
            tallies.add(index, name, found, labels)
        first = wanted if first is None else first
    layers = comparison.layers()
    table = [
        LayerRow(
            *(row.layer, row.operator, row.channels, row.cells, row.fake_sqnr_db, row.fake_cosine),
            *(row.saturated, row.input_amax),
        )
        for row in layers
    ]
    kind = "heatmap" if isinstance(first, dict) else "bird's-eye view"
    cells = shape.numel() / shape[1]
    table.append(LayerRow("output", kind, shape[1], cells, whole.sqnr_db, whole.cosine, None, None))
    seen, reached = tallies.first, [stage for stage in stages.values() if stage.fake.channels]
    judgement = Judgement(
        table,
        [stage.fake.result() for stage in reached],
        [],
        *tallies.rows("quantized"),
        (seen["float"], seen["quantized"]) if seen else None,
        tallies.float_detections,
        first,
    )
    agreement, both = tallies.rows("integer")
    rows = tuple(stage.row() for stage in reached)
    return BpuComparison(judgement, layers, rows, tuple(agreement), tuple(both))


def _on(batch: Batch, model: SplitModel) -> Callable[[Note], Any]:
    return lambda note: model(*batch, note=note)

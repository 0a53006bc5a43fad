"""A split detector in float, fake-quantized and in integers, on the same frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bev_data.metrics import AccuracyTally, AgreementRow, FoundRow
from bev_data.tables import Table, table_of
from bevfusion.deployment._split import Note, SplitModel
from bevfusion.evaluation import FrameBatches, ModelTallies
from bevfusion.model import Batch, BEVFusionConfig
from bevfusion.quantization import STAGE_TITLES, Judgement, StageProbe, whole_output
from bevquant_qnn import LayerRow, PairSums

JudgeStage = Callable[[Tensor, Tensor, Tensor], None]
"""Takes a stage's float values, the fake-quantized ones and those of the integers."""


@dataclass(frozen=True)
class SplitStage:
    """The end of one stage, over all frames: both quantized models against float."""

    stage: str
    title: str
    channels: int
    fake_sqnr_db: float | None
    fake_cosine: float | None
    integer_sqnr_db: float | None
    integer_cosine: float | None


@dataclass(frozen=True, eq=False)
class SplitComparison:
    """Everything that was compared.

    Attributes:
        judgement: Float against fake-quantized.
        layers: Operators of the units in the order of execution, as whoever compared them has them.
        stages: Of the model, in order.
        agreement: Detections, float against integers; empty without a head.
        found: Labelled objects that both find.
    """

    judgement: Judgement
    layers: tuple[Any, ...]
    stages: tuple[SplitStage, ...]
    agreement: tuple[AgreementRow, ...]
    found: tuple[FoundRow, ...]


class Comparison(Protocol):
    """Runs three models in step, as `bevquant_hybrid_tools.forms.FormsComparison` does."""

    def run(self, models: Sequence[Callable[[Note], Any]]) -> tuple[Any, Any, Any]:
        """Run them on one batch; their outputs."""

    def layers(self) -> Iterable[Any]:
        """A row for each operator, such as `bevquant_hybrid_tools.forms.BpuLayer`."""


class _Stage:
    """The end of one stage, in all three models."""

    def __init__(self, name: str) -> None:
        self.fake, self.integers = StageProbe(name, ""), PairSums()

    def judge(self, wanted: Tensor, fake: Tensor, got: Tensor) -> None:
        self.fake.add(wanted, fake.dequantize())
        self.integers.add(wanted, got.dequantize())

    def row(self) -> SplitStage:
        row, integers = self.fake.result().row, self.integers
        return SplitStage(
            *(row.stage, row.title, row.channels, row.sqnr_db, row.cosine),
            *(integers.sqnr_db, integers.cosine),
        )


def judge_split(
    models: Sequence[SplitModel],
    comparing: Callable[[Mapping[str, JudgeStage]], Comparison],
    batches: FrameBatches,
    config: BEVFusionConfig,
    accuracy: AccuracyTally | None = None,
) -> SplitComparison:
    """Run three forms of a split detector side by side on every batch.

    Args:
        models: Float, fake-quantized, integers; their parts in float are the same modules.
        comparing: Makes what compares their units, given what takes the values at each stage's
            end, such as ``partial(FormsComparison, forms)`` of `bevquant_hybrid_tools.forms`.
        batches: At least one.
        config: Sizes.
        accuracy: Is handed the models' detections, as "float", "quantized" and "integer".
    """
    stages = {name: _Stage(name) for name in STAGE_TITLES}
    comparison = comparing({name: stage.judge for name, stage in stages.items()})
    tallies, model = ModelTallies(config, accuracy), models[0].model
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
    layers = tuple(comparison.layers())
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
    return SplitComparison(judgement, layers, rows, tuple(agreement), tuple(both))


def _on(batch: Batch, model: SplitModel) -> Callable[[Note], Any]:
    return lambda note: model(*batch, note=note)


def split_stage_table(stages: Sequence[SplitStage]) -> Table:
    """Fake-quantized and integer model against float at the end of each stage."""
    columns = {
        "Stage": "{title}",
        "Channels": "{channels}",
        "Fake dB": "{fake_sqnr_db:.1f}",
        "Integer dB": "{integer_sqnr_db:.1f}",
        "Fake cosine": "{fake_cosine:.6f}",
        "Integer cosine": "{integer_cosine:.6f}",
    }
    return table_of("SQNR and cosine against float", stages, columns, "wide")

"""What comparing three models gives, as plain rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bevfusion_quant.ptq._agreement import AgreementRow, FoundRow
    from bevfusion_quant.ptq._judge import Judgement

__all__ = ["BpuComparison", "BpuLayer", "BpuStage"]


@dataclass(frozen=True)
class BpuLayer:
    """One operator on the BPU, over all frames.

    Attributes:
        layer: Its path in the model.
        operator: What it computes.
        channels: Of the result.
        cells: Of the result, in a frame.
        fake_sqnr_db: Of the fake-quantized result against float; None where equal or all zero.
        fake_cosine: Of the two as vectors.
        integer_sqnr_db: The same of the integers.
        integer_cosine: The same of the integers.
        max_steps: Largest difference of integers and fake-quantized result, in steps of it, each
            model on its own activations.
        mean_steps: Mean of its size.
        differ: Share of values that differ.
        saturated: Share of the float model's input values beyond the input's range.
        input_amax: End of that range, the widest input's.
    """

    layer: str
    operator: str
    channels: int
    cells: float
    fake_sqnr_db: float | None
    fake_cosine: float | None
    integer_sqnr_db: float | None
    integer_cosine: float | None
    max_steps: int
    mean_steps: float
    differ: float
    saturated: float | None
    input_amax: float | None


@dataclass(frozen=True)
class BpuStage:
    """The end of one stage, over all frames: both quantized models against float."""

    stage: str
    title: str
    channels: int
    fake_sqnr_db: float | None
    fake_cosine: float | None
    integer_sqnr_db: float | None
    integer_cosine: float | None


@dataclass(frozen=True, eq=False)
class BpuComparison:
    """Everything that was compared.

    Attributes:
        judgement: Float against fake-quantized, as the report shows it.
        layers: Operators on the BPU in the order of execution.
        stages: Of the model, in order.
        agreement: Detections, float against integers; empty without a head.
        found: Labelled objects that both find.
    """

    judgement: Judgement
    layers: tuple[BpuLayer, ...]
    stages: tuple[BpuStage, ...]
    agreement: tuple[AgreementRow, ...]
    found: tuple[FoundRow, ...]

"""What is measured on a float and a quantized model, whatever made them."""

from bevfusion_quant.measure._judge import (
    Comparison,
    DetectorComparison,
    Judgement,
    compare_layers,
    judge,
    layer_table,
    short_names,
    stage_table,
)
from bevfusion_quant.measure._stage_maps import (
    STAGE_TITLES,
    StageMaps,
    StageProbe,
    StageRow,
    relative_change,
    whole_output,
)

__all__ = [
    "STAGE_TITLES",
    "Comparison",
    "DetectorComparison",
    "Judgement",
    "StageMaps",
    "StageProbe",
    "StageRow",
    "compare_layers",
    "judge",
    "layer_table",
    "relative_change",
    "short_names",
    "stage_table",
    "whole_output",
]

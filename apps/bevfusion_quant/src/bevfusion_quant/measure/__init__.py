"""What is measured on a float and a quantized model, whatever made them."""

from bevfusion_quant.measure._compare import Comparison, LayerComparison, LayerRow, compare_layers
from bevfusion_quant.measure._judge import Judgement, judge, layer_table, short_names, stage_table
from bevfusion_quant.measure._lockstep import Leader, lead
from bevfusion_quant.measure._stage_maps import (
    STAGE_TITLES,
    StageMaps,
    StageProbe,
    StageRow,
    whole_output,
)
from bevfusion_quant.measure._sums import PairSums, relative_change
from bevfusion_quant.measure._tally import (
    Model,
    ModelTallies,
    accuracy_tally,
    detection_rules,
    detection_tally,
    tally_models,
)

__all__ = [
    "STAGE_TITLES",
    "Comparison",
    "Judgement",
    "LayerComparison",
    "LayerRow",
    "Leader",
    "Model",
    "ModelTallies",
    "PairSums",
    "StageMaps",
    "StageProbe",
    "StageRow",
    "accuracy_tally",
    "compare_layers",
    "detection_rules",
    "detection_tally",
    "judge",
    "layer_table",
    "lead",
    "relative_change",
    "short_names",
    "stage_table",
    "tally_models",
    "whole_output",
]

"""What is measured on a float and a quantized model, whatever made them."""

from bevfusion_quant.measure._agreement import (
    AgreementRow,
    DetectionTally,
    FoundRow,
    Model,
    accuracy_tally,
    match,
    tally_models,
)
from bevfusion_quant.measure._compare import Comparison, LayerComparison, LayerRow, compare_layers
from bevfusion_quant.measure._judge import Judgement, judge
from bevfusion_quant.measure._lockstep import Leader, lead
from bevfusion_quant.measure._quantizer_values import (
    QuantizerRow,
    QuantizerValues,
    watch_quantizers,
)
from bevfusion_quant.measure._stage_maps import StageMaps, StageProbe, StageRow, whole_output
from bevfusion_quant.measure._sums import PairSums, relative_change
from bevfusion_quant.measure._tables import (
    agreement_text,
    layer_table,
    or_dash,
    short_names,
    stage_table,
)

__all__ = [
    "AgreementRow",
    "Comparison",
    "DetectionTally",
    "FoundRow",
    "Judgement",
    "LayerComparison",
    "LayerRow",
    "Leader",
    "Model",
    "PairSums",
    "QuantizerRow",
    "QuantizerValues",
    "StageMaps",
    "StageProbe",
    "StageRow",
    "accuracy_tally",
    "agreement_text",
    "compare_layers",
    "judge",
    "layer_table",
    "lead",
    "match",
    "or_dash",
    "relative_change",
    "short_names",
    "stage_table",
    "tally_models",
    "watch_quantizers",
    "whole_output",
]

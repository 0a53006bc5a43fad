"""Quantization of a detector: folding, quantizers, comparison with float, training.

`fuse_detector` and `quantize_detector` make the fake-quantized model. `evaluate_quantized` compares
both models on frames: layers, stages, detections. `MeanAp` is a metric for
`bevquant_qnn.sensitivity`. `QatDetectorTrainer` trains with rounding.
"""

from bevfusion.quantization._evaluate import (
    Comparison,
    QuantizationEvaluation,
    compare_layers,
    evaluate_quantized,
    layer_table,
    short_names,
    short_path,
    stage_table,
)
from bevfusion.quantization._integers import (
    FloatPart,
    IntegerLayerSummary,
    IntegerStage,
    SavedPart,
    Simulation,
    SimulationSummary,
    StageSummary,
    in_integers,
    integer_stages,
    lies_below,
    simulate_detector,
)
from bevfusion.quantization._integers_text import (
    QUERIES,
    integer_box_table,
    integer_stage_table,
    simulation_text,
)
from bevfusion.quantization._parts import (
    Distiller,
    QatDetectorTrainer,
    calibrate_detector,
    expand_patterns,
    first_sparse_conv,
    fuse_detector,
    quantize_detector,
    round_detector,
)
from bevfusion.quantization._sensitivity import (
    check_precisions,
    measure_sensitivity,
    plan_precisions,
    plan_within,
    refine_within,
    sensitivity_output,
    study_sensitivity,
)
from bevfusion.quantization._sensitivity_table import (
    KeptScores,
    MeanAp,
    SensitivityOutcome,
    SensitivitySummary,
    front_picture,
    front_table,
    sensitivity_headline,
    sensitivity_plan,
    sensitivity_table,
    sensitivity_text,
)
from bevfusion.quantization._stage_maps import (
    STAGE_TITLES,
    StageMaps,
    StageProbe,
    StageRow,
    relative_change,
    whole_output,
)

__all__ = [
    "QUERIES",
    "STAGE_TITLES",
    "Comparison",
    "Distiller",
    "FloatPart",
    "IntegerLayerSummary",
    "IntegerStage",
    "KeptScores",
    "MeanAp",
    "QatDetectorTrainer",
    "QuantizationEvaluation",
    "SavedPart",
    "SensitivityOutcome",
    "SensitivitySummary",
    "Simulation",
    "SimulationSummary",
    "StageMaps",
    "StageProbe",
    "StageRow",
    "StageSummary",
    "calibrate_detector",
    "check_precisions",
    "compare_layers",
    "evaluate_quantized",
    "expand_patterns",
    "first_sparse_conv",
    "front_picture",
    "front_table",
    "fuse_detector",
    "in_integers",
    "integer_box_table",
    "integer_stage_table",
    "integer_stages",
    "layer_table",
    "lies_below",
    "measure_sensitivity",
    "plan_precisions",
    "plan_within",
    "quantize_detector",
    "refine_within",
    "relative_change",
    "round_detector",
    "sensitivity_headline",
    "sensitivity_output",
    "sensitivity_plan",
    "sensitivity_table",
    "sensitivity_text",
    "short_names",
    "short_path",
    "simulate_detector",
    "simulation_text",
    "stage_table",
    "study_sensitivity",
    "whole_output",
]

Judgement, judge = QuantizationEvaluation, evaluate_quantized  # their former names

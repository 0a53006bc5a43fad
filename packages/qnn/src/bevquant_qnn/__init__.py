"""Quantized modules and the rewriting of float models into them."""

from __future__ import annotations

from bevquant_qnn._add import QuantAdd, QuantConcat
from bevquant_qnn._assign_precision import BIT_OPERATIONS, Budget, assign_precision, plan_front
from bevquant_qnn._attention import QuantMultiheadAttention
from bevquant_qnn._compare_layers import LayerComparison, compare_layers
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantLinear,
)
from bevquant_qnn._estimate_sensitivity import estimate_sensitivity
from bevquant_qnn._followed_ranges import (
    RangeFollower,
    keep_within_ranges,
    narrow_weights,
    weighted_layers,
)
from bevquant_qnn._freeze import freeze
from bevquant_qnn._layer_row import LayerRow, layer_table
from bevquant_qnn._lockstep import Leader, lead
from bevquant_qnn._matmul import QuantAttention, QuantMatmul
from bevquant_qnn._pair_sums import Gap, PairSums, gap
from bevquant_qnn._pool import (
    QuantAdaptiveAvgPool1d,
    QuantAdaptiveAvgPool2d,
    QuantAdaptiveAvgPool3d,
    QuantAvgPool1d,
    QuantAvgPool2d,
    QuantAvgPool3d,
    QuantMaxPool1d,
    QuantMaxPool2d,
    QuantMaxPool3d,
)
from bevquant_qnn._precision_groups import PrecisionGroup, precision_groups
from bevquant_qnn._precision_plan import PlannedGroup, PrecisionPlan, apply_precision
from bevquant_qnn._pt2e import pt2e_quantizer
from bevquant_qnn._qat_trainer import (
    FramePart,
    QatTrainer,
    StepSum,
    add_up,
    distillation_loss,
    parts_in_order,
)
from bevquant_qnn._quantize_model import quantize_model
from bevquant_qnn._ranks import Kept
from bevquant_qnn._refine_plan import RefinedPlan, refine_plan
from bevquant_qnn._remedy import USELESS_DB, FloatRemedy, float_remedy
from bevquant_qnn._result import QuantizedModule, QuantizeResult, SharedQuantizer, SkippedModule
from bevquant_qnn._round_weights import RoundedLayer, RoundingResult, round_weights
from bevquant_qnn._search_ranges import RangeSearch, SearchedRange, search_ranges
from bevquant_qnn._sensitivity import sensitivity
from bevquant_qnn._sensitivity_table import SensitivityRow, SensitivityTable
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_qnn._sparsity import SparseLayer, SparsityReport, keep_sparsity, sparsify
from bevquant_qnn._training_ranges import LearnedRange, RangeTracker, learn_ranges, track_ranges
from bevquant_qnn._weight_size import WeightSize, weight_size

__version__ = "0.2.0"
__all__ = [
    "BIT_OPERATIONS",
    "USELESS_DB",
    "Budget",
    "FloatRemedy",
    "FramePart",
    "Gap",
    "Kept",
    "LayerComparison",
    "LayerRow",
    "Leader",
    "LearnedRange",
    "PairSums",
    "PlannedGroup",
    "PrecisionGroup",
    "PrecisionPlan",
    "QatTrainer",
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAdd",
    "QuantAttention",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
    "QuantConcat",
    "QuantConfig",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantLinear",
    "QuantMatmul",
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
    "QuantMultiheadAttention",
    "QuantSparseConvolution",
    "QuantizeResult",
    "QuantizedModule",
    "RangeFollower",
    "RangeSearch",
    "RangeTracker",
    "RefinedPlan",
    "RoundedLayer",
    "RoundingResult",
    "SearchedRange",
    "SensitivityRow",
    "SensitivityTable",
    "SharedQuantizer",
    "SkippedModule",
    "SparseLayer",
    "SparsityReport",
    "StepSum",
    "WeightSize",
    "add_up",
    "apply_precision",
    "assign_precision",
    "compare_layers",
    "distillation_loss",
    "estimate_sensitivity",
    "float_remedy",
    "freeze",
    "gap",
    "keep_sparsity",
    "keep_within_ranges",
    "layer_table",
    "lead",
    "learn_ranges",
    "narrow_weights",
    "parts_in_order",
    "plan_front",
    "precision_groups",
    "pt2e_quantizer",
    "quantize_model",
    "refine_plan",
    "round_weights",
    "search_ranges",
    "sensitivity",
    "sparsify",
    "track_ranges",
    "weight_size",
    "weighted_layers",
]

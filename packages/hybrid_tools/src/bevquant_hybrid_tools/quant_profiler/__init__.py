"""Tools that locate accuracy loss of a quantized model, at their documented path."""

from __future__ import annotations

from bevquant_hybrid_tools.quant_profiler._calls import (
    END,
    Call,
    get_module_called_count,
    record_calls,
)
from bevquant_hybrid_tools.quant_profiler._compared import compare_weights
from bevquant_hybrid_tools.quant_profiler._cuda_memory import (
    MemoryReading,
    read_memory,
    show_cuda_memory_consumption,
)
from bevquant_hybrid_tools.quant_profiler._featuremap import featuremap_similarity
from bevquant_hybrid_tools.quant_profiler._features import (
    Statistic,
    get_raw_features,
    profile_featuremap,
    set_preserve_qat_mode,
)
from bevquant_hybrid_tools.quant_profiler._model_profiler import model_profiler
from bevquant_hybrid_tools.quant_profiler._qconfig import (
    QConfigReport,
    check_deploy_device,
    check_qconfig,
    check_unfused_operations,
)
from bevquant_hybrid_tools.quant_profiler._stages import (
    Stage,
    compare_script_models,
    compare_stages,
    render_stages,
    script_profile,
)

__all__ = [
    "END",
    "Call",
    "MemoryReading",
    "QConfigReport",
    "Stage",
    "Statistic",
    "check_deploy_device",
    "check_qconfig",
    "check_unfused_operations",
    "compare_script_models",
    "compare_stages",
    "compare_weights",
    "featuremap_similarity",
    "get_module_called_count",
    "get_raw_features",
    "model_profiler",
    "profile_featuremap",
    "read_memory",
    "record_calls",
    "render_stages",
    "script_profile",
    "set_preserve_qat_mode",
    "show_cuda_memory_consumption",
]

"""The profiler of `bevquant_hybrid_tools` under its documented path."""

from __future__ import annotations

from bevquant_hybrid._documented import names_from

_NAMES = (
    "END Call MemoryReading QConfigReport Stage Statistic check_deploy_device check_qconfig "
    "check_unfused_operations compare_script_models compare_stages compare_weights "
    "featuremap_similarity get_module_called_count get_raw_features model_profiler "
    "profile_featuremap read_memory record_calls render_stages script_profile "
    "set_preserve_qat_mode show_cuda_memory_consumption"
).split()
__all__ = [*_NAMES]

__getattr__ = names_from("utils.quant_profiler", *_NAMES)

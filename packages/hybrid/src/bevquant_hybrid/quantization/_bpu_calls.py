"""What a model that the BPU runs alone calls, and what it is called."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.operators import OperatorCall, is_float, trace_calls

__all__ = ["bpu_calls", "model_name", "require_module"]

_QAT = "bevquant_hybrid.nn.qat."


def require_module(caller: str, module: object) -> None:
    """Refuse what is no module.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: expected a module, got {type(module).__name__}")


def bpu_calls(caller: str, module: nn.Module, arguments: tuple[Any, ...]) -> list[OperatorCall]:
    """List the calls of a model, run once.

    Args:
        caller: Named in errors.
        module: Float with stubs, prepared, converted, or traced after it was converted.
        arguments: Of its forward.

    Raises:
        TypeError: No module.
        ValueError: A hybrid model: a prepared or converted one with operators on the CPU. Or one
            that was traced before it was converted.
        RuntimeError: It does not run on the arguments.
    """
    require_module(caller, module)
    calls = trace_calls(module, arguments)
    script = isinstance(module, torch.jit.ScriptModule)
    if script and not any(call.operator.endswith("Stub") for call in calls):
        raise ValueError(
            f"{caller}: nothing in the traced model is quantized; give torch.jit.trace what "
            "convert or convert_fx returns"
        )
    on_cpu = [f"{call.path} ({call.operator})" for call in calls if is_float(call)]
    if on_cpu and (script or _is_quantized(module)):
        raise ValueError(
            f"{caller} takes models that the BPU runs alone, and this one is hybrid: on the CPU, "
            f"in floats, run {', '.join(on_cpu)}. Look at its parts with visualize_partition, and "
            "hand it to hb_mapper with utils.onnx_helper.export_to_onnx and mapper.write_config"
        )
    return calls


def _is_quantized(module: nn.Module) -> bool:
    """Whether the model was prepared or converted: its float operators are meant to be that."""
    return any(
        is_fixed_point(part) or type(part).__module__.startswith(_QAT) for part in module.modules()
    )


def model_name(caller: str, module: nn.Module, name: str | None = None) -> str:
    """The name given, or that of the class that the model had before it was traced or converted.

    Raises:
        ValueError: The name is none for a file.

    Example:
        >>> model_name("perf_model", nn.Sequential())
        'Sequential'
    """
    source: Any = getattr(module, "_source_name", None) or getattr(module, "original_name", None)
    name = name or str(source or type(module).__name__)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{caller}: name={name!r}: expected letters, digits, '_', '-' and '.', and no folder"
        )
    return name

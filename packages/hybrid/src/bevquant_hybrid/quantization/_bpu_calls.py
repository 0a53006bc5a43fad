"""The operator calls of a model that runs on the BPU alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bevquant_hybrid.operators import OperatorCall, trace_calls

__all__ = ["bpu_calls", "is_float"]

_FORMS = ("bevquant_hybrid.nn.qat.", "bevquant_hybrid.nn.quantized.")


def is_float(call: OperatorCall) -> bool:
    """Whether a call computes on floats."""
    return "float32" in call.input_dtypes and not call.operator.endswith("Stub")


def bpu_calls(caller: str, module: nn.Module, arguments: tuple[Any, ...]) -> list[OperatorCall]:
    """List the calls of a model, run once.

    Args:
        caller: Named in errors.
        module: Float with stubs, prepared, converted, or traced after it was converted.
        arguments: Of its forward.

    Raises:
        TypeError: No module.
        ValueError: A hybrid model: a prepared or converted one with operators on the CPU.
        RuntimeError: It does not run on the arguments.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: expected a module, got {type(module).__name__}")
    calls = trace_calls(module, arguments)
    on_cpu = [f"{call.path} ({call.operator})" for call in calls if is_float(call)]
    if on_cpu and _is_quantized(module):
        raise ValueError(
            f"{caller}: a hybrid model: {', '.join(on_cpu)} computes on floats, so on the CPU, and "
            "this is offered for models that the BPU runs alone. Look at the parts with "
            "visualize_partition, and hand the model to hb_mapper with utils.onnx_helper."
            "export_to_onnx and mapper.write_config"
        )
    return calls


def _is_quantized(module: nn.Module) -> bool:
    """Whether the model was prepared, converted or traced: its float operators are meant so."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return any(type(part).__module__.startswith(_FORMS) for part in module.modules())

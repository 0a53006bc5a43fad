"""Find who reads which tensor from the code alone, where no example input is at hand."""

from __future__ import annotations

from torch import nn

from bevquant_fusion import Call, trace_dataflow
from bevquant_qnn._concat import QuantConcat
from bevquant_qnn._flow import Flow, Read
from bevquant_qnn._kinds import is_batch_norm, is_identity, is_library_module, is_quantized
from bevquant_quantizers import TensorQuantizer

__all__ = ["walk"]

# Functions and methods after which the values are the same, in another shape or place.
_KEEPS_VALUES = frozenset(
    "view reshape permute transpose contiguous flatten unflatten squeeze unsqueeze movedim "
    "swapaxes clone detach roll dropout to float hook".split()
)


def walk(model: nn.Module) -> Flow:
    """Return the reads of the model's forward, as far as its code can be followed."""
    dataflow = trace_dataflow(model)
    flow = Flow()
    modules = dict(model.named_modules())
    producer: dict[int, str] = {}
    same: dict[int, int] = {}
    for call in dataflow.calls:
        module = modules.get(call.path) if call.kind == "module" else None
        values = [same.get(value, value) for value in call.inputs]
        if _keeps_values(call, module) and len(values) == 1:
            same.update(dict.fromkeys(call.outputs, values[0]))
        quantizer = module if isinstance(module, TensorQuantizer) else None
        if module is not None and is_quantized(module):
            quantizer = module._modules["_input_quantizer"]
        if isinstance(quantizer, TensorQuantizer):
            flow.reads += [Read(quantizer, value) for value in values]
        # A QuantConcat is entered or not, as its operands are known to be dense or not.
        if isinstance(module if call.path else modules[call.scope], QuantConcat):
            flow.joins += [(output, value) for output in call.outputs for value in values]
        for output in call.outputs:
            flow.names.setdefault(output, _description(call))
            if module is not None and "_weight_quantizer" in module._modules:
                producer[output] = call.path
        if module is not None and is_batch_norm(module):
            flow.unfolded += [(call.path, producer[v]) for v in values if v in producer]
    for value in dataflow.inputs:
        flow.names.setdefault(value, "an input")
    flow.blind_spots += [
        (path, reason)
        for path, reason in dataflow.untraced.items()
        if not is_library_module(modules[path])
    ]
    return flow


def _keeps_values(call: Call, module: nn.Module | None) -> bool:
    if module is None:
        return call.name in _KEEPS_VALUES
    return isinstance(module, TensorQuantizer) or is_identity(module)


def _description(call: Call) -> str:
    if call.kind == "module":
        return f"output of {call.path}"
    return f"{call.name} in {call.scope or 'the model'}"

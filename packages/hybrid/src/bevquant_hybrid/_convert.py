"""Conversion of QAT modules to fixed-point modules."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._fx._scales import warn_of_uncollected
from bevquant_hybrid.march import require_march
from bevquant_hybrid.nn.qat._base import OutputQuantized
from bevquant_hybrid.nn.qat._composed import Composed
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.nn.qat.stubs import QuantStub
from bevquant_hybrid.nn.quantized import fixed_point_form
from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.qtensor import QTensor


def preserved_form(module: nn.Module, rounding: str) -> nn.Module | None:
    """Keep a QAT module's computation, with integers as its input and output."""
    if not isinstance(module, Weighted | OutputQuantized | QuantStub):
        return None
    # Its scales are the ones that were learnt, whatever passes from now on.
    for part in module.modules():
        if isinstance(part, FakeQuantizeBase):
            part.enable_observer(False)
    fake_quant: Any = module.activation_post_process
    if fake_quant is not None:
        fake_quant.register_forward_hook(functools.partial(_as_integers, rounding))
    return module


def _as_integers(rounding: str, module: nn.Module, args: Any, result: QTensor) -> QTensor:
    axis = result.q_per_channel_axis()
    return QTensor(result.int_repr(), result.scale, result.dtype, axis, rounding=rounding)


def refuse_converted(model: nn.Module, caller: str, hint: str = "") -> None:
    """Refuse a model that is already converted."""
    for path, module in model.named_modules():
        if is_fixed_point(module):
            raise ValueError(
                f"{caller}: {path or 'the model'} ({type(module).__name__}) computes in integers: "
                "the model is converted already; pass the model that was given to convert" + hint
            )


def convert_in_place(
    model: nn.Module, caller: str, remove_qconfig: bool, rounding: str
) -> nn.Module:
    """Replace every QAT module in `model`, or return the converted form of `model` itself."""
    require_march(caller)
    if rounding not in ("half_up", "half_even"):
        raise ValueError(f"{caller}: rounding={rounding!r}: expected 'half_up' or 'half_even'")
    refuse_converted(model, caller)
    modules = dict(model.named_modules())
    calibrating = [path for path, m in modules.items() if isinstance(m, CalibFakeQuantize)]
    if calibrating:
        raise ValueError(
            f"{caller}: {calibrating[0]} is there to calibrate; prepare the calibrated model with "
            "get_default_qat_qconfig first"
        )
    for module in modules.values():
        if isinstance(module, Composed):
            module.drop_unused()
    warn_of_uncollected(
        [
            path
            for path, m in model.named_modules()
            if isinstance(m, FakeQuantize)
            and not m.observed
            and not path.endswith("weight_fake_quant")
        ]
    )
    converted = _converted(model, "", rounding, False)
    if remove_qconfig:
        for module in converted.modules():
            module.__dict__.pop("qconfig", None)
    return converted.eval()


def _converted(module: nn.Module, path: str, rounding: str, kept: bool) -> nn.Module:
    kept = bool(module.__dict__.get("preserve_qat_mode", kept))
    if kept and (preserved := preserved_form(module, rounding)) is not None:
        return preserved
    made = fixed_point_form(module, path, rounding)
    if made is not None:
        if "qconfig" in module.__dict__:
            made.qconfig = module.__dict__["qconfig"]
        return made
    done: dict[int, nn.Module] = {}  # a module under two names stays one module
    for name, child in list(module._modules.items()):
        if child is not None:
            if id(child) not in done:
                below = f"{path}.{name}" if path else name
                done[id(child)] = _converted(child, below, rounding, kept)
            module._modules[name] = done[id(child)]
    return module

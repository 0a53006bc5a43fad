"""From a model that trained quantized to one that computes in integers."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid._fake_quant._calib import CalibFakeQuantize
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._fx._calibrated import warn_of_uncollected
from bevquant_hybrid.march import require_march
from bevquant_hybrid.nn.qat._parts import Composed
from bevquant_hybrid.nn.qat._preserved import preserved_form
from bevquant_hybrid.nn.quantized import fixed_point_form
from bevquant_hybrid.nn.quantized._base import FixedPoint

__all__ = ["convert_in_place", "refuse_converted"]


def refuse_converted(model: nn.Module, caller: str) -> None:
    """Refuse a model that computes in integers already.

    Raises:
        ValueError: It does; the message names a module.
    """
    for path, module in model.named_modules():
        if isinstance(module, FixedPoint):
            raise ValueError(
                f"{caller}: {path or 'the model'} ({type(module).__name__}) computes in integers: "
                "the model is converted already; pass the model that was given to convert"
            )


def convert_in_place(
    model: nn.Module, caller: str, remove_qconfig: bool, rounding: str
) -> nn.Module:
    """Replace every QAT module below `model`, or return the form of the model itself.

    Raises:
        RuntimeError: No march is set.
        ValueError: A calibration model, one that is converted already, an unknown rounding, or
            settings a BPU does not execute.
    """
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
    done: dict[int, nn.Module] = {}
    for name, child in list(module._modules.items()):
        if child is not None:
            if id(child) not in done:
                below = f"{path}.{name}" if path else name
                done[id(child)] = _converted(child, below, rounding, kept)
            module._modules[name] = done[id(child)]
    return module

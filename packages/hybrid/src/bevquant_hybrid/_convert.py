"""From a model that trained quantized to one that computes in integers."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid._fake_quant._calib import CalibFakeQuantize
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._fx._calibrated import warn_of_uncollected
from bevquant_hybrid.march import require_march
from bevquant_hybrid.nn.quantized import fixed_point_form

__all__ = ["convert_in_place"]


def convert_in_place(
    model: nn.Module, caller: str, remove_qconfig: bool, rounding: str
) -> nn.Module:
    """Replace every QAT module below `model`, or return the form of the model itself.

    Raises:
        RuntimeError: No march is set.
        ValueError: A calibration model, an unknown rounding, or settings a BPU does not execute.
    """
    require_march(caller)
    if rounding not in ("half_up", "half_even"):
        raise ValueError(f"{caller}: rounding={rounding!r}: expected 'half_up' or 'half_even'")
    modules = dict(model.named_modules())
    calibrating = [path for path, m in modules.items() if isinstance(m, CalibFakeQuantize)]
    if calibrating:
        raise ValueError(
            f"{caller}: {calibrating[0]} is there to calibrate; prepare the calibrated model with "
            "get_default_qat_qconfig first"
        )
    warn_of_uncollected(
        [
            path
            for path, m in modules.items()
            if isinstance(m, FakeQuantize)
            and not m.observed
            and not path.endswith("weight_fake_quant")
        ]
    )
    converted = _converted(model, "", rounding)
    if remove_qconfig:
        for module in converted.modules():
            module.__dict__.pop("qconfig", None)
    return converted.eval()


def _converted(module: nn.Module, path: str, rounding: str) -> nn.Module:
    made = fixed_point_form(module, path, rounding)
    if made is not None:
        return made
    done: dict[int, nn.Module] = {}
    for name, child in list(module._modules.items()):
        if child is not None:
            if id(child) not in done:
                done[id(child)] = _converted(child, f"{path}.{name}" if path else name, rounding)
            module._modules[name] = done[id(child)]
    return module

"""What calibration found, and a model that takes it over."""

from __future__ import annotations

import warnings

from torch import Tensor, nn
from torch.fx import GraphModule

from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    _WrappedCalibFakeQuantize,
)
from bevquant_hybrid._fx._float_operators import BOUNDARY
from bevquant_hybrid._observers._range import FixedScaleObserver
from bevquant_hybrid.nn.qat._parts import Composed


def is_calibration(model: nn.Module) -> bool:
    """Whether a prepared model is one that only collects statistics."""
    kinds = [type(m) for m in model.modules() if isinstance(m, CalibFakeQuantize | FakeQuantize)]
    return FakeQuantize not in kinds and any(issubclass(k, CalibFakeQuantize) for k in kinds)


def _optional_paths(model: nn.Module) -> set[str]:
    """Fake quantizers of parts that not every call needs."""
    return {
        f"{path}.{name}.activation_post_process".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, Composed)
        for name in module.optional
    }


def calibrated_scales(model: nn.Module) -> dict[str, Tensor | None]:
    """The scale of every activation that was to be calibrated; None where nothing was seen."""
    optional = _optional_paths(model)
    return {
        path: module.calculate_qparams()[0] if module.observed else None
        for path, module in model.named_modules()
        if isinstance(module, CalibFakeQuantize)
        and not path.endswith("weight_fake_quant")
        and (module.observed or path not in optional)
    }


def adopt_scales(model: nn.Module, scales: dict[str, Tensor | None]) -> None:
    """Start the fake quantizers of a model from the scales found at the same names.

    Where an operator runs on the CPU that did not during the calibration, what quantizes its result
    takes the scale that this had.
    """
    if isinstance(model, GraphModule):
        scales = {**scales, **_at_new_boundaries(model, scales)}
    modules = dict(model.named_modules())
    forgotten = []
    for path, scale in scales.items():
        module = modules.get(path)
        if isinstance(module, _WrappedCalibFakeQuantize):
            module = module.activation_post_process
        if not isinstance(module, FakeQuantize):
            continue  # a 32-bit output needs no scale
        if isinstance(module.activation_post_process, FixedScaleObserver):
            continue
        if scale is None:
            forgotten.append(path)
        else:
            module.set_qparams(scale)
    warn_of_uncollected(forgotten)


def _at_new_boundaries(
    model: GraphModule, scales: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    found = {}
    for node in model.graph.nodes:
        if node.meta.get(BOUNDARY) == "quantize" and node.name not in scales:
            maker = node.args[0]
            owner = maker.args[0] if maker.op == "call_method" else maker
            path = f"{owner.target}.activation_post_process"
            if path in scales:
                found[node.name] = scales[path]
    return found


def warn_of_uncollected(paths: list[str]) -> None:
    """Warn of fake quantizers that have seen nothing."""
    owners = [path.removesuffix(".activation_post_process") for path in paths]
    for owner in dict.fromkeys(owners):
        warnings.warn(
            f"`{owner}` has not collected any statistics of activations and its scale is 1, "
            "please check whether this is intended! Run calibration batches before this step",
            UserWarning,
            stacklevel=4,
        )

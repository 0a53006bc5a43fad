"""What calibration found, and a model that takes it over, or is deployed with it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    _WrappedCalibFakeQuantize,
)
from bevquant_hybrid._fx._float_operators import BOUNDARY
from bevquant_hybrid._observers._range import FixedScaleObserver
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.qat._composed import Composed
from bevquant_hybrid.nn.qat._weighted import Weighted, WithBatchNorm
from bevquant_hybrid.quantization.qconfig import get_default_qat_qconfig


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


def deployed(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, in which every fake quantizer rounds and none observes.

    What only calibrates becomes a fake quantizer of the scale that it found, and weights get the
    scale of the largest value of each output channel.
    """
    made = copy.deepcopy(model).eval()
    for owner in list(made.modules()):
        for name, part in list(owner._modules.items()):
            if isinstance(part, CalibFakeQuantize) and name == "weight_fake_quant":
                _quantize_weight(owner)
            elif isinstance(part, CalibFakeQuantize):
                owner._modules[name] = _of_its_scale(part)
    for module in made.modules():
        if isinstance(module, FakeQuantize):
            module.enable_fake_quant(True)
            module.enable_observer(False)
    return made


def _of_its_scale(part: CalibFakeQuantize) -> FakeQuantize:
    if not part.observed:
        return FakeQuantize(dtype=part.dtype)
    scale = part.calculate_qparams()[0]
    return FakeQuantize(observer=FixedScaleObserver, scale=scale, dtype=part.dtype)


def _quantize_weight(owner: Any) -> None:
    qconfig = get_default_qat_qconfig()
    if not isinstance(owner, Weighted):
        owner.weight_fake_quant = qconfig.weight()
        if isinstance(owner, qat.BatchNorm2d | qat.BatchNorm3d | qat.SyncBatchNorm):
            owner._factor_and_offset()
        return
    owner.weight_fake_quant = owner._weight_fake_quant(qconfig)
    if isinstance(owner, WithBatchNorm):
        owner.quantized_weight()
    else:
        owner.weight_fake_quant.observe(owner.weight)


def _has_steps(module: nn.Module) -> bool:
    """Whether a module has several steps, some of which may never run: no file holds it."""
    return isinstance(module, Composed) and not isinstance(module, qat.Softmax)


def refuse_uncalibrated(model: nn.Module, graph: Graph, caller: str) -> None:
    """Refuse a model whose forward rounds to a scale that was never found.

    Raises:
        ValueError: It does; all of its fake quantizers without a scale are listed.
    """
    called = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    found = {
        f"{path}.{name}".strip("."): None
        for path, module in model.named_modules()
        if path in called and not _has_steps(module)
        for name, part in module.named_modules()
        if isinstance(part, FakeQuantize) and not part.observed
    }
    if found:
        raise ValueError(
            f"{caller}: {', '.join(found)}: no values seen, so that there is no scale; run "
            "calibration or training batches through the model before it is exported"
        )


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

"""A prepared model as it will be deployed."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.fx import Graph

from bevquant_hybrid._fake_quant._calib import CalibFakeQuantize
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._observers._fixed import FixedScaleObserver
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.qat._parts import Composed
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.nn.qat._with_bn import WithBatchNorm
from bevquant_hybrid.quantization.qconfig import get_default_qat_qconfig

__all__ = ["deployed", "refuse_uncalibrated"]


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


def _is_refused(module: nn.Module) -> bool:
    """Whether no file holds a module of several steps, some of which may never run."""
    return isinstance(module, Composed) and not isinstance(module, qat.Softmax)


def refuse_uncalibrated(model: nn.Module, graph: Graph) -> None:
    """Refuse a model whose forward rounds to a scale that was never found.

    Raises:
        ValueError: It does; all of its fake quantizers without a scale are listed.
    """
    called = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    found = {
        f"{path}.{name}".strip("."): None
        for path, module in model.named_modules()
        if path in called and not _is_refused(module)
        for name, part in module.named_modules()
        if isinstance(part, FakeQuantize) and not part.observed
    }
    if found:
        raise ValueError(
            f"export_qdq_onnx: {', '.join(found)}: no values seen, so that there is no scale; run "
            "calibration or training batches through the model before it is exported"
        )

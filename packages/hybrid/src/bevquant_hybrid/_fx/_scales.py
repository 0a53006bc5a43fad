"""Scales of fake quantizers: from calibration, and shared by concatenated tensors."""

from __future__ import annotations

import copy
import operator
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig
from torch.fx import Graph, GraphModule, Node

from bevquant_graph import layer_class
from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    LearnedFakeQuantize,
    _WrappedCalibFakeQuantize,
)
from bevquant_hybrid._fx._float_operators import BOUNDARY
from bevquant_hybrid._fx._placement import keeps_scale
from bevquant_hybrid._fx._tracer import called_function, called_path
from bevquant_hybrid._observers import FixedScaleObserver, MovingAveragePerChannelMinMaxObserver
from bevquant_hybrid._scale_keeping import rule_of
from bevquant_hybrid.dtype import qint8
from bevquant_hybrid.march import JOINS_AT_ONE_SCALE
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.qat._composed import Composed
from bevquant_hybrid.nn.qat._weighted import Weighted, WithBatchNorm


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
    """Start the fake quantizers of a model from the scales found at the same names."""
    # Where an operator has moved to the CPU since the calibration, the boundary on its output takes
    # the operator's scale.
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
            # A learned or observed scale starts from the calibration's; a fixed one stays.
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
            # Named as the operator's own fake quantizer, which it had on the BPU.
            path = f"{called_path(node.args[0])}.activation_post_process"
            if path in scales:
                found[node.name] = scales[path]
    return found


def deployed(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, in which every fake quantizer rounds and none observes."""
    made = copy.deepcopy(model).eval()
    for owner in list(made.modules()):
        for name, part in list(owner._modules.items()):
            # A weight's scale is that of the largest value of each output channel; other observers
            # keep the scale that they found.
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
    # A part that no call needed: it is refused only where the forward reads it.
    if not part.observed:
        return FakeQuantize(dtype=part.dtype)
    scale = part.calculate_qparams()[0]
    return FakeQuantize(observer=FixedScaleObserver, scale=scale, dtype=part.dtype)


def _quantize_weight(owner: Any) -> None:
    made_by = FakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver, dtype=qint8,
        qscheme=torch.per_channel_symmetric, ch_axis=0,
    )  # fmt: skip
    if not isinstance(owner, Weighted):
        owner.weight_fake_quant = made_by()
        if isinstance(owner, qat.BatchNorm2d | qat.BatchNorm3d | qat.SyncBatchNorm):
            # Its factors, which its statistics give, are what the fake quantizer has to see.
            owner._factor_and_offset()
        return
    owner.weight_fake_quant = owner._weight_fake_quant(QConfig(None, made_by))
    if isinstance(owner, WithBatchNorm):
        owner.quantized_weight()
    else:
        owner.weight_fake_quant.observe(owner.weight)


def refuse_uncalibrated(model: nn.Module, graph: Graph, caller: str) -> None:
    """Refuse a model whose forward rounds to a scale without calibration."""
    called = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    found = {
        f"{path}.{name}".strip("."): None
        for path, module in model.named_modules()
        # Modules of several steps, but Softmax, may have steps that no call needs.
        if path in called and (isinstance(module, qat.Softmax) or not isinstance(module, Composed))
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


def unify_cat_scales(graph: Graph, root: nn.Module, march: str, caller: str) -> list[list[str]]:
    """Tie the scales of the inputs and the output of every concatenation.

    Returns the names of the modules that share, group by group.
    """
    # While a model is calibrated nothing is rounded, so that no scale is shared either.
    if march not in JOINS_AT_ONE_SCALE or is_calibration(root):
        return []
    # Concatenations that share a tensor become one group. Each module keeps its own observer, and
    # the largest range decides: values are then joined without being rescaled.
    groups = _groups(graph, root)
    for paths in groups:
        _tie(root, paths, caller)
    return groups


def _groups(graph: Graph, root: nn.Module) -> list[list[str]]:
    """Names of the modules that quantize the inputs and the output of concatenations."""
    leader: dict[str, str] = {}

    def first(path: str) -> str:
        while leader[path] != path:
            path = leader[path]
        return path

    for node in graph.nodes:
        if node.op != "call_method" or node.target != "cat":
            continue
        found = [path for path in (_quantizer(n, root) for n in _joined(node)) if path]
        mine = _quantizer(node, root)
        if mine is None:
            continue
        for path in (mine, *found):
            # A tensor that was in another group before brings that group along.
            leader.setdefault(path, path)
            leader[first(path)] = first(mine)
    made: dict[str, list[str]] = {}
    for path in leader:
        made.setdefault(first(path), []).append(path)
    return list(made.values())


def _joined(node: Node) -> list[Node]:
    tensors = node.args[1] if len(node.args) > 1 else node.kwargs.get("tensors", ())
    if isinstance(tensors, Node):
        return [tensors]
    return [n for n in tensors if isinstance(n, Node)] if isinstance(tensors, list | tuple) else []


def _quantizer(node: Node, root: nn.Module) -> str | None:
    """Name of the module that gives a node's value its scale, beyond what keeps the scale."""
    while True:
        path = called_path(node)
        module = root.get_submodule(path) if path else None
        if module is not None and _quantizes(module):
            return path
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
        keeps = _keeps(node) if module is None else keeps_scale(module)
        if not keeps or not inputs:
            return None
        node = inputs[0]


def _quantizes(module: nn.Module) -> bool:
    if isinstance(module, FakeQuantize | CalibFakeQuantize):
        return True
    if "activation_post_process" not in module._modules:
        return False
    # torch's own arithmetic holds an Identity there.
    return layer_class(module._modules["activation_post_process"], nn.Identity) is None


def _keeps(node: Node) -> bool:
    """Whether a function's value has its first input's scale."""
    function = called_function(node)
    return node.op in ("call_function", "call_method") and (
        function is operator.getitem or rule_of(function) is not None
    )


def _tie(root: nn.Module, paths: list[str], caller: str) -> None:
    found = {path: _fake_quant(root.get_submodule(path)) for path in paths}
    wide = [path for path, fake_quant in found.items() if fake_quant is None]
    kinds = sorted({str(fake_quant.dtype) for fake_quant in found.values() if fake_quant})
    learned = [path for path, q in found.items() if isinstance(q, LearnedFakeQuantize)]
    fixed = sorted(
        {
            float(q.activation_post_process.fixed_scale)
            for q in found.values()
            if q and isinstance(q.activation_post_process, FixedScaleObserver)
        }
    )
    reason = ""
    if wide:
        reason = f"{wide[0]} has 32 bits; give it a qconfig with an activation"
    elif len(kinds) > 1:
        reason = f"they have {', '.join(kinds)}; give them one type"
    elif learned:
        reason = f"that of {learned[0]} is learned; use activation_fake_quant='fake_quant'"
    elif len(fixed) > 1:
        reason = f"their scales are fixed at {fixed}; fix one of them"
    if reason:
        raise ValueError(
            f"{caller}: optimize_graph=True gives {', '.join(paths)} one scale, but {reason}, or "
            "leave optimize_graph off"
        )
    first, *others = (q for q in found.values() if isinstance(q, FakeQuantize))
    first.tie(others)


def _fake_quant(module: nn.Module) -> Any:
    if isinstance(module, FakeQuantize | CalibFakeQuantize):
        return module
    return module._modules["activation_post_process"]

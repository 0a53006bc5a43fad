"""Preparation of float, fused or calibrated models for calibration and QAT."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Node

from bevquant_hybrid._convert import refuse_converted
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize, _WrappedCalibFakeQuantize
from bevquant_hybrid._leaf import MethodCall
from bevquant_hybrid.march import March, get_march, require_march
from bevquant_hybrid.nn.qat import QatForms, float_form, has_qat_form
from bevquant_hybrid.nn.qat._base import errors_that_name, expect_pictures, first_prepared

from ._float_operators import (
    BOUNDARY,
    insert_boundaries,
    list_cpu_operators,
    refuse_float_operators,
)
from ._fuse import fuse_graph
from ._graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    clone_containers,
    copied_graph,
    replace_module,
)
from ._placement import Kind, Placement, has_weight, replace_functions
from ._scales import adopt_scales, calibrated_scales, is_calibration, unify_cat_scales
from ._settings import Names, Settings
from ._tracer import is_leaf, scope_of, trace


def fuse(model: nn.Module, names: Names, caller: str) -> GraphModuleWithAttr:
    """Trace a model, replace functions by modules, fuse; the model itself is not changed."""
    root = clone_containers(model, _stays)
    if isinstance(model, GraphModuleWithAttr):
        graph = copied_graph(model.graph)
    else:
        _refuse_module_by_module(model, caller)
        graph = trace(root, caller)
        # Functions that the mapper of a hybrid model runs on the CPU stay functions.
        replace_functions(graph, root, get_march() or March.BAYES)
    modules = dict(root.named_modules(remove_duplicate=False))

    def stays_apart(layer: Node, member: Node) -> bool:
        owner = member.args[0] if member.op == "call_method" else member
        target = owner.target if isinstance(owner, Node) else ""
        paths = (target if isinstance(target, str) else "", scope_of(member))
        mine = names.cover((str(layer.target),), modules)
        return names.cover(paths, modules) and not mine

    fuse_graph(graph, root, stays_apart)
    return GraphModuleWithAttr(root, graph)


def _stays(module: nn.Module) -> bool:
    """Leaves of the tree are shared between a model and what is prepared of it."""
    return is_leaf(module) or not module._modules


def prepare(
    model: nn.Module,
    qconfig_dict: dict[str, Any] | None,
    hybrid: bool,
    hybrid_dict: dict[str, Any] | None,
    caller: str,
    optimize_graph: bool = False,
    strip: bool = False,
) -> ObservedGraphModule:
    """Prepare a model; see `prepare_qat_fx`, and for `strip` `Placement`."""
    march = require_march(caller)
    names = Names(hybrid_dict if hybrid else None)
    if hybrid_dict and not hybrid:
        warnings.warn(
            f"{caller}: hybrid_dict says nothing without hybrid=True: all of the model is taken "
            "for the BPU",
            UserWarning,
            stacklevel=3,
        )
    scales = None
    refuse_converted(model, caller)
    if isinstance(model, ObservedGraphModule):
        _refuse_prepared_twice(model, caller)
        scales = calibrated_scales(model)
        fused: GraphModuleWithAttr = _unprepared(model)
    else:
        fused = fuse(model, names, caller)
    if not hybrid:
        replace_functions(fused.graph, fused)
    names.warn_of_unknown_names(fused)
    settings = Settings(fused, qconfig_dict)
    placement = Placement(fused.graph, fused, settings.of, names, hybrid, march, strip)
    if strip and Kind.QUANT not in placement.kinds.values():
        raise ValueError(
            f"{caller}: no QuantStub is called: what is before the first one stays float, which is "
            "all of the model; put one on each input"
        )
    _warn_of_edges(placement)
    _warn_of_missing_qconfigs(placement, settings)
    on_cpu = list_cpu_operators(placement) if hybrid else ()
    if not hybrid:
        refuse_float_operators(placement, caller)
    if hybrid:
        make = _boundary_maker(placement, wrapped=scales is not None)
        insert_boundaries(fused.graph, fused, placement, make)
    _swap(fused, placement, settings)
    prepared = ObservedGraphModule(fused, fused.graph)
    prepared.hybrid, prepared.on_cpu = hybrid, on_cpu
    expect_pictures(prepared, march, hybrid)
    if scales is not None:
        adopt_scales(prepared, scales)
    if optimize_graph:
        unify_cat_scales(prepared.graph, prepared, march, caller)
    return prepared


def _refuse_prepared_twice(model: nn.Module, caller: str) -> None:
    if not is_calibration(model) and any(isinstance(m, FakeQuantize) for m in model.modules()):
        raise ValueError(
            f"{caller}: {first_prepared(model)} is quantized: the model is prepared for "
            "quantization-aware training already; pass the float model, or one prepared with "
            "get_default_calib_qconfig and calibrated"
        )


def _refuse_module_by_module(model: nn.Module, caller: str) -> None:
    prepared = first_prepared(model)
    if prepared:
        raise ValueError(
            f"{caller}: {prepared} is quantized: the model was prepared by prepare_qat or "
            "prepare_calibration, whose models keep their own forward and are not traced; pass the "
            "float model, and use the functions that end in _fx throughout"
        )


def _unprepared(model: ObservedGraphModule) -> GraphModuleWithAttr:
    """The fused float model that a prepared one was made of: no boundaries, float layers."""
    root = clone_containers(model, _stays)
    graph = model.graph
    done: list[str] = []  # parts of a module that is float again are gone with it
    for path, module in list(root.named_modules()):
        if not path or path.startswith(tuple(f"{above}." for above in done)):
            continue
        made = float_form(module)
        if made is not module:
            replace_module(root, path, made)
            done.append(path)
    graph = copied_graph(graph)
    for node in list(graph.nodes):
        if BOUNDARY in node.meta:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            root._modules.pop(str(node.target), None)
    return GraphModuleWithAttr(root, copied_graph(graph))


def _boundary_maker(placement: Placement, wrapped: bool) -> Callable[[Node], nn.Module]:
    def make(node: Node) -> nn.Module:
        qconfig = placement.qconfig(node)
        if qconfig is None or qconfig.activation is None:
            where = placement.path(node) or "the model"
            raise ValueError(
                f"node {node.name} (in {where}) runs on the CPU and a BPU node reads it: its "
                "output must be quantized, but no qconfig with an activation reaches it; set one "
                "globally, or for that module (what shall run on the CPU is named in hybrid_dict, "
                "not given None)"
            )
        with errors_that_name(f"node {node.name}"):
            made: nn.Module = qconfig.activation()
        if wrapped and isinstance(made, FakeQuantize):
            return _WrappedCalibFakeQuantize(made)
        return made

    return make


def _swap(fused: GraphModuleWithAttr, placement: Placement, settings: Settings) -> None:
    """Put QAT modules where the BPU computes, and where stubs stand."""
    forms = QatForms()
    for node, kind in placement.kinds.items():
        module = placement.module(node)
        if kind in (Kind.BPU, Kind.QUANT, Kind.DEQUANT) and module is not None:
            path = placement.path(node)
            replace_module(fused, path, forms.of(module, placement.qconfig(node), path))
    if not placement.hybrid:
        _swap_in_methods(fused, placement, settings, forms)


def _swap_in_methods(
    fused: GraphModuleWithAttr, placement: Placement, settings: Settings, forms: QatForms
) -> None:
    """Put QAT modules where wrapped methods may call them: no node says which they do call."""
    owners = [m.owner_path for m in fused.modules() if isinstance(m, MethodCall)]
    calls = ("call_module", "get_attr")
    called = {str(node.target) for node in placement.kinds if node.op in calls}
    for path, module in list(fused.named_modules()):
        below = any(not owner or path.startswith(f"{owner}.") for owner in owners)
        if path and below and path not in called and has_qat_form(module):
            replace_module(fused, path, forms.of(module, settings.of(path), path))


def _warn_of_edges(placement: Placement) -> None:
    """Warn of layers that read a float value nobody quantizes."""
    for node, kind in placement.kinds.items():
        if kind is not Kind.BPU or not has_weight(placement.module(node)):
            continue
        for value in placement.inputs(node):
            source = placement.source(value)
            if source.op == "placeholder" or placement.kinds[source] is Kind.DEQUANT:
                warnings.warn(
                    f"node {node.name} ({placement.path(node)}) is on the BPU but reads "
                    f"{source.name}, which is not quantized; insert a QuantStub between them",
                    UserWarning,
                    stacklevel=4,
                )


def _warn_of_missing_qconfigs(placement: Placement, settings: Settings) -> None:
    """Warn of layers that stay float because no setting reaches them, though others have one."""
    if not settings.any:
        return
    for node in placement.kinds:
        if has_weight(placement.module(node)) and settings.has_no_setting_for(placement.path(node)):
            warnings.warn(
                f"node {node.name} ({placement.path(node)}) has no qconfig and stays float; set "
                "one for it or for the whole model, or None to say that this is intended",
                UserWarning,
                stacklevel=4,
            )

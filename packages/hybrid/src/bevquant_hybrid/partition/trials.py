"""Prepared models with some operators on the CPU, measured by `suggest_cpu`."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    _WrappedCalibFakeQuantize,
)
from bevquant_hybrid._fx._float_operators import BOUNDARY, insert_boundaries
from bevquant_hybrid._fx._graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    QuantizedGraphModule,
    clone_containers,
    copied_graph,
    replace_module,
)
from bevquant_hybrid._fx._placement import Kind, Placement
from bevquant_hybrid._fx._prepare import _stays, _unprepared, prepare
from bevquant_hybrid._fx._scales import is_calibration
from bevquant_hybrid._fx._settings import Names, anchor_path_of
from bevquant_hybrid.nn.qat import is_qat
from bevquant_hybrid.quantization.fake_quantize import FakeQuantState, set_fake_quantize
from bevquant_hybrid.quantization.qconfig import (
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
)

__all__ = ["NoScaleError", "Trials", "measured_form", "rounding_off"]

_SWAPPED = (Kind.BPU, Kind.QUANT, Kind.DEQUANT)


class NoScaleError(ValueError):
    """A CPU node's output must be quantized, but has no known range."""


@dataclass(frozen=True)
class Trial:
    """A model with some layers on the CPU."""

    model: ObservedGraphModule  # model with the fake quantizers of its source
    placement: Placement  # the kinds of its nodes
    scaled: frozenset[str]  # paths of the modules whose output has its own scale

    def moves(self) -> list[tuple[str, ...]]:
        """Candidates for the CPU: single layers, and producers with their consumers."""
        kinds = self.placement.kinds
        names = [_name_of(self.placement, n) for n, kind in kinds.items() if kind is Kind.BPU]
        order = {name: i for i, name in enumerate(dict.fromkeys(filter(None, names)))}
        found: dict[tuple[str, ...], None] = {(name,): None for name in order}
        # A value between two BPU layers stays quantized if one of them moves. It is a float only if
        # its producer and all its consumers run on the CPU.
        for node, kind in kinds.items():
            inserted = node.meta.get(BOUNDARY) == "quantize"
            if kind is not Kind.BPU and not inserted:
                continue
            members = [*([] if inserted else [node]), *self._readers(node)]
            moved = {_name_of(self.placement, member) for member in members}
            if "" not in moved and len(moved) > 1:
                found[tuple(sorted(moved, key=order.__getitem__))] = None
        return [*found]

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """BPU consumers of a value, also through operators that keep its scale."""
        found = []
        for user in node.users:
            kind = self.placement.kinds.get(user)
            if kind is Kind.BPU:
                found.append(user)
            keeps = not self._has_scale(user)
            if kind is Kind.PASS or (kind is Kind.BPU and keeps):
                found += self._readers(user)
        return list(dict.fromkeys(found))

    def _has_scale(self, node: fx.Node) -> bool:
        own = self.placement.module(node) is not None
        return own and self.placement.path(node) in self.scaled


def _name_of(placement: Placement, node: fx.Node) -> str:
    """The name of a node's own module; ``""`` for a function, which no name means alone."""
    module = placement.module(node)
    return anchor_path_of(module, placement.path(node)) if module is not None else ""


class Trials:
    """Builds models with other placements from one that is prepared.

    Args:
        model: Prepared. It is not changed, but its modules are shared.
        march: Whose list of operators decides what must run on the CPU.
    """

    def __init__(self, model: ObservedGraphModule, march: str) -> None:
        self._float = _unprepared(model)
        self._march = march
        modules = dict(model.named_modules(remove_duplicate=False))
        self._quantized = {path: m for path, m in modules.items() if is_qat(m)}
        self._scaled = frozenset(
            path for path, m in self._quantized.items() if hasattr(m, "activation_post_process")
        )
        self._boundaries = {
            node.args[0].name: modules[str(node.target)]
            for node in model.graph.nodes
            if node.meta.get(BOUNDARY) == "quantize"
        }

    def build(self, names: Iterable[str]) -> Trial:
        """The prepared model for a `hybrid_dict` with these names.

        Raises:
            NoScaleError: An input of a BPU node has no known range.
        """
        root = clone_containers(self._float, _stays)
        fused = GraphModuleWithAttr(root, copied_graph(self._float.graph))
        placement = self._placement(fused, names)

        def make(node: fx.Node) -> nn.Module:
            own = self._quantized.get(placement.path(node)) if placement.module(node) else None
            # A result has the scale of its boundary, or of the module that makes it.
            made = self._boundaries.get(node.name) or getattr(own, "activation_post_process", None)
            if not isinstance(made, FakeQuantizeBase | _WrappedCalibFakeQuantize):
                raise NoScaleError(node.name)
            return made

        insert_boundaries(fused.graph, fused, placement, make)
        for node, kind in placement.kinds.items():
            module = self._quantized.get(placement.path(node))
            if kind in _SWAPPED and placement.module(node) is not None and module is not None:
                replace_module(fused, placement.path(node), module)
        result = ObservedGraphModule(fused, fused.graph)
        result.hybrid = True
        result.eval()
        return Trial(result, placement, self._scaled)

    def kept_float(self) -> tuple[str, ...]:
        """Names of modules that a BPU could run, but were prepared for the CPU."""
        could = self._placement(self._float, (), lambda path: path or "all").kinds
        now = self._placement(self._float, ())
        found = [
            _name_of(now, node)
            for node, kind in now.kinds.items()
            if kind is Kind.CPU and could[node] is Kind.BPU
        ]
        return tuple(dict.fromkeys(name for name in found if name))

    def names_of_classes(self, classes: Sequence[type[nn.Module]]) -> tuple[str, ...]:
        """Names of all modules of some classes."""
        names = Names({"module_type": [*classes]})
        modules = dict(self._float.named_modules(remove_duplicate=False))
        return tuple(
            anchor_path_of(module, path)
            for path, module in modules.items()
            if path and names.cover((path,), {path: module})
        )

    def _placement(
        self,
        fused: GraphModuleWithAttr,
        names: Iterable[str],
        qconfig_of: Callable[[str], Any] | None = None,
    ) -> Placement:
        """Kinds of the nodes; by default with the qconfigs that the model was prepared with."""
        given = qconfig_of or (lambda path: getattr(self._quantized.get(path), "qconfig", None))
        requests = Names({"module_name": [*names]})
        return Placement(fused.graph, fused, given, requests, True, self._march)


def measured_form(
    model: nn.Module,
    march: str,
    hybrid_dict: Mapping[str, Iterable[Any]] | None,
    qconfig_dict: dict[str, Any] | None,
) -> tuple[ObservedGraphModule, Trials, tuple[str, ...]]:
    """Copy a prepared model into its training form, with its observers off and rounding on.

    Returns:
        The copy, what builds it with other placements, and the names of what runs on the CPU
        though a BPU could run it.
    """
    if isinstance(model, QuantizedGraphModule):
        raise TypeError(
            "suggest_cpu: the model is converted to integers; pass the one that convert_fx was "
            "given"
        )
    if not isinstance(model, ObservedGraphModule):
        raise TypeError(
            f"suggest_cpu: expected a model from prepare_calibration_fx or prepare_qat_fx, got "
            f"{type(model).__name__}; prepare it and run calibration batches first"
        )
    _refuse_uncalibrated(model)
    made: ObservedGraphModule = copy.deepcopy(model)
    trials = Trials(made, march)
    names = _names(trials, hybrid_dict)
    _refuse_other_placement(made, trials, names, march)
    if is_calibration(made):
        floats = () if made.hybrid else names  # in a hybrid model the names say it
        # Without `qconfig_dict`: the default fake quantizers, in the types that it was calibrated
        # for.
        requests = qconfig_dict if qconfig_dict is not None else _as_calibrated(made, floats)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all was said when the model was prepared
            made = prepare(made, requests, made.hybrid, {"module_name": [*names]}, "suggest_cpu")
    elif qconfig_dict is not None:
        raise ValueError(
            "suggest_cpu: qconfig_dict is for calibrated models; this one is prepared for training "
            "and keeps its fake quantizers"
        )
    left = [path for path, m in made.named_modules() if isinstance(m, CalibFakeQuantize)]
    if left:
        raise ValueError(
            f"suggest_cpu: {left[0]} would still only calibrate; give its layer a qconfig with "
            "fake quantizers in qconfig_dict, and no qconfig attribute of its own"
        )
    set_fake_quantize(made, FakeQuantState.VALIDATION)
    made.eval()
    return made, Trials(made, march), names


def _names(trials: Trials, hybrid_dict: Mapping[str, Iterable[Any]] | None) -> tuple[str, ...]:
    if hybrid_dict is None:
        return trials.kept_float()
    given = Names(hybrid_dict)
    return tuple(dict.fromkeys([*given.names, *trials.names_of_classes(given.types)]))


def _refuse_other_placement(
    model: ObservedGraphModule, trials: Trials, names: tuple[str, ...], march: str
) -> None:
    """Refuse a model that does not run where its march and names say."""
    try:
        nodes = [node.name for node in trials.build(names).model.graph.nodes]
    except NoScaleError as error:
        raise ValueError(
            f"suggest_cpu: with hybrid=True the result of {error} must be quantized behind the "
            "CPU, and the model has no range for it; prepare and calibrate it with hybrid=True"
        ) from error
    given = [node.name for node in model.graph.nodes]
    if model.hybrid and nodes != given:
        differs = [n for n in given if n not in nodes] + [n for n in nodes if n not in given]
        raise ValueError(
            f"suggest_cpu: the model does not run where march {march!r} and the names "
            f"{[*names]} put it (node {(differs or given)[0]}); pass the hybrid_dict that it was "
            "prepared with, and set that march"
        )


def _refuse_uncalibrated(model: ObservedGraphModule) -> None:
    used = {str(n.target) for n in model.graph.nodes if n.op in ("call_module", "get_attr")}
    missing = []
    for path, module in model.named_modules():
        if not isinstance(module, CalibFakeQuantize | FakeQuantize) or module.observed:
            continue
        parts = path.split(".")
        holders = {".".join(parts[: i + 1]) for i in range(len(parts))}
        if not path.endswith("weight_fake_quant") and holders & used:
            missing.append(path.removesuffix(".activation_post_process"))
    if missing:
        raise ValueError(
            f"suggest_cpu: {', '.join(dict.fromkeys(missing))}: no range was observed there; run "
            "calibration batches through the model first, or load a calibrated state"
        )


def _as_calibrated(model: ObservedGraphModule, floats: tuple[str, ...]) -> dict[str, Any]:
    """A qconfig_dict in the integer types that a model was calibrated for."""
    types: dict[str, str | None] = {}
    for path, module in model.named_modules():
        if is_qat(module) and hasattr(module, "activation_post_process"):
            own = module.activation_post_process
            types[path] = None if own is None else str(own.dtype)
    # The commonest type stands for the model, so that exceptions alone have names.
    common = Counter(kind for kind in types.values() if kind).most_common(1)[0][0]
    return {
        "": get_default_qat_qconfig(dtype=common),
        "module_name": [
            (path, get_default_qat_qconfig(dtype=kind) if kind else get_default_qat_out_qconfig())
            for path, kind in types.items()
            if kind != common
        ]
        + [(name, None) for name in floats],
    }


@contextmanager
def rounding_off(model: nn.Module) -> Iterator[None]:
    """The float form of a copied model: every fake quantizer off, for a while."""
    fake_quants = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    try:
        for fake_quant in fake_quants:
            fake_quant.disable_fake_quant()
        yield
    finally:
        for fake_quant in fake_quants:
            fake_quant.enable_fake_quant()

"""A prepared model built anew with some of its layers on the CPU, from its own fake quantizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid._fake_quant._calib import _WrappedCalibFakeQuantize
from bevquant_hybrid._fx._boundaries import BOUNDARY, insert_boundaries
from bevquant_hybrid._fx._graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    clone_containers,
    replace_module,
)
from bevquant_hybrid._fx._placement import Kind, Placement
from bevquant_hybrid._fx._prepare import _copied, _stays, _unprepared
from bevquant_hybrid._fx._settings import Names, Settings, anchor_path_of

__all__ = ["NoScaleError", "Trial", "Trials"]

_SWAPPED = (Kind.BPU, Kind.QUANT, Kind.DEQUANT)


class NoScaleError(ValueError):
    """A value would have to be quantized behind a CPU node, and no range of it is known."""


@dataclass(frozen=True)
class Trial:
    """A model with some layers on the CPU.

    Attributes:
        model: Runs with the fake quantizers of the model that it was built from.
        placement: The kinds of its nodes.
        scaled: Paths of the modules whose result has a scale of its own.
    """

    model: ObservedGraphModule
    placement: Placement
    scaled: frozenset[str]

    def names(self, kind: Kind) -> tuple[str, ...]:
        """What `hybrid_dict` calls the modules that run somewhere, in the graph's order."""
        kinds = self.placement.kinds
        found = [_name_of(self.placement, node) for node, where in kinds.items() if where is kind]
        return tuple(dict.fromkeys(name for name in found if name))

    def moves(self) -> list[tuple[str, ...]]:
        """What could go to the CPU next: single layers, and layers with a value between them.

        A value between two layers of the BPU stays quantized when one of them moves; it is a
        float only where its producer and all its readers run on the CPU.
        """
        order = {name: i for i, name in enumerate(self.names(Kind.BPU))}
        found: dict[tuple[str, ...], None] = {(name,): None for name in order}
        for node, kind in self.placement.kinds.items():
            inserted = node.meta.get(BOUNDARY) == "quantize"
            if kind is not Kind.BPU and not inserted:
                continue
            members = [*([] if inserted else [node]), *self._readers(node)]
            names = {_name_of(self.placement, member) for member in members}
            if "" not in names and len(names) > 1:
                found[tuple(sorted(names, key=order.__getitem__))] = None
        return [*found]

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """BPU nodes that read a value on its scale, through what keeps that scale."""
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


class _AsPrepared(Settings):
    """The qconfigs that the modules of a prepared model were made with."""

    def __init__(self, quantized: dict[str, nn.Module]) -> None:
        self._quantized = quantized

    def of(self, path: str) -> Any:
        return getattr(self._quantized.get(path), "qconfig", None)


class _EveryoneHas(Settings):
    """A qconfig for every module, to tell what only a name or a missing qconfig keeps float."""

    def __init__(self) -> None:
        pass

    def of(self, path: str) -> Any:
        return path or "all"


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
        self._quantized = {path: m for path, m in modules.items() if _is_qat(m)}
        self._scaled = frozenset(
            path for path, m in self._quantized.items() if hasattr(m, "activation_post_process")
        )
        self._boundaries = {
            node.args[0].name: modules[str(node.target)]
            for node in model.graph.nodes
            if node.meta.get(BOUNDARY) == "quantize"
        }

    def build(self, names: Iterable[str]) -> Trial:
        """The model as prepare makes it where `hybrid_dict` has these names.

        Raises:
            NoScaleError: A BPU node would read a value whose range the model does not know.
        """
        root = clone_containers(self._float, _stays)
        fused = GraphModuleWithAttr(root, _copied(self._float.graph))
        placement = self._placement(fused, names, _AsPrepared(self._quantized))

        def make(node: fx.Node) -> nn.Module:
            own = self._quantized.get(placement.path(node)) if placement.module(node) else None
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
        """Names of what could run on the BPU, but was prepared to run on the CPU."""
        could = self._placement(self._float, (), _EveryoneHas()).kinds
        now = self._placement(self._float, (), _AsPrepared(self._quantized))
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
        self, fused: GraphModuleWithAttr, names: Iterable[str], settings: Settings
    ) -> Placement:
        wishes = Names({"module_name": [*names]})
        return Placement(fused.graph, fused, settings, wishes, True, self._march)


def _is_qat(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bevquant_hybrid.nn.qat.")

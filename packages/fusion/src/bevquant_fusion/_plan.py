"""What becomes of every batch norm of a model: by its graph, or by the structure of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import Graph

from ._fold import Fold, Skipped
from ._foldable import conv_problem
from ._graph_plan import from_graph
from ._plain import plain_layers
from ._structure import from_structure


@dataclass(frozen=True)
class Plan:
    """All batch norms of a model, each in one of the two; what was not followed; plain layers."""

    folds: tuple[Fold, ...]
    skipped: tuple[Skipped, ...]
    untraced: Mapping[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()


def plan_fusion(model: nn.Module, graph: Graph | None, failure: str = "") -> Plan:
    """Find out what becomes of every batch norm of ``model``.

    Args:
        model: The model; it is not changed.
        graph: Its captured graph. Without one, or in modules that are opaque in it, what belongs
            together is told by the structure of the modules.
        failure: Why there is no graph although example inputs were given.
    """
    found: dict[str, Fold | Skipped] = {}
    untraced: dict[str, str] = {}
    plain: tuple[str, ...] = ()
    if graph is not None:
        plain = plain_layers(model, graph)
        found |= {p: f for p, f in from_graph(model, graph, plain).items() if p not in plain}
        untraced |= {
            path: entry.reason
            for path, entry in graph.opaque.items()
            if conv_problem(model.get_submodule(path)) is not None
        }
    roots = [""] if graph is None else list(untraced)
    by_structure, refused = from_structure(model, roots)
    if graph is None:
        untraced |= refused
        if failure:
            untraced[""] = failure
    called = {f.conv for f in found.values() if isinstance(f, Fold) and not f.ahead}
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or path in found:
            continue
        guess = by_structure.get(path)
        if isinstance(guess, Fold) and guess.conv in called:
            guess = Skipped(path, f"{guess.conv} is shared: another batch norm reads it, too")
        found[path] = guess or Skipped(path, _never_called(path, untraced, graph))
    return Plan(
        tuple(f for f in found.values() if isinstance(f, Fold)),
        tuple(f for f in found.values() if isinstance(f, Skipped)),
        untraced,
        plain,
    )


def _never_called(path: str, untraced: Mapping[str, str], graph: Graph | None) -> str:
    if path in untraced:
        return f"cannot be followed: {untraced[path]}"
    parts = path.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        parent = ".".join(parts[:depth])
        if parent in untraced:
            return (
                f"{parent or 'the model'} cannot be followed, and only chains of modules inside it "
                f"are folded: {untraced[parent]}"
            )
    if graph is None:
        return "is never called by the forward of the model, as far as it can be read"
    return "is never called by the forward of the model"

"""A calibrated model as one graph, down to its quantizers and layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import fx, nn

from bevquant_fusion import DataFlow, trace_dataflow
from bevquant_int8sim.model._signature import Arguments, arguments, with_symbols

__all__ = ["SCOPE", "Traced", "trace"]

SCOPE = "bevquant_scope"  # node.meta key of the module whose forward makes the node
_FROM_NOTHING = "makes a tensor that is not computed from its inputs"


@dataclass(frozen=True, eq=False)
class Traced:
    """A model's graph.

    Attributes:
        model: The model; targets of the graph are paths in it.
        graph: Its steps, modules entered as far as they could be followed.
        untraced: Path to the reason, for modules that are one step because they could not be.
        arguments: Example arguments.
        numbers: Whether numbers among the arguments are inputs of the graph; else constants.
    """

    model: nn.Module
    graph: fx.Graph
    untraced: Mapping[str, str]
    arguments: Arguments
    numbers: bool


def trace(model: nn.Module, example_inputs: Any) -> Traced:
    """Follow the forward of `model`.

    Numbers among the inputs, such as a batch size, are followed as values; a forward that counts
    with them is followed again with the numbers as they are.

    Raises:
        ValueError: The forward of the model itself cannot be followed.
    """
    args, kwargs = arguments(example_inputs)
    symbols: Any = {**with_symbols(kwargs)} if kwargs else with_symbols(args)
    given: Any = dict(kwargs) if kwargs else args
    flow, forced = _followed(model, symbols)
    numbers = True
    if not _is_whole(flow) or len(flow.untraced) > len(forced):
        other, other_forced = _followed(model, given)
        if not _is_whole(flow) or len(other.untraced) < len(flow.untraced):
            flow, forced, numbers = other, other_forced, False
    if not _is_whole(flow):
        reason = flow.untraced.get("", "its forward could not be followed")
        raise ValueError(
            f"simulate: {type(model).__name__} cannot be followed as a whole: {reason}. Simulate "
            "the parts of it that can, each with its own example inputs"
        )
    graph = flow.calls[0].node.graph
    for node in graph.nodes:
        if node.op == "call_function" and _name(node) == "hook":
            raise ValueError(
                f"simulate: {node.meta[SCOPE] or 'the model'} holds a module with forward hooks, "
                "which may change what it computes; remove the hooks first"
            )
    return Traced(model, graph, {**flow.untraced, **forced}, (args, kwargs), numbers)


def _is_whole(flow: DataFlow) -> bool:
    return bool(flow.regions) and flow.regions[0] == "" and bool(flow.calls)


def _followed(model: nn.Module, inputs: Any) -> tuple[DataFlow, dict[str, str]]:
    """The data flow; modules that make tensors from nothing are steps, as their values are lost."""
    forced: dict[str, str] = {}
    while True:
        with _closed(model, forced) as shell:
            flow = trace_dataflow(shell, inputs)
        if not _is_whole(flow):
            return flow, forced
        scopes = {
            node.meta[SCOPE]
            for node in flow.calls[0].node.graph.nodes
            if node.op == "call_function" and _name(node) == "constant_tensor"
        }
        if not scopes or "" in scopes:
            return flow, forced
        forced.update(dict.fromkeys(scopes, _FROM_NOTHING))


@contextmanager
def _closed(model: nn.Module, paths: Mapping[str, str]) -> Iterator[nn.Module]:
    """A copy of the structure in which the modules at `paths` cannot be entered."""
    if not paths:
        yield model
        return
    shared: Any = {id(t): t for t in chain(model.parameters(), model.buffers())}
    shell = copy.deepcopy(model, shared)
    for path in paths:
        module: Any = shell.get_submodule(path)
        # The tracer takes a module whose forward is its own for one step.
        module.forward = module.forward
    yield shell


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))

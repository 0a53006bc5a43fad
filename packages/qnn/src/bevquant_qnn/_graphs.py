"""Graphs of the forwards of a model's modules, as the model calls them."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from bevquant_fusion import UntraceableError, trace_forward
from bevquant_qnn._branches import Branches
from bevquant_qnn._calls import CallForm, call_forms, has_options
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._unpacked import trace_given, trace_unpacked

__all__ = ["forward_graphs"]


def forward_graphs(
    modules: dict[str, nn.Module], config: QuantConfig, model: nn.Module, example_inputs: Any
) -> dict[str, fx.Graph | str]:
    """Return each module's graph, or the reason why there is none.

    With example inputs the model runs once more where the code alone leaves doubt.
    """
    found: dict[str, fx.Graph | str] = {}
    for path, module in modules.items():
        pattern = config.excluded_by(path)
        try:
            found[path] = (
                trace_forward(module) if pattern is None else f"it is excluded by {pattern!r}"
            )
        except UntraceableError as error:
            found[path] = str(error)
    unsure = [
        path
        for path, module in modules.items()
        if config.excluded_by(path) is None
        and (isinstance(found[path], str) or has_options(module))
    ]
    if example_inputs is not None and unsure:
        forms = call_forms((modules[path] for path in unsure), model, example_inputs)
        for path in unsure:
            found[path] = _trace_as_called(modules[path], forms[modules[path]], found[path])
    return found


def _trace_as_called(module: nn.Module, form: CallForm, before: fx.Graph | str) -> fx.Graph | str:
    if form.option is not None:
        graph = _trace_for_reading(module, form)
        return graph or (
            f"it is called with {form.option}=…, and a rebuilt forward knows the default only"
        )
    if isinstance(before, fx.Graph) or not form.lengths:
        return before
    try:
        return trace_unpacked(module, form.lengths)
    except UntraceableError as error:
        return str(error)


def _trace_for_reading(module: nn.Module, form: CallForm) -> fx.Graph | None:
    """The graph of a forward with optional tensors, if there is nothing in it to rewrite."""
    if form.tensors is None:
        return None
    try:
        graph = trace_given(module, form.tensors)
    except UntraceableError:
        return None
    branches = Branches(module, graph)
    return None if branches.additions() or branches.concatenations() else graph

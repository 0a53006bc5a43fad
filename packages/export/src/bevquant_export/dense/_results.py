"""From a float tensor to the form in which a step's result is held: ReLU, QDQ pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bevquant_export.dense._graph import Graph, Held
from bevquant_export.dense._source import Integers


def finished(
    graph: Graph, path: str, held: Held | str, form: Any, attributes: Mapping[str, Any],
    *, kept: bool = False, block: int = 0,
) -> Held:  # fmt: skip
    """What a step stores, given what its operator makes.

    Args:
        graph: Where nodes are added.
        path: Module of the step.
        held: The operator's result, or a tensor that is to be held in another form.
        form: Form of the result.
        attributes: Of the step: ``relu``, ``ceiling`` (in units of the form).
        kept: The result lies on the form's grid already, and gets no pair.
        block: Side of the block of pixels that the result's channels still have to become.
    """
    held = Held(held) if isinstance(held, str) else held
    if block and not (graph.profile.integer_relu and isinstance(form, Integers)):
        held, block = Held(graph.pixels(path, held.name, block)), 0
    relu, ceiling = bool(attributes.get("relu")), attributes.get("ceiling")
    if not isinstance(form, Integers):
        return Held(_limited(graph, path, held.name, ceiling)) if relu else held
    if graph.profile.integer_relu:
        least = 0 if relu else form.low if form.narrow else None
        same = held.form in (None, form)
        known = held.low if same or held.low == 0 else None  # 0 is 0 in every scale
        # A Clip that repeats a range is left out.
        low = None if known is not None and least is not None and known >= least else least
        if held.form == form:
            if low is None and ceiling is None:
                return held
            made = graph.dequantized(path, graph.clipped(path, held.integers, low, ceiling), form)
        else:
            made = graph.quantized(path, held.name, form, low, ceiling, block=block)
        bounds = [bound for bound in (known, least) if bound is not None]
        return replace(made, low=max(bounds, default=None))
    if held.form == form and not relu:
        return held
    if form.narrow and not relu:
        _note_narrow(graph, path)
    name = held.name
    if relu:
        name = _limited(graph, path, name, None if ceiling is None else ceiling * form.scale)
    return Held(name, form=form) if kept else graph.quantized(path, name, form)


def _limited(graph: Graph, path: str, name: str, ceiling: float | None) -> str:
    if ceiling is None:
        return graph.node("Relu", path, [name])
    limits = [
        graph.constant("zero", 0.0),
        graph.constant(f"{path}.ceiling" if path else "ceiling", ceiling),
    ]
    return graph.node("Clip", path, [name, *limits])


def _note_narrow(graph: Graph, path: str) -> None:
    note = (
        f"{path or 'the model'}: its quantizer leaves −128 out (narrow_range), QuantizeLinear does "
        "not: a value below the range comes out one step lower"
    )
    if note not in graph.notes:
        graph.notes.append(note)

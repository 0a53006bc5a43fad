"""Conditions of a model's forward on sizes that the file leaves free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bevquant_export._size_guards import first_refused, frames_of, guards_of
from bevquant_export.lint._rule import Finding, Rule, quoted

if TYPE_CHECKING:
    import onnx

ASKED = Rule(
    "ONX024",
    "warning",
    "the model does not ask about sizes that the file leaves free",
    "give the engine inputs of such sizes only, or take the question out of the forward, and "
    "export again",
)


def check_guards(model: onnx.ModelProto) -> Iterator[Finding]:
    """Report the conditions in a file's metadata, which engines do not read, and damaged ones."""
    try:
        guards, _ = guards_of(model), frames_of(model)
    except ValueError as error:
        yield ASKED.found("file", str(error))
        return
    for guard in guards:
        if first_refused(guard) is None:
            continue
        yield ASKED.found(guard.sizes[0][0], f"the file is right where {quoted(guard, plain=True)}")

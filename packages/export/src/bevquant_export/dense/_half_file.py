"""A QDQ file in half precision, tried on the example and on the most critical inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from bevquant_export.dense._compare import departing, refusal, required_of, tensors_by_input
from bevquant_export.dense._half import Typed
from bevquant_export.dense._half_digits import Size
from bevquant_export.dense._half_single import Known
from bevquant_export.dense._half_tried import arrays, tried
from bevquant_export.dense._recorded import EXAMPLE, LARGEST, hard_inputs, measured
from bevquant_export.dense._source import Source
from bevquant_export.dense._written import QdqFile


def typed_file(
    file: QdqFile, proto: Any, source: Source, args: Any, known: Known, *, verify: bool, sums: bool
) -> Typed:
    """A QDQ file in half precision, except for parts that then differ from the integer model.

    Raises:
        ValueError: onnxruntime does not run the file on inputs that the model accepts.
    """
    required = required_of(file, source.integer, args)
    given, notes = {EXAMPLE: required}, []
    for name, inputs in hard_inputs(required, list(file.inputs), known):
        why = "" if name == EXAMPLE else refusal(source.integer, inputs)
        if why:
            notes.append(f"half precision is not tried on {name}: the model refuses it: {why}")
        else:
            given[name] = inputs
    frames = [
        arrays(tensors_by_input(file, given[name])) for name in (EXAMPLE, LARGEST) if name in given
    ]

    @cache
    def measure(names: frozenset[str]) -> Mapping[str, Size]:
        return measured(proto, frames, names)

    def apart(typed: Typed) -> set[str]:
        content, found = typed.proto.SerializeToString(), set[str]()
        for name, inputs in given.items():
            found |= departing(
                file, content, source.integer, inputs, integer_sums=sums, inputs=name
            )
        return found

    typed = tried(proto, known, measure, apart if verify else lambda typed: ())
    return replace(typed, reasons=(*typed.reasons, *notes))

"""Names of a file's inputs and outputs, from the parameters and the result of the forward."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bevquant_export._errors import QdqError
from bevquant_export.dense._source import Source
from bevquant_export.floats._torch_exporter import checked
from bevquant_int8sim.program import Ref, SparseRef, replaced

Shape = tuple[int | str, ...]


def named_inputs(source: Source, wanted: Sequence[str] | None) -> dict[str, str]:
    """Name in the program to name in the file."""
    names = [re.sub(r"\W+", "_", name).strip("_") for name in source.inputs.values()]
    return dict(zip(source.inputs, _named("input_names", names, wanted), strict=True))


def named_outputs(
    source: Source, wanted: Sequence[str] | None, inputs: Collection[str]
) -> list[tuple[str, str]]:
    """Name in the program and name in the file, for every returned tensor.

    A name that is already an input's gets the prefix ``output_``.
    """
    found = list(_members(source, source.program.result, ""))
    if not found:
        raise QdqError("the model returns no tensor")
    single = len(found) == 1 and not found[0][1]
    names = ["output" if single else name.lstrip("_") or "output" for _, name in found]
    names = [f"output_{n}" if n[0].isdigit() or n in inputs else n for n in names]
    chosen = _named("output_names", names, wanted)
    if both := [name for name in chosen if name in inputs]:
        raise QdqError(f"output_names: {both[0]!r} is an input's name too; give another one")
    return [(ref, name) for (ref, _), name in zip(found, chosen, strict=True)]


def _members(source: Source, value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every tensor in the model's result, and its keys and positions."""
    if isinstance(value, Ref) and f"{value.name}[0]" in source.shapes:
        for index in range(len(source.shapes[value.name])):
            yield f"{value.name}[{index}]", f"{where}_{index}"
    elif isinstance(value, Ref) and value.name in source.shapes:
        yield value.name, where
    elif isinstance(value, SparseRef):
        yield value.features, f"{where}_features"
        yield f"{value.coords}.indices", f"{where}_indices"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _members(source, item, f"{where}_{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _members(source, item, f"{where}_{index}")


def with_names(source: Source, value: Any, names: Iterable[str]) -> Any:
    """A signature or result of the program with the file's names, in the program's order.

    Numbers among the inputs are the file's constants; None stands for others and for sizes.
    """
    order = iter(names)

    def named(ref: Ref | SparseRef) -> Any:
        if isinstance(ref, SparseRef) or ref.name in source.program.sparse_inputs:
            return SparseRef(next(order), next(order))
        if f"{ref.name}[0]" in source.shapes:
            return tuple(Ref(next(order)) for _ in source.shapes[ref.name])
        if ref.name in source.shapes:
            return Ref(next(order))
        return source.fixed.get(source.integer.names.get(ref.name, ""))

    return replaced(value, named)


def _named(argument: str, names: list[str], wanted: Sequence[str] | None) -> list[str]:
    given = f"export_qdq_onnx: {argument}"
    return names if wanted is None else checked(given, names, len(names), wanted)

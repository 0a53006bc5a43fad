"""Names of a file's inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from bevquant_export.dense._source import Ref, Source, SparseRef


def input_names(source: Source, wanted: Sequence[str] | None) -> dict[str, str]:
    """Name in the program to name in the file.

    Raises:
        ValueError: Names that are not as many as the inputs, or not different.
    """
    names = [re.sub(r"\W+", "_", name).strip("_") for name in source.inputs.values()]
    return dict(zip(source.inputs, _checked("input_names", names, wanted), strict=True))


def output_names(
    source: Source, wanted: Sequence[str] | None, inputs: Collection[str]
) -> list[tuple[str, str]]:
    """Name in the program and name in the file, for every tensor that the model returns.

    One that is called as one of the file's `inputs` gets ``output_`` before its name.

    Raises:
        ValueError: No tensor is returned, or names that are not as many or not different.
    """
    found = list(_members(source, source.program.result, ""))
    if not found:
        raise ValueError("export_qdq_onnx: the model returns no tensor")
    single = len(found) == 1 and not found[0][1]
    names = ["output" if single else name.lstrip("_") or "output" for _, name in found]
    names = [f"output_{n}" if n[0].isdigit() or n in inputs else n for n in names]
    chosen = _checked("output_names", names, wanted)
    return [(ref, name) for (ref, _), name in zip(found, chosen, strict=True)]


def _members(source: Source, value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every tensor in what the model returns, and the keys and places that lead to it."""
    if isinstance(value, Ref) and f"{value.name}[0]" in source.shapes:
        for index in range(len(source.shapes[value.name])):
            yield f"{value.name}[{index}]", f"{where}_{index}"
    elif isinstance(value, Ref) and value.name in source.shapes:
        yield value.name, where
    elif isinstance(value, SparseRef):
        yield value.features, f"{where}_features"
        yield f"{value.sites}.indices", f"{where}_indices"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _members(source, item, f"{where}_{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _members(source, item, f"{where}_{index}")


def _checked(argument: str, names: list[str], wanted: Sequence[str] | None) -> list[str]:
    if wanted is None:
        return names
    chosen = list(wanted)
    if len(chosen) != len(names) or len(set(chosen)) != len(chosen) or not all(chosen):
        raise ValueError(
            f"export_qdq_onnx: {argument}={chosen}: expected {len(names)} different names, one for "
            f"each of {names}"
        )
    return chosen

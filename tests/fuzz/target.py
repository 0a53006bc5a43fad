"""What is attacked: readers with their good files, kernels with their good arguments."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fuzz.mutate import Rng, changed_json

Files = dict[str, bytes]


class Target(NamedTuple):
    """A reader: good files, how each is changed, how they are read again.

    Attributes:
        files: The good ones by name.
        change: By name of a file; one of them is changed in each mutant.
        read: Reads them from a folder.
        sign: Brings checksums up to date in nine of ten mutants.
        types: Whether values of another type are a TypeError, as the reader says.
    """

    files: Files
    change: dict[str, Callable[[Rng, bytes], bytes]]
    read: Callable[[Path], Any]
    sign: Callable[[Files], Files] | None = None
    types: bool = False


def written(write: Callable[[Path], Any]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        found = [p for p in Path(folder).rglob("*") if p.is_file()]
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def document(make: Callable[[], Any]) -> Target:
    value = make()
    cls = type(value)
    files = {"d.json": value.to_json().encode()}
    return Target(files, {"d.json": changed_json}, lambda f: str(cls.load(f / "d.json")))


class Call(NamedTuple):
    """A kernel with good arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})

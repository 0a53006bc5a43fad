"""Values of a call by the names that a program has for its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bevquant_graph import input_tensor, members_of, refuse_other_members
from bevquant_int8sim.program import Program, Ref, SparseRef, arguments


def bound(program: Program, args: Any) -> Iterator[tuple[str, Any]]:
    """Inputs of the program and their values in a call, sparse tensors whole."""
    for name, value in placed(program.signature, arguments(args)):
        yield name, value.float() if name in program.single else value


def placed(wanted: Any, given: Any, where: str = "inputs") -> Iterator[tuple[str, Any]]:
    """Names in a structure of `Ref`s, and the members of another value at these positions.

    Members of containers are found by their keys. A `SparseRef` stands for two tensors.
    """
    if isinstance(wanted, Ref):
        yield wanted.name, input_tensor(given)
    elif isinstance(wanted, SparseRef):
        yield wanted.features, given.features
        yield wanted.coords, given.indices
    else:
        members, own = members_of(wanted) or {}, members_of(given) or {}
        refuse_other_members(members, {key: own[key] for key in own if key in members}, where)
        for key, item in members.items():
            yield from placed(item, own[key], f"{where}[{key!r}]")

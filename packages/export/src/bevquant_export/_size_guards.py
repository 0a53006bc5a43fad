"""Conditions on free sizes of a file, in its metadata.

A forward that asks about a size is one branch in a file. Constant sizes decide the branch at
export. A condition on a free size is written into the metadata under `KEY`: `open_onnx` and
`load_sparse_onnx` refuse inputs that break it, `lint_onnx` reports it, other runtimes do not read
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bevquant_export._inputs import bound
from bevquant_graph import Guard
from bevquant_int8sim.program import Program

KEY = "bevquant.guards"
FRAMES_KEY = "bevquant.frames"
REMEDY = "export again with an example of such sizes"
Sizes = Mapping[str, Sequence[Any] | int]


def open_guards(guards: Iterable[Guard], names: Mapping[str, str], sizes: Sizes) -> list[Guard]:
    """Guards on free sizes of a file.

    `names` are inputs of the program to inputs of the file; others are constants there. A free size
    in `sizes` is a string, the same one for equal sizes.
    """
    found: list[Guard] = []
    for guard in (guard.renamed(names) for guard in guards):
        given = {place: _size(sizes.get(place[0], ""), place[1]) for place in guard.sizes}
        rest = guard.where({place: n for place, n in given.items() if isinstance(n, int)})
        if rest is None or rest in found:
            continue
        if rest.condition != "s0 == s1" or len(set(given.values())) > 1:
            found.append(rest)
    return found


def _size(given: Any, axis: int | None) -> Any:
    return given if axis is None or isinstance(given, str) else given[axis]


_ROWS = (*range(1, 1025), 1 << 12, 1 << 16, 1 << 20)


def first_refused(guard: Guard) -> int | None:
    """The smallest number of rows, the same for all free sizes, that breaks a guard.

    None where all guards hold, for guards of equal sizes, and for those that torch could not prove,
    as for a padded size.
    """
    plain = Guard(guard.condition, tuple((f"s{i}", None) for i in range(len(guard.sizes))))
    names = [name for name, _ in plain.sizes]
    return next((n for n in _ROWS if not plain.holds(dict.fromkeys(names, n))), None)


def refuse_free_batch(guards: Iterable[Guard], who: str) -> None:
    """Refuse a file with a free batch whose forward branches on it."""
    for guard in guards:
        rows = first_refused(guard)
        if rows is not None:
            raise ValueError(
                f"{who}: dynamic_batch=True, but the forward asks about the batch: the file is "
                f"right where {guard}, and not for a batch of {rows}. Export with "
                "dynamic_batch=False"
            )


def note_guards(model: Any, guards: Iterable[Guard]) -> None:
    """Write guards into a model's metadata; without any it is unchanged."""
    if data := [guard.to_json() for guard in guards]:
        model.metadata_props.add(key=KEY, value=json.dumps(data))


def guards_of(model: Any) -> tuple[Guard, ...]:
    """The guards in a model's metadata."""
    texts = [entry.value for entry in model.metadata_props if entry.key == KEY]
    try:
        return tuple(Guard.from_json(item) for text in texts for item in json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the metadata {KEY!r} are damaged ({error}): export it again") from error


def frames_of(model: Any) -> dict[str, int]:
    """Tables of coordinates of a file, and its number of frames, which is a constant there."""
    texts = [entry.value for entry in model.metadata_props if entry.key == FRAMES_KEY]
    inputs = {port.name for port in model.graph.input}
    try:
        frames: dict[str, int] = {n: c for text in texts for n, c in json.loads(text).items()}
        if not frames.keys() <= inputs or any(type(count) is not int for count in frames.values()):
            raise ValueError(f"expected numbers of frames by input, got {frames}")
    except (AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the metadata {FRAMES_KEY!r} are damaged ({error}): export it again"
        ) from error
    return frames


def sparse_guards(
    program: Program, args: Any, frame: Callable[[], tuple[Tensor, Tensor, int]]
) -> tuple[Guard, ...]:
    """Guards of an encoder's program in terms of its file's ``coords`` and ``batch_size``.

    Grids, and sizes of `args` behind the first axis, are constants of the file. `frame` gives
    features, coordinates and frames of the example.
    """
    sizes: dict[str, Any] = {}
    grids: dict[str, Any] = {}
    for name, value in bound(program, args):
        coords = program.sparse_inputs.get(name)
        if coords is not None:
            sizes[f"{coords}.indices"] = tuple(value.indices.shape)
            grids[f"{coords}.spatial_shape"] = tuple(map(int, value.spatial_shape))
            sizes[f"{coords}.batch_size"], value = int(value.batch_size), value.features
        sizes[name] = tuple(value.shape) if isinstance(value, Tensor) else value
    rest = {n: ("voxels", *s[1:]) if isinstance(s, tuple) else "" for n, s in sizes.items()}
    if not open_guards(program.guards, {}, rest | grids):
        return ()
    _, coords_made, frames = frame()
    names: dict[str, str] = {}
    for name, size in sizes.items():
        if isinstance(size, tuple) and size[:1] == (len(coords_made),):
            names[name] = "coords"
        elif not isinstance(size, tuple) and size == frames:
            names[name] = "batch_size"
    known = {name: rest[name] if name in names else size for name, size in sizes.items()}
    return tuple(guard.renamed(names) for guard in open_guards(program.guards, {}, known | grids))

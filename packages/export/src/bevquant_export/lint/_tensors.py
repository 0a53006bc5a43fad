"""Tensors of a file: claimed size, real size, and values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.lint._rule import Finding, Rule

if TYPE_CHECKING:
    import onnx

# fmt: off
ESCAPES = Rule("ONX009", "error",
    "external data lies in the folder of the model: no absolute path, no .., no link out of it",
    "keep the data file next to the model and write its bare name into `location`")
MISSING_DATA = Rule("ONX010", "error",
    "external data is there, in the length that the tensor needs",
    "copy the data file together with the model, or save the model with its data inside")
SIZES = Rule("ONX011", "error",
    "a tensor has a known type, dimensions a machine can hold, and as much data as they ask for",
    "write the tensor again with onnx.numpy_helper.from_array")
# fmt: on

_MOST_ELEMENTS = 2**40
_MOST_DIMS = 64
# Fields with typed data, and the types that each of them holds (onnx.proto, TensorProto).
_TYPED = {
    "float_data": {1, 14},
    "int32_data": {2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26},
    "string_data": {8},
    "int64_data": {7},
    "double_data": {11, 15},
    "uint64_data": {12, 13},
}
_BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((25, 26), 2),
    15: 128,
    8: 0,
}


def numel(dims: Any) -> int | None:
    """Number of elements, None where dimensions are negative or exceed any memory.

    Example:
        >>> numel([2, 3]), numel([]), numel([2**62, 2**62]), numel([-1])
        (6, 1, None, None)
    """
    if len(dims) > _MOST_DIMS or any(d < 0 for d in dims):
        return None
    count = 1
    for dim in dims:
        count *= int(dim)
    return count if count <= _MOST_ELEMENTS else None


def shape_of(tensor: onnx.TensorProto) -> list[int]:
    """Dimensions, at most 65 of them: a tensor may claim more, and every node may read it."""
    return list(tensor.dims[: _MOST_DIMS + 1])


def check_tensor(tensor: onnx.TensorProto, folder: Path) -> Iterator[Finding]:
    """Compare a tensor's claims with its content, without allocating by the claim."""
    name = tensor.name or "tensor"
    if tensor.data_type not in _BITS:
        yield SIZES.found(name, f"data type {tensor.data_type} is none of ONNX")
        return
    count = numel(tensor.dims)
    if count is None:
        shown = ", ".join(str(d) for d in tensor.dims[:8])
        yield SIZES.found(name, f"dimensions [{shown}] are impossible")
        return
    needed = (count * _BITS[tensor.data_type] + 7) // 8
    if tensor.data_location == 1:
        yield from _check_external(tensor, name, needed, folder)
        return
    if tensor.data_type == 8:
        if len(tensor.string_data) != count:
            yield SIZES.found(name, f"{count} strings expected, {len(tensor.string_data)} there")
    elif tensor.HasField("raw_data"):
        if len(tensor.raw_data) != needed:
            yield SIZES.found(name, f"{needed} bytes expected, {len(tensor.raw_data)} there")
    else:
        field = next(f for f, types in _TYPED.items() if tensor.data_type in types)
        entries = len(getattr(tensor, field))
        if tensor.data_type in (14, 15):
            count *= 2
        packed = _BITS[tensor.data_type] < 8 and entries == (needed)
        if entries != count and not packed:
            yield SIZES.found(name, f"{count} numbers expected in {field}, {entries} there")


def _check_external(
    tensor: onnx.TensorProto, name: str, needed: int, folder: Path
) -> Iterator[Finding]:
    place = _external(tensor, folder)
    if isinstance(place, str):
        yield ESCAPES.found(name, place)
        return
    path, offset, length = place
    try:
        size = path.stat().st_size if path.is_file() else -1
    except OSError:
        size = -1
    if size < 0:
        yield MISSING_DATA.found(name, "its data file is not in the folder of the model")
    elif offset < 0 or length not in (-1, needed) or offset + needed > size:
        yield MISSING_DATA.found(
            name,
            f"{needed} bytes from byte {offset} expected, `length` says "
            f"{length if length >= 0 else 'nothing'} and the file has {size}",
        )


def _external(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int, int] | str:
    """Path, offset (−1 where it is no number) and length (−1 where none is given)."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location or "\0" in location:
        return "external data without a location"
    parts = location.replace("\\", "/").split("/")
    if ".." in parts or location[0] in "/\\" or location[1:2] == ":":
        return f"location {location[:60]!r} leads out of the folder of the model"
    path = folder / location
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"location {location[:60]!r} is a link out of the folder of the model"
    except (OSError, RuntimeError):
        return f"location {location[:60]!r} cannot be followed"
    offset, length = entries.get("offset", "0"), entries.get("length", "-1")
    begin, size = (
        int(text) if re.fullmatch("-?[0-9]{1,18}", text) else -2 for text in (offset, length)
    )
    return path, begin, size


def values(tensor: onnx.TensorProto | None, folder: Path) -> np.ndarray[Any, Any] | None:
    """Values of a tensor, None where `check_tensor` has a finding or it holds strings."""
    import onnx
    from onnx import numpy_helper

    if tensor is None or tensor.data_type == onnx.TensorProto.STRING:
        return None
    if next(check_tensor(tensor, folder), None) is not None:
        return None
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        place = _external(tensor, folder)
        if isinstance(place, str):
            return None
        path, offset, _ = place
        needed = ((numel(tensor.dims) or 0) * _BITS[tensor.data_type] + 7) // 8
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(needed)
        tensor = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data)
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (TypeError, ValueError, OverflowError):
        return None

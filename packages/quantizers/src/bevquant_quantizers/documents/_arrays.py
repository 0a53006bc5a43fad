"""Tensors and arrays in files: safetensors with metadata, and `.npz` without pickles."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from torch import Tensor

from bevquant_graph import file_path

from ._json import DocumentError, a, read_content
from ._write import write_whole

Arrays = dict[str, "np.ndarray[Any, Any]"]

_LARGEST_ARRAYS = 1 << 32  # bytes of all arrays of one .npz, unpacked
_PART = 1 << 20


class Tensors(NamedTuple):
    """Content of a safetensors file.

    Attributes:
        tensors: By name, on the CPU.
        metadata: Texts by name.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_tensors(
    source: str | os.PathLike[str] | bytes, what: str = "safetensors file", *, where: str = ""
) -> Tensors:
    """Read a safetensors file, or its bytes.

    Args:
        source: The file, or what it holds.
        what: What it should be, for messages.
        where: What to call bytes in messages.

    Raises:
        DocumentError: It is missing, cut short, damaged, or something else.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
        from safetensors.torch import load
    except ImportError as error:
        raise ImportError(
            f"{what}: reading it needs the package safetensors: pip install safetensors"
        ) from error
    if isinstance(source, bytes):
        place, content = where or "the content", source
    else:
        place = str(file_path(source, what))
        if not Path(source).is_file():
            read_content(source, what)  # says what is there instead
    try:
        if isinstance(source, bytes):
            return Tensors(load(content), _metadata(content))
        with safe_open(place, "pt") as file:
            return Tensors({n: file.get_tensor(n) for n in file.keys()}, file.metadata() or {})
    except Exception as error:  # whatever the parser raises, it is no such file
        raise DocumentError(
            f"{place} is not {a(what)}: damaged, cut short or something else ({_first_line(error)})"
        ) from error


def _metadata(content: bytes) -> dict[str, str]:
    import msgspec

    length = int.from_bytes(content[:8], "little")
    header = msgspec.json.decode(content[8 : 8 + length], type=dict[str, msgspec.Raw])
    if "__metadata__" not in header:
        return {}
    return msgspec.json.decode(header["__metadata__"], type=dict[str, str])


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write safetensors, whole or not at all; each tensor is a contiguous copy of its own."""
    from safetensors.torch import save

    # A buffer that several modules share is one tensor under several names, which save refuses.
    held = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    return write_whole(path, save(held, dict(metadata) if metadata else None))


def read_arrays(
    source: str | os.PathLike[str] | bytes,
    names: Sequence[str] | None = None,
    *,
    what: str = ".npz archive",
    where: str = "",
    optional: Sequence[str] = (),
) -> Arrays:
    """Read arrays of numbers, booleans or text from a `.npz`, or from its bytes.

    Sizes are compared with what the file holds before memory is taken, and sums of the zip archive
    are checked. An array of Python objects is refused.

    Args:
        source: The file, or what it holds.
        names: Which arrays; all by default.
        what: What the file should be, for messages.
        where: What to call bytes in messages.
        optional: Arrays that are read where they are there.

    Raises:
        DocumentError: It is missing, cut short, damaged, something else, lacks an array, or holds
            more than 4 GiB.

    Example:
        >>> packed = pack_arrays({"sums": np.array([0.1, 2.0])})
        >>> read_arrays(packed)["sums"].tolist()
        [0.1, 2.0]
    """
    place = (where or "the content") if isinstance(source, bytes) else str(file_path(source, what))
    content = source if isinstance(source, bytes) else read_content(source, what)
    begin = f"{place} is not {a(what)}"
    if content.startswith(npy.MAGIC_PREFIX):
        raise DocumentError(f"{begin}: it is a bare .npy array, not a zip archive of arrays")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            chosen = list(members) if names is None else list(names)
            chosen += [name for name in optional if name in members and name not in chosen]
            lacking = [name for name in chosen if name not in members]
            if lacking:
                raise DocumentError(
                    f"{begin}: no array {lacking[0]!r}; the archive holds {sorted(members)}"
                )
            left, found = _LARGEST_ARRAYS, {}
            for name in chosen:
                with archive.open(members[name]) as member:
                    found[name] = _array(member, left, f"{begin}: array {name!r}")
                left -= found[name].nbytes
            return found
    except DocumentError:
        raise
    except Exception as error:  # whatever zip, zlib and numpy raise, it is no such file
        raise DocumentError(
            f"{begin}: damaged, cut short or something else ({_first_line(error)})"
        ) from error


def read_array(path: str | os.PathLike[str], *, what: str = ".npy array") -> np.ndarray[Any, Any]:
    """Read one array of numbers, booleans, text or plain records from a `.npy`.

    Raises:
        DocumentError: It is missing, cut short, damaged, something else, holds Python objects or
            more than 4 GiB.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/a.npy", np.arange(3, dtype=">f8"))
        ...     read_array(f"{folder}/a.npy").tolist()
        [0.0, 1.0, 2.0]
    """
    begin = f"{file_path(path, what)} is not {a(what)}"
    content = read_content(path, what)
    try:
        return _array(io.BytesIO(content), _LARGEST_ARRAYS, f"{begin}: it", records=True)
    except DocumentError:
        raise
    except Exception as error:  # whatever numpy raises, it is no such file
        raise DocumentError(
            f"{begin}: damaged, cut short or something else ({_first_line(error)})"
        ) from error


def _array(
    member: IO[bytes], limit: int, where: str, *, records: bool = False
) -> np.ndarray[Any, Any]:
    version = npy.read_magic(member)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(member, max_header_size=10_000)
    if dtype.hasobject:
        raise DocumentError(
            f"{where} holds pickled Python objects, which are never loaded; save it as a plain "
            "numeric array"
        )
    parts = [dtype[name] for name in dtype.names] if records and dtype.names else [dtype]
    plain = all(part.kind in "biufcUS" and not part.subdtype for part in parts)
    if not plain or any(type(n) is not int or n < 0 for n in shape):
        raise DocumentError(f"{where} has type {dtype} and shape {shape}: no plain array")
    size = math.prod(shape) * dtype.itemsize
    if size > limit:
        raise DocumentError(f"{where} takes {size} bytes, more than is read")
    # In parts: a size that lies does not take the memory that it claims.
    data = bytearray()
    while part := member.read(_PART):
        data += part
        if len(data) > size:
            break
    if len(data) != size:
        raise DocumentError(f"{where} holds {len(data)} bytes or more where {shape} takes {size}")
    flat = np.frombuffer(data, dtype, math.prod(shape)) if size else np.zeros(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def check_arrays(
    arrays: Mapping[str, Any],
    forms: Mapping[str, tuple[Any, tuple[int | str, ...]]],
    what: str,
    begin: str = "",
) -> None:
    """Refuse arrays of another type or shape.

    Args:
        arrays: By name, as `read_arrays` gives them.
        forms: For each name its type, or a text of the kinds of numpy that it may have, and its
            sizes; those that are names, such as "points", are equal wherever they are named.
        what: What the arrays should be, for messages.
        begin: Begin of messages, such as the file and a colon.

    Raises:
        DocumentError: One is missing or does not fit.

    Example:
        >>> check_arrays({"sums": np.zeros((3, 2))}, {"sums": ("f", ("rows", 2))}, "record")
    """
    sizes: dict[str, int] = {}
    for name, (kind, wanted) in forms.items():
        array = arrays.get(name)
        fits = array is not None and array.ndim == len(wanted)
        if array is not None and fits:
            fits = array.dtype.kind in kind if isinstance(kind, str) else array.dtype == kind
            for size, length in zip(array.shape, wanted, strict=True):
                known = sizes.setdefault(length, size) if isinstance(length, str) else length
                fits = fits and size == known
        if not fits:
            came = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise DocumentError(
                f"{begin}not {a(what)}: {name} is {came}, expected "
                f"{kind if isinstance(kind, str) else np.dtype(kind)} {list(wanted)}"
            )


def pack_arrays(arrays: Mapping[str, Any], *, compress: bool = False) -> bytes:
    """Arrays as the bytes of a `.npz`.

    Raises:
        ValueError: One holds Python objects.
    """
    objects = [name for name, array in arrays.items() if np.asarray(array).dtype.hasobject]
    if objects:
        raise ValueError(f"{', '.join(objects)}: a file holds numbers and text, not objects")
    buffer = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(buffer, **dict(arrays))
    return buffer.getvalue()


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, Any], *, compress: bool = False
) -> Path:
    """Write a `.npz`, whole or not at all."""
    return write_whole(path, pack_arrays(arrays, compress=compress))


def _first_line(error: Exception) -> str:
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line[:200]}" if line else type(error).__name__

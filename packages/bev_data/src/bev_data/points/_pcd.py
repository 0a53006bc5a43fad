"""`.pcd` files of PCL: ascii, binary and binary_compressed, organised or not.

A header of text lines ends with `DATA`. Binary rows are packed little-endian fields. Compressed
data are two uint32 (compressed and full size) and an LZF stream, in which each field's values lie
together. http://pointclouds.org/documentation/tutorials/pcd_file_format.html
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np

from bev_data.points._columns import Array
from bev_data.points._frame import PointsError
from bevquant_quantizers.documents import read_content

_LOG = logging.getLogger(__name__)
_HEADER = ("FIELDS", "SIZE", "TYPE", "WIDTH", "HEIGHT", "DATA")
_LARGEST_HEADER = 1 << 16
_UNPACKED = 300  # an LZF stream grows at most 264 bytes from 3
_MOST = 1 << 28  # points
_HERE = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]  # translation and quaternion w, x, y, z


def read_pcd(path: Path) -> dict[str, Array]:
    """Columns of a `.pcd` by name, [points] each; fields with several values are left out.

    Raises:
        PointsError: no header, fields without a known type, or data that are cut short or damaged.
    """
    raw = read_content(path, "frame")
    header, body = _header(path, raw)
    try:
        dtype, points = _layout(header)
    except (ValueError, TypeError) as error:
        raise PointsError(f"{path}: damaged header of a .pcd: {error}") from error
    if _elsewhere(header):
        _LOG.warning(
            "%s: VIEWPOINT %s is not applied: points are taken in the frame of the file",
            path, " ".join(header["VIEWPOINT"]),
        )  # fmt: skip
    kind = header["DATA"][0]
    if kind == "ascii":
        return _ascii(path, body, dtype, points)
    if kind == "binary":
        if len(body) // dtype.itemsize != points:
            raise PointsError(
                f"{path}: {points} points take {points * dtype.itemsize} bytes, the file has "
                f"{len(body)} after its header: truncated or damaged"
            )
        rows = np.frombuffer(body, dtype, points)
        return {name: rows[name] for name in _scalars(dtype)}
    if kind == "binary_compressed":
        return _compressed(path, body, dtype, points)
    raise PointsError(
        f"{path}: DATA {kind}; expected ascii, binary or binary_compressed: convert it with "
        "pcl_convert_pcd_ascii_binary"
    )


def _header(path: Path, raw: bytes) -> tuple[dict[str, list[str]], bytes]:
    found: dict[str, list[str]] = {}
    at = 0
    while "DATA" not in found:
        end = raw.find(b"\n", at, _LARGEST_HEADER)
        line = raw[at:end].decode("latin-1").split()
        if end < 0:
            raise PointsError(
                f"{path}: no header of a .pcd, which ends with a line DATA; found {raw[:40]!r}: "
                "the file is damaged or of another kind"
            )
        at = end + 1
        if line and not line[0].startswith("#"):
            found["FIELDS" if line[0] == "COLUMNS" else line[0]] = line[1:]
    missing = [name for name in _HEADER if not found.get(name)]
    if missing:
        raise PointsError(f"{path}: the header of the .pcd lacks {', '.join(missing)}")
    return found, raw[at:]


def _layout(header: dict[str, list[str]]) -> tuple[np.dtype[np.void], int]:
    """Type of a row and the number of points."""
    fields, types = header["FIELDS"], header["TYPE"]
    sizes = [int(size) for size in header["SIZE"]]
    counts = [int(count) for count in header.get("COUNT", ["1"] * len(fields))]
    if not len(fields) == len(types) == len(sizes) == len(counts):
        raise ValueError("FIELDS, SIZE, TYPE and COUNT differ in length")
    width, height = int(header["WIDTH"][0]), int(header["HEIGHT"][0])
    points = int(header.get("POINTS", [str(width * height)])[0])
    if min(width, height) < 0 or width * height != points or points > _MOST:
        raise ValueError(f"WIDTH {width} × HEIGHT {height} contradicts POINTS {points}")
    parts = []
    for i, (name, kind, size, count) in enumerate(zip(fields, types, sizes, counts, strict=True)):
        if kind not in "IUF" or not 1 <= count <= 10_000:
            raise ValueError(f"field {name} has TYPE {kind} and COUNT {count}")
        # "_" is padding and may be there several times.
        own = f"_{i}" if name == "_" else name
        parts.append((own, f"<{kind.lower()}{size}", (count,) if count > 1 else ()))
    return np.dtype(parts), points


def _scalars(dtype: np.dtype[np.void]) -> list[str]:
    return [n for n in dtype.names or () if not dtype[n].shape and not n.startswith("_")]


def _elsewhere(header: dict[str, list[str]]) -> bool:
    try:
        place = [float(value) for value in header.get("VIEWPOINT", [])]
    except ValueError:
        return True
    return place not in ([], _HERE)


def _ascii(path: Path, body: bytes, dtype: np.dtype[np.void], points: int) -> dict[str, Array]:
    try:
        values = np.array(body.decode("ascii").split(), np.float64)
    except (ValueError, UnicodeDecodeError) as error:
        raise PointsError(f"{path}: a value is no number ({error}): damaged") from error
    widths = {name: math.prod(dtype[name].shape) for name in dtype.names or ()}
    width = sum(widths.values())
    if values.size != points * width:
        raise PointsError(
            f"{path}: {points} points of {width} values take {points * width} numbers, the file "
            f"has {values.size}: truncated or damaged"
        )
    rows, begin, found = values.reshape(points, width), 0, {}
    for name, count in widths.items():
        if name in _scalars(dtype):
            column = rows[:, begin]
            whole = dtype[name].kind in "iu"
            if whole and not (np.abs(column) < 2.0**63).all():
                raise PointsError(
                    f"{path}: field {name} holds values that are no integers: damaged"
                )
            found[name] = column.astype(np.int64) if whole else column
        begin += count
    return found


def _compressed(path: Path, body: bytes, dtype: np.dtype[np.void], points: int) -> dict[str, Array]:
    packed, full = (int.from_bytes(body[at : at + 4], "little") for at in (0, 4))
    if full != points * dtype.itemsize or len(body) < 8 + packed or full > _UNPACKED * packed:
        raise PointsError(
            f"{path}: {points} points take {points * dtype.itemsize} bytes; the file says {full} "
            f"in {packed} compressed ones and has {max(0, len(body) - 8)}: truncated or damaged"
        )
    try:
        data = unpack_lzf(body[8 : 8 + packed], full)
    except ValueError as error:
        raise PointsError(f"{path}: damaged: {error}") from error
    begin, found = 0, {}
    for name in dtype.names or ():
        size = points * dtype[name].itemsize
        if name in _scalars(dtype):
            found[name] = np.frombuffer(data, dtype[name], points, begin)
        begin += size
    return found


def unpack_lzf(packed: bytes, size: int) -> bytearray:
    """Expand an LZF stream (liblzf) of `size` bytes.

    A control byte c below 32 stands before c + 1 literal bytes. Otherwise 2 + (c >> 5) bytes are
    copied from ((c & 31) << 8) + 1 + (next byte) back; if c >> 5 is 7, one more byte adds to it.

    Raises:
        ValueError: the stream ends early, points before its begin, or has another size.
    """
    out, at, end = bytearray(), 0, len(packed)
    try:
        while at < end:
            control = packed[at]
            at += 1
            if control < 32:
                out += packed[at : at + control + 1]
                at += control + 1
                continue
            length = control >> 5
            if length == 7:
                length += packed[at]
                at += 1
            start = len(out) - ((control & 31) << 8) - packed[at] - 1
            at += 1
            length += 2
            if start < 0:
                raise ValueError("an LZF stream points before its begin")
            part = out[start : start + length]
            # Source and destination may overlap: the copied bytes repeat.
            out += (part * (length // len(part) + 1))[:length]
            if len(out) > size:
                break
    except IndexError:
        raise ValueError("an LZF stream ends early") from None
    if len(out) != size:
        raise ValueError(f"an LZF stream holds {len(out)} bytes or more, expected {size}")
    return out

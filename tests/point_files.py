"""Point files as users have them, written by other means than the package's."""

from __future__ import annotations

import struct

import numpy as np


def drive(rows: int = 50, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of a sweep: x forward, y left, z up [m], intensity 0..255, ring, offset [ns]."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.uniform(-60, 60, rows).astype(np.float32),
        "y": rng.uniform(-60, 60, rows).astype(np.float32),
        "z": rng.uniform(-2, 3, rows).astype(np.float32),
        "intensity": rng.integers(2, 256, rows).astype(np.uint8),
        "laser_number": rng.integers(0, 64, rows).astype(np.uint8),
        "offset_ns": np.sort(rng.integers(0, 100_000_000, rows)).astype(np.int32),
    }


def records(columns: dict[str, np.ndarray]) -> np.ndarray:
    """An array of packed records."""
    found = np.zeros(len(columns["x"]), [(n, v.dtype) for n, v in columns.items()])
    for name, values in columns.items():
        found[name] = values
    return found


def pack_lzf(data: bytes) -> bytes:
    """An LZF stream with the longest match of the last place of each three bytes."""
    out, literals, places, at = bytearray(), bytearray(), {}, 0

    def flush() -> None:
        for begin in range(0, len(literals), 32):
            part = literals[begin : begin + 32]
            out.append(len(part) - 1)
            out.extend(part)
        literals.clear()

    while at < len(data):
        start = places.get(data[at : at + 3], -1)
        places[data[at : at + 3]] = at
        back, length = at - start - 1, 0
        if start >= 0 and back < 1 << 13:
            while (
                length < 264
                and at + length < len(data)
                and data[at + length] == data[start + length]
            ):
                length += 1
        if length < 3:
            literals.append(data[at])
            at += 1
            continue
        flush()
        long = length - 2
        out.append((min(long, 7) << 5) | (back >> 8))
        if long >= 7:
            out.append(long - 7)
        out.append(back & 255)
        at += length
    flush()
    return bytes(out)


def write_pcd(path, columns, data="binary", *, width=None, extra=(), viewpoint="0 0 0 1 0 0 0"):
    """A `.pcd`; `extra` are (name, array [points, count]) fields of several values."""
    fields = [*((n, v[:, None]) for n, v in columns.items()), *extra]
    rows = len(fields[0][1])
    width = width or rows
    header = [
        "# .PCD v0.7 - Point Cloud Data file format", "VERSION 0.7",
        f"FIELDS {' '.join(name for name, _ in fields)}",
        f"SIZE {' '.join(str(v.dtype.itemsize) for _, v in fields)}",
        f"TYPE {' '.join({'f': 'F', 'i': 'I', 'u': 'U'}[v.dtype.kind] for _, v in fields)}",
        f"COUNT {' '.join(str(v.shape[1]) for _, v in fields)}",
        f"WIDTH {width}", f"HEIGHT {rows // width}", f"VIEWPOINT {viewpoint}", f"POINTS {rows}",
        f"DATA {data}", "",
    ]  # fmt: skip
    if data == "ascii":
        lines = zip(*(v for _, v in fields), strict=True)
        body = "".join(" ".join(str(n) for part in line for n in part) + "\n" for line in lines)
        content = body.encode()
    elif data == "binary":
        content = b"".join(
            b"".join(np.ascontiguousarray(v[i]).tobytes() for _, v in fields) for i in range(rows)
        )
    else:
        whole = b"".join(np.ascontiguousarray(v).tobytes() for _, v in fields)
        packed = pack_lzf(whole)
        content = struct.pack("<II", len(packed), len(whole)) + packed
    path.write_bytes("\n".join(header).encode() + content)
    return path

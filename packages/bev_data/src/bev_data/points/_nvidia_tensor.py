"""NVIDIA's `.tensor` files: points, or voxels as a features and an indices file.

The layout, little-endian: int32 magic 0x33FF1101, int32 number of dimensions, int32 type code,
int32 shape[…], the data. Type codes as in the CUDA-BEVFusion and sparse-engine samples.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bev_data.points._frame import PointsError, VoxelData
from bevquant_quantizers.documents import read_content, write_whole

_MAGIC = 0x33FF1101
_DTYPES = {
    1: "<i4",
    2: "<f2",
    3: "<f4",
    4: "<i8",
    5: "<u8",
    6: "<u4",
    7: "|i1",
    8: "|u1",
}
_MAX_DIMS = 16
_FEATURES = re.compile(r"^(?P<prefix>.*)in_features(?P<rest>.*)\.tensor$")
_INDICES = re.compile(r"^(?P<prefix>.*)in_indices_(?P<order>xyz|zyx)(?P<rest>.*)\.tensor$")
_TYPE_WORDS = re.compile(r"\.?(fp16|fp32|int32|half|float)\b")


def load_tensor(path: str | Path) -> npt.NDArray[np.generic]:
    """Array of a `.tensor` file, in the file's own type.

    Raises:
        PointsError: too short for its header, wrong magic number, unknown type code, impossible
            shape, or a length that does not match the shape.
    """
    raw = read_content(path, "frame")
    if len(raw) < 12:
        raise PointsError(f"{path}: {len(raw)} bytes are too few for a .tensor header (12)")
    magic, ndim, code = struct.unpack_from("<Iii", raw)
    if magic != _MAGIC:
        raise PointsError(
            f"{path}: magic number 0x{magic:08X}, expected 0x{_MAGIC:08X}: not an NVIDIA .tensor "
            "file"
        )
    if code not in _DTYPES:
        known = ", ".join(f"{number} {np.dtype(name)}" for number, name in _DTYPES.items())
        raise PointsError(f"{path}: unknown type code {code}; known are {known}")
    start = 12 + 4 * ndim
    if not 1 <= ndim <= _MAX_DIMS or len(raw) < start:
        raise PointsError(f"{path}: {ndim} dimensions do not fit a file of {len(raw)} bytes")
    shape = struct.unpack_from(f"<{ndim}i", raw, 12)
    if min(shape) < 0:
        raise PointsError(f"{path}: impossible shape {list(shape)}")
    dtype = np.dtype(_DTYPES[code])
    count = 1
    for size in shape:
        count *= size
    if len(raw) - start != count * dtype.itemsize:
        raise PointsError(
            f"{path}: shape {list(shape)} of {dtype} needs {count * dtype.itemsize} bytes of data, "
            f"the file has {len(raw) - start}: truncated or damaged"
        )
    return np.frombuffer(raw, dtype, count, start).reshape(shape).copy()


def save_tensor(path: str | Path, array: npt.NDArray[np.generic]) -> None:
    """Write `array` as a `.tensor` file; the inverse of `load_tensor`.

    Raises:
        PointsError: a type that the format cannot hold.
    """
    codes = {np.dtype(name): code for code, name in _DTYPES.items()}
    little = np.ascontiguousarray(array)
    if little.dtype.newbyteorder("<") not in codes:
        raise PointsError(f"{path}: the .tensor format cannot hold {array.dtype}")
    little = little.astype(little.dtype.newbyteorder("<"))
    head = struct.pack(f"<Iii{array.ndim}i", _MAGIC, array.ndim, codes[little.dtype], *array.shape)
    write_whole(path, head + little.tobytes())


def find_sibling(path: Path) -> tuple[Path, Path, str] | None:
    """Features file, indices file and coordinate order of the pair that `path` belongs to.

    None where the name is neither `…in_features….tensor` nor `…in_indices_xyz….tensor`. The two
    names of a pair share what stands before and, number types left out, after those words.

    Raises:
        PointsError: the sibling is missing, or several files could be it.
    """
    own, other = _FEATURES, _INDICES
    match = own.match(path.name)
    if match is None:
        own, other = _INDICES, _FEATURES
        match = own.match(path.name)
    if match is None:
        return None
    found = []
    for candidate in sorted(path.parent.glob("*.tensor")):
        reply = other.match(candidate.name)
        if reply and reply["prefix"] == match["prefix"]:
            found.append((candidate, reply))
    same = [pair for pair in found if _bare(pair[1]["rest"]) == _bare(match["rest"])]
    found = same or found
    if len(found) != 1:
        wanted = "in_indices_xyz" if own is _FEATURES else "in_features"
        names = ", ".join(candidate.name for candidate, _ in found) or "none"
        raise PointsError(
            f"{path}: voxels come as two files; looked for one {match['prefix']}{wanted}*.tensor "
            f"beside it, found {names}"
        )
    candidate, reply = found[0]
    if own is _FEATURES:
        return path, candidate, reply["order"]
    return candidate, path, match["order"]


def _bare(rest: str) -> str:
    return _TYPE_WORDS.sub("", rest)


def read_voxels(features_path: Path, indices_path: Path, order: str) -> VoxelData:
    """Voxels of a features file [V, 5] and an indices file [V, 4] (batch, then `order`).

    Raises:
        PointsError: shapes or types that are no voxels, different lengths, negative coordinates.
    """
    features, indices = load_tensor(features_path), load_tensor(indices_path)
    if features.ndim != 2 or features.shape[1] != 5 or features.dtype.kind != "f":
        raise PointsError(
            f"{features_path}: {features.dtype} {list(features.shape)}; expected floating point "
            "[voxels, 5]: mean x, y, z, intensity, time lag"
        )
    if indices.ndim != 2 or indices.shape[1] != 4 or indices.dtype != np.int32:
        raise PointsError(
            f"{indices_path}: {indices.dtype} {list(indices.shape)}; expected int32 [voxels, 4]: "
            f"batch, {', '.join(order)}"
        )
    if len(features) != len(indices):
        raise PointsError(
            f"{features_path} has {len(features)} voxels but {indices_path} has {len(indices)}"
        )
    if len(indices) and int(indices.astype(np.int32).min()) < 0:
        row = int(np.flatnonzero((indices.astype(np.int32) < 0).any(axis=1))[0])
        raise PointsError(
            f"{indices_path}: negative coordinate in row {row}: {indices[row].tolist()}"
        )
    coords = indices.astype(np.int32)
    if order == "zyx":
        coords = np.ascontiguousarray(coords[:, [0, 3, 2, 1]])
    return VoxelData(features.astype(np.float32), coords)

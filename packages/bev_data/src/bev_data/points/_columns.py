"""Columns of a file as points: which is which, their units, and values that cannot be right.

Every format passes through `points_of`. It returns x, y, z [m], intensity 0..255 and time lag [s]:

- intensity: 255 × values whose largest is at most 1. Integers, and five columns without names, keep
  their scale.
- `time` is an age: 0 for the newest sweep, growing into the past. A column with a negative mean is
  one that ends at 0: its signs are dropped. Without a time column the lag is 0.
- `offset` and `timestamp` grow with time: lag = largest − value.
- `ring` and its synonyms are dropped.

Refused, in rows whose values are all finite: coordinates from 1000 m on, a cloud of 1000 points
within 1 m (other than zeros), intensities outside of 0..255, and lags beyond 10 s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bev_data.points._frame import PointsError

_LOG = logging.getLogger(__name__)
Array: TypeAlias = npt.NDArray[Any]
Content: TypeAlias = Array | Mapping[str, Array]
"""Rows without names, [points, columns]; or columns by their names, [points] each."""

Said: TypeAlias = int | tuple[tuple[str, str, str], ...] | None
"""A number of columns without names; or of each column its role, a name or "", and the word for
the role, which may be a synonym."""

_UNITS = {"": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
_TIMES = {
    f"{word}{unit}": (factor, word != "time")
    for word in ("time", "offset", "timestamp")
    for unit, factor in _UNITS.items()
}
_SPATIAL = ("x", "y", "z")
_SYNONYMS = {
    "intensity": ("i", "reflectivity", "reflectance", "remission"),
    "ring": ("laser_number", "laser_id", "channel", "beam"),
}
_UNIT_UNKNOWN = ("timestamp", "offset", "time_stamp", "stamp", "t")
_SKIPPED = "-"
ROLES = (*_SPATIAL, "intensity", *_TIMES, "ring", _SKIPPED)
NAMES = tuple(
    dict.fromkeys((*ROLES[:-1], *_UNIT_UNKNOWN, *(n for own in _SYNONYMS.values() for n in own)))
)
"""Names of columns that are understood or in doubt."""

_COORDINATE_LIMIT = 1000.0
_TINY, _MANY = 1.0, 1000
_RING_LIMIT = 127
_TIME_LIMIT = 10.0
_CLOCK_STEP = 1e-3


def parse_columns(columns: int | str | Sequence[str] | None) -> Said:
    """The option `columns` of `read_points`: a number, or a list such as "x,y,z,intensity:refl".

    Raises:
        PointsError: an unknown role, one that is there twice, or no x, y or z.
    """
    if columns is None or columns in (4, 5):
        return columns
    if columns in ("4", "5"):
        return int(str(columns))
    if isinstance(columns, int) or (isinstance(columns, str) and columns.isdigit()):
        raise PointsError(
            f"columns={columns}: without names a file has 4 columns (KITTI) or 5 (nuScenes); "
            "list the names of others, such as columns='x,y,z,intensity,ring,-'"
        )
    given = list(columns) if isinstance(columns, Sequence) else [columns]
    items = columns.split(",") if isinstance(columns, str) else list(map(str, given))
    said = []
    for item in items:
        word, _, name = item.strip().partition(":")
        role = _role(word)
        if role not in ROLES:
            raise PointsError(
                f"columns= has {word!r}, none of {', '.join(ROLES)}; give each column a role, - if "
                f"it is not used, and ROLE:NAME for a name in the file, such as intensity:{word}"
            )
        said.append((role, name, word))
    used = [role for role, _, _ in said if role not in ("ring", _SKIPPED)]
    times = [role for role in used if role in _TIMES]
    if len(set(used)) < len(used) or len(times) > 1:
        raise PointsError(f"columns= has {', '.join(used)}; each role, and a time, at most once")
    missing = [role for role in _SPATIAL if role not in used]
    if missing:
        raise PointsError(f"columns= has {', '.join(used)}; {', '.join(missing)} missing")
    return tuple(said)


def _role(word: str) -> str:
    lower = word.lower()
    return next((role for role, names in _SYNONYMS.items() if lower in names), lower)


def points_of(
    path: Path, content: Content, said: Said, label: str, intensity_scale: float | None
) -> npt.NDArray[np.float32]:
    """Points float32 [points, 5] by the rules of the module.

    Args:
        path: the file, for messages.
        content: rows without names, or columns by name. An array of records has names.
        said: the caller's columns.
        label: how messages call the content.
        intensity_scale: factor on the intensity instead of the rules'.

    Raises:
        PointsError: columns that are missing or in doubt, values that are no numbers or cannot be
            right.
    """
    if isinstance(content, np.ndarray) and content.dtype.names:
        content = {name: content[name].reshape(-1) for name in content.dtype.names}
    if isinstance(content, np.ndarray):
        columns = _in_order(path, content, said, label)
    else:
        columns = _by_name(path, content, said)
    points, scale = converted(path, columns, intensity_scale)
    reason = fault(points)
    if reason:
        raise PointsError(f"{path}: read as {label} with intensity × {scale:g}, the {reason}")
    if "fifth" in columns and intensity_scale is None and len(points) >= _MANY:
        if points[:, 3].max() <= 1.0:
            _LOG.warning(
                "%s: intensities of at most 1 are read as 0..255; if they are 0..1, name the "
                "columns, as in columns='x,y,z,intensity,ring' (--columns x,y,z,intensity,ring)",
                path,
            )
    return points


def roles_in_order(said: Said, width: int) -> tuple[str, ...]:
    """Roles of columns without names; "fifth" is a ring number or a time."""
    if isinstance(said, tuple):
        return tuple(role for role, _, _ in said)
    return (*_SPATIAL, "intensity", "fifth")[:width]


def _in_order(path: Path, rows: Array, said: Said, label: str) -> dict[str, Array]:
    named = isinstance(said, tuple)
    wanted = len(said) if isinstance(said, tuple) else said
    shape = list(rows.shape)
    if isinstance(said, tuple) and (given := [name for _, name, _ in said if name]):
        raise PointsError(
            f"{path}: columns= gives the names {', '.join(given)}, but {label} has none; list the "
            "roles in the file's order, such as columns='x,y,z,intensity,ring'"
        )
    if rows.ndim != 2 or (named and rows.shape[1] != wanted):
        raise PointsError(f"{path}: {label} has shape {shape}; expected [N, {wanted or '4 or 5'}]")
    if not named and (rows.shape[1] not in (4, 5) or wanted not in (None, rows.shape[1])):
        raise PointsError(
            f"{path}: {label} has shape {shape}; expected [N, 4] (x, y, z, intensity) or [N, 5] (… "
            "and time lag or ring); name other columns, such as columns='x,y,z,intensity,ring,-'"
        )
    if rows.dtype.kind != "f":
        raise PointsError(f"{path}: {label} is {rows.dtype}; expected floating point numbers")
    roles = roles_in_order(said, rows.shape[1])
    return {role: rows[:, i] for i, role in enumerate(roles) if role not in ("ring", _SKIPPED)}


def _by_name(path: Path, table: Mapping[str, Array], said: Said) -> dict[str, Array]:
    found = f"{path}: columns {', '.join(table)}"
    if isinstance(said, int):
        raise PointsError(f"{found}; they have names, so leave columns={said} out or list roles")
    if said is None:
        chosen = _found(found, table)
    else:
        chosen = {}
        for role, name, word in said:
            if role in ("ring", _SKIPPED):
                continue
            own = [n for n in table if (n == name if name else n.lower() == word.lower())]
            own = own or [n for n in table if not name and _role(n) == role]
            if len(own) != 1:
                raise PointsError(f"{found}; {_unclear(role, own, name)}")
            chosen[role] = own[0]
    for name in chosen.values():
        if table[name].dtype.kind not in "iuf":
            raise PointsError(f"{found}; {name!r} is {table[name].dtype}, expected numbers")
    return {role: table[name] for role, name in chosen.items()}


def _found(found: str, table: Mapping[str, Array]) -> dict[str, str]:
    """The column of each role, by the names in the file."""
    chosen = {}
    for role in (*_SPATIAL, "intensity"):
        own = [name for name in table if name.lower() == role]
        own = own or [name for name in table if _role(name) == role]
        if len(own) != 1:
            raise PointsError(f"{found}; {_unclear(role, own)}")
        chosen[role] = own[0]
    used = ",".join(r if r == n else f"{r}:{n}" for r, n in chosen.items())
    times = {name: name.lower() for name in table if name.lower() in (*_TIMES, *_UNIT_UNKNOWN)}
    known = [name for name, role in times.items() if role not in _UNIT_UNKNOWN]
    if len(known) == 1:
        return {**chosen, times[known[0]]: known[0]}
    if times:
        name = next(iter(times))
        raise PointsError(
            f"{found}; the unit of the time {', '.join(times)} is in doubt: say "
            f"columns='{used},timestamp_ns:{name}' (also timestamp, timestamp_ms, timestamp_us; "
            f"or time for an age), or read lag 0 with columns='{used}'"
        )
    return chosen


def _unclear(role: str, own: Sequence[str], name: str = "") -> str:
    if name:
        return f"there is no {name!r}, which columns= gives as {role}"
    what = f"{' and '.join(own)} may be the {role}" if own else f"none is the {role}"
    advice = f"say which with columns='x,y,z,intensity:NAME'; here {role}:NAME"
    if role == "intensity":
        advice += ", or read intensity 0 with columns='x,y,z'"
    return f"{what}: {advice}"


def converted(
    path: Path, columns: Mapping[str, Array], intensity_scale: float | None
) -> tuple[npt.NDArray[np.float32], float]:
    """Points and the factor on their intensity.

    Args:
        path: the file, for messages.
        columns: by role; no intensity is intensity 0, no time is lag 0.
        intensity_scale: factor on the intensity instead of the rules'.

    Raises:
        PointsError: columns of several lengths, or timestamps with steps above 1 ms.
    """
    lengths = {role: len(values) for role, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise PointsError(f"{path}: columns of several lengths: {lengths}")
    points = np.zeros((lengths["x"], 5), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float32 is Inf, refused as such
        for i, role in enumerate((*_SPATIAL, "intensity")):
            if role in columns:
                points[:, i] = columns[role]
        for role, values in columns.items():
            if role == "fifth":
                points[:, 4] = 0 if is_ring(values[np.isfinite(values)]) else _age(values)
            elif role in _TIMES:
                points[:, 4] = _lag(path, role, values)
    scale = intensity_scale
    if scale is None:
        finite = points[np.isfinite(points[:, 3]), 3]
        as_it_is = "fifth" in columns or "intensity" not in columns
        as_it_is = as_it_is or columns["intensity"].dtype.kind != "f"
        scale = 1.0 if as_it_is or finite.max(initial=0.0) > 1.0 else 255.0
    points[:, 3] *= np.float32(scale)
    return points, scale


def _age(values: Array) -> Array:
    finite = values[np.isfinite(values)].astype(np.float64)
    return np.abs(values) if len(finite) and finite.mean() < 0 else values


def _lag(path: Path, role: str, values: Array) -> Array:
    """Seconds since each point was measured."""
    factor, grows = _TIMES[role]
    if not grows:
        return _age(values * np.float64(factor))
    finite = values[np.isfinite(values)]
    if not len(finite):
        return values
    newest = finite.max()
    if values.dtype.kind == "f" and (step := float(np.spacing(newest)) * factor) > _CLOCK_STEP:
        reason = (
            f"{role} reaches {newest:.6g} as {values.dtype}, whose steps there are {step:.3g} s: "
            "its times are lost"
        )
        remedy = "write float64 or integers, or leave it out"
        raise PointsError(f"{path}: {reason}; {remedy}", reason)
    whole = values.dtype.kind in "iu"
    since = newest - values if whole else np.float64(newest) - values.astype(np.float64)
    return since * np.float64(factor)


def fault(points: npt.NDArray[np.float32]) -> str | None:
    """The first value that cannot be right, with the remedy; None if there is none."""
    good = points[np.isfinite(points).all(axis=1)]
    reach = float(np.abs(good[:, :3]).max(initial=0.0))
    if reach >= _COORDINATE_LIMIT:
        return (
            f"coordinates reach {reach:.4g} m; expected metres from the scanner, below "
            f"{_COORDINATE_LIMIT:g}: millimetres and a map's coordinates are converted beforehand"
        )
    # Points that are all zeros, of a scanner without returns, are a matter of the calibration.
    if len(good) >= _MANY and 0 < reach < _TINY:
        return (
            f"coordinates of {len(good)} points reach {reach:.3g} m; expected metres: scaled or "
            "normalised coordinates are converted beforehand"
        )
    low, high = (float(end) for end in (good[:, 3].min(initial=0.0), good[:, 3].max(initial=0.0)))
    if low < 0.0 or high > 255.5:
        return (
            f"intensity spans {low:.4g}..{high:.4g}, not 0..255; set intensity_scale= (255 "
            "by the sensor's largest intensity), or check columns= and, for a .bin, dtype="
        )
    lag = float(np.abs(good[:, 4]).max(initial=0.0))
    if lag > _TIME_LIMIT:
        return (
            f"time lag reaches {lag:.4g} s; expected at most {_TIME_LIMIT:g} s, or ring numbers, "
            f"0..{_RING_LIMIT}; say what the column is, such as columns='x,y,z,intensity,timestamp'"
            " (also timestamp_ms, timestamp_us, timestamp_ns), or skip it with -"
        )
    return None


def is_ring(column: Array) -> bool:
    """Whether a fifth column numbers the laser (integers 0..127) instead of telling the time.

    A column of zeros is both; read as a ring it becomes time 0, the same thing.
    """
    inside = (column >= 0) & (column <= _RING_LIMIT)
    return bool((inside & (column == np.floor(column))).all())

"""The sums of a row, and gaps, in one pass over memory on all of torch's threads; needs numba.

Each block of values writes a line of its own: both pairs' sums in the order of `PairSums`, then
the steps as `_layer_sums` names them. So sums do not depend on the number of threads. What is
counted in steps is counted in integers: branches, and floats whose order matters, would keep a loop
from working on several values at a time. A NaN is clamped to the lowest integer, and what is added
up beside it is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import lines_of


def integer_lines(
    wanted: Any, fake: Any, integer: Any, scale: float, low: float, high: float, fields: int
) -> Any:
    """A line for each block of two flat float32 arrays and one of int8, run free."""
    return lines_of(_integers, fields, (wanted, fake, integer), scale, low, high)


def teacher_forced_lines(
    teacher_forced: Any, integer: Any, scale: float, low: float, high: float, fields: int
) -> Any:
    """A line for each block of flat float32 and int8 on the same inputs; all of it is counted."""
    return lines_of(_teacher_forced, fields, (teacher_forced, integer), scale, low, high)


def largest_steps(
    teacher_forced: Any, integer: Any, scale: float, low: float, high: float
) -> float:
    """``max |integer − clamp(rint(teacher_forced / scale))|`` of flat arrays; inf with NaN."""
    found = lines_of(_steps, 1, (teacher_forced, integer), scale, low, high)
    return float(found.max(initial=0))


def float_gaps(wanted: Any, got: Any) -> tuple[float, float, float, float]:
    """Largest and energy of the gaps of flat float32 arrays, and of what is finite in `wanted`.

    A NaN or an infinity that the other lacks is an infinite gap.
    """
    lines = lines_of(_gaps, 4, (wanted, got))
    most, top = (float(lines[:, i].max(initial=0)) for i in (0, 2))
    return most, float(lines[:, 1].sum()), top, float(lines[:, 3].sum())


@compiled("void(float32[::1], int8[::1], float64, float64, float64, float64[::1])")
def _steps(teacher_forced, integer, scale, low, high, line):
    most = np.int32(0)
    unknown = 0
    for i in range(len(integer)):
        raw = np.rint(np.float64(teacher_forced[i]) / scale)
        unknown += raw != raw
        clamped = raw if raw > low else low
        clamped = clamped if clamped < high else high
        most = max(most, abs(np.int32(integer[i]) - np.int32(clamped)))
    line[0] = np.inf if unknown else most


@compiled("void(float32[::1], float32[::1], float64[::1])")
def _gaps(wanted, got, line):
    most = energy = top = power = 0.0
    for i in range(len(got)):
        w, q = np.float64(wanted[i]), np.float64(got[i])
        if not (w == q or (w != w and q != q)):
            apart = abs(w - q)
            if apart != apart:
                apart = np.float64(np.inf)
            most = max(most, apart)
            energy += apart * apart
        if abs(w) < np.inf:
            top = max(top, abs(w))
            power += w * w
    line[0], line[1], line[2], line[3] = most, energy, top, power


@compiled(
    "void(float32[::1], float32[::1], int8[::1], float64, float64, float64, float64[::1])",
    any_order=True,
)
def _integers(wanted, fake, integer, scale, low, high, line):
    power = fake_power = integer_power = fake_dot = integer_dot = 0.0
    fake_error = integer_error = 0.0
    total: Any = 0
    off: Any = 0
    unknown = 0
    most = np.int32(0)
    for i in range(len(integer)):
        raw = np.rint(np.float64(fake[i]) / scale)
        unknown += raw != raw
        expected = raw if raw > low else low
        expected = expected if expected < high else high
        made = np.int32(integer[i])
        apart = abs(made - np.int32(expected))
        total += apart
        off += apart > 0
        most = max(most, apart)
        w, f, q = np.float64(wanted[i]), expected * scale, np.float64(made) * scale
        power += w * w
        fake_power += f * f
        integer_power += q * q
        fake_dot += f * w
        integer_dot += q * w
        fake_error += (f - w) * (f - w)
        integer_error += (q - w) * (q - w)
    line[0], line[1], line[2], line[3] = power, fake_power, fake_dot, fake_error
    line[4], line[5], line[6], line[7] = power, integer_power, integer_dot, integer_error
    line[8], line[9], line[13] = total, off, most
    if unknown:
        line[1], line[2], line[3], line[8] = np.nan, np.nan, np.nan, np.nan


@compiled("void(float32[::1], int8[::1], float64, float64, float64, float64[::1])")
def _teacher_forced(teacher_forced, integer, scale, low, high, line):
    total: Any = 0
    off: Any = 0
    saturated = unknown = 0
    most = np.int32(0)
    for i in range(len(integer)):
        raw = np.rint(np.float64(teacher_forced[i]) / scale)
        unknown += raw != raw
        clamped = raw if raw > low else low
        clamped = clamped if clamped < high else high
        saturated += raw != clamped
        apart = abs(np.int32(integer[i]) - np.int32(clamped))
        total += apart
        off += apart > 0
        most = max(most, apart)
    line[10], line[11], line[12], line[14] = total, off, saturated, most
    if unknown:
        line[10] = np.nan

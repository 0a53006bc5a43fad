"""What a calibrator has collected, as plain values and arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ._histogram import AbsHistogram
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator
from .calib._max import MaxCalibrator

__all__ = ["Arrays", "calibrator_state", "load_calibrator_state", "settings_of"]

Arrays = dict[str, "np.ndarray[Any, Any]"]

_SCALARS = ("bins", "upper", "shift", "max", "values", "zeros", "nans", "infs")


def settings_of(calibrator: Calibrator) -> dict[str, Any]:
    """Return what two calibrators must share for their collections to be added.

    Raises:
        TypeError: A class of calibrator that cannot be saved or merged.
    """
    axis = list(calibrator.axis) if isinstance(calibrator.axis, Sequence) else calibrator.axis
    common = {"kind": type(calibrator).__name__, "axis": axis}
    if type(calibrator) is MaxCalibrator:
        return common
    if type(calibrator) is HistogramCalibrator:
        return {
            **common,
            "num_bins": calibrator._num_bins,
            "skip_zeros": calibrator._skip_zeros,
        }
    raise TypeError(
        f"{calibrator._who()}: a {type(calibrator).__qualname__} can be neither saved nor merged; "
        "use a HistogramCalibrator or a MaxCalibrator"
    )


def calibrator_state(calibrator: Calibrator) -> tuple[dict[str, Any], Arrays]:
    """Return everything collected: values that JSON holds exactly, and arrays."""
    meta = settings_of(calibrator)
    if isinstance(calibrator, HistogramCalibrator):
        rows = calibrator._rows
        meta["shape"] = list(calibrator._shape)
        meta["lengths"] = [row.counts.numel() for row in rows]
        meta["rows"] = [[getattr(row, key) for key in _SCALARS] for row in rows]
        counts = [row.counts.numpy() for row in rows]
        arrays = {"counts": np.concatenate(counts) if counts else np.zeros(0, np.int64)}
        arrays["peaks"] = np.array([row.peak for row in rows], np.int64)
        if calibrator._own_edges is not None:
            arrays["edges"] = calibrator._own_edges.numpy()
        return meta, arrays
    arrays = {}
    if isinstance(calibrator, MaxCalibrator):
        arrays = {f"amax{i}": amax for i, amax in enumerate(calibrator._amaxs)}
        meta["tracked"] = len(arrays)
        if calibrator._calib_amax is not None:
            arrays["amax"] = calibrator._calib_amax.float().cpu().numpy()
    return meta, arrays


def load_calibrator_state(
    calibrator: Calibrator, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Put back what `calibrator_state` returned; the calibrator is left alone on error.

    Raises:
        ValueError: The state is of another kind of calibrator, or damaged.
    """
    wanted = settings_of(calibrator)
    given = {key: meta.get(key) for key in wanted}
    if given != wanted:
        raise ValueError(f"{calibrator._who()}: the state is of {given}, the calibrator {wanted}")
    try:
        if isinstance(calibrator, HistogramCalibrator):
            rows = _with_peaks(_rows(meta, arrays), arrays.get("peaks"))
            calibrator._shape, calibrator._rows = tuple(meta["shape"]), rows
            edges = arrays.get("edges")
            calibrator._own_edges = None if edges is None else torch.from_numpy(edges)
        elif isinstance(calibrator, MaxCalibrator):
            tracked = [arrays[f"amax{i}"] for i in range(meta["tracked"])]
            amax = arrays.get("amax")
            calibrator._amaxs = tracked
            calibrator._calib_amax = None if amax is None else torch.from_numpy(amax.copy())
    except (KeyError, TypeError) as error:
        raise ValueError(f"{calibrator._who()}: damaged state ({error!r})") from error


def _rows(
    meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> list[AbsHistogram]:
    counts, lengths = arrays["counts"], meta["lengths"]
    fine = counts.dtype == np.int64 and counts.ndim == 1 and counts.size == sum(lengths)
    if not fine or len(meta["rows"]) != len(lengths) or (counts < 0).any():
        raise ValueError("damaged state: the counts do not agree with their description")
    parts = torch.from_numpy(counts.copy()).split_with_sizes(lengths)
    return [AbsHistogram(part.clone(), *row) for part, row in zip(parts, meta["rows"], strict=True)]


def _with_peaks(rows: list[AbsHistogram], peaks: np.ndarray[Any, Any] | None) -> list[AbsHistogram]:
    """The rows with the batches of their maxima, where the state names these."""
    if peaks is None or peaks.shape != (len(rows),) or peaks.dtype != np.int64:
        return rows
    return [replace(row, peak=int(peak)) for row, peak in zip(rows, peaks, strict=True)]

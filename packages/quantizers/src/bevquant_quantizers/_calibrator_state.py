"""State of a calibrator as plain values and arrays, and back.

An interrupted calibration is stored in one .npz without pickles, checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from bevquant_graph import check_kind, file_path

from ._abs_histogram import AbsHistogram, impossible
from ._float_ranges import Ranges
from ._ranges import floats_as_json, floats_of_json
from ._select import NamedQuantizer
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator
from .calib._max import MaxCalibrator
from .documents import (
    Count,
    DocumentError,
    NotNegative,
    Size,
    as_form,
    parse_json,
    read_arrays,
    write_arrays,
)
from .nn import TensorQuantizer

Arrays = dict[str, "np.ndarray[Any, Any]"]

_SCHEMA = "bevquant-collection/2"
_SCALARS = ("bins", "upper", "shift", "max", "values", "zeros", "nans", "infs")


def settings_of(calibrator: Calibrator) -> dict[str, Any]:
    """Settings that must be equal for two calibrators to be merged."""
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
    """Return all statistics of a calibrator: values that JSON holds exactly, and arrays."""
    check_kind(calibrator, Calibrator, "a calibrator")
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


class _State(msgspec.Struct, kw_only=True):
    """Fields of `calibrator_state` beside the arrays, for both kinds of calibrator."""

    shape: list[Size] = []
    lengths: list[Size] = []
    # bins, upper, shift, max, values, zeros, nans, infs: _SCALARS
    rows: list[tuple[Size, NotNegative, Size, NotNegative, Count, Count, Count, Count]] = []
    tracked: Size = 0


def load_calibrator_state(
    calibrator: Calibrator, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Load the result of `calibrator_state`; on error the calibrator is unchanged.

    Raises:
        ValueError: The state belongs to another kind of calibrator, or its counts, edges and sizes
            contradict each other.
    """
    check_kind(calibrator, Calibrator, "a calibrator")
    who, wanted = calibrator._who(), settings_of(calibrator)
    given = {key: meta.get(key) for key in wanted}
    if given != wanted:
        raise ValueError(f"{who}: the state is of {given}, the calibrator {wanted}")
    state = as_form(dict(meta), _State, where=f"{who}: its state", what="calibrator's")
    if isinstance(calibrator, HistogramCalibrator):
        edges = arrays.get("edges")
        if edges is not None:
            edges = _numbers(edges, f"{who}: edges")
            if edges.ndim != 1 or (np.diff(edges) < 0).any():
                raise ValueError(f"{who}: damaged state: its edges do not ascend")
        rows = _with_peaks(_rows(state, arrays, calibrator, who), arrays.get("peaks"))
        calibrator._shape, calibrator._rows = tuple(state.shape), rows
        calibrator._own_edges = None if edges is None else torch.from_numpy(edges.copy())
    elif isinstance(calibrator, MaxCalibrator):
        names = [f"amax{i}" for i in range(min(state.tracked, len(arrays)))]
        if len(names) < state.tracked or not arrays.keys() >= set(names):
            raise ValueError(f"{who}: damaged state: it lacks some of {state.tracked} ranges")
        tracked = [_numbers(arrays[name], f"{who}: {name}") for name in names]
        amax = arrays.get("amax")
        found = None if amax is None else torch.from_numpy(_numbers(amax, f"{who}: amax").copy())
        if found is not None and not _is_range(found, calibrator.axis):
            raise ValueError(
                f"{who}: damaged state: a range of shape {tuple(found.shape)} for the axis "
                f"{calibrator.axis}"
            )
        calibrator._amaxs, calibrator._calib_amax = tracked, found


def _is_range(amax: torch.Tensor, axis: Any) -> bool:
    """Whether a MaxCalibrator keeps ranges of this shape: one value, or those along its axes."""
    if not amax.dim():
        return True
    axes = [axis] if isinstance(axis, int) else list(axis or ())
    if any(not -amax.dim() <= a < amax.dim() for a in axes):
        return False
    kept = {a % amax.dim() for a in axes}
    return amax.numel() > 1 and all(n == 1 for i, n in enumerate(amax.shape) if i not in kept)


def _numbers(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    if array.dtype != np.float32 or not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"{what}: damaged state: expected finite float32, none negative")
    return array


def _rows(
    state: _State, arrays: Mapping[str, np.ndarray[Any, Any]], calibrator: Calibrator, who: str
) -> list[AbsHistogram]:
    counts = arrays.get("counts", np.zeros(0))
    fine = counts.dtype == np.int64 and counts.ndim == 1 and counts.size == sum(state.lengths)
    rows = math.prod(state.shape) if state.shape or state.rows else 0
    fine = fine and len(state.rows) == len(state.lengths) == rows
    if not fine or (state.shape and calibrator.axis is None):
        raise ValueError(f"{who}: damaged state: the counts do not agree with their description")
    parts = torch.from_numpy(counts.copy()).split_with_sizes(state.lengths) if rows else []
    found = [AbsHistogram(p.clone(), *row) for p, row in zip(parts, state.rows, strict=True)]
    for index, row in enumerate(found):
        problem = impossible(row)
        if problem is not None:
            raise ValueError(f"{who}: damaged state: histogram {index}: {problem}")
    return found


def _with_peaks(rows: list[AbsHistogram], peaks: np.ndarray[Any, Any] | None) -> list[AbsHistogram]:
    """The rows with the batches of their maxima, where the state names these."""
    if peaks is None or peaks.shape != (len(rows),) or peaks.dtype != np.int64:
        return rows
    return [replace(row, peak=int(peak)) for row, peak in zip(rows, peaks, strict=True)]


class Checkpoint:
    """Saves and restores the state of a model's calibrators.

    Args:
        path: File; with several processes each adds its rank to the name.
        model: Fingerprinted: a state from other weights is refused.
        entries: The calibrated quantizers.
        calibrators: Their calibrators.
        rank: This process.
        world: Number of processes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        entries: Sequence[NamedQuantizer],
        calibrators: Sequence[Calibrator],
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.path = file_path(path)
        if world > 1:
            self.path = self.path.with_name(f"{self.path.name}.{rank}-of-{world}")
        if not self.path.parent.is_dir():
            raise ValueError(
                f"cannot save to {self.path}: the folder {self.path.parent} does not exist"
            )
        self.calibrators = calibrators
        self.floats: Ranges = {}
        self.header = {
            "schema": _SCHEMA,
            "weights": _fingerprint(model),
            "processes": [rank, world],
            "quantizers": [
                [list(entry.names), settings_of(calibrator)]
                for entry, calibrator in zip(entries, calibrators, strict=True)
            ],
        }

    def save(self, rounds: int) -> None:
        """Write everything collected in the first `rounds` batches, whole or not at all."""
        arrays: Arrays = {}
        states = []
        for i, calibrator in enumerate(self.calibrators):
            meta, found = calibrator_state(calibrator)
            states.append(meta)
            arrays.update({f"{i}.{key}": value for key, value in found.items()})
        floats = floats_as_json(self.floats)
        text = json.dumps({**self.header, "rounds": rounds, "states": states, "floats": floats})
        arrays["header"] = np.frombuffer(text.encode(), np.uint8)
        write_arrays(self.path, arrays)

    def load(self) -> int:
        """Restore the calibrators and return how many batches they have seen; 0 without a file.

        Raises:
            ValueError: The file is damaged, or of another model, weights or number of processes.
        """
        if not self.path.exists():
            return 0
        try:
            arrays = read_arrays(self.path, what="saved collection")
            if "header" not in arrays or arrays["header"].dtype != np.uint8:
                raise DocumentError(f"{self.path} is not a saved collection: it has no header")
            text = arrays.pop("header").tobytes()
            header = parse_json(text, _Header, where=f"{self.path}", what="saved collection")
            self._compare(header)
            try:
                self._restore(header.states, arrays)
                self.floats = floats_of_json(header.floats)
            except ValueError as error:
                raise DocumentError(f"{self.path}: {error}") from error
        except ValueError as error:
            raise DocumentError(f"{error}: delete it to begin anew") from error
        rounds: int = header.rounds
        return rounds

    def _restore(self, states: list[dict[str, Any]], arrays: Arrays) -> None:
        """Every calibrator, or none of them."""
        if len(states) != len(self.calibrators):
            raise ValueError(f"{len(states)} states for {len(self.calibrators)} calibrators")
        restored = [copy(calibrator) for calibrator in self.calibrators]
        for i, (calibrator, meta) in enumerate(zip(restored, states, strict=True)):
            own = {
                key.partition(".")[2]: value
                for key, value in arrays.items()
                if key.partition(".")[0] == str(i)
            }
            load_calibrator_state(calibrator, meta, own)
        for calibrator, source in zip(self.calibrators, restored, strict=True):
            calibrator.__dict__.update(source.__dict__)

    def _compare(self, header: _Header) -> None:
        names = {
            "schema": "another version's format",
            "weights": "other weights",
            "processes": "another process or number of processes",
            "quantizers": "other quantizers or calibrators",
        }
        wanted = json.loads(json.dumps(self.header))
        wrong = [text for key, text in names.items() if getattr(header, key) != wanted[key]]
        if wrong:
            raise DocumentError(
                f"{self.path} was collected with {' and '.join(wrong)}: calibrate the model it "
                "belongs to"
            )


class _Header(msgspec.Struct):
    schema: str
    weights: str
    processes: list[int]
    quantizers: list[Any]
    rounds: Count
    states: list[dict[str, Any]]
    floats: dict[str, dict[str, tuple[NotNegative | None, bool]]]


def _fingerprint(model: nn.Module) -> str:
    """Hash every parameter and buffer but those of quantizers, which calibration changes."""
    digest = hashlib.blake2b(digest_size=16)
    for path, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            continue
        if any(isinstance(parent, TensorQuantizer) for parent in _parents(model, path)):
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            digest.update(f"{path}.{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parents(model: nn.Module, path: str) -> list[nn.Module]:
    pieces = path.split(".")
    return [model.get_submodule(".".join(pieces[:i])) for i in range(1, len(pieces))]

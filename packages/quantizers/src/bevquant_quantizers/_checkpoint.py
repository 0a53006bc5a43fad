"""An interrupted calibration on disk: one .npz, no pickles, checked when it is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from ._calibrator_state import Arrays, calibrator_state, load_calibrator_state, settings_of
from ._select import NamedQuantizer
from ._tensor_quantizer import TensorQuantizer
from .calib._calibrator import Calibrator
from .documents import Count, DocumentError, parse_json, read_arrays, write_arrays

_SCHEMA = "bevquant-collection/1"


class Checkpoint:
    """Saves and restores what the calibrators of a model have collected.

    Args:
        path: File; with several processes each adds its rank to the name.
        model: Fingerprinted: a collection from other weights is refused.
        entries: The quantizers that collect.
        calibrators: Theirs.
        rank: This process.
        world: How many there are.
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
        self.path = Path(path)
        if world > 1:
            self.path = self.path.with_name(f"{self.path.name}.{rank}-of-{world}")
        if not self.path.parent.is_dir():
            raise ValueError(
                f"cannot save to {self.path}: the folder {self.path.parent} does not exist"
            )
        self.calibrators = calibrators
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
        text = json.dumps({**self.header, "rounds": rounds, "states": states})
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
            self._restore(header.states, arrays)
        except ValueError as error:
            place = "" if str(error).startswith(f"{self.path}") else f"{self.path}: "
            raise DocumentError(f"{place}{error}: delete it to begin anew") from error
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

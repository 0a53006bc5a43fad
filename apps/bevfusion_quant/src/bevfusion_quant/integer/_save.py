"""The integer model on disk: whole where that can be, else the parts that can."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bevfusion_quant.ptq._branches import FOLDED_APART

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevquant_int8sim import IntegerModel

__all__ = ["SavedPart", "save_parts"]

WHOLE = "model"


@dataclass(frozen=True)
class SavedPart:
    """One integer model.

    Attributes:
        part: Path of the module, or "model" for all of it.
        folder: Where `IntegerModel.load` finds it, below the run's folder; empty where it is not
            saved.
        reason: Why not.
    """

    part: str
    folder: str
    reason: str = ""


def save_parts(
    folder: Path, model: IntegerModel, quantized_model: BEVFusion, batch: Any, backend: str
) -> tuple[SavedPart, ...]:
    """Write the model to `folder/model`, or its units to `folder/<path>`.

    A program can be saved if it calls torch's own functions alone; the view transform's splat and
    the head's choice of queries are functions of this program. Each unit takes and gives floats.
    """
    folder.mkdir()
    saved = _saved(folder, WHOLE, model)
    if saved.folder:
        return (saved,)
    known = dict(quantized_model.named_modules())
    units = {path: known[path] for path in FOLDED_APART if path in known}
    inputs = _inputs(quantized_model, units, batch)
    parts = [_unit(folder, path, units[path], inputs[path], backend) for path in inputs]
    return (saved, *(part for part in parts if part is not None))


def _inputs(model: BEVFusion, units: Mapping[str, Any], batch: Any) -> dict[str, Any]:
    """What each unit is called with on a frame."""
    found: dict[str, Any] = {}

    def record(path: str) -> Callable[[Any, tuple[Any, ...]], None]:
        return lambda _, args: found.setdefault(path, copy.deepcopy(args)) and None

    handles = [unit.register_forward_pre_hook(record(path)) for path, unit in units.items()]
    try:
        with torch.no_grad():
            model(*batch)
    finally:
        for handle in handles:
            handle.remove()
    return {path: found[path] for path in units if path in found}


def _unit(folder: Path, path: str, unit: Any, example: Any, backend: str) -> SavedPart | None:
    from bevquant_int8sim import simulate

    if not any("_quantizer" in name for name, _ in unit.named_modules()):
        return None  # float, as the run wanted it
    try:
        model = simulate(unit, example, backend=backend)
    except ValueError as error:
        return SavedPart(path, "", str(error))
    return _saved(folder, path, model)


def _saved(folder: Path, name: str, model: IntegerModel) -> SavedPart:
    try:
        model.save(folder / name)
    except ValueError as error:
        text = str(error)
        own = dict.fromkeys(i.what for i in model.islands if f"({i.what})" in text)
        return SavedPart(name, "", f"a file cannot hold {', '.join(own)}" if own else text)
    return SavedPart(name, f"{folder.name}/{name}")

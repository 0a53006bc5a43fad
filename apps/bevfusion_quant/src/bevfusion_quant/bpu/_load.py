"""A finished run for a BPU back in memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bevfusion.model import CONFIGS, build_model
from bevfusion_quant._errors import InputError
from bevfusion_quant.bpu._config import BpuConfig
from bevfusion_quant.bpu._follow import Models
from bevfusion_quant.bpu._prepare import SplitUnits
from bevfusion_quant.bpu._quantize import Forms, for_march
from bevfusion_quant.bpu._save import WEIGHTS, cpu_weights, graph_weights
from bevfusion_quant.run import sha256
from bevfusion_quant.steps import built_parts, read_model_settings
from bevquant_quantizers.documents import read_tensors

__all__ = ["LoadedBpuRun", "load_bpu_run"]


@dataclass(frozen=True, eq=False)
class LoadedBpuRun:
    """A run's settings, its units with their forms, and the whole model in each form."""

    config: BpuConfig
    units: SplitUnits
    forms: dict[str, Forms]
    models: Models


def load_bpu_run(folder: str | Path) -> LoadedBpuRun:
    """What `run_bpu` wrote, bit for bit; nothing is unpickled.

    Raises:
        InputError: The folder is no run for a BPU, or its files are damaged.
    """
    folder = Path(folder)
    saved = read_model_settings(folder)
    try:
        if not saved.for_bpu:
            raise ValueError("it was not made with --target bpu")
        if sha256(folder / WEIGHTS) != saved.sha256[WEIGHTS]:
            raise ValueError(f"{WEIGHTS} is not the file that the run wrote")
        config = _config(saved.written)
        state = read_tensors(folder / WEIGHTS).tensors
        model = build_model(CONFIGS[config.config], built_parts(config.branch))
        wanted = cpu_weights(model.state_dict(), config.branch)
        model.load_state_dict({**model.state_dict(), **{name: state[name] for name in wanted}})
        with for_march(config.march):
            units = SplitUnits(model, config)
            forms = units.finished(units.calibrating(), lambda unit: graph_weights(state, unit))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{folder} cannot be loaded as a run for a BPU: {error}: give a folder that "
            "bevfusion-quant ptq --target bpu has written, unchanged"
        ) from error
    return LoadedBpuRun(config, units, forms, units.models(forms))


def _config(saved: dict[str, Any]) -> BpuConfig:
    values = {f.name: saved[f.name] for f in fields(BpuConfig)}
    for name in ("exclude", "cameras"):
        values[name] = tuple(values[name])
    values["weights"] = None if values["weights"] is None else Path(values["weights"])
    return BpuConfig(**values)

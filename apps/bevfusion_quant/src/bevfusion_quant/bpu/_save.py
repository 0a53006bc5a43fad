"""A run for a BPU on disk and back: float weights of the CPU's parts, calibrated graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevfusion.model import CONFIGS, PART_PATHS, build_model
from bevfusion_quant._errors import InputError
from bevfusion_quant.bpu._compare import Models
from bevfusion_quant.bpu._prepare import SplitUnits
from bevfusion_quant.bpu._quantize import Forms, for_march
from bevfusion_quant.bpu._units import bpu_parts
from bevfusion_quant.options import BpuConfig
from bevfusion_quant.run import sha256
from bevfusion_quant.steps import built_parts, read_model_settings
from bevquant_quantizers.documents import read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from bevfusion.model import BEVFusion

WEIGHTS = "weights.safetensors"
_GRAPH = "bpu."  # before the names of a unit's graph


def save_weights(
    folder: Path, model: BEVFusion, forms: Mapping[str, Forms], branch: str
) -> dict[str, str]:
    """Write weights.safetensors.

    The CPU's parts stand under their own names, each unit's fake-quantized graph (folded weights,
    scales) under "bpu.<unit>.<name>".

    Returns:
        The sha256 by file name.
    """
    tensors = cpu_weights(model.state_dict(), branch)
    for unit, form in forms.items():
        state = form.fake_graph.state_dict()
        tensors |= {f"{_GRAPH}{unit}.{name}": tensor for name, tensor in state.items()}
    path = folder / WEIGHTS
    write_tensors(path, tensors, {"format": "pt"})
    return {WEIGHTS: sha256(path)}


def cpu_weights(state: Mapping[str, Tensor], branch: str) -> dict[str, Tensor]:
    """Those of a model's weights, or of a file's, that belong to parts in float."""
    graphs = [f"{PART_PATHS[part]}." for part in bpu_parts(branch) if part != "camera"]
    if "camera" in bpu_parts(branch):
        camera = PART_PATHS["camera"]
        graphs += [f"{camera}.backbone.", f"{camera}.neck."]
    return {
        name: tensor for name, tensor in state.items() if not name.startswith((_GRAPH, *graphs))
    }


def graph_weights(state: Mapping[str, Tensor], unit: str) -> dict[str, Tensor]:
    """A unit's graph among a file's weights."""
    stem = f"{_GRAPH}{unit}."
    return {name.removeprefix(stem): t for name, t in state.items() if name.startswith(stem)}


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

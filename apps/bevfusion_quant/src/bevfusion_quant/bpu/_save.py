"""A run for a BPU on disk and back: float weights of the CPU's parts, calibrated graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion.model import PART_PATHS
from bevfusion_quant.bpu._config import bpu_parts
from bevfusion_quant.run import sha256
from bevquant_quantizers.documents import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from bevfusion.model import BEVFusion
    from bevfusion_quant.bpu._quantize import Forms

__all__ = ["WEIGHTS", "cpu_weights", "graph_weights", "save_weights"]

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

"""A finished run back in memory: the quantized branch with its folded weights and ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion_quant._errors import InputError
from bevfusion_quant.ptq._run_folder import CONFIG_FILE, RUN_FORMAT
from bevfusion_quant.ptq._stages import example_batch, fuse_branch, quantize_branch

if TYPE_CHECKING:
    from bevfusion_quant.model import BEVFusion

__all__ = ["load_quantized"]


def load_quantized(folder: str | Path) -> BEVFusion:
    """The fake-quantized branch of a run, as it was when the run was written; nothing is unpickled.

    Args:
        folder: A run folder, `runs/name`.

    Returns:
        The calibrated model in eval mode; its output is the run's, bit for bit.

    Raises:
        InputError: The folder is not a run, or its files are damaged or do not belong together.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from bevfusion_quant.model import CONFIGS, build_lidar_branch
    from bevquant_quantizers import load_ranges

    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if config["format"] != RUN_FORMAT:
            raise ValueError(f"its format is {config['format']!r}")
        sizes = CONFIGS[config["config"]]
        example = example_batch(sizes)
        fused = fuse_branch(build_lidar_branch(sizes), example).model
        model = quantize_branch(
            fused, example, method=config["method"], exclude=config["exclude"]
        ).model
        load_ranges(model, folder / "ranges.json")
        model.load_state_dict(load_file(folder / "weights.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{folder} cannot be loaded as a run of bevfusion-quant: {error}: give a folder that a "
            "run has written, unchanged"
        ) from error
    return model

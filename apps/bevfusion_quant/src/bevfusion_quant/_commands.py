"""What each sub-command does; answers the text to print."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from bevfusion_quant._errors import InputError
from bevfusion_quant._options import Command, Demo, Ptq, Tree
from bevfusion_quant.model import CONFIGS, build_lidar_branch
from bevfusion_quant.points import read_frames
from bevfusion_quant.ptq import (
    PtqConfig,
    PtqResult,
    example_batch,
    free_name,
    fuse_branch,
    layer_table,
    quantize_branch,
    run_ptq,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["execute", "tree"]


@singledispatch
def execute(options: Command, command: str) -> str:
    """Run one sub-command; `command` is the command line, kept in the run's summary."""
    raise TypeError(f"{type(options).__name__} is not a sub-command")


@execute.register
def _demo(options: Demo, command: str) -> str:
    from bevfusion_quant.scenes import street_frame

    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: it must not be negative")
    config = PtqConfig(config=options.config, method=options.method, seed=options.seed)
    return _report(
        run_ptq(
            [street_frame(seed=options.seed)],
            config,
            runs=options.runs,
            name=options.name or free_name(options.runs, "demo"),
            overwrite=options.overwrite,
            command=command,
        )
    )


@execute.register
def _ptq(options: Ptq, command: str) -> str:
    frames = read_frames(
        options.points, columns=options.columns, dtype=options.dtype, nonfinite=options.nonfinite
    )
    config = PtqConfig(
        config=options.config,
        method=options.method,
        weights=options.weights,
        weight_layout=options.weight_layout,
        seed=options.seed,
        calibration_frames=options.calibration_frames,
        exclude=options.exclude,
    )
    return _report(
        run_ptq(
            frames,
            config,
            runs=options.runs,
            name=options.name or free_name(options.runs, "ptq"),
            overwrite=options.overwrite,
            command=command,
        )
    )


@execute.register
def _tree(options: Tree, command: str) -> str:
    return str(tree(options.stage, options.config))


def tree(stage: str, config: str = "nuscenes") -> nn.Module:
    """The part of the model that a stage is about, ready to be printed.

    The float stage is the whole branch (voxelize, backbone); folding and quantization rewrite the
    backbone, and the other stages are that alone. Quantizers are not calibrated.
    """
    sizes = CONFIGS[config]
    model = build_lidar_branch(sizes)
    if stage == "float":
        return model.lidar
    example = example_batch(sizes)
    fused = fuse_branch(model, example).model
    if stage == "fused":
        return fused.lidar["backbone"]
    return quantize_branch(fused, example).model.lidar["backbone"]


def _report(result: PtqResult) -> str:
    steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    warnings = "".join(f"\nwarning: {text}" for text in result.warnings)
    return (
        "\nFloat against fake-quantized, output of each layer\n\n"
        f"{layer_table(result.layers)}\n{warnings}\n"
        f"{steps}\npeak memory {result.peak_memory_mib:,.0f} MiB\n\n"
        f"Written to {result.folder}: summary.json, ranges.json, weights.safetensors, "
        "config.json, bev.png, layers.png, histograms_*.png"
    )

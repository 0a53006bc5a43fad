"""The whole job: build or load, fold, quantize, calibrate, compare, write."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bevfusion_quant._errors import InputError
from bevfusion_quant.model import CONFIGS, build_lidar_branch, load_weights, random_weights
from bevfusion_quant.ptq._batches import VoxelBatches
from bevfusion_quant.ptq._compare import LayerRow, compare_layers
from bevfusion_quant.ptq._quantizer_values import QuantizerRow, watch_quantizers
from bevfusion_quant.ptq._record import (
    calibration_record,
    calibration_warnings,
    fusion_record,
    quantization_record,
    save_model,
)
from bevfusion_quant.ptq._run_folder import CONFIG_FILE, RUN_FORMAT, run_folder
from bevfusion_quant.ptq._stages import (
    Method,
    calibrate_branch,
    example_batch,
    fuse_branch,
    quantize_branch,
)
from bevfusion_quant.ptq._summary import peak_memory_mib, versions, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from bevfusion_quant.model import BEVFusion
    from bevfusion_quant.points import Frame
    from bevfusion_quant.ptq._compare import Batch

__all__ = ["PtqConfig", "PtqResult", "run_ptq"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PtqConfig:
    """Everything that decides the result of a run, its frames apart.

    Args:
        config: Sizes of the branch: "nuscenes" or "tiny".
        method: How activation ranges are chosen.
        weights: State dict to load; None for random weights.
        weight_layout: How that file stores sparse weights, or "auto".
        seed: Seed of random weights.
        calibration_frames: How many frames, from the first, set the ranges; 0 for all.
        exclude: Paths or globs below the backbone to leave float.
    """

    config: str = "nuscenes"
    method: Method = "mse"
    weights: Path | None = None
    weight_layout: str = "auto"
    seed: int = 0
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class PtqResult:
    """Where the run lies, its tables, what to look at, seconds by step, peak memory in MiB."""

    folder: Path
    layers: list[LayerRow]
    quantizers: list[QuantizerRow]
    warnings: tuple[str, ...]
    seconds: dict[str, float]
    peak_memory_mib: float


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, blame: str = "") -> Iterator[None]:
        """Time a step; with `blame`, what it refuses is the input's fault and is said so."""
        LOG.info("%s …", name)
        start = time.perf_counter()
        try:
            yield
        except ValueError as error:
            if not blame or isinstance(error, InputError):
                raise
            raise InputError(f"{blame}: {error}") from error
        self.seconds[name] = round(time.perf_counter() - start, 3)


def run_ptq(
    frames: Sequence[Frame],
    config: PtqConfig,
    *,
    runs: Path = Path("runs"),
    name: str = "ptq",
    overwrite: bool = False,
    command: str = "",
) -> PtqResult:
    """Quantize the LiDAR branch on the given frames and write `runs/name`.

    Args:
        frames: At least one; ranges come from the first `calibration_frames`, the comparison from
            all of them.
        config: What to do.
        runs: Folder of all runs.
        name: This run's folder in it.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats this run, for the summary.

    Raises:
        InputError: Whatever is wrong with the input; nothing is written then.
    """
    clock, start = _Clock(), time.perf_counter()
    count = config.calibration_frames or len(frames)
    if not 1 <= count <= len(frames):
        raise InputError(
            f"--calibration-frames {count} of {len(frames)} frames: it must be from 1 to the "
            "number of "
            "frames given, or 0 for all of them"
        )
    if config.seed < 0:
        raise InputError(f"--seed {config.seed}: it must not be negative")
    with run_folder(runs, name, overwrite=overwrite) as folder:
        sizes = CONFIGS[config.config]
        with clock.step("voxelize"):
            float_model = build_lidar_branch(sizes)
            batches = VoxelBatches(frames, sizes, float_model.lidar["voxelize"])
            first = batches[0]
        weights = _fill(float_model, config, first, clock)
        example = example_batch(sizes)
        with clock.step("fuse", blame="the weights cannot be folded"):
            fused = fuse_branch(float_model, example)
        with clock.step("quantize", blame="the branch cannot be quantized this way"):
            quantized = quantize_branch(
                fused.model, example, method=config.method, exclude=config.exclude
            )
        with clock.step("calibrate", blame="no ranges can be found"):
            report = calibrate_branch(quantized.model, batches.head(count), method=config.method)
        with clock.step("compare"):
            layers, wanted, got = compare_layers(fused.model, quantized.model, batches)
            with torch.no_grad():
                folding_error = _relative_change(float_model(*first), wanted)
        with clock.step("watch quantizers"):
            values = watch_quantizers(quantized.model, lambda model: model(*first))
        with clock.step("draw"):
            from bevfusion_quant.pictures import bev_pictures, histogram_pictures, layer_picture

            bev_pictures(folder, sizes, first.features, first.coords, wanted, got)
            histogram_pictures(folder, values)
            layer_picture(folder, layers)
        rows = [QuantizerRow.of(v) for v in values]
        with clock.step("write"):
            save_model(folder, quantized.model)
            write_json(
                folder / CONFIG_FILE,
                {"format": RUN_FORMAT, "version": 1, **asdict(config), "sizes": asdict(sizes)},
            )
        seconds = {**clock.seconds, "total": round(time.perf_counter() - start, 3)}
        peak = round(peak_memory_mib(), 1)
        summary = {
            "format": RUN_FORMAT,
            "version": 1,
            "command": command,
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "frames": [
                {"name": frame, "size": size, "calibration": index < count}
                for index, (frame, size) in sorted(batches.names.items())
            ],
            "weights": weights,
            "fusion": {**fusion_record(fused.result), "largest_relative_change": folding_error},
            "quantization": quantization_record(quantized.result),
            "calibration": calibration_record(report),
            "layers": layers,
            "quantizers": rows,
            "seconds": seconds,
            "peak_memory_mib": peak,
        }
        write_json(folder / "summary.json", summary)
    return PtqResult(runs / name, layers, rows, calibration_warnings(report), seconds, peak)


def _fill(model: BEVFusion, config: PtqConfig, first: Batch, clock: _Clock) -> dict[str, object]:
    """Weights from the file, or random ones fitted to the first frame; says which."""
    if config.weights is None:
        with clock.step("random weights"):
            random_weights(model, first.features, first.coords, seed=config.seed)
        return {"source": "random", "seed": config.seed, "batch_norms_fitted_to": "the first frame"}
    with clock.step("load weights"):
        report = load_weights(model, config.weights, layout=config.weight_layout)
    if report.not_used:
        LOG.info("%d entries of other branches are not used", len(report.not_used))
    return {
        "source": str(config.weights),
        "layout": report.layout,
        "loaded": len(report.loaded),
        "not_used": report.not_used,
    }


def _relative_change(wanted: Tensor, got: Tensor) -> float:
    """Max |got − wanted| / max |wanted|."""
    scale = float(wanted.abs().max())
    return float((got - wanted).abs().max()) / scale if scale else 0.0

"""`bevfusion-quant demo`: all of it on one street."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bevfusion_quant.commands._text import run_text
from bevfusion_quant.options import (
    Branch,
    ConfigName,
    Method,
    ModelName,
    PartBranch,
    RunOptions,
    config_from,
)

__all__ = ["Demo", "demo_target"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Demo(RunOptions):
    """Do all of it on an embedded street scene with six cameras; no download, no data.

    Args:
        model: The detector: bevfusion, centerpoint (LiDAR alone, voxels) or centerpoint-pillars.
        config: Sizes of the model: tiny of bevfusion and centerpoint comes trained and takes
            seconds; nuscenes is mit-bevfusion's, with random weights, and takes minutes.
        branch: What to quantize; see `ptq`.
        method: How activation ranges are chosen.
        weights: trained: those that come with the package, by default where it has some for the
            sizes; or random ones.
        seed: Seed of the street and of random weights.
        name: The run's folder in it; by default demo, demo-2, …
    """

    model: ModelName = "bevfusion"
    config: ConfigName = "tiny"
    branch: PartBranch = "all"
    method: Method = "mse"
    weights: Literal["trained", "random"] | None = None
    seed: int = 0

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bev_scenes import stored_street, street_frame
        from bevfusion.model import named_weights, trained_weights
        from bevfusion_quant.frames import street_size
        from bevfusion_quant.ptq import PtqConfig, run_ptq
        from bevfusion_quant.stages import reads_images, sizes_of

        name, size = sizes_of(self.model, self.config).name, street_size(self.config)
        if self.weights is None:
            weights: Path | None = trained_weights(name)
        else:
            weights = named_weights(self.weights, name)
        cameras = size if reads_images(self.branch, self.model) else None
        if (self.seed, self.config, cameras) == (0, "tiny", "tiny"):
            frame = stored_street()
        else:
            frame = street_frame(seed=self.seed, size=size, cameras=cameras)
        with _kernels_compiled_beside():
            done = run_ptq(
                [frame],
                config_from(PtqConfig, self, weights=weights),
                **self.place(command),
                integers="auto",
                export=demo_target(self.branch, self.model),
            )
        return run_text(done, self)


@contextmanager
def _kernels_compiled_beside() -> Iterator[None]:
    """Compile the kernels of a first run on another core, from the start."""
    if (os.cpu_count() or 1) < 2:
        yield
        return
    compiling = [sys.executable, "-m", "bevquant_int8sim", "auto"]
    with subprocess.Popen(
        compiling, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as beside:
        try:
            yield
        finally:
            beside.terminate()


def demo_target(branch: Branch, model: str = "bevfusion") -> str | None:
    """Engine of the demo's files; None, with a message, if no file can be written."""
    from bevfusion_quant.export import missing_libraries

    missing = missing_libraries()
    if missing:
        LOG.warning("no ONNX files without %s: pip install onnxruntime onnxscript", missing)
    elif branch == "head" and model == "bevfusion":
        LOG.warning("no ONNX files: a quantized head has no form in a file")
    return None if missing or (branch, model) == ("head", "bevfusion") else "tensorrt"

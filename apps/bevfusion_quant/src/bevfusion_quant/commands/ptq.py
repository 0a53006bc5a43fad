"""Commands that quantize: `ptq` a float model on frames, for either target; `demo` one street."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bevfusion_quant._errors import InputError
from bevfusion_quant.commands._text import bpu_run_text, run_text
from bevfusion_quant.options import (
    Branch,
    ConfigName,
    FrameOptions,
    MarchName,
    Method,
    ModelName,
    PartBranch,
    PtqOptions,
    RunOptions,
    Target,
    TargetOptions,
    config_from,
)

if TYPE_CHECKING:
    from bevfusion.model import Sizes
    from bevfusion_quant.options import Branch

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Demo(RunOptions):
    """Run the whole job on a street with six cameras and a LiDAR; needs no data.

    Args:
        model: The detector: bevfusion, centerpoint (LiDAR alone, voxels) or centerpoint-pillars.
        config: Sizes of the model. tiny has trained weights (bevfusion, centerpoint) and takes
            seconds; nuscenes, mit-bevfusion's, has random weights and takes minutes. FILE is the
            config.json or the folder of a run: its settings become the defaults.
        branch: Part to quantize, as in `ptq`.
        method: Search method of activation ranges.
        weights: The package's trained weights (the default, if it has some of these sizes), or
            random weights.
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
        # This very street comes with the package.
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


_OF_OWN_MODELS = (
    "config", "quantize_head", "weight_entry", "weight_layout", "seed", "target", "march",
)  # fmt: skip
"""Options that a network in other code has no use for."""


@dataclass(frozen=True, kw_only=True)
class Ptq(RunOptions, PtqOptions, FrameOptions):
    """Fold, quantize, calibrate and compare on your own frames.

    Args:
        model: The detector: bevfusion (cameras and LiDAR), centerpoint (LiDAR, voxels),
            centerpoint-pillars, mmdet3d:CONFIG.py of mmdetection3d, openpcdet:CONFIG.yaml of
            OpenPCDet, or package.module:function that returns a model of yours.
        name: The run's folder in it; by default ptq, ptq-2, …
        target: Hardware. nvidia: every part, for TensorRT and libspconv. bpu: the dense parts for a
            Horizon BPU (camera backbone and neck, fuser, decoder; of centerpoint decoder and head);
            the rest is float on its CPU.
        march: The BPU's architecture, with --target bpu: bayes (Journey 5, RDK Ultra; the default),
            bernoulli2 (RDK X3) or bayes-e (RDK X5).
        allow_poor_calibration: Exit with 0 even if the calibration cannot be right; its faults are
            still reported.
    """

    target: Target = "nvidia"
    march: MarchName | None = None
    allow_poor_calibration: bool = False

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion.detectors import is_foreign
        from bevfusion.model import named_weights
        from bevfusion_quant.stages import is_detector, sizes_of

        if is_foreign(self.model):
            self._refuse(_OF_OWN_MODELS, f"--model {self.model} does not read it")
            return self._execute(self.branch or "all", self.weights, command, whole=self.fold)
        sizes = sizes_of(self.model, self.config)
        lidar = self.dataset is None and self.model == "bevfusion"
        branch: Branch = self.branch or ("lidar" if lidar else "all")
        if self.quantize_head and not is_detector(branch):
            raise InputError(
                f"--quantize-head goes with --branch all or a detector, not with {branch}"
            )
        if self.target == "bpu":
            return self._execute_bpu(branch, sizes, command)
        if self.march is not None:
            raise InputError(
                f"--march {self.march} goes with --target bpu: add that, or leave it out"
            )
        return self._execute(branch, named_weights(self.weights, sizes.name), command)

    def _execute(
        self, branch: Branch, weights: Path | None, command: str, *, whole: bool = False
    ) -> str:
        """For NVIDIA; the `whole` job includes integers and files."""
        from bevfusion_quant.frames import camera_names, frames_of
        from bevfusion_quant.ptq import PtqConfig, check_settings, run_ptq
        from bevfusion_quant.stages import reads_images

        images = reads_images(branch, self.model) or (":" in self.model and bool(self.cameras))
        config = config_from(
            PtqConfig,
            self,
            branch=branch,
            method=self.method or PtqConfig.method,
            weights=weights,
            cameras=camera_names(self) if images else (),
        )
        frames = frames_of(self, with_cameras=images, size=self.config)
        if self.dry_run:
            check_settings(config, len(frames))
        result = run_ptq(
            frames,
            config,
            integers="auto" if whole else None,
            export=demo_target(branch, self.model) if whole and self.plan is None else None,
            **self.place(command),
        )
        return run_text(result, self, allow_poor=self.allow_poor_calibration)

    def _execute_bpu(self, branch: Branch, sizes: Sizes, command: str) -> str:
        from bevfusion.model import named_weights
        from bevfusion_quant.bpu import BpuConfig, bpu_parts, run_bpu
        from bevfusion_quant.frames import camera_names, frames_of
        from bevfusion_quant.stages import is_detector, reads_images

        if branch != "all" and is_detector(branch):
            raise InputError(
                f"--branch {branch}: for a BPU the detector is the whole one, of cameras and "
                "LiDAR; choose --branch camera, fuser, decoder or all"
            )
        bpu_parts(branch, self.model)  # refuses before any frame is read
        self._refuse_without_bpu_form()
        config = config_from(
            BpuConfig,
            self,
            branch=branch,
            march=self.march or BpuConfig.march,
            method=self.method or BpuConfig.method,
            weights=named_weights(self.weights, sizes.name),
            cameras=camera_names(self),
        )
        frames = frames_of(self, with_cameras=reads_images("all", self.model), size=self.config)
        result = run_bpu(frames, config, **self.place(command))
        return bpu_run_text(result, self, allow_poor=self.allow_poor_calibration)

    def _refuse_without_bpu_form(self) -> None:
        """Refuse what `PtqOptions` has beyond any target's."""
        if self.quantize_head:
            raise InputError("--quantize-head: for a BPU --branch decides it; leave it out")
        if self.plan is not None:
            raise InputError(
                f"--plan {self.plan}: a BPU's layers are int8, or float on its CPU: name the "
                "latter with --exclude"
            )
        shared = {field.name for field in fields(TargetOptions)}
        self._refuse(
            {field.name for field in fields(PtqOptions)} - shared,
            "for a BPU batch norms are folded and weights rounded to the nearest of 8 bits",
        )

    def _refuse(self, names: Collection[str], reason: str) -> None:
        """Refuse those of the options that are not at their default, as they are written."""
        given = [
            ("--no-" if field.default is True else "--") + field.name.replace("_", "-")
            for field in fields(self)
            if field.name in names and getattr(self, field.name) != field.default
        ]
        if given:
            raise InputError(f"{', '.join(given)}: {reason}; leave it out")

"""`bevfusion-quant ptq`: a float model and frames to a quantized run, for either target."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from bevfusion_quant._errors import InputError
from bevfusion_quant.commands._text import bpu_run_text, run_text
from bevfusion_quant.commands.demo import demo_target
from bevfusion_quant.options import (
    FrameOptions,
    MarchName,
    PtqOptions,
    RunOptions,
    Target,
    TargetOptions,
    config_from,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bevfusion.model import Sizes
    from bevfusion_quant.options import Branch

__all__ = ["Ptq"]

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
        target: What is quantized for. nvidia: every part, as TensorRT and libspconv take it. bpu:
            the dense parts for a Horizon BPU (camera backbone and neck, fuser, decoder; of
            centerpoint decoder and head), the rest in float on its CPU.
        march: Of --target bpu, the BPU's architecture: bayes (Journey 5, RDK Ultra; the default),
            bernoulli2 (RDK X3) or bayes-e (RDK X5).
        allow_poor_calibration: End with 0 where the calibration cannot be right too; what is wrong
            with it is told all the same.
    """

    target: Target = "nvidia"
    march: MarchName | None = None
    allow_poor_calibration: bool = False

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion.detectors import is_foreign
        from bevfusion.model import named_weights
        from bevfusion_quant.ptq import is_detector
        from bevfusion_quant.stages import sizes_of

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
        from bevfusion_quant.ptq import PtqConfig, reads_images, run_ptq

        images = reads_images(branch, self.model) or (":" in self.model and bool(self.cameras))
        config = config_from(
            PtqConfig,
            self,
            branch=branch,
            method=self.method or PtqConfig.method,
            weights=weights,
            cameras=camera_names(self) if images else (),
        )
        result = run_ptq(
            frames_of(self, with_cameras=images, size=self.config),
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
        from bevfusion_quant.ptq import is_detector, reads_images

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
        """Refuse those of the options that are not at their default.

        Raises:
            InputError: Naming them as they are written.
        """
        given = [
            ("--no-" if field.default is True else "--") + field.name.replace("_", "-")
            for field in fields(self)
            if field.name in names and getattr(self, field.name) != field.default
        ]
        if given:
            raise InputError(f"{', '.join(given)}: {reason}; leave it out")

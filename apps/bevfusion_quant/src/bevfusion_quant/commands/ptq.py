"""`bevfusion-quant ptq`: a float model and frames to a quantized run, for either target."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from bevfusion_quant._errors import InputError
from bevfusion_quant.commands._text import bpu_run_text, finished_text, run_text
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
    from bevfusion_quant.options import Branch

__all__ = ["Ptq"]


@dataclass(frozen=True, kw_only=True)
class Ptq(RunOptions, PtqOptions, FrameOptions):
    """Fold, quantize, calibrate and compare on your own frames.

    Args:
        model: The detector: bevfusion (cameras and LiDAR), centerpoint (LiDAR, voxels),
            centerpoint-pillars, mmdet3d:CONFIG.py of mmdetection3d, openpcdet:CONFIG.yaml of
            OpenPCDet, or package.module:function that returns a model of yours.
        name: The run's folder in it; by default ptq, ptq-2, …
        target: What is quantized for. nvidia: every part, as TensorRT and libspconv take it. bpu:
            the dense parts for a Horizon BPU (camera backbone and neck, fuser, decoder), the rest
            in float on its CPU.
        march: Of --target bpu, the BPU's architecture: bayes (Journey 5, RDK Ultra; the default),
            bernoulli2 (RDK X3) or bayes-e (RDK X5).
        allow_poor_calibration: End with 0 where the calibration cannot be right too; what is wrong
            with it is told all the same.
    """

    target: Target = "nvidia"
    march: MarchName | None = None
    allow_poor_calibration: bool = False

    def execute(self, command: str) -> str:
        """Run it and answer what to print."""
        from bevfusion.model import named_weights
        from bevfusion_quant.frames import camera_names, frames_of
        from bevfusion_quant.ptq import PtqConfig, is_detector, reads_images, run_ptq
        from bevfusion_quant.stages import sizes_of

        if ":" in self.model:
            return self._execute_any(command)
        sizes = sizes_of(self.model, self.config)
        lidar = self.dataset is None and self.model == "bevfusion"
        branch: Branch = self.branch or ("lidar" if lidar else "all")
        if self.quantize_head and not is_detector(branch):
            raise InputError(
                f"--quantize-head goes with --branch all or a detector, not with {branch}"
            )
        if self.target == "bpu":
            return self._execute_bpu(branch, command)
        if self.march is not None:
            raise InputError(
                f"--march {self.march} goes with --target bpu: add that, or leave it out"
            )
        frames = frames_of(self, with_cameras=reads_images(branch, self.model), size=self.config)
        config = config_from(
            PtqConfig,
            self,
            branch=branch,
            method=self.method or PtqConfig.method,
            weights=named_weights(self.weights, sizes.name),
            cameras=camera_names(self),
        )
        result = run_ptq(frames, config, **self.place(command))
        return run_text(result, self, allow_poor=self.allow_poor_calibration)

    def _execute_any(self, command: str) -> str:
        """A network in code of another project."""
        from bevfusion_quant.any_model import AnyConfig, any_text, run_any
        from bevfusion_quant.frames import frames_of
        from bevfusion_quant.verdict import verdict

        read = {
            one.name for one in (*fields(AnyConfig), *fields(FrameOptions), *fields(RunOptions))
        }
        given = self._given({one.name for one in fields(self)} - read - {"allow_poor_calibration"})
        if given:
            raise InputError(
                f"{', '.join(given)}: --model {self.model} does not read it; leave it out"
            )
        frames = frames_of(self, with_cameras=False, size="nuscenes")
        config = config_from(
            AnyConfig, self, method=self.method or AnyConfig.method, target=AnyConfig.target
        )
        result = run_any(frames, config, **self.place(command))
        return finished_text(any_text(result), result, self, result.warnings, verdict(result))

    def _execute_bpu(self, branch: Branch, command: str) -> str:
        from bevfusion.model import named_weights
        from bevfusion_quant.bpu import BpuConfig, bpu_parts, run_bpu
        from bevfusion_quant.frames import camera_names, frames_of
        from bevfusion_quant.ptq import is_detector

        if branch != "all" and is_detector(branch):
            raise InputError(
                f"--branch {branch}: for a BPU the detector is the whole one, of cameras and "
                "LiDAR; choose --branch camera, fuser, decoder or all"
            )
        bpu_parts(branch)  # refuses before any frame is read
        self._refuse_without_bpu_form()
        config = config_from(
            BpuConfig,
            self,
            branch=branch,
            march=self.march or BpuConfig.march,
            method=self.method or BpuConfig.method,
            weights=named_weights(self.weights, self.config),
            cameras=camera_names(self),
        )
        frames = frames_of(self, with_cameras=True, size=self.config)
        result = run_bpu(frames, config, **self.place(command))
        return bpu_run_text(result, self, allow_poor=self.allow_poor_calibration)

    def _refuse_without_bpu_form(self) -> None:
        """Refuse what `PtqOptions` has beyond any target's."""
        if self.model != "bevfusion":
            raise InputError(
                f"--model {self.model}: --target bpu is for bevfusion alone; leave it out, or "
                "choose --model bevfusion"
            )
        if self.quantize_head:
            raise InputError("--quantize-head: for a BPU the head stays on the CPU; leave it out")
        if self.plan is not None:
            raise InputError(
                f"--plan {self.plan}: a BPU's layers are int8, or float on its CPU: name the "
                "latter with --exclude"
            )
        shared = {field.name for field in fields(TargetOptions)}
        given = self._given({field.name for field in fields(PtqOptions)} - shared)
        if given:
            raise InputError(
                f"{', '.join(given)}: for a BPU batch norms are folded and weights rounded to the "
                "nearest of 8 bits; leave it out"
            )

    def _given(self, names: Collection[str]) -> list[str]:
        """Those of the options that are not at their default, as they are written."""
        return [
            ("--no-" if field.default is True else "--") + field.name.replace("_", "-")
            for field in fields(self)
            if field.name in names and getattr(self, field.name) != field.default
        ]

"""Commands on saved runs.

`evaluate` and `simulate` run one on other frames. `compare` judges several by the labels of the
same frames. `sensitivity` measures the rounding of each layer and finds a plan within a budget.
`export` writes the model as ONNX files. `report` writes one page to sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant.commands._text import bpu_run_text, finished_text, joined, run_text, shown
from bevfusion_quant.options import (
    Backend,
    BootstrapOptions,
    Cpu,
    ExportTarget,
    FrameOptions,
    Precision,
    RunOptions,
    SensitivityMetric,
    SensitivityOutput,
)


def _given(function: Callable[..., Any], options: RunOptions) -> dict[str, Any]:
    """The options that have the name of one of the function's arguments."""
    named = signature(function).parameters.keys() & {one.name for one in fields(options)}
    return {name: getattr(options, name) for name in named}


def _frames_of(run: Path, options: FrameOptions) -> dict[str, Any]:
    from bevfusion_quant.saved_run import frames_for_run, read_model_settings

    frames = frames_for_run(options, read_model_settings(run))
    return {"frames": frames, "cameras": options.cameras or None}


@dataclass(frozen=True, kw_only=True)
class Evaluate(RunOptions, BootstrapOptions, FrameOptions):
    """Compare a saved run's float and quantized model on other frames; the run stays unchanged.

    Args:
        run: The folder of a run that demo or ptq wrote.
        runs: Folder of all runs; the evaluation is a new one.
        name: The evaluation's folder in it; by default evaluate, evaluate-2, …
    """

    run: Path

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        return self._execute(command, integers=None)

    def _execute(
        self, command: str, *, integers: Backend | None, layer_frames: int | None = None
    ) -> str:
        from bevfusion_quant.ptq import run_evaluate
        from bevfusion_quant.saved_run import read_model_settings

        given = {**_frames_of(self.run, self), "bootstrap": self.bootstrap()}
        if not read_model_settings(self.run).for_bpu:
            given |= {"integers": integers, "layer_frames": layer_frames}
            return run_text(run_evaluate(self.run, **given, **self.place(command)), self)

        from bevfusion_quant.bpu import run_bpu_evaluate
        from bevquant_quantizers.ranks import current_ranks

        if not current_ranks().alone:
            raise InputError(
                f"{self.run} is a run for a BPU, which is judged in one process: start it "
                "without torchrun or srun"
            )
        if integers not in (None, "auto"):
            raise InputError(
                f"--backend {integers}: the integers of a run for a BPU take the kernels "
                "that fit them; leave it out"
            )
        if layer_frames is not None:
            raise InputError(
                f"--layer-frames {layer_frames}: the forms of a run for a BPU are compared on "
                "every frame; leave it out"
            )
        return bpu_run_text(run_bpu_evaluate(self.run, **given, **self.place(command)), self)


@dataclass(frozen=True, kw_only=True)
class Simulate(Evaluate):
    """Run a saved run's model in integer arithmetic on frames, beside float and fake-quantized.

    Args:
        name: The simulation's folder in --runs; by default simulate, simulate-2, …
        backend: Kernels. auto takes the fastest that are exact on this CPU.
        layer_frames: Number of frames, from the first on, on which each operation is compared with
            float and fake-quantized. Default: all. Other frames take half the time.
    """

    backend: Backend = "auto"
    layer_frames: int | None = None

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        return self._execute(command, integers=self.backend, layer_frames=self.layer_frames)


@dataclass(frozen=True, kw_only=True)
class Compare(RunOptions, BootstrapOptions, FrameOptions):
    """Compare several runs of one float model by the labels of the same frames.

    Args:
        resamples: Bootstrap resamples for the intervals; 0 for none.
        runs: Folder of all runs; the comparison is a new one.
        name: Its folder in it; by default compare, compare-2, …
        run: Folders of runs that demo, ptq or qat wrote from the same float weights, for NVIDIA.
        integers: Run every model in integers too.
        backend: Kernels for --integers. auto takes the fastest that are exact on this CPU.
    """

    run: tuple[Path, ...]
    integers: bool = False
    backend: Backend = "auto"

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.compare import comparison_text, run_compare

        if self.backend != "auto" and not self.integers:
            raise InputError(f"--backend {self.backend} goes with --integers: add that")
        if not self.run:
            raise InputError("no runs to compare: name finished runs with --run")
        if self.points:
            raise InputError(
                "--points: files of points have no labels, which runs are compared by; give "
                "frames of a labelled data set with --dataset"
            )
        result = run_compare(
            self.run,
            integers=self.backend if self.integers else None,
            bootstrap=self.bootstrap(),
            **_frames_of(self.run[0], self),
            **self.place(command),
        )
        return finished_text(comparison_text(result.comparison), result, self)


@dataclass(frozen=True, kw_only=True)
class Sensitivity(RunOptions, FrameOptions):
    """Measure the loss from each layer's rounding; with a budget, choose each layer's precision.

    Args:
        runs: Folder of all runs; the measurement is a new one.
        name: Its folder in it; by default sensitivity, sensitivity-2, …
        run: The folder of a run that demo or ptq wrote, for NVIDIA.
        metric: sqnr and kl (of the heat map's classes) compare with the float model and need no
            labels; mAP compares the boxes with the frames' labels.
        output: Tensor that sqnr compares: the map that the head reads, or the head's heat map.
            Default: the map; if the head is quantized, the heat map.
        precisions: Precisions to measure for each group of layers. A plan chooses among them and
            float: int8, int16 (activations of 16 bits), int4 (weights of 4 bits), fp8 (E4M3).
            Default: int8; int4 for a run with --weight-bits 4.
        sparse_precisions: The same of the layers of sparse convolutions: int8 with --precisions
            fp8, as libspconv takes no FP8. Default: those of --precisions.
        estimate: Estimate sqnr from gradients, in one pass a frame. Plans are still measured.
        alone_only: Measure each group quantized alone; skip the second half, each group alone in
            float.
        budget: time=1.2 finds the best score within 1.2 times the int8 model's estimated time,
            size=0.7 the best with 0.7 times its size of weights (time=1.2,size=0.7: both), score=35
            the fastest plan with that score. Writes plan.json for ptq --plan.
        plan_rounds: Rounds in which plans near the estimated one are measured, about as many a
            round as there are groups of layers; 0 for a few plans in all.
    """

    run: Path
    metric: SensitivityMetric = "sqnr"
    output: SensitivityOutput | None = None
    precisions: tuple[Precision, ...] = ()
    sparse_precisions: tuple[Precision, ...] = ()
    estimate: bool = False
    alone_only: bool = False
    budget: str | None = None
    plan_rounds: int = 2

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.sensitivity import run_sensitivity, sensitivity_text

        given = {**_given(run_sensitivity, self), **_frames_of(self.run, self)}
        result = run_sensitivity(**given, without=not self.alone_only, **self.place(command))
        text = finished_text(sensitivity_text(result.outcome), result, self)
        if result.outcome.refusal:
            raise VerificationError(result.outcome.refusal, text)
        return text


@dataclass(frozen=True, kw_only=True)
class Export(RunOptions, FrameOptions):
    """Write a saved run's model as ONNX files for an engine, and verify them on a frame.

    The default frame is a street. Your own frames set the number of voxels that the files hold.

    Args:
        runs: Folder of all runs; the export is a new one.
        name: The export's folder in it; by default export, export-2, …
        run: The folder of a run that demo or ptq wrote.
        target: Engine. tensorrt, tensorrt10: the files of CUDA-BEVFusion, with the sparse encoder
            for libspconv. tensorrt11: the same with types in the file, as TensorRT 11 requires.
            onnxruntime, openvino: every part for a CPU. autoware: the sparse encoder for Autoware's
            plugin; of a lidar-detector, decoder and head in one file. bpu: the dense parts for
            hb_mapper, of a run with --target bpu. Default: the target of the run.
        cpu: CPU of the files, for onnxruntime and openvino. vnni multiplies int8 exactly (x86 with
            VNNI or AMX, ARM). Files for any are exact everywhere, and slower unless the run has
            --weight-bits 7. Default: this CPU.
        measure: Time each quantized file for a CPU beside its part in float32, on this CPU.
    """

    run: Path
    target: ExportTarget | None = None
    cpu: Cpu | None = None
    measure: bool = False

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.export import export_run, export_text, refuse_wrong_files

        named = self.dataset is not None or self.points
        frames = _frames_of(self.run, self if named else replace(self, dataset="street"))
        result = export_run(**{**_given(export_run, self), **frames}, **self.place(command))
        text = finished_text(export_text(result.exported), result, self)
        refuse_wrong_files(result.exported, text)
        return text


@dataclass(frozen=True, kw_only=True)
class Report(RunOptions):
    """Collect a run and its measurements on one page to sign; measures nothing itself.

    Takes the newest finished folder of each kind in --runs that has the run's weights. The page
    lists missing measurements with their commands.

    Args:
        runs: Folder of all runs; the page gets one of its own.
        name: Its folder in it; by default report, report-2, …
        overwrite: Replace an earlier page of that name.
        run: The folder of a run that demo, ptq or qat wrote.
        qat: Run of qat from the same float model, to show beside it.
        bpu: Run of ptq --target bpu from the same float model, to show beside it.
        take: Folders of evaluate, simulate, sensitivity, export or compare to use in place of the
            newest.
        pdf: Print the page to report.pdf, with Chromium or Chrome.
        browser: The browser to print with; by default the first on the path.
    """

    run: Path
    qat: Path | None = None
    bpu: Path | None = None
    take: tuple[Path, ...] = ()
    pdf: bool = False
    browser: Path | None = None

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.report import report_text, run_report
        from bevfusion_quant.run import written_text

        result = run_report(**_given(run_report, self), **self.place(command))
        if self.quiet or self.json:
            return shown(result.folder, self, "")
        return joined([*report_text(result), *written_text(result.folder)])

"""Commands on saved runs.

`evaluate` and `simulate` run one on other frames. `compare` judges several by the labels of the
same frames. `sensitivity` measures the rounding of each layer and finds a plan within a budget.
`export` writes the model as ONNX files. `report` writes one page to sign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class Evaluate(RunOptions, BootstrapOptions, FrameOptions):
    """Compare a saved run's float and quantized model on other frames; the run stays as it is.

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
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings

        settings = read_model_settings(self.run)
        frames = frames_for_run(self, settings)
        cameras, bootstrap = self.cameras or None, self.bootstrap()
        if not settings.for_bpu:
            result = run_evaluate(
                self.run,
                frames,
                cameras=cameras,
                integers=integers,
                layer_frames=layer_frames,
                bootstrap=bootstrap,
                **self.place(command),
            )
            return run_text(result, self)

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
        return bpu_run_text(
            run_bpu_evaluate(
                self.run, frames, cameras=cameras, bootstrap=bootstrap, **self.place(command)
            ),
            self,
        )


@dataclass(frozen=True, kw_only=True)
class Simulate(Evaluate):
    """Run a saved run's model in integer arithmetic on frames, beside float and fake-quantized.

    Args:
        name: The simulation's folder in --runs; by default simulate, simulate-2, …
        backend: Kernels to run on; auto takes the fastest that is exact here.
        layer_frames: On how many frames, from the first on, each operation is compared with float
            and fake-quantized; all by default. A frame without takes half of the time.
    """

    backend: Backend = "auto"
    layer_frames: int | None = None

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        return self._execute(command, integers=self.backend, layer_frames=self.layer_frames)


@dataclass(frozen=True, kw_only=True)
class Compare(RunOptions, BootstrapOptions, FrameOptions):
    """Judge several runs of one float model by the labels of the same frames, in one pass.

    Args:
        resamples: Bootstrap resamples for the intervals; 0 for none.
        runs: Folder of all runs; the comparison is a new one.
        name: Its folder in it; by default compare, compare-2, …
        run: Folders of runs that demo, ptq or qat wrote from the same float weights, for NVIDIA.
        integers: Run every run's model in integers, too.
        backend: Kernels for --integers; auto takes the fastest that is exact here.
    """

    run: tuple[Path, ...]
    integers: bool = False
    backend: Backend = "auto"

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.compare import comparison_text, run_compare
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings

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
            frames_for_run(self, read_model_settings(self.run[0])),
            integers=self.backend if self.integers else None,
            cameras=self.cameras or None,
            bootstrap=self.bootstrap(),
            **self.place(command),
        )
        return finished_text(comparison_text(result.comparison), result, self)


@dataclass(frozen=True, kw_only=True)
class Sensitivity(RunOptions, FrameOptions):
    """Measure what each layer's rounding costs a saved run's model; with a budget, plan precisions.

    Args:
        runs: Folder of all runs; the measurement is a new one.
        name: Its folder in it; by default sensitivity, sensitivity-2, …
        run: The folder of a run that demo or ptq wrote, for NVIDIA.
        metric: sqnr and kl (of the heat map's classes) compare with the float model and need no
            labels; mAP judges the boxes by the frames' labels.
        output: What sqnr looks at: the map before the head, or the head's heat map. By default the
            map, or where the head is quantized the heat map.
        precisions: At which each group of layers is measured alone, and which a plan may choose
            beside float: int8, int16 (activations of 16 bits), int4 (weights of 4), fp8 (E4M3).
            By default int8, of a run with --weight-bits 4 int4.
        estimate: Estimate sqnr from gradients, one pass a frame whatever the number of layers,
            without the second half. A plan is measured all the same.
        alone_only: Leave out the second half of the measurement, each group alone left in float.
        budget: time=1.2 for the best score in 1.2 times the int8 model's estimated time, or
            score=35 for the fastest plan that keeps a score; writes plan.json for ptq --plan.
        plan_rounds: Rounds of measuring plans around the estimated one, each with about as many as
            there are groups of layers; 0 for a few plans alone.
    """

    run: Path
    metric: SensitivityMetric = "sqnr"
    output: SensitivityOutput | None = None
    precisions: tuple[Precision, ...] = ()
    estimate: bool = False
    alone_only: bool = False
    budget: str | None = None
    plan_rounds: int = 2

    def execute(self, command: str) -> str:
        """Execute the command and return its output.

        Raises:
            VerificationError: No plan keeps within the budget; what was measured is kept.
        """
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings
        from bevfusion_quant.sensitivity import run_sensitivity, sensitivity_text

        result = run_sensitivity(
            self.run,
            frames_for_run(self, read_model_settings(self.run)),
            metric=self.metric,
            output=self.output,
            precisions=self.precisions,
            without=not self.alone_only,
            estimate=self.estimate,
            budget=self.budget,
            plan_rounds=self.plan_rounds,
            cameras=self.cameras or None,
            **self.place(command),
        )
        text = finished_text(sensitivity_text(result.outcome), result, self)
        if result.outcome.refusal:
            raise VerificationError(result.outcome.refusal, text)
        return text


@dataclass(frozen=True, kw_only=True)
class Export(RunOptions, FrameOptions):
    """Write a saved run's model as ONNX files for an engine, and prove them on a frame.

    Without frames one street is made; frames of your own set how many voxels the files can hold.

    Args:
        runs: Folder of all runs; the export is a new one.
        name: The export's folder in it; by default export, export-2, …
        run: The folder of a run that demo or ptq wrote.
        target: tensorrt: the files of CUDA-BEVFusion, the sparse encoder for libspconv, as
            TensorRT 10 takes them (tensorrt10 is the same). tensorrt11: with the types that
            TensorRT 11 takes from the file. onnxruntime, openvino: all for a CPU. autoware: the
            sparse encoder for Autoware's plugin, of a lidar-detector with decoder and head in one
            file. bpu: of a run with --target bpu, the dense parts for hb_mapper. By default what
            the run was quantized for.
        cpu: Of files for a CPU: vnni for one that multiplies int8 exactly (x86 with VNNI or AMX,
            ARM), any for files that are right everywhere, and slower unless the run's weights have
            seven bits (--weight-bits 7 of ptq). By default the one at hand.
        measure: Time each quantized file for a CPU beside its part in float32, on this CPU.
    """

    run: Path
    target: ExportTarget | None = None
    cpu: Cpu | None = None
    measure: bool = False

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.export import export_run, export_text, refuse_wrong_files
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings

        settings = read_model_settings(self.run)
        given = self.dataset is not None or self.points
        result = export_run(
            self.run,
            frames_for_run(self if given else replace(self, dataset="street"), settings),
            target=self.target,
            cpu=self.cpu,
            measure=self.measure,
            cameras=self.cameras or None,
            **self.place(command),
        )
        text = finished_text(export_text(result.exported), result, self)
        refuse_wrong_files(result.exported, text)
        return text


@dataclass(frozen=True, kw_only=True)
class Report(RunOptions):
    """Put a run and what was measured of it on one page to sign; nothing is measured anew.

    Of the finished folders in --runs those are taken that were made with the run's weights, of each
    kind the newest. What nobody measured is named, with the command that would.

    Args:
        runs: Folder of all runs; the page gets one of its own.
        name: Its folder in it; by default report, report-2, …
        overwrite: Replace an earlier page of that name.
        run: The folder of a run that demo, ptq or qat wrote.
        qat: A run of qat from the same float model, to stand beside.
        bpu: A run of ptq --target bpu of the same float model, to stand beside.
        take: Folders of evaluate, simulate, sensitivity, export or compare to take instead of the
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
        from bevfusion_quant.ptq import written_text
        from bevfusion_quant.report import report_text, run_report

        result = run_report(
            self.run,
            qat=self.qat,
            bpu=self.bpu,
            take=self.take,
            pdf=self.pdf,
            browser=self.browser,
            **self.place(command),
        )
        if self.quiet or self.json:
            return shown(result.folder, self, "")
        return joined([*report_text(result), *written_text(result.folder)])

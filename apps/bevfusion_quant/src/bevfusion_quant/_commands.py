"""What each sub-command does; answers the text to print."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from bevfusion.model import (
    CONFIGS,
    PART_PATHS,
    build_model,
    named_weights,
    trained_weights,
)
from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant._frames import camera_names, frames_of
from bevfusion_quant._options import (
    Command,
    Compare,
    Demo,
    Evaluate,
    Export,
    FrameOptions,
    Ptq,
    Qat,
    Report,
    Sensitivity,
    Simulate,
    Train,
    Tree,
)
from bevfusion_quant.ptq import (
    EvaluateResult,
    PtqConfig,
    PtqResult,
    agreement_text,
    built_parts,
    example_batch,
    free_name,
    fuse_branch,
    is_detector,
    layer_table,
    quantize_branch,
    reads_images,
    refuse_poor,
    run_evaluate,
    run_ptq,
    stage_table,
    written_text,
)
from bevfusion_quant.ranks import current_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from bev_data.metrics import Bootstrap
    from bev_data.points import Frame
    from bevfusion_quant.bpu import BpuResult
    from bevfusion_quant.export import ExportedSet
    from bevfusion_quant.ptq import Branch, PoorData

__all__ = ["check_processes", "execute", "tree"]

LOG = logging.getLogger(__name__)


_SHARED = (Ptq, Evaluate, Compare, Sensitivity, Qat)


def check_processes(options: Command, world: int) -> None:
    """Refuse several processes for what runs in one.

    Raises:
        InputError: There are several, and they would all do the same.
    """
    for_bpu = getattr(options, "target", None) == "bpu"
    if world > 1 and (for_bpu or not isinstance(options, _SHARED)):
        name = type(options).__name__.lower() + (" --target bpu" if for_bpu else "")
        raise InputError(
            f"{name} runs in one process, and {world} were started: start it without torchrun or "
            "srun; ptq, evaluate, simulate, compare, sensitivity and qat share their frames"
        )


@singledispatch
def execute(options: Command, command: str) -> str:
    """Run one sub-command; `command` is the command line, kept in the run's summary."""
    raise TypeError(f"{type(options).__name__} is not a sub-command")


@execute.register
def _demo(options: Demo, command: str) -> str:
    from bev_scenes import street_frame

    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: it must not be negative")
    weights = trained_weights(options.config)
    if options.weights is not None:
        weights = named_weights(options.weights, options.config)
    config = PtqConfig(
        config=options.config,
        branch=options.branch,
        method=options.method,
        weights=weights,
        seed=options.seed,
    )
    cameras = None if options.branch == "lidar" else options.config
    frame = street_frame(seed=options.seed, size=options.config, cameras=cameras)
    return _report(
        run_ptq(
            [frame],
            config,
            runs=options.runs,
            name=options.name or free_name(options.runs, "demo"),
            overwrite=options.overwrite,
            command=command,
            integers="auto",
            export=_demo_target(options.branch),
        )
    )


def _demo_target(branch: Branch) -> str | None:
    """What the demo's files are for; None where none can be written, which is said."""
    from bevfusion_quant.export import missing_libraries

    missing = missing_libraries()
    if missing:
        LOG.warning("no ONNX files without %s: pip install 'bevfusion-quant[export]'", missing)
    elif branch == "head":
        LOG.warning("no ONNX files: a quantized head has no form in a file")
    return None if missing or branch == "head" else "tensorrt"


@execute.register
def _ptq(options: Ptq, command: str) -> str:
    branch = options.branch or ("lidar" if options.dataset is None else "all")
    if options.quantize_head and not is_detector(branch):
        raise InputError(f"--quantize-head goes with --branch all or a detector, not with {branch}")
    if options.target == "bpu":
        return _ptq_bpu(options, branch, command)
    if options.march is not None:
        raise InputError(
            f"--march {options.march} goes with --target bpu: add that, or leave it out"
        )
    frames = frames_of(options, with_cameras=reads_images(branch), size=options.config)
    config = PtqConfig(
        config=options.config,
        branch=branch,
        method=options.method or "mse",
        weights=named_weights(options.weights, options.config),
        weight_layout=options.weight_layout,
        seed=options.seed,
        calibration_frames=options.calibration_frames,
        exclude=options.exclude,
        quantize_head=options.quantize_head,
        quantize_first_layer=options.quantize_first_layer,
        cameras=camera_names(options),
        plan=options.plan,
        weight_bits=options.weight_bits,
        rounding=options.rounding,
        bias_correction=options.bias_correction,
        fold=options.fold,
    )
    return _report(
        run_ptq(
            frames,
            config,
            runs=options.runs,
            name=options.name or free_name(options.runs, "ptq"),
            overwrite=options.overwrite,
            command=command,
        ),
        allow_poor=options.allow_poor_calibration,
    )


def _ptq_bpu(options: Ptq, branch: Branch, command: str) -> str:
    from bevfusion_quant.bpu import BpuConfig, bpu_parts, run_bpu

    if branch != "all" and is_detector(branch):
        raise InputError(
            f"--branch {branch}: for a BPU the detector is the whole one, of cameras and LiDAR; "
            "choose --branch camera, fuser, decoder or all"
        )
    bpu_parts(branch)  # refuses before any frame is read
    if options.quantize_head:
        raise InputError("--quantize-head: for a BPU the head stays on the CPU; leave it out")
    if options.plan is not None:
        raise InputError(
            f"--plan {options.plan}: a BPU's layers are int8, or float on its CPU: name the latter "
            "with --exclude"
        )
    given = {
        "--weight-bits": options.weight_bits != 8,
        "--rounding": options.rounding != "nearest",
        "--bias-correction": options.bias_correction,
        "--quantize-first-layer": options.quantize_first_layer,
        "--no-fold": not options.fold,
    }
    if any(given.values()):
        raise InputError(
            f"{', '.join(name for name, on in given.items() if on)}: for a BPU batch norms are "
            "folded and weights rounded to the nearest of 8 bits; leave it out"
        )
    config = BpuConfig(
        config=options.config,
        branch=branch,
        march=options.march or "bayes",
        method=options.method or "percentile",
        weights=named_weights(options.weights, options.config),
        weight_layout=options.weight_layout,
        seed=options.seed,
        calibration_frames=options.calibration_frames,
        exclude=options.exclude,
        cameras=camera_names(options),
    )
    return _report_bpu(
        run_bpu(
            frames_of(options, with_cameras=True, size=options.config),
            config,
            runs=options.runs,
            name=options.name or free_name(options.runs, "ptq"),
            overwrite=options.overwrite,
            command=command,
        ),
        allow_poor=options.allow_poor_calibration,
    )


@execute.register
def _evaluate(options: Evaluate, command: str) -> str:
    from bevfusion_quant.ptq import read_run_config

    bootstrap = _bootstrap(options)
    config = read_run_config(options.run)
    frames = _frames_for(config, options)
    if config.get("target") == "bpu":
        from bevfusion_quant.bpu import run_bpu_evaluate

        if not current_ranks().alone:
            raise InputError(
                f"{options.run} is a run for a BPU, which is judged in one process: start it "
                "without torchrun or srun"
            )
        if isinstance(options, Simulate) and options.backend != "auto":
            raise InputError(
                f"--backend {options.backend}: the integers of a run for a BPU take the kernels "
                "that fit them; leave it out"
            )
        return _report_bpu(
            run_bpu_evaluate(
                options.run,
                frames,
                cameras=options.cameras or None,
                runs=options.runs,
                name=options.name or free_name(options.runs, type(options).__name__.lower()),
                overwrite=options.overwrite,
                command=command,
                bootstrap=bootstrap,
            )
        )
    return _report(
        run_evaluate(
            options.run,
            frames,
            cameras=options.cameras or None,
            runs=options.runs,
            name=options.name or free_name(options.runs, type(options).__name__.lower()),
            overwrite=options.overwrite,
            command=command,
            integers=options.backend if isinstance(options, Simulate) else None,
            bootstrap=bootstrap,
        )
    )


@execute.register
def _compare(options: Compare, command: str) -> str:
    from bevfusion_quant.compare import comparison_text, run_compare
    from bevfusion_quant.ptq import read_run_config

    bootstrap = _bootstrap(options)
    if options.backend != "auto" and not options.integers:
        raise InputError(f"--backend {options.backend} goes with --integers: add that")
    if not options.run:
        raise InputError("no runs to compare: name finished runs with --run")
    if options.points:
        raise InputError(
            "--points: files of points have no labels, which runs are compared by; give frames of "
            "a labelled data set with --dataset"
        )
    config = read_run_config(options.run[0])
    result = run_compare(
        options.run,
        _frames_for(config, options),
        integers=options.backend if options.integers else None,
        cameras=options.cameras or None,
        bootstrap=bootstrap,
        runs=options.runs,
        name=options.name or free_name(options.runs, "compare"),
        overwrite=options.overwrite,
        command=command,
    )
    parts = (
        *comparison_text(result.comparison),
        _end((), result.seconds, result.peak_memory_mib),
        *written_text(result.folder),
    )
    return "\n" + "\n\n".join(parts)


def _frames_for(config: Mapping[str, Any], options: FrameOptions) -> Sequence[Frame]:
    """The frames of the options, as the model of a finished run takes them."""
    images = reads_images(config.get("branch", "lidar"))
    return frames_of(options, with_cameras=images, size=config["config"])


def _bootstrap(options: Evaluate | Compare) -> Bootstrap:
    from bev_data.metrics import Bootstrap

    if options.resamples < 0 or options.resample_seed < 0:
        raise InputError(
            f"--resamples {options.resamples} --resample-seed {options.resample_seed}: neither may "
            "be negative"
        )
    return Bootstrap(options.resamples, options.resample_seed)


@execute.register
def _sensitivity(options: Sensitivity, command: str) -> str:
    from bevfusion_quant.ptq import read_run_config
    from bevfusion_quant.sensitivity import run_sensitivity, sensitivity_text

    config = read_run_config(options.run)
    result = run_sensitivity(
        options.run,
        _frames_for(config, options),
        metric=options.metric,
        output=options.output,
        precisions=options.precisions,
        without=not options.alone_only,
        budget=options.budget,
        plan_rounds=options.plan_rounds,
        cameras=options.cameras or None,
        runs=options.runs,
        name=options.name or free_name(options.runs, "sensitivity"),
        overwrite=options.overwrite,
        command=command,
    )
    parts = (
        *sensitivity_text(result.outcome),
        _end((), result.seconds, result.peak_memory_mib),
        *written_text(result.folder),
    )
    text = "\n" + "\n\n".join(parts)
    if result.outcome.refusal:
        raise VerificationError(result.outcome.refusal, text)
    return text


@execute.register
def _train(options: Train, command: str) -> str:
    from bevfusion_quant.train import train_from_options

    return train_from_options(options, command)


@execute.register
def _qat(options: Qat, command: str) -> str:
    from bevfusion_quant.qat import qat_from_options

    return qat_from_options(options, command)


@execute.register
def _export(options: Export, command: str) -> str:
    from bevfusion_quant.export import export_run, export_text
    from bevfusion_quant.ptq import read_run_config

    config = read_run_config(options.run)
    if options.dataset is None and not options.points:
        options = replace(options, dataset="street")
    result = export_run(
        options.run,
        _frames_for(config, options),
        target=options.target,
        cpu=options.cpu,
        cameras=options.cameras or None,
        runs=options.runs,
        name=options.name or free_name(options.runs, "export"),
        overwrite=options.overwrite,
        command=command,
    )
    parts = (
        *export_text(result.exported),
        _end((), result.seconds, result.peak_memory_mib),
        *written_text(result.folder),
    )
    return _verified("\n" + "\n\n".join(parts), result.exported)


@execute.register
def _report_page(options: Report, command: str) -> str:
    from bevfusion_quant.review import review_text, run_review

    result = run_review(
        options.run,
        qat=options.qat,
        bpu=options.bpu,
        take=options.take,
        pdf=options.pdf,
        browser=options.browser,
        runs=options.runs,
        name=options.name or free_name(options.runs, "report"),
        overwrite=options.overwrite,
        command=command,
    )
    parts = (
        *review_text(result),
        *written_text(result.folder),
    )
    return "\n" + "\n\n".join(parts)


def _verified(text: str, made: ExportedSet | None) -> str:
    """The text of a run whose files are right; raises what ends the command where they are not."""
    if made is not None and made.failures:
        more = f" and {len(made.failures) - 1} more" if len(made.failures) > 1 else ""
        raise VerificationError(
            f"the ONNX files in {made.folder} are not what the model computes: "
            f"{made.failures[0]}{more}: do not deploy them; the page shows every layer",
            text,
        )
    return text


@execute.register
def _tree(options: Tree, command: str) -> str:
    if options.quantize_head and options.branch != "all":
        raise InputError(f"--quantize-head goes with --branch all, not with {options.branch}")
    return str(
        tree(options.stage, options.config, options.branch, quantize_head=options.quantize_head)
    )


def tree(
    stage: str, config: str = "nuscenes", branch: Branch = "lidar", *, quantize_head: bool = False
) -> nn.Module:
    """The part of the model that a stage is about, ready to be printed.

    The part alone for `camera`, `lidar`, `fuser`, `decoder` and `head`, the whole model for `all`.
    Of the LiDAR branch, the float stage is all of it (voxelize, backbone); folding and quantization
    rewrite the backbone, and the other stages are that alone. Quantizers are not calibrated.
    """
    sizes = CONFIGS[config]
    model = build_model(sizes, built_parts(branch))
    path = "" if branch == "all" else PART_PATHS[branch]
    if stage == "float":
        return model.get_submodule(path)
    if branch == "lidar":
        path += ".backbone"
    example = example_batch(sizes)
    fused = fuse_branch(model, example).model
    if stage == "fused":
        return fused.get_submodule(path)
    quantized = quantize_branch(fused, example, branch, with_head=quantize_head).model
    return quantized.get_submodule(path)


def _report(result: PtqResult | EvaluateResult, *, allow_poor: bool = False) -> str:
    detections: tuple[str, ...] = ()
    if result.agreement:
        text = agreement_text(result.agreement, result.labels_found)
        detections = ("Detections, float against fake-quantized, same class", text)
    layers = ("Float against fake-quantized, output of each layer", layer_table(result.layers))
    parts = (
        *(() if _is_simulation(result) else layers),
        "Stages, float against fake-quantized",
        stage_table(result.stages),
        *detections,
        *_integers(result),
        *_accuracy(result),
        *_files(result),
        _end(getattr(result, "warnings", ()), result.seconds, result.peak_memory_mib),
        *written_text(result.folder),
    )
    text = _verified("\n" + "\n\n".join(parts), getattr(result, "exported", None))
    return _calibrated(text, getattr(result, "findings", ()), allow_poor=allow_poor)


def _calibrated(text: str, findings: Sequence[PoorData], *, allow_poor: bool) -> str:
    """The text of a run whose ranges may be right; raises what ends the command where not."""
    if not allow_poor and current_ranks().first:
        refuse_poor(findings, text)
    return text


def _files(result: PtqResult | EvaluateResult) -> tuple[str, ...]:
    """The ONNX files, where the run wrote some."""
    from bevfusion_quant.export import export_text

    return export_text(result.exported) if isinstance(result, PtqResult) and result.exported else ()


def _report_bpu(result: BpuResult, *, allow_poor: bool = False) -> str:
    from bevfusion_quant.bpu import bpu_text

    parts = (
        *bpu_text(result.outcome),
        _end(result.warnings, result.seconds, result.peak_memory_mib),
        *written_text(result.folder),
    )
    return _calibrated("\n" + "\n\n".join(parts), result.findings, allow_poor=allow_poor)


def _end(warnings: Sequence[str], seconds: Mapping[str, float], peak: float) -> str:
    steps = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
    told = "".join(f"\nwarning: {text}" for text in warnings)
    return f"{told}\n{steps}\npeak memory {peak:,.0f} MiB"


def _accuracy(result: PtqResult | EvaluateResult) -> tuple[str, ...]:
    """What is found of what is labelled, where an evaluation had labels."""
    from bev_data.metrics import accuracy_text

    accuracy = getattr(result, "accuracy", None)
    return () if accuracy is None else ("Against labels", accuracy_text(accuracy))


def _is_simulation(result: PtqResult | EvaluateResult) -> bool:
    return isinstance(result, EvaluateResult) and result.simulation is not None


def _integers(result: PtqResult | EvaluateResult) -> tuple[str, ...]:
    """The simulation; layer by layer where it is what was asked for."""
    from bevfusion_quant.integer import simulation_text

    if result.simulation is None:
        return ()
    text = simulation_text(result.simulation, layers=_is_simulation(result))
    return "In integers, against float and fake-quantized", text

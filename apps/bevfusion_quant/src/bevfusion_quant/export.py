"""A run's model as ONNX files: written, linted, run and compared with the integer model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from bev_data.points import Frame
from bevfusion.deployment import (
    ExportedFile,
    ExportedSet,
    FileLayer,
    FilePort,
    SetStage,
    beside_bpu_layers,
    beside_layers,
    bpu_pieces,
    export_pieces,
    export_text,
    export_whole,
    nvidia_pieces,
)
from bevfusion.detectors import example_of, is_foreign
from bevfusion.model import Detector
from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer import lowered
from bevfusion_quant.options import Place
from bevfusion_quant.pages import write_found
from bevfusion_quant.run import Clock, new_run, return_freed_memory, versions
from bevfusion_quant.saved_run import (
    PLAN_FILE,
    ModelSettings,
    load_run,
    read_model_settings,
    read_plan,
    refuse_in_files,
    refuse_unfolded,
    refuse_unsigned,
)
from bevfusion_quant.stages import fuse_branch, sizes_of
from bevquant_export.targets import CPUS, cpu_at_hand, find_target, targets
from bevquant_int8sim import LayerRow, compare
from bevquant_quantizers.plugins import importable

__all__ = [
    "ONNX_FOLDER",
    "ExportResult",
    "ExportedFile",
    "ExportedSet",
    "FileLayer",
    "FilePort",
    "SetStage",
    "export_model",
    "export_run",
    "export_text",
    "missing_libraries",
    "refuse_wrong_files",
]

ONNX_FOLDER = "onnx"
LIBRARIES = ("onnx", "onnxruntime", "onnxscript")
_PACKAGES = ("bevquant-export", *LIBRARIES)


def missing_libraries() -> str:
    """Missing packages that writing and checking files needs; empty if none."""
    return ", ".join(name for name in LIBRARIES if not importable(name))


def _check_libraries() -> None:
    if missing := missing_libraries():
        raise InputError(f"export needs {missing}: pip install onnxruntime onnxscript")


def export_model(
    float_model: Detector,
    quantized_model: Detector,
    batches: FrameBatches,
    clock: Clock,
    folder: Path,
    *,
    target: str,
    layers: Sequence[LayerRow] = (),
    **how: Any,
) -> ExportedSet:
    """Write the files for an engine to `folder` and check them.

    Args:
        float_model: The folded float model.
        quantized_model: Its calibrated quantized model.
        batches: At least one. The files run on the first; all of them bound the number of voxels.
        clock: Times the steps.
        folder: Created here; holds the files and manifest.json.
        target: Name of an engine.
        layers: Result of `bevquant_int8sim.compare`, printed beside the files' tensors. Default:
            compared on the first batch.
        **how: cpu, measure, known and calibration of `bevfusion.deployment.export_pieces`
            (`known` by ``"float"`` and ``"fake"``); command, run and settings for the manifest.

    Raises:
        InputError: A library is missing, the head is quantized, or a file cannot be written.
    """
    _check_libraries()
    if is_foreign(batches.sizes.name):
        how.pop("known", None)
        write = partial(export_whole, float_model, quantized_model, batches, folder)
    else:
        pieces = nvidia_pieces(float_model, quantized_model, target)
        write = partial(export_pieces, pieces, quantized_model, batches, folder)
    made = _exported(write, batches, clock, target=target, **how)
    if not layers:
        with clock.step("compare layers", blame="float and integer model cannot be compared"):
            example = example_of(batches.sizes, batches[0])
            model = lowered(quantized_model, example, "auto", verify=False)
            layers = compare(float_model, model, [tuple(batches[0])], verify=True).rows
    return replace(made, files=beside_layers(made.files, layers))


def _exported(
    write: Callable[..., ExportedSet],
    batches: FrameBatches,
    clock: Clock,
    *,
    command: str = "",
    run: str = "",
    settings: Any = None,
    **how: Any,
) -> ExportedSet:
    """Write and check the files, and write the manifest."""
    found = write(after_each=return_freed_memory, step=clock.step, **how)
    found.write_manifest(
        run=run,
        command=command,
        settings=settings or {},
        versions=versions("bevquant-export", "bevquant-hybrid", *LIBRARIES),
        frames=batches.frame_names,
    )
    return found


def refuse_wrong_files(made: ExportedSet, text: str) -> None:
    """End the command if a file does not compute the model.

    Raises:
        VerificationError: Names the first difference; its output begins with `text`.
    """
    if not made.failures:
        return
    more = f" and {len(made.failures) - 1} more" if len(made.failures) > 1 else ""
    raise VerificationError(
        f"the ONNX files in {made.folder} do not compute the model: "
        f"{made.failures[0]}{more}: do not deploy them; the page shows every layer",
        text,
    )


def _export_bpu(
    frames: Sequence[Frame],
    clock: Clock,
    folder: Path,
    *,
    run: str,
    cameras: Sequence[str] | None,
    **given: Any,
) -> tuple[ExportedSet, FrameBatches]:
    """Write and check the files of a run for a BPU; `given` holds command and settings."""
    from bevfusion_quant.bpu import compare_forms, for_march, load_bpu_run

    with clock.step("load the run"):
        loaded = load_bpu_run(run)
    config, sizes = loaded.config, sizes_of(loaded.config.model, loaded.config.config)
    folded = fuse_branch(loaded.units.model, example_of(sizes)).model
    with for_march(config.march):
        batches = FrameBatches(frames, sizes, folded, cameras or config.cameras)
        pieces = bpu_pieces(folded, loaded.units.parts, loaded.forms)
        write = partial(export_pieces, pieces, folded, batches, folder)
        exported = _exported(
            write, batches, clock, target="bpu", march=config.march, run=run, **given
        )
        with clock.step("compare layers", blame="float and integer model cannot be compared"):
            compared = compare_forms(loaded.models, loaded.forms, batches.head(1))
    paths = {
        form.prefix + label.place: label.path
        for form in loaded.forms.values()
        for label in form.labels.values()
    }
    files = beside_bpu_layers(exported.files, compared.layers, paths)
    return replace(exported, files=files), batches


@dataclass(frozen=True, eq=False)
class ExportResult:
    """Run folder, written files, seconds by step, peak memory in MiB."""

    folder: Path
    exported: ExportedSet
    seconds: dict[str, float]
    peak_memory_mib: float


def export_run(
    run: str | Path,
    frames: Sequence[Frame],
    *,
    target: str | None = None,
    cpu: str | None = None,
    measure: bool = False,
    cameras: Sequence[str] | None = None,
    **place: Unpack[Place],
) -> ExportResult:
    """Write a run's model as ONNX files to `runs/name/onnx`, check them, and write a page.

    The run's own folder is not changed. The new folder appears whole or not at all. If a file does
    not compute the integer model, the folder appears too: its manifest has "verified": false, and
    `ExportResult.exported.failures` lists the layers.

    Args:
        run: A folder of `run_ptq` or `bpu.run_bpu`.
        frames: At least one. The files are checked on the first; the voxel counts of all frames
            set the capacity of the sparse file.
        target: Name of an engine (`bevquant_export.find_target`). Default: "bpu" for a run for a
            BPU, else "tensorrt".
        cpu: For files for a CPU, "vnni" or "any". Default: the CPU at hand.
        measure: Time each quantized file for a CPU beside its float32 part.
        cameras: Names of the cameras to use. Default: those of the run.
        **place: Where the export is written; see `Place`.

    Raises:
        InputError: The run, the target or the input is wrong. Nothing is written.
    """
    _check_libraries()
    ran = read_model_settings(run)
    chosen = _target(target, ran, run)
    refuse_unfolded(ran, run, "written as files")
    refuse_unsigned(ran.unsigned, run, chosen)
    if ran.plan is not None:
        refuse_in_files(read_plan(Path(run) / PLAN_FILE), run, chosen)
    clock = Clock()
    settings = {"target": chosen, "exports": str(run), "config": ran.config}
    on_cpu = _engines_on_cpu()
    if chosen in on_cpu:
        settings["cpu"] = cpu = _cpu(cpu)
    elif cpu is not None or measure:
        option = "--measure" if cpu is None else f"--cpu {cpu}"
        raise InputError(
            f"{option}: --target {chosen} is no CPU; leave it out, or add --target "
            f"{' or '.join(on_cpu)}"
        )
    with new_run("export", clock, _PACKAGES, keep=run, **place) as record:
        folder = record.folder / ONNX_FOLDER
        given: dict[str, Any] = {"command": record.command, "run": str(run), "settings": settings}
        if chosen == "bpu":
            exported, batches = _export_bpu(frames, clock, folder, cameras=cameras, **given)
        else:
            with clock.step("load the run"):
                loaded = load_run(run)
            model, cameras = loaded.quantized_model, cameras or ran.used_cameras
            batches = FrameBatches(frames, loaded.sizes, model, cameras)
            with clock.step("read and voxelize"):
                batches.head(1)[0]
            exported = export_model(
                loaded.float_model, model, batches, clock, folder,
                target=chosen, cpu=cpu or "any", calibration=ran.poor_calibration,
                measure=measure, **given,
            )  # fmt: skip
        seconds, peak = write_found(record, settings, ran, run, batches, export=exported)
    exported = replace(exported, folder=record.path / ONNX_FOLDER)
    return ExportResult(record.path, exported, seconds, peak)


def _cpu(cpu: str | None) -> str:
    if cpu is not None and cpu not in CPUS:
        raise InputError(f"--cpu {cpu}: expected one of {', '.join(CPUS)}")
    return cpu or cpu_at_hand()


def _engines_on_cpu() -> list[str]:
    """Names of engines whose files depend on the CPU."""
    return [
        name
        for target in targets()
        if target.sparse and any(target.fastest(cpu) != target.fastest(CPUS[0]) for cpu in CPUS)
        for name in (target.name, *target.aliases)
    ]


def _target(target: str | None, ran: ModelSettings, run: str | Path) -> str:
    bpu = find_target("bpu")
    for_bpu = ran.for_bpu
    try:
        found = find_target(target or ("bpu" if for_bpu else "tensorrt"))
    except (ValueError, ImportError) as error:
        raise InputError(f"--target: {error}") from error
    dialects = [dialect.name for dialect in map(find_target, {t.sparse for t in targets()} - {""})]
    if found.name in dialects:
        raise InputError(
            f"--target {target}: it takes the sparse encoder alone; name an engine, whose files "
            "hold all of the model"
        )
    if (found is bpu) != for_bpu:
        made = "for a BPU (ptq --target bpu)" if for_bpu else "for NVIDIA's engines"
        others = [t.name for t in targets() if t is not bpu and t.name not in dialects]
        fitting = "bpu" if for_bpu else ", ".join(others)
        again = f", or quantize again with ptq{'' if for_bpu else ' --target bpu'}"
        again = "" if is_foreign(ran.model) else again  # which a BPU's tools do not take
        raise InputError(
            f"--target {target}: {run} is a run {made}; export it with --target {fitting}{again}"
        )
    return "bpu" if for_bpu else target or "tensorrt"

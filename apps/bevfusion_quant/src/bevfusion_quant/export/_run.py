"""A finished run's model as a set of files, in a run folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from bev_data.cameras import CAMERA_NAMES
from bevfusion.model import CONFIGS
from bevfusion_quant._errors import InputError
from bevfusion_quant.export._bpu import export_bpu
from bevfusion_quant.export._export import ONNX_FOLDER, check_libraries, export_model
from bevfusion_quant.export._outcome import ExportTarget
from bevfusion_quant.ptq import FrameBatches, load_run, read_run_config, run_folder
from bevfusion_quant.ptq._clock import Clock
from bevfusion_quant.ptq._load_run import refuse_unfolded
from bevfusion_quant.ptq._plan import PLAN_FILE, read_plan, refuse_in_files
from bevfusion_quant.ptq._run_folder import CONFIG_FILE, RUN_FORMAT, RUN_VERSIONS
from bevfusion_quant.ptq._summary import peak_memory_mib, versions, write_json

if TYPE_CHECKING:
    from bev_data.points import Frame
    from bevfusion_quant.export._outcome import ExportedSet

__all__ = ["ExportResult", "export_run"]

_ON_CPU = ("onnxruntime", "openvino")
_TARGETS = get_args(ExportTarget)


@dataclass(frozen=True, eq=False)
class ExportResult:
    """Where the run lies, what was written, seconds by step, peak memory in MiB."""

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
    cameras: Sequence[str] | None = None,
    runs: Path = Path("runs"),
    name: str = "export",
    overwrite: bool = False,
    command: str = "",
) -> ExportResult:
    """Write a run's model as ONNX files to `runs/name/onnx`, check them, and write a page about it.

    The run is read and left as it is. The folder appears whole or not at all; one whose files were
    written but do not compute what the integer model computes appears too, with "verified": false
    in its manifest and the layers in `ExportResult.exported.failures`.

    Args:
        run: A folder that `run_ptq` or `bpu.run_bpu` wrote.
        frames: At least one. The files are checked on the first; the voxels of all of them bound
            what the sparse file can hold.
        target: One of `ExportTarget`; by default "bpu" for a run for a BPU, else "tensorrt".
        cpu: Of files for a CPU, "vnni" or "any"; by default what this one is.
        cameras: Names of the cameras to use; those of the run by default.
        runs: Folder of all runs.
        name: The export's folder in it.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats it, for the manifest.

    Raises:
        InputError: Whatever is wrong with the run, the target or the input; nothing is written
            then.
    """
    check_libraries()
    config = read_run_config(run)
    chosen = _target(target, config, run)
    refuse_unfolded(config, run, "written as files")
    if config.get("plan") is not None:
        refuse_in_files(read_plan(Path(run) / PLAN_FILE), run)
    clock = Clock()
    settings = {"target": chosen, "exports": str(run), "config": config["config"]}
    if chosen in _ON_CPU:
        settings["cpu"] = cpu = _cpu(cpu)
    elif cpu is not None:
        raise InputError(
            f"--cpu {cpu}: --target {chosen} is no CPU; leave it out, or add --target "
            f"{' or '.join(_ON_CPU)}"
        )
    with run_folder(runs, name, overwrite=overwrite, keep=Path(run)) as folder:
        given: dict[str, Any] = {"command": command, "run": str(run), "settings": settings}
        if chosen == "bpu":
            exported, batches = export_bpu(
                frames, clock, folder / ONNX_FOLDER, cameras=cameras, **given
            )
        else:
            exported, batches = _export(
                run, frames, clock, folder / ONNX_FOLDER, chosen, cpu or "any", cameras, given
            )
        names = [frame for _, (frame, _) in sorted(batches.names.items())]
        head = {"format": RUN_FORMAT, "version": RUN_VERSIONS[-1]}
        read = {"evaluates": str(run), "run_sha256": config.get("sha256")}
        write_json(folder / CONFIG_FILE, {**head, **read, **settings})
        with clock.step("page"):
            _page(folder / "report.html", name, command, settings, names, clock, exported)
        seconds, peak = clock.seconds(), round(peak_memory_mib(), 1)
        content = {
            **head,
            "command": command,
            **settings,
            "versions": versions("bevquant-export", "onnx", "onnxruntime", "onnxscript"),
            "threads": torch.get_num_threads(),
            "frames": names,
            "export": exported.summary(),
            "seconds": seconds,
            "peak_memory_mib": peak,
        }
        write_json(folder / "summary.json", content)
    folder = runs / name
    return ExportResult(folder, replace(exported, folder=folder / ONNX_FOLDER), seconds, peak)


def _cpu(cpu: str | None) -> str:
    """The CPU that is wanted, or the one at hand."""
    from bevquant_export.targets import CPUS, cpu_at_hand

    if cpu is not None and cpu not in CPUS:
        raise InputError(f"--cpu {cpu}: expected one of {', '.join(CPUS)}")
    return cpu or cpu_at_hand()


def _target(target: str | None, config: dict[str, Any], run: str | Path) -> str:
    """The target wanted, if the run is of its kind."""
    for_bpu = config.get("target") == "bpu"
    chosen = target or ("bpu" if for_bpu else "tensorrt")
    if chosen not in _TARGETS:
        raise InputError(f"--target {chosen}: expected one of {', '.join(_TARGETS)}")
    if (chosen == "bpu") != for_bpu:
        made = "for a BPU (ptq --target bpu)" if for_bpu else "for NVIDIA's engines"
        fitting = "bpu" if for_bpu else ", ".join(t for t in _TARGETS if t != "bpu")
        raise InputError(
            f"--target {chosen}: {run} is a run {made}; export it with --target {fitting}, or "
            "quantize again with ptq"
            f"{'' if for_bpu else ' --target bpu'}"
        )
    return chosen


def _export(
    run: str | Path,
    frames: Sequence[Frame],
    clock: Clock,
    folder: Path,
    target: str,
    cpu: str,
    cameras: Sequence[str] | None,
    given: dict[str, Any],
) -> tuple[ExportedSet, FrameBatches]:
    with clock.step("load the run"):
        loaded = load_run(run)
    config, model = loaded.config, loaded.quantized_model
    sizes = CONFIGS[config["config"]]
    batches = FrameBatches(frames, sizes, model, cameras or config.get("cameras") or CAMERA_NAMES)
    with clock.step("read and voxelize"):
        batches.head(1)[0]
    exported = export_model(
        loaded.float_model,
        model,
        batches,
        sizes,
        clock,
        folder,
        target=target,
        cpu=cpu,
        calibration=config.get("poor_calibration", ()),
        **given,
    )
    return exported, batches


def _page(
    path: Path,
    title: str,
    command: str,
    settings: dict[str, Any],
    names: Sequence[str],
    clock: Clock,
    exported: ExportedSet,
) -> None:
    from bevfusion_quant.report import ReportContent, write_report

    content = ReportContent(
        title=title,
        config=settings["config"],
        command=command,
        versions=versions("bevquant-export", "onnx", "onnxruntime", "onnxscript"),
        settings={**settings, "threads": torch.get_num_threads()},
        frames=tuple(names),
        seconds=clock.seconds(),
        peak_memory_mib=peak_memory_mib(),
        export=exported,
    )
    write_report(path, content)

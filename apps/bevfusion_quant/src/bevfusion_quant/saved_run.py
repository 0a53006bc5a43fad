"""Save and load the model of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bev_data.cameras import CAMERA_NAMES
from bev_data.datasets import open_dataset
from bev_data.points import Frame
from bev_scenes import stored_street
from bevfusion.detectors import DETECTORS, build_detector, example_of, is_foreign
from bevfusion.model import Detector, Sizes
from bevfusion.quantization import fuse_detector
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import frames_of
from bevfusion_quant.options import Branch, FrameOptions, Method, PtqConfig
from bevfusion_quant.run import CONFIG_FILE, RunSettings, as_settings, read_written, refuse_version
from bevfusion_quant.stages import built_parts, quantize_as, reads_images, sizes_of
from bevquant_export.targets import find_target, targets
from bevquant_qnn import PrecisionPlan, apply_precision
from bevquant_quantizers import load_ranges, save_ranges
from bevquant_quantizers.documents import as_form, read_tensors, sha256, write_tensors

# The plan of precisions that calibration, comparison, simulation and export follow.

PLAN_FILE = "plan.json"


def read_plan(path: Path) -> PrecisionPlan:
    """Read a plan of `bevfusion-quant sensitivity --budget`."""
    try:
        return PrecisionPlan.load(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(
            f"{path} is no plan of precisions: {reason}: give the plan.json that bevfusion-quant "
            "sensitivity --budget wrote"
        ) from error


def apply_plan(model: nn.Module, plan: PrecisionPlan) -> None:
    """Set the model's quantizers to the plan's precisions."""
    try:
        apply_precision(model, plan)
    except ValueError as error:
        raise InputError(
            f"the plan cannot be applied: {error}; quantize with the branch and --exclude of the "
            "run that it was made from"
        ) from error


def refuse_in_files(plan: PrecisionPlan, where: str | Path, target: str) -> None:
    """Refuse a plan with precisions that an engine's files cannot hold."""
    held = find_target(target).precisions
    refused = [group for group in plan if group.precision not in held]
    if refused:
        layers = "; ".join(f"{', '.join(group.modules)} ({group.precision})" for group in refused)
        needed = {group.precision for group in plan}
        others = [t.name for t in targets() if needed.issubset(t.precisions)]
        remedy = f"write it with --target {' or '.join(others)}, or " if others else ""
        raise InputError(
            f"{where} cannot be written as ONNX files for {target}, which hold {', '.join(held)}: "
            f"{layers}: {remedy}make a plan with sensitivity --precisions int8, and quantize again "
            "with ptq --plan"
        )


def refuse_unsigned(unsigned: bool, where: str | Path, target: str) -> None:
    """Refuse unsigned activations for an engine of signed ones."""
    if unsigned and not find_target(target).unsigned:
        others = " or ".join(t.name for t in targets() if t.unsigned)
        raise InputError(
            f"{where} has unsigned activations, which {target} lacks: write it with --target "
            f"{others}, or quantize again without --unsigned"
        )


MODEL_FILES = ("weights.safetensors", "ranges.json")
"""What `save_model` writes in any case."""

EXAMPLE_FRAME = "example"
"""Folder of the frame that a detector in other code was traced with."""

FLOAT_FILE = "float_weights.safetensors"
"""The float model's own weights, where the quantized model has others."""


def save_model(
    folder: Path,
    model: Detector,
    float_model: Detector | None = None,
    plan: PrecisionPlan | None = None,
) -> dict[str, str]:
    """Write weights.safetensors (folded weights and ranges), ranges.json (ranges alone), plan.json.

    Returns the sha256 of each file by name; `load_run` checks them.
    """
    save_ranges(model, folder / "ranges.json")
    held = model.state_dict()
    contents = {"weights.safetensors": held}
    # Rounding or training may have changed the weights: the float model's own have a file then.
    own = {} if float_model is None else float_model.state_dict()
    changed = {name: t for name, t in own.items() if not torch.equal(t, held[name])}
    if changed:
        contents[FLOAT_FILE] = changed
    for name, state in contents.items():
        write_tensors(folder / name, state, {"format": "pt"})
    names = ["ranges.json", *contents]
    if plan is not None:
        plan.save(folder / PLAN_FILE)
        names.append(PLAN_FILE)
    return {name: sha256(folder / name) for name in names}


class ModelSettings(RunSettings, kw_only=True):
    """Settings of a run that holds a model, of any command."""

    config: str
    branch: Branch = "lidar"
    method: Method
    exclude: list[str]
    sha256: dict[str, str]

    @property
    def parts(self) -> tuple[str, ...]:
        """The built parts of the model."""
        return built_parts(self.branch, self.model)

    @property
    def used_cameras(self) -> tuple[str, ...]:
        """Cameras that the models read."""
        return tuple(self.cameras or CAMERA_NAMES)


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run's settings, sizes, float model and calibrated quantized model, in eval mode.

    The float model's batch norms are folded, unless the run kept them.
    """

    settings: ModelSettings
    sizes: Sizes
    float_model: Detector
    quantized_model: Detector

    @property
    def config(self) -> dict[str, Any]:
        """The settings as written."""
        return self.settings.written


def load_quantized(folder: str | Path) -> Detector:
    """Load the fake-quantized model of a run. Nothing is unpickled.

    Args:
        folder: A run folder, `runs/name`.

    Returns:
        The calibrated model in eval mode; its output equals the run's bit for bit.

    Raises:
        InputError: The folder is not a run, or its files are damaged or of different runs.
    """
    return load_run(folder).quantized_model


def read_run_config(folder: str | Path) -> dict[str, Any]:
    """Read the settings of a run.

    Raises:
        InputError: The folder is not a run with a model.
    """
    return read_model_settings(folder).written


def read_model_settings(folder: str | Path) -> ModelSettings:
    """Read the settings of a run with a model, of any command."""
    folder = Path(folder)
    try:
        written = read_written(folder)
        refuse_version("its schema is", written.get("version", 1))
        if "evaluates" in written:
            run = written["evaluates"]
            raise ValueError(f"it has figures of {run} and no model, which is there: --run {run}")
        settings = as_settings(ModelSettings, written)
        configs = getattr(DETECTORS.get(settings.model), "configs", {})
        if not is_foreign(settings.model) and settings.config not in configs:
            raise ValueError(f"its sizes {settings.config!r} of {settings.model!r} are unknown")
    except ValueError as error:
        raise _refusal(folder, error) from error
    return settings


def load_run(folder: str | Path) -> LoadedRun:
    """Load the float and the quantized model of a run.

    Both read the file of folded weights and ranges. If rounding or training changed the quantized
    model's weights, the float weights have a file of their own.

    Args:
        folder: A run folder.

    Raises:
        InputError: As `load_quantized`.
    """
    folder = Path(folder)
    settings = read_model_settings(folder)
    if settings.for_bpu:
        raise InputError(
            f"{folder} is a run for a BPU (ptq --target bpu): load it with "
            "bevfusion_quant.bpu.load_bpu_run, or compare it with bevfusion-quant evaluate"
        )
    try:
        sizes = sizes_of(settings.model, settings.config)
        fused = build_detector(sizes, settings.parts)
        given: Any = None
        if is_foreign(settings.model):
            stored = folder / EXAMPLE_FRAME
            frame = open_dataset("files", stored)[0] if stored.is_dir() else stored_street()
            given = fused.arguments(frame)
        example = example_of(sizes, given)
        planned, digests = settings.plan is not None, settings.sha256
        apart = FLOAT_FILE in digests
        for name in (*MODEL_FILES, *[PLAN_FILE] * planned, *[FLOAT_FILE] * apart):
            if digests.get(name) != sha256(folder / name):
                raise ValueError(f"{name} is not the file that the run wrote")
        state = read_tensors(folder / "weights.safetensors").tensors
        if settings.fold:
            fused = cast("Detector", fuse_detector(fused, example, state).model)
        plan = read_plan(folder / PLAN_FILE) if planned else None
        model = quantize_as(fused, example, _config(settings), plan).model
        if plan is not None:
            apply_plan(model, plan)
        load_ranges(model, folder / "ranges.json")
        model.load_state_dict(state)
        own = read_tensors(folder / FLOAT_FILE).tensors if apart else {}
        fused.load_state_dict({**{name: state[name] for name in fused.state_dict()}, **own})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _refusal(folder, error) from error
    return LoadedRun(settings, sizes, fused, model)


def _config(settings: ModelSettings) -> PtqConfig:
    """Settings that decided how the model was quantized, without file paths."""
    given_values = {
        **settings.written,
        "branch": settings.branch,
        "quantize_first_layer": settings.quantize_first_layer,
        "output_weight_bits": settings.output_weight_bits,
        "cameras": settings.used_cameras,
        "weights": None,
        "plan": None,
    }
    return as_form(given_values, PtqConfig, where=CONFIG_FILE, what="run's settings")


def frames_for_run(options: FrameOptions, settings: ModelSettings) -> Sequence[Frame]:
    """Frames of the options, in the form that the run's model reads."""
    images = reads_images(settings.branch, settings.model)
    images |= is_foreign(settings.model) and bool(options.cameras)
    return frames_of(options, with_cameras=images, size=settings.config)


def refuse_unfolded(settings: ModelSettings, run: str | Path, what: str) -> None:
    """Refuse an operation that needs folded batch norms, such as "run in integers"."""
    if not settings.fold:
        raise InputError(
            f"{run} cannot be {what}: ptq --no-fold left its batch norms between the convolutions, "
            "where no INT8 engine has them: quantize again without --no-fold"
        )


def _refusal(folder: Path, error: Exception) -> InputError:
    return InputError(
        f"{folder} cannot be loaded as a run of bevfusion-quant: {error}: give a folder that a "
        "run has written, unchanged"
    )

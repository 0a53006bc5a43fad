"""A finished run back in memory: the quantized model with its folded weights and ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from bevfusion.model import CONFIGS, build_model
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import frames_of
from bevfusion_quant.options import Branch
from bevfusion_quant.run import CONFIG_FILE, RUN_FORMAT, RUN_VERSIONS, sha256
from bevfusion_quant.steps._branches import built_parts, reads_images
from bevfusion_quant.steps._plan import PLAN_FILE, apply_plan, quantizes_first_layer, read_plan
from bevfusion_quant.steps._record import FLOAT_FILE, MODEL_FILES
from bevfusion_quant.steps._stages import example_batch, fuse_branch, quantize_branch
from bevquant_quantizers.documents import as_form, read_json, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from bev_data.points import Frame
    from bevfusion.model import Batch, BEVFusion
    from bevfusion_quant.options import FrameOptions

__all__ = [
    "LoadedRun",
    "frames_for_run",
    "load_quantized",
    "load_run",
    "read_run_config",
    "refuse_unfolded",
]


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run's settings, its float model and its calibrated quantized one, in eval mode.

    The float model's batch norms are folded, unless the run left them as they are.
    """

    config: dict[str, Any]
    float_model: BEVFusion
    quantized_model: BEVFusion


def load_quantized(folder: str | Path) -> BEVFusion:
    """The fake-quantized model of a run, as it was when the run was written; nothing is unpickled.

    Args:
        folder: A run folder, `runs/name`.

    Returns:
        The calibrated model in eval mode; its output is the run's, bit for bit.

    Raises:
        InputError: The folder is not a run, or its files are damaged or do not belong together.
    """
    return load_run(folder).quantized_model


def read_run_config(folder: str | Path) -> dict[str, Any]:
    """A run's settings, as `run_ptq` wrote them.

    Raises:
        InputError: The folder is not a run that holds a model.
    """
    folder = Path(folder)
    try:
        config: dict[str, Any] = read_json(
            folder / CONFIG_FILE,
            dict[str, Any],
            what="run's settings",
            head={"format": RUN_FORMAT},
        )
        if config.get("version", 1) not in RUN_VERSIONS:
            raise ValueError(
                f"its schema is version {config['version']!r}, this program reads "
                f"{RUN_VERSIONS[0]} to {RUN_VERSIONS[-1]}"
            )
        if "evaluates" in config:
            raise ValueError(f"it is an evaluation of {config['evaluates']}, which has the model")
        as_form(config, _Settings, where=CONFIG_FILE, what="run's settings")
        if config["config"] not in CONFIGS:
            raise ValueError(f"its sizes {config['config']!r} are unknown")
    except ValueError as error:
        raise _refusal(folder, error) from error
    return config


class _Settings(msgspec.Struct):
    """What is read of the settings of a run, whichever command wrote it."""

    config: str
    method: str
    exclude: list[str]
    sha256: dict[str, str]
    branch: Branch = "lidar"
    fold: bool = True
    quantize_head: bool = False
    weight_bits: Annotated[int, msgspec.Meta(ge=2, le=16)] = 8
    plan: str | None = None
    target: str | None = None
    seed: int = 0
    calibration_frames: int = 0
    cameras: list[str] = []
    weights: str | None = None


def load_run(folder: str | Path) -> LoadedRun:
    """Both models of a run: the file of folded weights and ranges holds either.

    Where rounding or training gave the quantized model other weights, the float model's lie beside
    it.

    Raises:
        InputError: As `load_quantized`.
    """
    from bevquant_quantizers import load_ranges

    folder = Path(folder)
    config = read_run_config(folder)
    if config.get("target") == "bpu":
        raise InputError(
            f"{folder} is a run for a BPU (ptq --target bpu): load it with "
            "bevfusion_quant.bpu.load_bpu_run, or compare it with bevfusion-quant evaluate"
        )
    try:
        sizes, branch = CONFIGS[config["config"]], config.get("branch", "lidar")
        example = example_batch(sizes)
        planned = config.get("plan") is not None  # older runs do not say
        digests = config["sha256"]
        apart = FLOAT_FILE in digests
        for name in (
            *MODEL_FILES,
            *([PLAN_FILE] if planned else []),
            *([FLOAT_FILE] if apart else []),
        ):
            if digests.get(name) != sha256(folder / name):
                raise ValueError(f"{name} is not the file that the run wrote")
        state = read_tensors(folder / "weights.safetensors").tensors
        fused = build_model(sizes, built_parts(branch)).eval()
        if config.get("fold", True):
            fused = _folded(fused, example, state)
        model = quantize_branch(
            fused,
            example,
            branch,
            method=config["method"],
            exclude=config["exclude"],
            with_head=config.get("quantize_head", False),
            weight_bits=config.get("weight_bits", 8),
            # Runs of earlier versions quantized it, and did not say so.
            first_layer=quantizes_first_layer(
                fused,
                config.get("quantize_first_layer", True),
                read_plan(folder / PLAN_FILE) if planned else None,
            ),
        ).model
        if planned:
            apply_plan(model, read_plan(folder / PLAN_FILE))
        load_ranges(model, folder / "ranges.json")
        model.load_state_dict(state)
        own = read_tensors(folder / FLOAT_FILE).tensors if apart else {}
        fused.load_state_dict({**_float_part(state, fused.state_dict()), **own})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _refusal(folder, error) from error
    return LoadedRun(config, fused, model)


def frames_for_run(options: FrameOptions, config: Mapping[str, Any]) -> Sequence[Frame]:
    """The frames of the options, as the model of a finished run takes them.

    Args:
        options: The frame options.
        config: The run's settings.
    """
    images = reads_images(config.get("branch", "lidar"))
    return frames_of(options, with_cameras=images, size=config["config"])


def refuse_unfolded(config: Mapping[str, Any], run: str | Path, what: str) -> None:
    """Refuse what a run with batch norms in place cannot give.

    Args:
        config: The run's settings.
        run: Where it lies, for the message.
        what: What was asked for, such as "run in integers".

    Raises:
        InputError: The run has them.
    """
    if not config.get("fold", True):
        raise InputError(
            f"{run} cannot be {what}: ptq --no-fold left its batch norms between the convolutions, "
            "where no INT8 engine has them: quantize again without --no-fold"
        )


def _folded(model: BEVFusion, example: Batch, state: Mapping[str, Tensor]) -> BEVFusion:
    """The modules of the folded model, whose weights the run has.

    Which batch norms are gone is told by the structure of the modules, in a quarter of the time
    that it takes to capture and compare them; where the run's weights say otherwise, by capturing.
    """
    from bevquant_fusion import fuse_model

    folded = cast("BEVFusion", fuse_model(model).model)
    names = set(folded.state_dict())
    norms = {name for name in state if name.endswith(".running_var")}
    return folded if norms <= names <= set(state) else fuse_branch(model, example).model


def _float_part(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name] for name in wanted}


def _refusal(folder: Path, error: Exception) -> InputError:
    return InputError(
        f"{folder} cannot be loaded as a run of bevfusion-quant: {error}: give a folder that a "
        "run has written, unchanged"
    )

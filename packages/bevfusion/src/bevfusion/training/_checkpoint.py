"""The state of a training in one file: safetensors with JSON beside the tensors, no pickle."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from bev_data import InputError
from bevfusion.training._loop import run_steps
from bevquant_quantizers.documents import (
    Count,
    DocumentError,
    parse_json,
    read_tensors,
    write_tensors,
)

if TYPE_CHECKING:
    from bevfusion.training._prepare import FrameSource

LOG = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.safetensors"
"""Name of the file in the folder of a training."""
_FORMAT, _VERSION, _KEY = "bevfusion-quant training checkpoint", 1, "bevfusion-quant"
_MODEL, _OPTIMIZER, _OWN, _LOSSES = "model.", "optimizer.", "own.", "losses"


@dataclass(frozen=True)
class Checkpoint:
    """State of an interrupted run.

    Attributes:
        step: Number of finished steps.
        identity: Settings that decide the result, as JSON.
        tensors: State of the model, the optimizer and the trainer, and the losses so far.
    """

    step: int
    identity: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def losses(self) -> Tensor:
        """float32 [finished steps, terms], such as heatmap, classes, boxes."""
        return self.tensors[_LOSSES]

    @property
    def own(self) -> dict[str, Tensor]:
        """State of the trainer beside model and optimizer."""
        return _part(self.tensors, _OWN)


def write_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    losses: list[list[float]],
    identity: dict[str, Any],
    own: dict[str, Tensor] | None = None,
) -> None:
    """Write the state, whole or not at all; a kill leaves the previous checkpoint.

    Args:
        path: The file.
        model: Its state dict is stored.
        optimizer: Optimizer of the model's parameters.
        step: Number of finished steps.
        losses: Losses of each step.
        identity: Settings that decide the result.
        own: Further state of the trainer.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> about = {"training_frames": "two", "settings": {"lr": 0.1}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_checkpoint(Path(folder) / "c", model, optimizer, 1, [[0.5]], about)
        ...     found = read_checkpoint(Path(folder) / "c")
        >>> found.step, found.losses.tolist(), found.identity["settings"]
        (1, [[0.5]], {'lr': 0.1})
        >>> restore(found, model, optimizer)
    """
    tensors = {f"{_MODEL}{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{key}.{name}"] = value
    tensors |= {f"{_OWN}{name}": value for name, value in (own or {}).items()}
    tensors[_LOSSES] = torch.tensor(losses, dtype=torch.float64).reshape(len(losses), -1)
    about = {"format": _FORMAT, "version": _VERSION, "step": step, "identity": identity}
    write_tensors(path, tensors, {_KEY: json.dumps(about)})


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a file of `write_checkpoint`.

    Raises:
        InputError: The file is damaged, or no checkpoint.
    """
    try:
        held = read_tensors(path, "training checkpoint")
        about = parse_json(
            held.metadata.get(_KEY, "{}"),
            _About,
            where=str(path),
            what="training checkpoint",
            head={"format": _FORMAT, "version": _VERSION},
            remedy="use the version that wrote it, or begin a new run elsewhere",
        )
    except DocumentError as error:
        raise InputError(str(error)) from error
    losses = held.tensors.get(_LOSSES)
    if losses is None or losses.ndim != 2 or len(losses) != about.step:
        raise InputError(f"{path} is not a training checkpoint: its losses are not of its steps")
    identity = {"training_frames": about.identity.training_frames}
    return Checkpoint(about.step, {**identity, "settings": about.identity.settings}, held.tensors)


class _Identity(msgspec.Struct):
    training_frames: Any
    settings: dict[str, Any]


class _About(msgspec.Struct):
    step: Count
    identity: _Identity


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's state into a model and its optimizer, bit for bit.

    Raises:
        InputError: The state belongs to another model.
    """
    state = _part(checkpoint.tensors, _MODEL)
    wanted = model.state_dict()
    differ = [
        name
        for name in {**wanted, **state}
        if name not in state
        or name not in wanted
        or state[name].shape != wanted[name].shape
        or state[name].dtype != wanted[name].dtype
    ]
    if differ:
        raise InputError(
            f"the checkpoint is of another model: {len(differ)} entries differ, such as {differ[0]}"
        )
    model.load_state_dict(state)
    moments = _part(checkpoint.tensors, _OPTIMIZER)
    keys = sorted({name.split(".", 1)[0] for name in moments})
    for name, parameter in model.named_parameters():
        found = {key: moments[f"{key}.{name}"] for key in keys if f"{key}.{name}" in moments}
        for key, value in found.items():
            if not value.is_floating_point() or value.shape not in ((), parameter.shape):
                raise InputError(
                    f"the checkpoint's {_OPTIMIZER}{key}.{name} is {value.dtype} of shape "
                    f"{tuple(value.shape)}: it is damaged"
                )
        if found:
            # torch keeps the count of steps on the CPU, the moments beside the parameter.
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter, copy=True)
                for key, value in found.items()
            }


class Trainer(Protocol):
    """Interface of an object that takes training steps, such as `DetectorTrainer`."""

    @property
    def model(self) -> nn.Module:
        """The trained model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the model's parameters."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the losses."""

    def step(self, number: int) -> list[float]:
        """Take one step, counted from 0, and return its losses."""

    def own(self) -> dict[str, Tensor]:
        """Further state for a checkpoint, beside model and optimizer."""

    def go_on(self, own: dict[str, Tensor]) -> None:
        """Restore the state of `own`."""


def take_steps(
    trainer: Trainer,
    checkpoint: Path,
    identity: dict[str, Any],
    begun: Checkpoint | None = None,
    *,
    steps: int,
    every: int,
    title: str = "train",
    quiet: bool = False,
) -> tuple[list[list[float]], int]:
    """Take all steps, or those after a checkpoint; write checkpoints regularly and at the end.

    Args:
        trainer: Takes the steps.
        checkpoint: The file to write.
        identity: Settings that decide the result.
        begun: Content of the file, to continue from.
        steps: Steps of the whole run.
        every: Steps between two checkpoints.
        title: Title of the progress bar.
        quiet: Show no bar and write no file; see `run_steps`.

    Returns:
        The losses of every step, and the number of steps taken earlier.

    Raises:
        InputError: As `restore` and `run_steps`.
    """
    losses: list[list[float]] = []
    if begun is not None:
        restore(begun, trainer.model, trainer.optimizer)
        trainer.go_on(begun.own)
        losses = begun.losses.tolist()
        LOG.info("going on after step %d of %d", begun.step, steps)
    before = len(losses)

    def save(step: int) -> None:
        if not quiet:
            own, optimizer = trainer.own(), trainer.optimizer
            write_checkpoint(checkpoint, trainer.model, optimizer, step, losses, identity, own)

    run_steps(
        trainer.step, save, losses,
        steps=steps,
        every=every,
        terms=trainer.terms,
        title=title,
        quiet=quiet,
    )  # fmt: skip
    return losses, before


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def identity_of(source: FrameSource, config: Any, **more: str) -> dict[str, Any]:
    """Settings that decide the result, as they return from JSON.

    Args:
        source: Frames to train on.
        config: A dataclass of settings.
        more: Further settings by name.
    """
    about = {"training_frames": source.describe, "settings": {**asdict(config), **more}}
    identity: dict[str, Any] = json.loads(json.dumps(about, default=str))
    return identity


def begun_before(checkpoint: Path, identity: dict[str, Any], place: str) -> Checkpoint | None:
    """Checkpoint of an interrupted run for `take_steps`; None without a file.

    Args:
        checkpoint: The file.
        identity: Settings of the requested run.
        place: The option that names the run's folder.

    Raises:
        InputError: As `read_checkpoint` and `check_identity`.

    Example:
        >>> begun_before(Path("nowhere") / CHECKPOINT, {}, "--out") is None
        True
    """
    if not checkpoint.is_file():
        return None
    begun = read_checkpoint(checkpoint)
    check_identity(checkpoint, begun, identity, place)
    return begun


def check_identity(
    checkpoint: Path, begun: Checkpoint, identity: dict[str, Any], place: str
) -> None:
    """Refuse to continue a run with other settings.

    Args:
        checkpoint: The file.
        begun: Its content.
        identity: Settings of the requested run.
        place: The option that names the run's folder.

    Raises:
        InputError: Names every setting that differs.
    """
    old, new = (
        {"training_frames": d["training_frames"], **d["settings"]}
        for d in (begun.identity, identity)
    )
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    if keys:
        changes = "; ".join(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in keys)
        raise InputError(
            f"{checkpoint} is of another run: {changes}: give the same settings, or another {place}"
        )

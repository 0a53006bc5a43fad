"""Record of every run, the same for all commands: settings, summary, stages and page data.

A field for all runs is added here. Settings that decide the figures of a run with several processes
are defined here too.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import logging
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numba.core.event import Event, Listener, install_listener
from torch import nn
from tqdm import tqdm

from bev_data.points import Frame
from bevfusion_quant._errors import InputError
from bevfusion_quant.run._folder import CONFIG_FILE, RUN_FORMAT, RUN_VERSIONS, run_folder
from bevquant_quantizers.documents import write_json
from bevquant_quantizers.ranks import Shards, current_ranks

LOG = logging.getLogger(__name__)
COMPILING = "compiling kernels, once on this machine"


class _Compilations(Listener):  # type: ignore[misc]  # numba has no types
    """Reports when numba compiles a kernel that is not in its cache."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def on_start(self, event: Event) -> None:
        self._say(COMPILING)

    def on_end(self, event: Event) -> None:
        self._say("")


@contextmanager
def shown_stage(name: str) -> Iterator[None]:
    """Show the name of the stage while the block runs; nothing with --quiet."""
    if not LOG.isEnabledFor(logging.INFO):
        yield
        return
    shown = _bar if sys.stderr.isatty() else _lines
    with shown(name) as say, install_listener("numba:compile", _Compilations(say)):
        yield


@contextmanager
def _lines(name: str) -> Iterator[Callable[[str], None]]:
    said: set[str] = {""}

    def say(note: str) -> None:
        if note not in said:
            said.add(note)
            LOG.info("%s: %s …", name, note)

    LOG.info("%s …", name)
    yield say


@contextmanager
def _bar(name: str) -> Iterator[Callable[[str], None]]:
    ended = threading.Event()

    def tick(bar: tqdm[Any]) -> None:
        while not ended.wait(1.0):
            bar.refresh()

    with tqdm(desc=name, bar_format="{desc}  {elapsed}") as bar:
        clock = threading.Thread(target=tick, args=(bar,), daemon=True)
        clock.start()
        try:
            yield lambda note: bar.set_description_str(f"{name}: {note}" if note else name)
        finally:
            ended.set()
            clock.join()


SUMMARY_FILE = "summary.json"
_HEAD = {"format": RUN_FORMAT, "version": RUN_VERSIONS[-1]}
PACKAGES = (
    "bevquant", "bevfusion-quant", "bevquant-sparse", "bevquant-fusion", "bevquant-quantizers",
    "bevquant-qnn", "bevquant-int8sim", "torch", "numpy", "numba", "spconv",
)  # fmt: skip


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of every package that decides the result, if installed."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if hasattr(sys.modules.get("spconv"), "STANDIN"):
        found["spconv"] = "absent, bevquant-sparse stands in"
    return found


def peak_memory_mib() -> float:
    """Largest resident memory of this process so far, in MiB, as counted by the kernel."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def return_freed_memory() -> None:
    """Return freed blocks to the system, which later tensors may not fit into.

    Within a step the app keeps freed blocks for the next layer.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be asked
        return


@dataclass
class Clock:
    """Times the steps of a run: seconds by step, so far."""

    taken: dict[str, float] = field(default_factory=dict)
    _start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def step(self, name: str, blame: str = "") -> Iterator[None]:
        """Time a step; with `blame`, errors in it are reported as errors of the input.

        Freed memory is returned to the system afterwards.
        """
        start = time.perf_counter()
        try:
            with shown_stage(name):
                yield
        except ValueError as error:
            if not blame or isinstance(error, InputError):
                raise
            raise InputError(f"{blame}: {error}") from error
        return_freed_memory()
        self.taken[name] = round(time.perf_counter() - start, 3)

    def seconds(self) -> dict[str, float]:
        """Seconds by step, and `total` since the start."""
        return {**self.taken, "total": round(time.perf_counter() - self._start, 3)}

    def spent(self) -> tuple[dict[str, float], float]:
        """`seconds`, and the process's peak memory in MiB."""
        return self.seconds(), round(peak_memory_mib(), 1)


@dataclass(frozen=True)
class RunRecord:
    """Record of one run, while its folder is written; `path` is its final place.

    Without a clock nothing was computed.
    """

    folder: Path
    command: str
    clock: Clock | None
    packages: tuple[str, ...] = ()
    path: Path = Path()
    _shards: list[Shards] = field(default_factory=list)

    def step(self, name: str) -> AbstractContextManager[None]:
        """Time a step of writing, if the run has a clock."""
        return nullcontext() if self.clock is None else self.clock.step(name)

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write config.json: the settings."""
        write_json(self.folder / CONFIG_FILE, {**_HEAD, **settings, **_HEAD})

    def write_summary(self, found: Mapping[str, Any]) -> tuple[dict[str, float], float]:
        """Write summary.json: the results. Returns seconds by step and peak memory in MiB."""
        content = {**_HEAD, "command": self.command, "versions": versions(*self.packages)}
        if self.clock is None:
            write_json(self.folder / SUMMARY_FILE, {**content, **found})
            return {}, 0.0
        seconds, peak = self.clock.spent()
        content |= {"threads": torch.get_num_threads(), **found}
        content |= {"seconds": seconds, "peak_memory_mib": peak}
        write_json(self.folder / SUMMARY_FILE, content)
        return seconds, peak

    def shards(
        self, frames: Sequence[Frame], settings: Mapping[str, Any], *models: nn.Module
    ) -> Shards:
        """Storage of finished results; all ranks must have the same models and frames.

        Frames are compared by names and file sizes, models by weights and ranges. The settings
        decide the figures.

        Raises:
            InputError: The ranks differ.
        """
        about: dict[str, Any] = {}
        if not current_ranks().alone:
            about = {
                **settings,
                "frames": _described(frames),
                "models": [_digest(model) for model in models],
                "versions": versions(),
                "threads": torch.get_num_threads(),
            }
        self._shards.append(Shards(self.path.parent, self.path.name, about))
        return self._shards[-1]

    def on_page(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """Fields of `ReportContent` that every run has."""
        return {
            "command": self.command,
            "versions": versions(*self.packages),
            "settings": {**settings, "threads": torch.get_num_threads()},
            "seconds": {} if self.clock is None else self.clock.seconds(),
            "peak_memory_mib": peak_memory_mib(),
        }


@contextmanager
def new_run(
    kind: str,
    clock: Clock | None,
    packages: tuple[str, ...] = (),
    *,
    keep: str | Path | Sequence[Path] = (),
    runs: Path = Path("runs"),
    name: str | None = None,
    overwrite: bool = False,
    command: str = "",
) -> Iterator[RunRecord]:
    """Record of a run whose folder is written in the block, whole or not at all.

    `kind` is its default name. Without a clock nothing is computed. Runs in `keep` are read and
    must not be replaced. The last arguments are the caller's `Place`.

    Raises:
        InputError: As `run_folder`.
    """
    name = kind if name is None else name
    kept = [Path(keep)] if isinstance(keep, str | Path) else keep
    with run_folder(runs, name, overwrite=overwrite, keep=kept) as folder:
        record = RunRecord(folder, command, clock, packages, runs / name)
        yield record
    for shards in record._shards:
        shards.remove()


def _described(frames: Sequence[Frame]) -> list[Any]:
    known = getattr(frames, "paths", None) or getattr(frames, "keys", None) or ()
    return [
        len(frames),
        getattr(frames, "kind", None),
        [
            [str(key), key.stat().st_size] if isinstance(key, Path) and key.is_file() else str(key)
            for key in known
            if isinstance(key, str | int | Path)
        ],
    ]


def _digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            data = value.detach().cpu().contiguous().reshape(-1)
            digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()

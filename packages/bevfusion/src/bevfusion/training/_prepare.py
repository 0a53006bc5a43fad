"""Frames prepared ahead by several processes and stored on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm.auto import tqdm

from bev_data import InputError
from bevfusion.training._compact import CompactFrame, compact
from bevquant_quantizers.documents import DocumentError, read_json, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bev_data.points import Frame

_INDEX = "frames.json"
_VERSION = 1
_CHUNK = 8


@dataclass(frozen=True)
class FrameSource:
    """Frames that another process can open too.

    Args:
        describe: Description that changes when the frames do.
        open: Opens them; can be pickled.
    """

    describe: str
    open: Callable[[], Sequence[Frame]]


class FrameForm(Protocol):
    """Form of prepared frames: sizes, pictures and cameras of the model to train."""

    @property
    def config(self) -> str:
        """Sizes of the model."""

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the network's images; None without cameras."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras, in this order."""


class PreparedFrames:
    """The frames of a folder, read one at a time.

    Args:
        folder: Folder of the frames.
        count: Number of frames.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self._count = folder, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> CompactFrame:
        return CompactFrame.load(_file(self.folder, index))


def prepare_frames(
    source: FrameSource, config: FrameForm, folder: Path, *, workers: int = 1
) -> PreparedFrames:
    """Prepare every frame of `source` that is not yet in `folder`.

    Ray casting and reading images take longer than a step of a small model; reading an .npz takes a
    millisecond. An interrupted preparation continues.

    Args:
        source: Frames to prepare.
        config: Provides the network's image size and cameras.
        folder: Created if missing; runs on the same frames may share it.
        workers: Processes beside this one; 0 prepares the frames in this process.

    Raises:
        InputError: The folder holds frames of another source or form, there are no frames, or a
            frame is unsuitable for training.
    """
    frames = source.open()
    if not len(frames):
        raise InputError(f"no frames to train on: {source.describe}")
    form = {
        "format": "bevfusion-quant prepared frames",
        "version": _VERSION,
        "source": source.describe,
        "count": len(frames),
        "image_size": None if config.image_size is None else list(config.image_size),
        "cameras": list(config.cameras) if config.image_size else [],
        "scan": config.config,
    }
    _claim(folder, form)
    missing = [i for i in range(len(frames)) if not _file(folder, i).is_file()]
    if missing:
        done = len(frames) - len(missing)
        with tqdm(total=len(frames), initial=done, desc="frames", disable=None) as bar:
            if workers < 1:
                for index in missing:
                    _make(frames, index, folder, config)
                    bar.update()
            else:
                _make_in_processes(source, missing, folder, config, workers, bar)
    return PreparedFrames(folder, len(frames))


def _claim(folder: Path, form: dict[str, object]) -> None:
    index = folder / _INDEX
    if not index.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{folder} is not empty and holds no {_INDEX}: choose another --cache")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(index, json.dumps(form, indent=1))
        return
    try:
        found = read_json(index, dict[str, Any], what="list of prepared frames")
    except DocumentError as error:
        raise InputError(f"{error}: remove the folder") from error
    if found != form:
        differ = [key for key in form if found.get(key) != form[key]]
        differences = ", ".join(f"{key} {found.get(key)!r}, not {form[key]!r}" for key in differ)
        raise InputError(f"{folder} holds other frames ({differences}): choose another --cache")


def _make_in_processes(
    source: FrameSource,
    missing: list[int],
    folder: Path,
    config: FrameForm,
    workers: int,
    bar: tqdm[None],
) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half
    chunks = [missing[i : i + _CHUNK] for i in range(0, len(missing), _CHUNK)]
    with ProcessPoolExecutor(
        min(workers, len(chunks)), mp_context=context, initializer=_end_with_parent
    ) as pool:
        futures: list[Future[int]] = [
            pool.submit(_make_chunk, source, chunk, folder, config) for chunk in chunks
        ]
        try:
            for future in as_completed(futures):
                bar.update(future.result())
        except BrokenProcessPool as error:
            raise InputError(
                "a process that prepares frames was killed, probably because memory ran out: run "
                "the command again with fewer --workers; it continues with the finished frames"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End a worker when the process that started it was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_chunk(source: FrameSource, chunk: list[int], folder: Path, config: FrameForm) -> int:
    import torch

    torch.set_num_threads(1)
    frames = source.open()
    for index in chunk:
        _make(frames, index, folder, config)
    return len(chunk)


def _make(frames: Sequence[Frame], index: int, folder: Path, config: FrameForm) -> None:
    prepared = compact(frames[index], config.image_size, config.cameras)
    prepared.save(_file(folder, index))


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:06d}.npz"

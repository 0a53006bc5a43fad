"""A run folder appears whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.ranks import current_ranks

__all__ = ["CONFIG_FILE", "RUN_FORMAT", "RUN_VERSIONS", "free_name", "run_folder"]

CONFIG_FILE = "config.json"
RUN_FORMAT = "bevfusion-quant run"
RUN_VERSIONS = (1, 2, 3)
"""Schemas of runs that can be read; the last one is written."""


def free_name(runs: Path, stem: str) -> str:
    """`stem`, or `stem-2`, `stem-3`, …: the first that no run in `runs` has."""
    number = 1
    while os.path.lexists(runs / (name := stem if number == 1 else f"{stem}-{number}")):
        number += 1
    return name


@contextmanager
def run_folder(
    runs: Path, name: str, *, overwrite: bool, keep: Path | None = None
) -> Iterator[Path]:
    """Give an empty folder to write into; at the end it becomes `runs/name` in one step.

    Whatever ends the block early, Ctrl-C included, leaves no trace of it, and an older run that was
    to be replaced stays as it was. Of several ranks the first alone gets one; the path that the
    others get is no folder, and nothing becomes of it.

    Args:
        runs: Folder of all runs; made when missing, and removed again if the run fails.
        name: One path component: letters, digits, `.`, `_`, `-`, not starting with a dot.
        overwrite: Replace `runs/name`, if it is a run of this program.
        keep: A run that is read and must not be replaced.

    Raises:
        InputError: The name is unusable, or taken and not to be overwritten, or taken by something
            that is not a run, or by the run to keep.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise InputError(
            f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-', no leading dot"
        )
    target = runs / name
    if keep is not None and target.exists() and keep.exists() and target.samefile(keep):
        raise InputError(
            f"{target} is the run that is read, and would be replaced: choose another --name"
        )
    _refuse(target, overwrite)
    if not current_ranks().first:
        yield runs / f".{name}.not-here"
        return
    made = _missing_parents(runs)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=runs))
        try:
            yield work
            _refuse(target, overwrite)
            _publish(work, target)
        finally:
            with _undisturbed():
                shutil.rmtree(work, ignore_errors=True)
    finally:
        with _undisturbed():
            for folder in made:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def _refuse(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise InputError(
            f"{target} exists already: choose another --name, or pass --overwrite to replace it"
        )
    if not _is_run(target):
        raise InputError(
            f"{target} is not a run of bevfusion-quant (no {CONFIG_FILE} of ours in it), so "
            "--overwrite "
            "leaves it alone: choose another --name, or move it away yourself"
        )


def _is_run(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        content = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == RUN_FORMAT


def _missing_parents(folder: Path) -> list[Path]:
    """`folder` and its parents that do not exist yet, deepest first."""
    return [p for p in (folder, *folder.parents) if not p.exists()]


def _publish(work: Path, target: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    work.chmod(0o777 & ~umask)
    with _undisturbed():
        if not target.exists():
            work.rename(target)
            return
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        target.rename(old / target.name)
        try:
            work.rename(target)
        except OSError:
            (old / target.name).rename(target)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back for a few file operations that belong together."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

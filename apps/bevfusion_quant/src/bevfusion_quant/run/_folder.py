"""A run folder appears whole or not at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bevfusion_quant._errors import InputError
from bevquant_quantizers.documents import (
    DocumentError,
    read_json,
    sha256,
    sweep,
    write_folder,
    write_whole,
)
from bevquant_quantizers.ranks import current_ranks

CONFIG_FILE, DIGESTS_FILE, PAGE_FILE = "config.json", "digests.json", "report.html"
RUN_FORMAT = "bevfusion-quant run"
RUN_VERSIONS = (1, 2, 3)
"""Schemas of runs that can be read; the last one is written."""

# Runs from before digests.json was written hold such files alone at their top.
_OF_OLDER_RUNS = (
    ".json", ".html", ".pdf", ".png", ".safetensors", ".svg", ".onnx", ".yaml", ".txt", ".hbm",
)  # fmt: skip


@contextmanager
def run_folder(
    runs: Path, name: str, *, overwrite: bool, keep: Sequence[Path] = ()
) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it becomes `runs/name` in one step.

    If the block ends early, Ctrl-C included, the new folder is removed and an older run stays as it
    was. With several ranks only the first gets a folder; the other ranks get a path that is never
    created.

    Args:
        runs: Folder of all runs; created if missing, and removed again if the run fails.
        name: One path component: letters, digits, `.`, `_`, `-`, not starting with a dot.
        overwrite: Replace `runs/name`, if it is a run of this program.
        keep: Runs that are read and must not be replaced.

    Raises:
        InputError: The name is invalid, or taken and `overwrite` is False, or taken by a folder
            that is no run, or by a run in `keep`.
    """
    check_folder(runs, name, overwrite=overwrite)
    target = runs / name
    if target.exists() and any(run.exists() and target.samefile(run) for run in keep):
        role = "the run that is read" if len(keep) == 1 else "one of the runs that are compared"
        raise InputError(f"{target} is {role}, and would be replaced: choose another --name")
    if not current_ranks().first:
        yield runs / f".{name}.not-here"
        return
    made = [p for p in (runs, *runs.parents) if not p.exists()]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        sweep(runs)

        def ready(work: Path) -> None:
            _refuse(target, overwrite)
            write_digests(work)

        with write_folder(target, ready=ready) as work:
            yield work
    finally:
        # Folders that were made for a run that failed.
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def check_folder(runs: Path, name: str, *, overwrite: bool) -> None:
    """Refuse a place where no run can be written; see `run_folder`."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise InputError(
            f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-', no leading dot"
        )
    if runs.exists() and not runs.is_dir():
        raise InputError(f"--runs {runs}: it is a file, not a folder of runs; choose another")
    _refuse(runs / name, overwrite)


def write_digests(folder: Path) -> Path:
    """Write digests.json: every file of a finished run with its sha256."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / DIGESTS_FILE)
    sums = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    content = {"format": "bevfusion-quant digests", "version": 1, "sha256": sums}
    return write_whole(folder / DIGESTS_FILE, json.dumps(content, indent=1) + "\n")


def read_digests(folder: Path) -> dict[str, str] | None:
    """The file of `write_digests`; None if missing, as in older runs.

    Raises:
        DocumentError: It is damaged.
    """
    if not (folder / DIGESTS_FILE).exists():
        return None
    head = {"format": "bevfusion-quant digests", "version": 1}
    found: _Digests = read_json(folder / DIGESTS_FILE, _Digests, what="list of digests", head=head)
    return found.sha256


class _Digests(msgspec.Struct):
    sha256: dict[str, str]


def written_text(folder: Path) -> tuple[str, ...]:
    """Lines that list the files of a run and its page.

    None in a process that writes nothing, where the folder may not exist yet.
    """
    if not current_ranks().first:
        return ()
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    others = ", ".join(name for name in names if name != PAGE_FILE)
    return f"Written to {folder}: {others}", f"Page: {(folder / PAGE_FILE).absolute()}"


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
    others = _files_of_others(target)
    if others:
        raise InputError(
            f"{target} holds files that no run has written, such as {others[0]}, which --overwrite "
            "would delete: move them away, or choose another --name"
        )


def _files_of_others(folder: Path) -> list[str]:
    """Files in a run's folder that the run did not write; for older runs, that no run writes."""
    known = read_digests(folder)
    there = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()]
    if known is None:
        return [n for n in there if "/" not in n and not n.endswith(_OF_OLDER_RUNS)]
    return [name for name in there if name not in known and name != DIGESTS_FILE]


def _is_run(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        read_json(folder / CONFIG_FILE, head={"format": RUN_FORMAT})
    except DocumentError:
        return False
    return True

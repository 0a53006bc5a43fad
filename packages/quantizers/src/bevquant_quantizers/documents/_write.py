"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bevquant_graph import file_path

# What is being written lies beside its place under such a name, locked by the writer.
_WORK = re.compile(r"\.(?P<name>.+)\.[0-9]+\.[0-9a-f]{8}\.(?P<kind>tmp|old)", re.DOTALL)


def write_whole(
    path: str | os.PathLike[str], content: bytes | str, *, parents: bool = False
) -> Path:
    """Write to a temporary name beside `path`, flush to the disk, rename.

    A reader of `path` finds the old content or the new, whenever the writer stops. A device or a
    named pipe is written into, and so is the target of a symbolic link.

    Args:
        path: The file; existing content is replaced.
        content: Bytes, or text, which is written as UTF-8.
        parents: Create missing folders of `path`.

    Returns:
        The path.

    Raises:
        ValueError: The folder of `path` does not exist, without `parents`; or `path` is a folder.
        OSError: The disk is full or not writable; `path` is unchanged and no temporary file
            remains. The error's file name is `path`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(f"{folder}/new/plan.json", "{}", parents=True).read_text()
        '{}'
    """
    target = file_path(path)
    if parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise ValueError(f"cannot write {target}: it is a folder; give a file name")
    content = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # a rename would replace the device or pipe, as /dev/null
        return target
    place = _link_target(target)
    _check_parent(place)
    temporary = _work_name(place, "tmp")
    try:
        with open(temporary, "xb") as file:
            _lock(file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, place)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _named(error, target) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target


def _link_target(path: Path) -> Path:
    """The target of a symbolic link, which a rename to the link would replace; else the path."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextmanager
def write_folder(
    path: str | os.PathLike[str], *, ready: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it replaces `path` in one step.

    If the block ends early, the new folder is removed and an existing folder stays as it was.
    Remains of a killed writer of the same folder are removed first, and a folder that it had moved
    aside is restored.

    Args:
        path: The folder; its old content is replaced.
        ready: Called with the finished folder before it takes its place; may refuse.

    Raises:
        ValueError: The parent of `path` does not exist.
        OSError: The disk is full, or writing is not permitted.
    """
    target = _link_target(file_path(path))
    _check_parent(target)
    sweep(target.parent, target.name)
    work, old = _work_name(target, "tmp"), _work_name(target, "old")
    handle = -1
    try:
        work.mkdir()
        handle = os.open(work, os.O_RDONLY)
        _lock(handle)
        yield work
        if ready is not None:
            ready(work)
        with _undisturbed():
            if os.path.lexists(target):
                os.rename(target, old)
            try:
                os.rename(work, target)
            except OSError:
                if old.exists():
                    os.rename(old, target)
                raise
    finally:
        with _undisturbed():
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
            if handle >= 0:
                os.close(handle)


def sha256(path: str | os.PathLike[str]) -> str:
    """The digest of a file, in hexadecimal."""
    with file_path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sweep(folder: Path, name: str | None = None) -> list[Path]:
    """Remove the remains of killed writers in `folder`: unlocked temporary files and folders.

    Args:
        folder: Where to look.
        name: Only those that were to become this; None for all.

    Returns:
        Paths removed, or restored where a replaced folder had been moved aside.
    """
    found = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _WORK.fullmatch(entry.name)
        if match is None or (name is not None and match["name"] != name):
            continue
        if entry.is_symlink() or not _abandoned(entry):
            continue
        with _undisturbed(), suppress(OSError):
            home = folder / match["name"]
            if match["kind"] == "old" and not os.path.lexists(home):
                os.rename(entry, home)
            elif entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
            found.append(entry)
    return found


def _abandoned(entry: Path) -> bool:
    """Whether no process holds it; one moved aside is held by the folder that takes its place."""
    pid = int(entry.name.rsplit(".", 3)[1])
    if entry.name.endswith(".old"):
        return pid != os.getpid() and not _alive(pid)
    try:
        handle = os.open(entry, os.O_RDONLY)
    except OSError:
        return False
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ImportError):
        return False
    finally:
        os.close(handle)
    # Between its creation and its lock a writer is seen as none: its process tells.
    return pid != os.getpid() and not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _check_parent(target: Path) -> None:
    if not target.parent.is_dir():
        raise ValueError(
            f"cannot write {target}: the folder {target.parent} does not exist; make it first"
        )


def _work_name(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.{kind}")


def _lock(handle: int) -> None:
    """Mark a file as being written for other processes, if the system has locks."""
    with suppress(OSError, ImportError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _named(error: OSError, target: Path) -> OSError:
    """The same error, with the file that was to be written instead of the temporary one."""
    if error.errno is None:
        return error
    return OSError(error.errno, error.strerror or "cannot be written", os.fspath(target))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back for a few file operations that belong together."""
    here = threading.current_thread() is threading.main_thread()
    if not here or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

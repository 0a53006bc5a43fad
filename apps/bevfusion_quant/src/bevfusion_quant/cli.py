"""The command `bevfusion-quant`: parses options, returns an exit code, prints one-line errors."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any, Union

from bevfusion_quant._version import __version__

__all__ = ["main"]

USAGE_ERROR = 2
NOT_VERIFIED = 1
# Numbers of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    | code | meaning |
    |---|---|
    | 0 | done |
    | 1 | done, but a written file does not compute the model, or no plan reaches the score |
    | 2 | wrong input, options or environment, or interrupted; no partial output is left |

    The last line on stderr names the error and the remedy. Where torchrun, Slurm or Kubernetes
    started several processes, only the first prints.

    Args:
        arguments: Without the program's name. Default: those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _sigterm_as_interrupt():
            return _run(given)
    except KeyboardInterrupt:
        again = "with --resume to go on" if given[:1] in (["train"], ["qat"]) else "to start over"
        return _fail(f"interrupted: nothing half-written is left; run the command again {again}")
    except BrokenPipeError:
        # The reader of our output has gone; writing the rest, or a message, would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USAGE_ERROR
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        return _fail(
            f"{error.strerror or error}{place}: the run was not written; check that the place is "
            "writable and has room (about 200 MB), or choose another with --runs"
        )


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"bevfusion-quant {__version__}")
        return 0
    for place, argument in enumerate(arguments):
        # Said before they are read: a path that is empty would be the folder one is in.
        if not argument or re.fullmatch(r"--[\w-]+=", argument):
            option = argument.rstrip("=") or "".join(arguments[max(place - 1, 0) : place])
            return _fail(f"{option} '': it names nothing; leave it out or give a name")
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    try:
        with _silent() if rank != "0" else nullcontext():
            command = _read(arguments)
    except ValueError as error:
        return _fail(str(error))
    _set_up_logging(rank, command)
    _let_waiting_threads_sleep()
    _reuse_freed_memory()
    _look_for_garbage_less_often()
    from bev_data.voxelize import VoxelizeError
    from bevfusion_quant._errors import InputError, VerificationError
    from bevfusion_quant.commands import check_processes
    from bevfusion_quant.commands._text import dry_run_text
    from bevfusion_quant.frames import as_options
    from bevfusion_quant.options import DryRun, check_options
    from bevquant_quantizers.documents import DocumentError
    from bevquant_quantizers.ranks import LaunchError, RankError, launched

    try:
        with launched("bevfusion-quant", (ValueError, OSError, VerificationError)) as ranks:
            check_options(command)
            check_processes(command, ranks.world)
            try:
                text = command.execute(shlex.join(["bevfusion-quant", *arguments]))
            except DryRun as stopped:
                text = dry_run_text(command, stopped.folder)
            if ranks.first:
                print(text, flush=True)
    except RankError as error:
        return _fail(str(error)) if error.speaks else USAGE_ERROR
    except VerificationError as error:
        print(error.output, flush=True)
        return _fail(str(error), NOT_VERIFIED)
    except InputError as error:
        return _fail(as_options(str(error)))
    except (VoxelizeError, DocumentError, LaunchError) as error:
        return _fail(str(error))
    return 0


def _read(arguments: Sequence[str]) -> Any:
    """Parse the arguments; --config FILE sets defaults from a run's config.json."""
    import tyro

    from bevfusion_quant.commands import COMMANDS
    from bevfusion_quant.options import saved_options
    from bevfusion_quant.options._help import flat, grouped

    arguments, saved = saved_options(arguments)
    forms = {grouped(command, saved): command for command in COMMANDS}
    any_of_them: Any = Union[tuple(forms)]  # noqa: UP007 - the types are known at run time only
    with warnings.catch_warnings():
        # --config may give `demo` the path of a run's weights; all commands accept paths.
        warnings.filterwarnings("ignore", r"The field `model\.weights` is annotated with type")
        read = tyro.cli(
            any_of_them,
            prog="bevfusion-quant",
            description="From a float detector in PyTorch to INT8: fold, quantize, calibrate, "
            "compare. --version prints the version, COMMAND --help the options of a command.",
            args=list(arguments),
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
        )
    return flat(forms[type(read)], read)


def _fail(message: str, code: int = USAGE_ERROR) -> int:
    print(f"bevfusion-quant: {message}", file=sys.stderr, flush=True)
    return code


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress messages about options in all processes but the first."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


class _BesideBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler: writes lines to stderr above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        if "tqdm" not in sys.modules or not sys.stderr.isatty():
            super().emit(record)
            return
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def _set_up_logging(rank: str, command: Any) -> None:
    """Log progress in the first process; in the others warnings only, with the process number."""
    first = rank == "0"
    quiet, verbose = getattr(command, "quiet", False), getattr(command, "verbose", False)
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # bars of libraries too
    logging.basicConfig(
        format="%(message)s" if first else f"rank {rank}: %(message)s", handlers=[_BesideBars()]
    )
    known = "bevfusion_quant bevfusion bev_data bev_scenes bevquant_quantizers.ranks"
    for ours in known.split():
        logging.getLogger(ours).setLevel(level if first else logging.WARNING)
    # torch.fx notes once that spconv's tensor class asks about tracing; no user can act on it.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Using a non-tuple sequence")  # spconv's dense(), likewise


def _let_waiting_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait."""
    # By default they spin, which doubles a run's time on a busy machine. OpenMP reads the setting
    # when torch starts.
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _reuse_freed_memory() -> None:
    """Make glibc keep freed feature maps for the next layer."""
    # By default glibc maps each large block anew and the kernel clears its pages: a fifth of a
    # forward pass at full size. A program that has imported torch keeps its own settings.
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for option, value in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, 2**31 - 1)):
        mallopt(option, value)
    mallopt(M_ARENA_MAX, 1)


def _look_for_garbage_less_often() -> None:
    """Scan old objects for garbage less often."""
    # Torch's compiler holds a million permanent objects, and each full scan visits them: 7 % of a
    # small run. Young objects are scanned nearly as often as by default, so feature maps in
    # reference cycles are still freed soon.
    if "torch" not in sys.modules:
        gc.set_threshold(2000, 20, 50)
        atexit.register(gc.freeze)  # not once more as the process ends


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C in the block; restore the old handler afterwards."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: signals are not ours
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Damaged files for every public reader, bad arguments for every kernel: what happens, as a table.

    PYTHONPATH=tests python -m fuzz [--seed 0] [--share 1.0] [--only NAME …] [--jobs 2]

Each mutant is made from a good file (or good arguments) by a generator of its own, seeded with the
seed, the target's name and its number, so that any one can be made again. Workers, one process for
thousands of mutants, read them one by one; a mutant has 10 s of CPU time and 2 GiB. It ends as

- ok: what was changed does not matter to the reader, or is another valid value;
- clean: a ValueError (for kernels also TypeError) that a `raise` of the project gives a message;
- wrong: any other exception; crash: the process died; hang, memory: a bound was passed.

The session fails unless the last four are 0.
"""

from __future__ import annotations

import argparse
import dis
import functools
import io
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fuzz import frames, models, runs
from fuzz.kernels import changed_argument, kernels
from fuzz.mutate import Rng
from fuzz.target import Files

SECONDS, GIBIBYTES, STUCK = 10.0, 2, 600.0
SHOWN = 12  # kinds of what is wrong, for each target
OF_A_KERNEL = 1000
READERS = {**models.READERS, **frames.READERS, **runs.READERS}
OUTCOMES = ("ok", "clean", "wrong", "crash", "hang", "memory")


class Hang(BaseException):
    """A mutant has had its time."""


def clean(error: BaseException, types: bool) -> bool:
    """Whether somebody wrote this message for a user: a `raise` of the project, of a kind it says.

    `OverflowError`s of ours are classes of their own, which say where an accumulator left int32.
    """
    kinds = (ValueError, TypeError) if types else (ValueError,)
    ours = type(error).__module__.startswith(("bevquant", "bevfusion", "bev_"))
    return (ours or type(error) in kinds) and bool(str(error)) and _raised_by_us(error)


def _raised_by_us(error: BaseException) -> bool:
    """Whether the innermost frame is of the project, or of this script, and stands at a `raise`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    ours = any(f"/{name}" in code.co_filename for name in ("bevquant_", "bev", "fuzz"))
    return ours and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _alarm(number: int, frame: Any) -> None:
    raise Hang


class Mutants:
    """The mutants of one target, by number.

    Args:
        name: Of a reader or a kernel.
        seed: Of all mutants.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        signal.signal(signal.SIGPROF, _alarm)
        self.call = kernels()[name.removeprefix("kernel ")] if name.startswith("kernel ") else None
        self.target = None if self.call else READERS[name][1]()
        self.types = self.target is None or self.target.types
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_fast()))
        self.check()

    def run(self, number: int) -> tuple[str, str]:
        """The outcome of one mutant, and what it said."""
        rng = Rng(f"{self.seed}/{self.name}/{number}")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            work = self._prepared(rng)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    work()
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            outcome, said = "ok", ""
        except Hang:
            return "hang", ""
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "clean" if clean(error, self.types) else "wrong"
            said = f"{type(error).__name__}: {' '.join(str(error)[:300].split())}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > GIBIBYTES * 2**19:  # half of what it may have at most
            return "memory", said
        return outcome, said

    def _prepared(self, rng: Rng) -> Callable[[], Any]:
        if self.call is not None:
            args, kwargs = list(self.call.args), dict(self.call.kwargs)
            for _ in range(rng.choice([1, 1, 2])):
                at = rng.choice([*range(len(args)), *kwargs])
                if isinstance(at, int):
                    args[at] = changed_argument(rng, args[at])
                else:
                    kwargs[at] = changed_argument(rng, kwargs[at])
            return functools.partial(self.call.function, *args, **kwargs)
        assert self.target is not None
        files = dict(self.target.files)
        name = rng.choice(sorted(self.target.change))
        files[name] = self.target.change[name](rng, files[name])
        if self.target.sign is not None and rng.random() < 0.9:
            files = self.target.sign(files)
        return self._reading(files)

    def _reading(self, files: Files) -> Callable[[], Any]:
        assert self.target is not None
        for path, content in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(content)
        return functools.partial(self.target.read, self.folder)

    def check(self) -> None:
        """What is good is taken: else no mutant would tell anything."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.call is not None:
                self.call.function(*self.call.args, **self.call.kwargs)
            else:
                assert self.target is not None
                self._reading(self.target.files)()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _fast() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def counts(share: float) -> dict[str, int]:
    """Mutants by target."""
    numbers = {name: number for name, (number, _) in READERS.items()}
    numbers |= {f"kernel {name}": OF_A_KERNEL for name in kernels()}
    return {name: max(1, round(number * share)) for name, number in numbers.items()}


# Workers are forked from a process that has imported what the targets need: an import of torch for
# each took more time than a thousand mutants.
_SERVER = multiprocessing.get_context("forkserver")
_IMPORTED = ["torch", "numba", "onnx", "spconv.pytorch", "bevquant_export", "bevquant_fusion",
             "bevquant_hybrid.quantization", "bevquant_hybrid_tools.suggestion",
             "bevfusion_quant.datasets", "bevfusion_quant.model", "bevfusion_quant.report",
             "bevfusion_quant.train"]  # fmt: skip


def worker(name: str, seed: int, start: int, stop: int, out: Connection) -> None:
    """Run mutants in this process; of each its number before it begins, then what became of it."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    torch.set_num_threads(1)
    mutants = Mutants(name, seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + GIBIBYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(start, stop):
        out.send(number)
        out.send((number, *mutants.run(number)))
    mutants.close()


def attack(name: str, count: int, seed: int, show: Callable[[str], None] = print) -> Counter[str]:
    """Run all mutants of a target in workers, a new one after each that died."""
    accumulator: Counter[str] = Counter()
    seen: set[str] = set()
    start, began = 0, time.monotonic()
    while start < count:
        results, out = _SERVER.Pipe(duplex=False)
        process = _SERVER.Process(target=worker, args=(name, seed, start, count, out))
        process.start()
        out.close()
        current, stuck = -1, False
        heard = time.monotonic() + 600  # what it may take to make its good files
        while True:
            if not results.poll(1.0):
                if time.monotonic() - heard > STUCK:
                    stuck = True
                    process.kill()
                continue
            heard = time.monotonic()
            try:
                said = results.recv()
            except (EOFError, OSError):
                break
            if isinstance(said, int):
                current = said
                continue
            number, outcome, text = said
            accumulator[outcome] += 1
            start = number + 1
            kind = f"{outcome} {text[:60]}"
            if outcome not in ("ok", "clean") and kind not in seen and len(seen) < SHOWN:
                seen.add(kind)
                show(f"  {name} #{number}: {outcome}: {text}")
        process.join()
        results.close()
        if start < count:
            if current < start:
                raise RuntimeError(f"{name}: the worker does not begin")
            outcome = "hang" if stuck else "crash"
            accumulator[outcome] += 1
            show(f"  {name} #{current}: {outcome}: exit code {process.exitcode}")
            start = current + 1
    show(f"{name}: {dict(accumulator)} in {time.monotonic() - began:.0f} s")
    return accumulator


def table(results: dict[str, Counter[str]]) -> str:
    rows = [["", "mutants", *OUTCOMES]]
    for name, accumulator in results.items():
        rows.append([name, str(accumulator.total()), *(str(accumulator[o]) for o in OUTCOMES)])
    total = sum(results.values(), Counter())
    rows.append(["together", str(total.total()), *(str(total[o]) for o in OUTCOMES)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))]
        )
        for r in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the whole run's mutants")
    parser.add_argument("--only", nargs="*", help="targets whose names hold one of these")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    from concurrent.futures import ThreadPoolExecutor

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _SERVER.set_forkserver_preload(["__main__", *_IMPORTED])
    chosen = {
        name: number
        for name, number in counts(options.share).items()
        if not options.only or any(word in name for word in options.only)
    }
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {n: pool.submit(attack, n, number, options.seed) for n, number in chosen.items()}
        results = {name: future.result() for name, future in waiting.items()}
    print(table(results))
    bad = sum(accumulator[outcome] for accumulator in results.values() for outcome in OUTCOMES[2:])
    return 1 if bad else 0

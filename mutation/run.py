"""Are the tests able to fail? One-token mutations of the numerics, each run against the tests.

    python mutation/run.py [package …] [--seed 0] [--count 40] [--only TEXT] [--list]

`targets.toml` says which files hold numbers and which tests are about each; `equivalent.toml` lists
mutations that change no result, with the reason. The sample is the `count` mutations of least rank
under the seed, so that it stays the same where the code around them changes. Every mutant is
written to a copy of its package and its tests run there, until one fails; the working tree is never
touched. It is noticed where a test fails, or none ends in time. Tests that ran the line when the
code was whole go first, the quickest of them ahead, so that a mutant costs seconds; one that none
of them notices meets all the others too.

A script of our own: mutmut and cosmic-ray know neither numba's caches on disk, which keep the code
of a function that was mutated in another file, nor several packages that import each other, and
start an interpreter with torch for each mutant, which costs more than most tests here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sites import Mutation, mutations

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).parent
WANTED = 0.95
_SERVER = multiprocessing.get_context("forkserver")
_OPTIONS = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0"]


def main() -> int:
    """Run what the command line asks for; 1 where a package falls short."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    targets = tomllib.loads((HERE / "targets.toml").read_text())
    parser.add_argument("packages", nargs="*", default=list(targets), metavar="package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="mutants a package")
    parser.add_argument("--only", default="", help="mutants whose description holds this text")
    parser.add_argument("--list", action="store_true", help="name the sample, run nothing")
    options = parser.parse_args()
    unknown = set(options.packages) - set(targets)
    if unknown:
        parser.error(f"no numerics listed for {', '.join(sorted(unknown))}")
    # What takes long to import, and pytest has no plugin of; what is not installed is passed over.
    _SERVER.set_forkserver_preload(["torch", "numba", "spconv.pytorch", "onnxruntime", "msgspec"])
    short = []
    for package in options.packages:
        sample = _sample(package, targets[package], options)
        if options.list:
            print(*sample, sep="\n")
        elif not _judge(package, targets[package], sample):
            short.append(package)
    if short:
        print(f"below {WANTED:.0%}: {', '.join(short)}")
    return 1 if short else 0


def _sample(package: str, target: dict[str, Any], options: argparse.Namespace) -> list[Mutation]:
    listed = tomllib.loads((HERE / "equivalent.toml").read_text()).get("equivalent", [])
    found = [m for file in _files(package, target) for m in mutations(ROOT, file)]
    for entry in listed:
        if entry["file"].startswith(f"packages/{package}/") and not any(
            m.is_listed(entry) for m in found
        ):
            print(f"equivalent.toml: {entry['file']}: {entry['text']!r} is gone: delete the entry")
    some = [m for m in found if not any(map(m.is_listed, listed)) and options.only in str(m)]
    return sorted(some, key=lambda m: m.rank(options.seed))[: options.count]


def _files(package: str, target: dict[str, Any]) -> list[str]:
    source = ROOT / "packages" / package / "src" / f"bevquant_{package}"
    files = [f for pattern in target["files"] for f in sorted(source.glob(pattern))]
    return [str(f.relative_to(ROOT)) for f in files]


def _judge(package: str, target: dict[str, Any], sample: Sequence[Mutation]) -> bool:
    """Run the tests on each mutant and print what was not noticed."""
    source = ROOT / "packages" / package / "src" / f"bevquant_{package}"
    noticed, missed = 0, []
    began = time.monotonic()
    with _copy(package) as place:
        healthy: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {}
        for mutation in sample:
            name = str((ROOT / mutation.path).relative_to(source))
            tests = tuple(
                next((v for k, v in target["tests"].items() if fnmatch(name, k)), target["all"])
            )
            if tests not in healthy:
                start = time.monotonic()
                if not _passes(place, package, tests, 1200.0, watched=_files(package, target)):
                    log = (place / "log").read_text()
                    raise SystemExit(
                        f"{package}: {' '.join(tests)} fail as they are\n{log[-3000:]}"
                    )
                ran = json.loads((place / "ran.json").read_text())
                healthy[tests] = time.monotonic() - start, ran
            seconds, ran = healthy[tests]
            with _mutated(place, mutation):
                first = _near(ran, mutation)
                if _passes(place, package, tests, 60.0 + 5 * seconds, first=first):
                    missed.append(mutation)
                    print(f"NOT NOTICED {mutation}", flush=True)
                else:
                    noticed += 1
                    print(f"noticed     {mutation}", flush=True)
    score = noticed / len(sample) if sample else 1.0
    minutes = (time.monotonic() - began) / 60
    print(f"{package}: {noticed} of {len(sample)} noticed, {score:.1%}, in {minutes:.1f} min")
    return score >= WANTED


@contextlib.contextmanager
def _copy(package: str) -> Iterator[Path]:
    """The package's sources and tests, with the compiled kernels that lie beside them."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        place = Path(folder)
        own = Path("packages") / package
        ignore = shutil.ignore_patterns("*.pyc", ".hypothesis", ".pytest_cache")
        shutil.copytree(ROOT / own, place / own, ignore=ignore)
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy2(ROOT / name, place / name)
        yield place


@contextlib.contextmanager
def _mutated(place: Path, mutation: Mutation) -> Iterator[None]:
    """The copy with the mutation, its numba caches as they were before once it is over.

    numba compiles anew where a function's own file has changed, not where one that it calls has.
    """
    file = place / mutation.path
    source = file.read_bytes()
    stat = file.stat()
    kept = {cache: cache.read_bytes() for cache in _caches(place, file)}
    for cache in kept:
        cache.unlink()
    file.write_bytes(mutation.apply(source))
    try:
        yield
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        for cache in _caches(place, file):
            cache.unlink()
        for cache, content in kept.items():
            cache.write_bytes(content)


def _caches(place: Path, file: Path) -> list[Path]:
    """What numba compiled of the module, and of all in its package that import it, however far."""
    package = next(p for p in file.parents if p.parent.name == "src")
    texts = {p: p.read_text() for p in package.rglob("*.py")}
    found = {file}
    more: set[Path] = set()
    while more != found:
        found |= more
        names = "|".join(re.escape(p.stem) for p in found)
        asks = re.compile(
            rf"^\s*from\s+\S+\s+import\s.*\b({names})\b|^\s*from\s+\S*\b({names})\s", re.M
        )
        more = {p for p, text in texts.items() if asks.search(text)} | found
    return [c for p in found for c in (p.parent / "__pycache__").glob(f"{p.stem}.*.nb?")]


def _near(ran: dict[str, Any], mutation: Mutation) -> list[str]:
    """The tests that ran the mutated line, then those that ran its file, the quickest first."""
    lines = {test: found.get(mutation.path, []) for test, (_, found) in ran.items()}
    near = [test for test in ran if lines[test]]
    return sorted(near, key=lambda test: (mutation.line not in lines[test], ran[test][0]))


def _passes(
    place: Path,
    package: str,
    tests: Sequence[str],
    limit: float,
    *,
    first: Sequence[str] = (),
    watched: Sequence[str] = (),
) -> bool:
    """Whether the tests pass in the copy before the limit, in seconds, runs out.

    Those named by `first` run before the others. With files to be watched, ``ran.json`` tells of
    each test its seconds and the lines of these files that it ran.
    """
    given = (place, package, list(tests), list(first), list(watched))
    process = _SERVER.Process(target=_run_tests, args=given)
    process.start()
    process.join(limit)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # it and what its tests have started
    process.join()
    return process.exitcode == 0


def _run_tests(
    place: Path, package: str, tests: list[str], first: list[str], watched: list[str]
) -> None:
    os.setsid()
    sys.dont_write_bytecode = True
    own = str(place / "packages" / package / "src")
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    os.environ.update(PYTHONPATH=os.pathsep.join([own, *others]), PYTHONDONTWRITEBYTECODE="1")
    sys.path.insert(0, own)
    os.chdir(place)
    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    import pytest

    class Order:
        """Sorts the tests, and keeps what each of them ran."""

        def __init__(self) -> None:
            self.ran: dict[str, tuple[float, dict[str, list[int]]]] = {}

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            place_of = {test: i for i, test in enumerate(first)}
            items.sort(key=lambda item: place_of.get(item.nodeid, len(place_of)))

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
            began = time.monotonic()
            with _watching(place, watched) as lines:
                result = yield
            self.ran[item.nodeid] = time.monotonic() - began, lines
            return result

        def pytest_sessionfinish(self) -> None:
            if watched:
                (place / "ran.json").write_text(json.dumps(self.ran))

    folder = place / "packages" / package / "tests"
    chosen = [str(folder / test) for test in tests]
    sys.exit(int(pytest.main([*_OPTIONS, *chosen], plugins=[Order()])))


@contextlib.contextmanager
def _watching(place: Path, files: Sequence[str]) -> Iterator[dict[str, list[int]]]:
    """What runs of the files' lines meanwhile; compiled code goes unseen."""
    names = {str(place / file): file for file in files}
    seen: set[tuple[str, int]] = set()
    lines: dict[str, list[int]] = {}

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in names:
            return None
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    if not names:
        yield lines
        return
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)
        threading.settrace(None)
        for name, line in sorted(seen):
            lines.setdefault(names[name], []).append(line)


if __name__ == "__main__":
    sys.exit(main())

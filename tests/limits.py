"""Limits of one test, and an account of the tests that never ran.

A test is ended, with the stacks of its threads, when it and its child processes used `CPU_SECONDS`
of CPU time, or when they used none for `IDLE_SECONDS`. On a busy machine both take longer, so a
slow test passes and a deadlock is still ended. Ending a test ends its worker. pytest-xdist starts
another, which skips that test and runs the rest.

Child processes are found in /proc. Without it (macOS, Windows) the limits are off: a test that
waits for a child looks idle there. pytest's own `faulthandler_timeout` then is the only limit.

The exit code is pytest's, and 6 where tests were collected and never ran: the summary counts them.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CPU_SECONDS = 400.0  # the slowest test takes a tenth of it
IDLE_SECONDS = 300.0
NEVER_RAN = 6  # the first exit code that pytest does not use
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")


def family() -> dict[int, float]:
    """This process and its descendants, living and waited for: CPU time in seconds."""
    times: dict[int, tuple[int, int]] = {}  # process to its parent and its ticks
    for folder in _PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        times[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    members, grown = {os.getpid()}, True
    while grown:
        children = {process for process, (parent, _) in times.items() if parent in members}
        grown = not children <= members
        members |= children
    return {process: times[process][1] / _TICKS for process in members if process in times}


class Watchdog:
    """Ends this process when its current test goes beyond a limit."""

    def __init__(self) -> None:
        self._test: str | None = None
        self._changed = threading.Condition()
        self._stderr = os.fdopen(os.dup(2), "w")  # not what pytest captures while a test runs
        if (_PROC / "self" / "stat").exists():
            threading.Thread(target=self._watch, daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watch a test for as long as it runs."""
        self._begin(item.nodeid)
        try:
            return (yield)
        finally:
            self._begin(None)

    def _begin(self, test: str | None) -> None:
        with self._changed:
            self._test = test
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._test is not None)
                test = self._test
            self._limit(test, period=min(10.0, IDLE_SECONDS / 4))

    def _limit(self, test: str | None, period: float) -> None:
        """Return when the test is over; most are within the first period."""
        if self._is_over(test, period):
            return
        first = last = sum(family().values())
        since = time.monotonic()
        while not self._is_over(test, period):
            used = sum(family().values())
            if used - last > 0.1:  # a process that waits polls now and then
                last, since = used, time.monotonic()
            if used - first > CPU_SECONDS:
                self._end(f"{test} used {used - first:.0f} s of CPU time")
            if time.monotonic() - since > IDLE_SECONDS:
                self._end(f"{test} waits: no CPU time used for {IDLE_SECONDS:.0f} s")

    def _end(self, reason: str) -> None:
        print(f"\nended: {reason}", file=self._stderr, flush=True)
        faulthandler.dump_traceback(file=self._stderr)
        for process in family().keys() - {os.getpid()}:  # they would run on without their parent
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os._exit(1)

    def _is_over(self, test: str | None, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._test != test, timeout=seconds)


class Worker:
    """Writes the test at which a worker is to a file, which outlives the worker."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder, self._own = folder, folder / worker

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Keep the test's name for as long as it runs."""
        self._own.write_text(item.nodeid)
        try:
            return (yield)
        finally:
            self._own.write_text("")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test that ended another worker: its failure is in the report already."""
        others = (file for file in self._folder.iterdir() if file != self._own)
        if any(file.read_text() == item.nodeid for file in others):
            pytest.skip("it ended its worker and is not run again")


class Account:
    """Compares the tests that were collected with those that ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: set[str] = set()
        self._collected: set[str] = set()
        self._ran: set[str] = set()

    def pytest_configure_node(self, node: Any) -> None:
        """Name the run's folder to a worker."""
        node.workerinput["run_folder"] = str(self.folder)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note the tests that a worker collected; all workers collect the same."""
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that ran, was skipped, or ended its worker."""
        self._ran.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Give the run an exit code of its own where tests never ran."""
        self.missing = self._collected - self._ran
        asked = session.config.getoption("maxfail")  # -x and --maxfail leave tests out on purpose
        if self.missing and not asked:
            session.exitstatus = NEVER_RAN
        shutil.rmtree(self.folder, ignore_errors=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Count the tests that never ran."""
        if self.missing:
            terminalreporter.write_sep(
                "=", f"{len(self.missing)} of {len(self._collected)} tests never ran", red=True
            )


def pytest_configure(config: pytest.Config) -> None:
    """Watch the tests where they run; count them where pytest-xdist starts workers."""
    workerinput = getattr(config, "workerinput", None)
    if workerinput is None and config.getoption("dist", "no") != "no":
        folder = Path(tempfile.mkdtemp(prefix="bevquant_tests_"))
        config.pluginmanager.register(Account(folder), "bevquant_account")
        return
    config.pluginmanager.register(Watchdog(), "bevquant_watchdog")
    if workerinput is not None:
        worker = Worker(Path(workerinput["run_folder"]), workerinput["workerid"])
        config.pluginmanager.register(worker, "bevquant_worker")

"""What a command says while it runs: lines in a log, a bar on a terminal, nothing with --quiet."""

from __future__ import annotations

import io
import logging

import numba
import pytest

from bevfusion_quant.run._record import COMPILING, shown_stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of stderr; called in the test, as pytest replaces stderr before it."""
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    return made


def compile_something() -> None:
    numba.njit(lambda x: x + 1)(1)  # no cache has it


def test_a_log_has_a_line_and_one_for_compilations(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bevfusion_quant"), shown_stage("calibrate"):
        compile_something()
        compile_something()
    assert caplog.messages == ["calibrate …", f"calibrate: {COMPILING} …"]


def test_without_a_compilation_none_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bevfusion_quant"), shown_stage("fuse"):
        pass
    assert caplog.messages == ["fuse …"]


def test_a_terminal_has_a_bar_with_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = terminal(monkeypatch)
    with caplog.at_level(logging.INFO, "bevfusion_quant"), shown_stage("calibrate"):
        compile_something()
    shown = made.getvalue()
    assert f"calibrate: {COMPILING}" in shown
    assert shown.rstrip().endswith("calibrate  00:00")
    assert not caplog.messages


def test_quiet_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = terminal(monkeypatch)
    with caplog.at_level(logging.WARNING, "bevfusion_quant"), shown_stage("calibrate"):
        compile_something()
    assert not made.getvalue()
    assert not caplog.messages

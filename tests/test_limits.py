"""A run of tests whose tests wait for ever, crash, or use too much CPU time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CONFTEST = """
import limits

pytest_plugins = ["limits"]
limits.CPU_SECONDS, limits.IDLE_SECONDS = 3.0, 2.0
"""


def run_of(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Exit code and output of a run over files of tests."""
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n")
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    # Plugins that no such run needs take two thirds of the time of each process.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider",
         "-n", "2", "--dist", "loadfile", *options],
        cwd=folder, capture_output=True, text=True, check=False,
        env=env | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return run.returncode, run.stdout + run.stderr


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@needs_proc
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import threading; threading.Event().wait()", "waits: no CPU time used for 2 s"),
        ("while True: pass", r"used \d+ s of CPU time"),
        ("import pathlib, subprocess, sys\n"
         "    child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
         "    pathlib.Path('child').write_text(str(child.pid)); child.wait()",
         r"used \d+ s of CPU time"),
    ],
)  # fmt: skip
def test_ended_test_is_named_and_all_others_run(tmp_path: Path, body: str, said: str) -> None:
    others = "".join(f"def test_after_{i}(): pass\n" for i in range(3))
    code, text = run_of(
        tmp_path,
        "--max-worker-restart", "4",
        test_a=f"def test_before(): pass\ndef test_bad():\n    {body}\n{others}",
        test_b=others,
    )  # fmt: skip
    assert code == 1, text
    assert re.search(r"1 failed, 7 passed, 1 skipped", text), text
    assert re.search(rf"ended: test_a.py::test_bad {said}", text), text
    assert "never ran" not in text
    if (tmp_path / "child").exists():
        stat = Path("/proc", (tmp_path / "child").read_text(), "stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_crash_is_one_failure(tmp_path: Path) -> None:
    code, text = run_of(
        tmp_path,
        "--max-worker-restart", "4",
        test_a="import os\ndef test_bad(): os._exit(3)\ndef test_after(): pass\n",
        test_b="def test_other(): pass\n",
    )  # fmt: skip
    assert code == 1
    assert "1 failed, 2 passed, 1 skipped" in text, text


def test_tests_that_never_ran_are_counted(tmp_path: Path) -> None:
    code, text = run_of(
        tmp_path,
        "--max-worker-restart", "0",
        test_a="import os\ndef test_bad(): os._exit(3)\ndef test_after(): pass\n",
    )  # fmt: skip
    assert code == 6
    assert "1 of 2 tests never ran" in text, text


@needs_proc
def test_slow_test_that_works_is_not_ended(tmp_path: Path) -> None:
    """Longer than the idle limit, with a little CPU time throughout."""
    slow = (
        "import time\ndef test_slow():\n    end = time.monotonic() + 4\n"
        "    while time.monotonic() < end:\n        sum(range(10_000_000)); time.sleep(0.3)\n"
    )
    code, text = run_of(tmp_path, test_a=slow, test_b="def test_b(): pass")
    assert code == 0, text

"""Real processes: one is killed, the others end, the same command goes on to the bits of one."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("spconv") is None:
    pytest.skip("spconv is not installed", allow_module_level=True)

MAIN = "import sys; from bevfusion_quant.cli import main; raise SystemExit(main(sys.argv[1:]))"
# What one rank does when it has finished a frame.
WATCHED = f"""
import os, signal
from bevfusion_quant.ranks import Shards

save = Shards.save

def watch(shards, step, index, record):
    save(shards, step, index, record)
    if (step, index) == ("compare", 1):
        %s

Shards.save = watch
{MAIN}
"""
KILLED = WATCHED % "os.kill(os.getpid(), signal.SIGKILL)"
NOT_AGAIN = WATCHED % "raise SystemExit('frame 1 was run again')"


def start(program: str, runs: Path, name: str, **place: str) -> subprocess.Popen[str]:
    options = "ptq --dataset street --count 4 --calibration-frames 3 --config tiny"
    return subprocess.Popen(
        [
            sys.executable, "-c", program, *options.split(), "--branch", "lidar-detector",
            "--runs", str(runs), "--name", name,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def two_ranks(programs: tuple[str, str], runs: Path) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of both."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        start(program, runs, "run", RANK=str(rank), **place)
        for rank, program in enumerate(programs)
    ]
    said = [process.communicate(timeout=600) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def figures(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    for key in ("command", "seconds", "peak_memory_mib"):
        del content[key]
    return content


def test_a_killed_rank_ends_the_run_and_the_next_one_ends_with_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    alone = start(MAIN, tmp_path / "alone", "run")
    runs = tmp_path / "ranks"
    (code, out, error), (killed, *_) = two_ranks((MAIN, KILLED), runs)
    assert (code, killed) == (2, -9)
    assert out == ""
    last = error.splitlines()[-1]
    assert last.startswith("bevfusion-quant: rank 1 of 2 has died")
    assert "run the same command again" in last
    (shards,) = runs.iterdir()
    assert str(shards) in last
    assert {"calibration.0-of-2", "calibration.1-of-2"} <= {p.name for p in shards.iterdir()}

    (code, out, error), other = two_ranks((MAIN, NOT_AGAIN), runs)
    assert code == 0, error
    assert other == (0, "", "")
    assert str(runs / "run" / "report.html") in out
    assert [path.name for path in runs.iterdir()] == ["run"]
    assert alone.wait(600) == 0
    alone.communicate()
    for name in ("ranges.json", "weights.safetensors", "bev.png"):
        assert (runs / "run" / name).read_bytes() == (
            tmp_path / "alone" / "run" / name
        ).read_bytes(), name
    assert figures(runs / "run") == figures(tmp_path / "alone" / "run")

"""Real processes: one is killed, the others end, the same command goes on to the bits of one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bev_scenes import street_frame
from bevfusion_quant.cli import main

FEW_BEAMS = {"beams": 8, "sweeps": 1, "azimuth_steps": 120}
MAIN = "from bevfusion_quant.cli import main; raise SystemExit(main(sys.argv[1:]))"
# What one rank does when it has finished a frame.
WATCHED = f"""
import signal
from bevquant_quantizers.ranks import Shards

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
# Starts processes that have imported what a run imports, which would take each 4 s of CPU time.
STARTER = """
import atexit, gc, json, os, sys
gc.disable()  # a tenth of what imports and captures take
atexit.register(gc.freeze)  # nor is garbage looked for as a process ends: half a second of each
import sympy, spconv.pytorch, torch, torch.distributed, torch._dynamo.convert_frame, torch.export
import bev_scenes, bevfusion.pictures, bevfusion_quant.ptq, bevfusion_quant.commands.ptq
from functools import partial

# Scans of few beams: each process makes each of its streets twice.
bev_scenes._frame.street_frame = partial(bev_scenes.street_frame, **json.loads(sys.argv[1]))
for line in sys.stdin:
    ranks = []
    for program, arguments, place, out, error in json.loads(line):
        rank = os.fork()
        if rank == 0:
            for stream, path in ((1, out), (2, error)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), stream)
            os.environ.update(place)
            sys.argv = ["-c", *arguments]
            exec(program)
        ranks.append(rank)
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    print(json.dumps(codes), flush=True)
"""


def options(runs: Path) -> list[str]:
    frames = "--dataset street --count 3 --calibration-frames 2"
    model = "--config tiny --branch lidar-detector"
    return ["ptq", *frames.split(), *model.split(), "--runs", str(runs), "--name", "run"]


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, json.dumps(FEW_BEAMS)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process


def two_ranks(
    starter: subprocess.Popen[str], programs: tuple[str, str], runs: Path
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of both."""
    assert starter.stdin is not None
    assert starter.stdout is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    said = runs.with_name("said")
    said.mkdir()
    files = [(said / f"{rank}.out", said / f"{rank}.err") for rank in range(2)]
    told = [
        (program, options(runs), place | {"RANK": str(rank)}, *map(str, files[rank]))
        for rank, program in enumerate(programs)
    ]
    print(json.dumps(told), file=starter.stdin, flush=True)
    codes = json.loads(starter.stdout.readline())
    texts = [[file.read_text() for file in pair] for pair in files]
    shutil.rmtree(said)
    return [(code, *text) for code, text in zip(codes, texts, strict=True)]


def figures(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    for key in ("command", "seconds", "peak_memory_mib"):
        del content[key]
    return content


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, this one, on one thread as the others."""
    runs, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bev_scenes._frame.street_frame", partial(street_frame, **FEW_BEAMS))
            assert main(options(runs)) == 0
    finally:
        torch.set_num_threads(threads)
    return runs / "run"


def test_a_killed_rank_ends_the_run_and_the_next_one_ends_with_the_bits_of_one_process(
    alone: Path, starter: subprocess.Popen[str], tmp_path: Path
) -> None:
    runs = tmp_path / "ranks"
    (code, out, error), (killed, *_) = two_ranks(starter, (MAIN, KILLED), runs)
    assert (code, killed) == (2, -9)
    assert out == ""
    last = error.splitlines()[-1]
    assert last.startswith("bevfusion-quant: rank 1 of 2 has died")
    assert "run the same command again" in last
    (shards,) = runs.iterdir()
    assert str(shards) in last
    assert {"calibration.0-of-2", "calibration.1-of-2"} <= {p.name for p in shards.iterdir()}

    (code, out, error), other = two_ranks(starter, (MAIN, NOT_AGAIN), runs)
    assert code == 0, error
    assert other == (0, "", "")
    assert str(runs / "run" / "report.html") in out
    assert [path.name for path in runs.iterdir()] == ["run"]
    for name in ("ranges.json", "weights.safetensors", "bev.png"):
        assert (runs / "run" / name).read_bytes() == (alone / name).read_bytes(), name
    assert figures(runs / "run") == figures(alone)

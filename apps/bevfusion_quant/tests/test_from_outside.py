"""A target and a data set of an installed package: in the help, and driven by the commands."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = """
import numpy as np
from bev_data.datasets import FrameList
from bev_data.points import Frame
from bevquant_export.targets.qdq import QdqTarget
from bevquant_export.targets.tensorrt import TENSORRT10

class Mine(QdqTarget):
    name, title, aliases = "mine", "my engine", ("my-engine",)
    sparse = "portable"
    form = TENSORRT10.form
    unverified = ("it runs nowhere",)

    def lint_pairs(self, pairs, file):
        return iter(())

    def commands(self, path, *, quantized=True):
        return (f"my-engine {path.name}",)

MINE = Mine()

def drives(path, *, split="day"):
    def read(number):
        points = np.zeros((3000, 5), np.float32)
        random = np.random.default_rng(number)
        points[:, :2] = random.uniform(-50, 50, (3000, 2))
        points[:, 2] = random.uniform(-1.8, 2, 3000)
        points[:, 3] = random.integers(0, 256, 3000)
        return Frame(f"{split} of {path} {number}", points)
    return FrameList("drives", range(3), read)
"""
ENTRY_POINTS = """
[bevquant.targets]
mine = outside:MINE
my-engine = outside:MINE

[bevquant.datasets]
drives = outside:drives
broken = outside:nothing
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is found, as in site-packages."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "outside.py").write_text(PACKAGE)
    told = folder / "outside-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


SERVE = """
import atexit, contextlib, gc, io, json, sys
gc.disable(); atexit.register(gc.freeze)  # a tenth of what imports and captures take
from bev_data import InputError
from bev_data.datasets import register_dataset
from bevfusion_quant.cli import main
from bevfusion_quant.pages import EvaluatedRun

EvaluatedRun.draw = lambda *given: None  # pictures are another test's subject

def opener(path=None, *, cameras="all"):
    raise InputError(f"nothing at {path} with cameras {cameras}")

register_dataset("own", opener)
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(json.loads(line))
        except SystemExit as left:
            code = left.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def run(here: Path) -> Iterator[Callable[..., str]]:
    """A command's output in a process that finds the package; what it says where it is refused.

    One process runs them all: each would import torch and its compiler anew.
    """
    environment = {
        **os.environ, "COLUMNS": "400", "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join([str(here), str(Path(__file__).parent)]),  # `own_detector`
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=here, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def command(*arguments: str, code: int = 0) -> str:
            print(json.dumps(arguments), file=process.stdin, flush=True)
            returned, out, err = json.loads(process.stdout.readline())
            assert returned == code, err
            assert "Traceback" not in err
            return out if code == 0 else err

        yield command


def test_help_names_what_packages_bring(run: Callable[..., str]) -> None:
    data, target = run("ptq", "--help"), run("export", "--help")
    kinds = next(line for line in data.splitlines() if "--dataset {" in line)
    names = next(line for line in target.splitlines() if "--target {" in line)
    assert {"drives", "street", "kitti"} <= set(
        kinds.partition("{")[2].rpartition("}")[0].split(",")
    )
    assert {"mine", "my-engine", "bpu"} <= set(
        names.partition("{")[2].rpartition("}")[0].split(",")
    )


def test_unknown_names_are_answered_with_those_there_are(run: Callable[..., str]) -> None:
    message = run("ptq", "--dataset", "waymo", code=2)
    assert "--dataset waymo: kind 'waymo': expected one of files, kitti" in message
    assert "drives" in message
    assert "a package adds one as an entry point of the group bevquant.datasets" in message
    assert "'nothing'" in run("ptq", "--dataset", "broken", "--data", ".", code=2)


def test_a_kind_that_a_program_registers_reaches_its_commands(run: Callable[..., str]) -> None:
    message = run("ptq", "--config", "tiny", "--branch", "lidar", "--dataset", "own", code=2)
    assert "bevfusion-quant: nothing at None with cameras none" in message


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnxruntime", "onnxscript", "spconv")),
    reason="files need onnxruntime and onnxscript, the model spconv",
)
def test_a_run_on_its_frames_is_written_for_its_engine(here: Path, run: Callable[..., str]) -> None:
    frames = ("--dataset", "drives", "--data", ".", "--split", "night", "--count", "1")
    run("ptq", "--model", "own_detector:make", *frames, "--name", "a")
    summary = json.loads((here / "runs/a/summary.json").read_text())
    assert [frame["name"] for frame in summary["frames"]] == ["night of . 0"]

    message = run("export", "--run", "runs/a", "--target", "nobody", code=2)
    assert "target 'nobody': expected one of " in message
    assert "mine" in message
    assert "a package adds one as an entry point of the group bevquant.targets" in message
    message = run("export", "--run", "runs/a", "--target", "portable", code=2)
    assert "it takes the sparse encoder alone" in message

    run("export", "--run", "runs/a", "--target", "my-engine", *frames, "--name", "b")
    manifest = json.loads((here / "runs/b/onnx/manifest.json").read_text())
    assert manifest["verified"] is True
    dense = next(file for file in manifest["files"] if file["kind"] == "int8")
    assert dense["runs_on"] == "my engine"
    assert dense["build"] == f"my-engine {dense['name']}"
    assert dense["unverified"] == ["it runs nowhere"]
    page = (here / "runs/b/report.html").read_text()
    assert "The engine was not run" in page

"""`bevfusion-quant export` on a LiDAR run: what it writes, proves, refuses and leaves."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
import onnx
import onnxruntime
from clouds import cloud
from run_files import digest
from without_pictures import without_pictures

from bev_data.points import read_frames
from bevfusion.deployment import SetExport
from bevfusion.model import CONFIGS
from bevfusion_quant.cli import main
from bevfusion_quant.ptq import FrameBatches, load_run
from bevquant_export import with_half_constants
from bevquant_int8sim import simulate
from bevquant_quantizers import plugins

NAME = "lidar.backbone.xyz.onnx"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LiDAR run, its frame, and its file for ONNX Runtime."""
    runs = tmp_path_factory.mktemp("runs")
    np.savez(runs / "frame.npz", points=cloud(1500))
    given = f"--points {runs}/frame.npz --runs {runs}"
    with without_pictures():
        assert main(f"ptq {given} --config tiny --method max --name a".split()) == 0
    assert main(export(runs, "--target onnxruntime --name files")) == 0
    return runs


def export(runs: Path, more: str, run: str = "a") -> list[str]:
    return f"export --run {runs}/{run} --points {runs}/frame.npz --runs {runs} {more}".split()


def manifest(folder: Path) -> dict:
    return json.loads((folder / "onnx" / "manifest.json").read_text(), parse_constant=pytest.fail)


def test_the_manifest_says_what_lies_in_the_folder(runs: Path) -> None:
    folder = runs / "files" / "onnx"
    told = manifest(runs / "files")
    assert (told["format"], told["version"]) == ("bevfusion-quant export", 1)
    assert (told["target"], told["verified"], told["failures"]) == ("onnxruntime", True, [])
    assert told["command"].startswith("bevfusion-quant export --run ")
    assert told["run"] == str(runs / "a")
    assert {"torch", "onnx", "onnxruntime", "bevquant-export"} <= set(told["versions"])
    (file,) = told["files"]
    assert {p.name for p in folder.iterdir()} == {file["name"], "manifest.json"} == {
        NAME, "manifest.json",
    }  # fmt: skip
    content = (folder / NAME).read_bytes()
    assert file["sha256"] == hashlib.sha256(content).hexdigest()
    assert file["size"] == len(content)
    graph = onnx.load(folder / NAME).graph
    assert [port["name"] for port in file["inputs"]] == [port.name for port in graph.input]
    assert [port["name"] for port in file["outputs"]] == [port.name for port in graph.output]
    assert file["findings"] == []
    assert file["checked"]["tensors"] == 30
    assert file["checked"]["wrong"] == 0
    assert file["checked"]["different"] == []
    assert len(file["ranges"]) == 20
    assert all(value > 0 for value in file["ranges"].values())


def test_the_portable_file_takes_any_number_of_voxels(runs: Path) -> None:
    (file,) = manifest(runs / "files")["files"]
    assert file["voxel_bound"] is None
    assert [port["shape"] for port in file["inputs"]] == [["voxels", 5], ["voxels", 4], [1]]


def test_stock_onnxruntime_gives_the_integer_models_map(runs: Path) -> None:
    run = load_run(runs / "a")
    batch = FrameBatches(
        list(read_frames([runs / "frame.npz"])), CONFIGS["tiny"], run.quantized_model
    )[0]
    wanted = simulate(with_half_constants(run.quantized_model), tuple(batch))(*batch)
    session = onnxruntime.InferenceSession(
        runs / "files" / "onnx" / NAME, providers=["CPUExecutionProvider"]
    )
    given = {"features": batch.features.numpy(), "coords": batch.coords.numpy()}
    (made,) = session.run(None, {**given, "batch_size": np.array([1])})
    assert made.shape == (1, 128, 40, 40)
    assert torch.equal(torch.from_numpy(made), wanted)


def test_page_and_summary_have_four_executions(runs: Path) -> None:
    page = (runs / "files" / "report.html").read_text(encoding="utf-8")
    assert '<section id="export"' in page
    assert page.count("<tr", page.index('id="export-layers"')) >= 31
    summary = json.loads((runs / "files" / "summary.json").read_text())
    layers = summary["export"]["files"][0]["layers"]
    told = [layer for layer in layers if layer["op"] == "sparse_conv"]
    assert len(told) == 21
    assert sum(layer["integer_sqnr_db"] is not None for layer in told) >= 20
    (stage,) = summary["export"]["stages"]
    assert stage["onnx_sqnr_db"] == pytest.approx(stage["integer_sqnr_db"], abs=0.1)


def refused(
    runs: Path, more: str, capsys: pytest.CaptureFixture[str], run: str = "a", code: int = 2
) -> str:
    """An export that must fail: one message, nothing written, the run as it was."""
    before, names = digest(runs), sorted(p.name for p in runs.iterdir())
    assert main(export(runs, more, run)) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert digest(runs) == before
    assert sorted(p.name for p in runs.iterdir()) == names
    return captured.err.splitlines()[-1]


def test_what_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be loaded as a run" in refused(runs, "", capsys, "absent")
    message = refused(runs, "", capsys, "files")
    assert f"figures of {runs / 'a'} and no model" in message
    message = refused(runs, "--target bpu", capsys)
    assert "--target bpu" in message
    assert "ptq --target bpu" in message
    message = refused(runs, "--name files", capsys)
    assert "exists already" in message
    assert "--overwrite" in message
    assert "is the run that is read" in refused(runs, "--name a --overwrite", capsys)


def test_a_damaged_run_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    shutil.copy(runs / "frame.npz", tmp_path)
    path = tmp_path / "a" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "weights.safetensors is not the file" in refused(tmp_path, "", capsys)


@pytest.mark.parametrize("library", ["onnxruntime", "onnxscript"])
def test_a_missing_library_is_named_with_its_extra(
    library: str, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plugins, "find_spec", lambda name: None if name == library else find_spec(name)
    )
    message = refused(runs, "", capsys)
    assert f"export needs {library}" in message
    assert "pip install onnxruntime onnxscript" in message


def test_an_unwritable_place(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "file").write_text("no folder")
    try:
        arguments = export(runs, "--runs")
        assert main([*arguments, str(runs / "file" / "deep")]) == 2
    finally:
        (runs / "file").unlink()
    assert "check that the place is writable" in capsys.readouterr().err


def test_an_interrupted_export_leaves_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert list(runs.glob(".export.*/onnx/*.onnx"))  # a file is there already
        raise KeyboardInterrupt

    monkeypatch.setattr(SetExport, "check", interrupted)
    assert "interrupted: nothing half-written is left" in refused(runs, "", capsys)
    assert not list(runs.glob(".*"))


@pytest.fixture
def spoiling(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight of the last layer changes its sign between writing and checking."""
    check = SetExport.check

    def spoiled(made: SetExport) -> None:
        (path,) = runs.glob(".bad.*/onnx/*.onnx")
        proto = onnx.load(path)
        last = [c for c in proto.graph.initializer if c.name.endswith(".weight")][-1]
        last.raw_data = (np.frombuffer(last.raw_data, np.float16) * np.float16(-1)).tobytes()
        onnx.save(proto, path)
        check(made)

    monkeypatch.setattr(SetExport, "check", spoiled)


@pytest.mark.usefixtures("spoiling")
def test_files_that_compute_something_else_end_the_command_with_one(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(export(runs, "--target tensorrt --name bad")) == 1
    captured = capsys.readouterr()
    folder = runs / "bad"
    try:
        message = captured.err.splitlines()[-1]
        assert "do not compute the model" in message
        assert str(folder / "onnx") in message
        assert "Not verified" in captured.out
        told = manifest(folder)
        assert told["verified"] is False
        assert told["failures"]
    finally:
        shutil.rmtree(folder)

"""`bevfusion-quant simulate` on a finished run: what it writes, refuses and leaves alone."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from clouds import cloud
from run_files import digest, summary
from without_pictures import without_pictures

from bev_data.points import read_frames
from bevfusion.model import CONFIGS
from bevfusion_quant.cli import main
from bevfusion_quant.pages import read_sections
from bevfusion_quant.ptq import FrameBatches, load_run
from bevfusion_quant.report import run_report
from bevquant_int8sim import IntegerModel, simulate

TINY = CONFIGS["tiny"]
LIDAR = "encoders.lidar.backbone"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LiDAR run whose first layer was left out, the frame beside it, and its simulation."""
    runs = tmp_path_factory.mktemp("runs")
    np.savez(runs / "frame.npz", points=cloud(2000))
    given = f"--points {runs}/frame.npz --runs {runs}"
    with without_pictures(page=True):
        assert main(f"ptq {given} --config tiny --exclude conv_input --name a".split()) == 0
    assert main(f"simulate --run {runs}/a {given} --name one".split()) == 0
    return runs


def test_section_and_summary_are_added(runs: Path) -> None:
    written = summary(runs / "one")["integers"]
    rows = {row["path"]: row for row in written["layers"]}
    assert len(rows) > 21
    assert written["wrong"] == []
    for row in written["layers"]:
        assert (row["forced_max_steps"] or 0) <= 1 or row["why"], row["path"]
    layer = rows[f"{LIDAR}.encoder_layers.encoder_layer2.0.conv1"]
    assert (layer["op"], layer["form"]) == ("sparse_conv + ReLU", "int8")
    assert 8 < layer["peak_bits"] < 32
    assert layer["integer_sqnr_db"] == pytest.approx(layer["fake_sqnr_db"], abs=0.3)
    last = rows[f"{LIDAR}.conv_out.0"]
    assert (last["form"], last["max_steps"]) == ("float", None)
    assert last["peak_bits"] > 8
    (stage,) = written["stages"]
    assert (stage["stage"], stage["layer"]) == ("lidar", f"{LIDAR}.conv_out.0")
    assert len(written["frame_seconds"]) == 1
    page = (runs / "one" / "report.html").read_text(encoding="utf-8")
    assert '<section id="integers"' in page
    assert written["backend"] in page
    assert "integers" not in summary(runs / "a")


def test_layers_are_compared_on_as_many_frames_as_asked(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = np.load(runs / "frame.npz")["points"][:1500]
    np.savez(runs / "other.npz", points=points)
    given = f"simulate --run {runs}/a --points {runs}/frame.npz {runs}/other.npz --runs {runs}"
    with without_pictures(page=True):
        assert main(f"{given} --layer-frames 1 --name first".split()) == 0
    printed = capsys.readouterr().out
    assert "Operations were compared on the first of 2 frames, boxes on all." in printed
    made, alone = summary(runs / "first"), summary(runs / "one")
    assert made["integers"]["layers"] == alone["integers"]["layers"]
    assert made["layers"] != alone["layers"]  # float against fake-quantized: on all
    assert len(made["integers"]["frame_seconds"]) == 2
    page = (runs / "first" / "report.html").read_text(encoding="utf-8")
    assert "Operations were compared on the first of 2 frames" in page
    assert main(f"{given} --layer-frames 0 --name none".split()) == 2
    assert "layer_frames=0: compare layers on one frame or more" in capsys.readouterr().err


def test_what_stays_float_says_why(runs: Path) -> None:
    islands = {
        item["path"]: item["reason"] for item in summary(runs / "one")["integers"]["islands"]
    }
    assert "--exclude" in islands[f"{LIDAR}.conv_input.0"]
    page = (runs / "one" / "report.html").read_text(encoding="utf-8")
    assert islands[f"{LIDAR}.conv_input.0"] in page


def test_the_saved_model_computes_the_same(runs: Path) -> None:
    (saved,) = summary(runs / "one")["integers"]["saved"]
    assert saved == {"part": "model", "folder": "integer/model", "reason": ""}
    run = load_run(runs / "a")
    frames = list(read_frames([runs / "frame.npz"]))
    batch = FrameBatches(frames, TINY, run.quantized_model)[0]
    loaded = IntegerModel.load(runs / "one" / saved["folder"])
    wanted = simulate(run.quantized_model, tuple(batch), backend="torch")(*batch)
    assert torch.equal(loaded(*batch), wanted)
    assert not torch.equal(wanted, run.quantized_model(*batch))


def test_again_and_on_other_kernels_it_gives_the_same_table(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(runs / "a")
    arguments = f"simulate --run {runs}/a --points {runs}/frame.npz --runs {runs}"
    with without_pictures(page=True):
        assert main([*arguments.split(), "--backend", "torch"]) == 0
    text = capsys.readouterr().out
    folder = Path(re.findall(r"Written to (\S+):", text)[0])
    assert folder == runs / "simulate"
    try:
        here, there = (summary(runs / name)["integers"] for name in ("one", "simulate"))
        assert here["layers"] == there["layers"]
        assert there["backend"].startswith("torch")
        assert f"Kernels: {there['backend']}" in text
        first = next(r for r in there["layers"] if (r["max_steps"] or 0) > 1)
        assert f"{first['path']} (" in text
        assert "departs first" in text
        assert re.search(r"^lidar\.backbone\.conv_out\.0 +sparse_conv .* 1\d$", text, re.MULTILINE)
        assert digest(runs / "a") == before
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def spoiled(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be spoiled."""
    shutil.copytree(runs / "a", tmp_path / "a")
    return tmp_path / "a"


def refused(
    runs: Path, run: Path, capsys: pytest.CaptureFixture[str], more: str = "", points: str = ""
) -> str:
    """A simulation that must be refused: exit code 2, one message, nothing written."""
    before, names = digest(run), sorted(p.name for p in runs.iterdir())
    points = points or f"--points {runs}/frame.npz"
    assert main(f"simulate --run {run} {points} --runs {runs} {more}".split()) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert digest(run) == before
    assert sorted(p.name for p in runs.iterdir()) == names
    return captured.err.splitlines()[-1]


def test_what_is_no_run(runs: Path, spoiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be loaded as a run" in refused(runs, runs / "absent", capsys)
    message = refused(runs, runs / "one", capsys)
    assert f"figures of {runs / 'a'} and no model" in message
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps({**config, "version": 99}))
    assert "schema is version 99" in refused(runs, spoiled, capsys)
    (spoiled / "config.json").write_text(json.dumps({**config, "format": "other"}))
    assert "format 'other'" in refused(runs, spoiled, capsys)


def test_changed_weights(runs: Path, spoiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spoiled / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "weights.safetensors is not the file" in refused(runs, spoiled, capsys)
    path.unlink()
    assert "weights.safetensors" in refused(runs, spoiled, capsys)


def test_a_run_without_ranges(
    runs: Path, spoiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    path = spoiled / "weights.safetensors"
    state = load_file(path)
    name = f"{LIDAR}.encoder_layers.encoder_layer2.0.conv1._input_quantizer"
    shared = [key for key in state if torch.equal(state[key], state[f"{name}._amax"])]
    save_file({**state, **{key: torch.zeros_like(state[key]) for key in shared}}, path)
    config = json.loads((spoiled / "config.json").read_text())
    config["sha256"]["weights.safetensors"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (spoiled / "config.json").write_text(json.dumps(config))
    message = refused(runs, spoiled, capsys)
    assert f"{name} (its range 0 is zero" in message
    assert "calibrate again with bevfusion-quant ptq" in message


def test_frames_and_names(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "a"
    assert "absent.npz: no such file" in refused(
        runs, run, capsys, points=f"--points {runs}/absent.npz"
    )
    assert "no frames given" in refused(runs, run, capsys, points="--first 0")
    assert "one exists already" in refused(runs, run, capsys, "--name one")
    assert "is the run that is read" in refused(runs, run, capsys, "--name a --overwrite")


def test_kernels_that_this_machine_lacks(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(backend: str) -> None:
        raise ValueError(f"{backend} cannot be used here: no such unit")

    monkeypatch.setattr("bevquant_int8sim.usable_backend", lost)
    message = refused(runs, runs / "a", capsys, "--backend vnni")
    assert "--backend vnni cannot be used here: no such unit" in message


def test_an_interrupt_leaves_run_and_folder_as_they_were(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert list(runs.glob(".simulate.*"))  # the folder to be is there
        raise KeyboardInterrupt

    monkeypatch.setattr("bevfusion_quant.integer.LayerComparison", interrupted)
    assert "interrupted: nothing half-written is left" in refused(runs, runs / "a", capsys)
    assert not list(runs.glob(".*"))


def test_a_simulation_that_is_replaced_stays_when_the_new_one_fails(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "model")

    before = digest(runs / "one")
    monkeypatch.setattr("bevquant_int8sim.IntegerModel.save", full)
    assert "No space left" in refused(runs, runs / "a", capsys, "--name one --overwrite")
    assert digest(runs / "one") == before


def test_the_page_to_sign_reads_what_the_commands_wrote(runs: Path, tmp_path: Path) -> None:
    result = run_report(runs / "a", take=[runs / "one"], runs=tmp_path)
    assert [evidence.kind for evidence in result.gathered.all] == ["ptq", "simulation"]
    (group,) = result.headline
    assert [row.model for row in group.rows] == ["Float", "PTQ", "PTQ, integers"]
    stage = summary(runs / "one")["integers"]["stages"][0]
    assert group.rows[-1].sqnr_db == stage["integer_sqnr_db"]
    states = {check.question: check.state for check in result.checks}
    assert states["Do integers compute the quantized model?"] == "good"
    assert states["What does it lose against float?"] == "missing"  # no head finds boxes
    sections = read_sections(result.folder / "page.json")
    assert {"verdict", "layers", "quantizers", "integers", "decisions"} <= set(sections)

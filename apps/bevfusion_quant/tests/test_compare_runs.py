"""Several runs judged in one pass: the figures that each gets alone, and what is no comparison."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bpu_split import small_frame
from decoder_runs import copied_run
from run_files import summary
from safetensors.torch import load_file, save_file
from without_pictures import without_pictures

from bev_data.metrics import Bootstrap
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.compare import (
    ComparedRun,
    CompareResult,
    Comparison,
    comparison_text,
    names_of,
    run_compare,
)
from bevfusion_quant.pages import read_sections
from bevfusion_quant.ptq import run_evaluate
from bevfusion_quant.run import RunSettings, as_settings

BOOTSTRAP = Bootstrap(resamples=20)
SETTINGS = {"eight": {}, "four": {"weight_bits": 4}, "apart": {"fold": False}}


@cache
def frames() -> list[Any]:
    return [small_frame(seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def runs(made_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in SETTINGS.items():
        copied_run(made_runs, folder / name, **settings)
    return folder


@pytest.fixture(scope="module")
def result(runs: Path) -> CompareResult:
    return run_compare(
        [runs / name for name in SETTINGS], frames(), integers="auto", bootstrap=BOOTSTRAP,
        runs=runs, name="beside", command="bevfusion-quant compare …",
    )  # fmt: skip


def test_each_run_gets_the_figures_that_it_gets_alone(runs: Path, result: CompareResult) -> None:
    found = summary(result.folder)["accuracy"]["models"]
    assert list(found) == [
        "float", "eight quantized", "eight integers", "four quantized", "four integers",
        "apart quantized",
    ]  # fmt: skip
    with without_pictures():
        run_evaluate(
            runs / "four", frames(), integers="auto", bootstrap=BOOTSTRAP, runs=runs, name="alone"
        )
    alone = summary(runs / "alone")["accuracy"]["models"]
    assert alone["float"]["mean_ap"] > 0.05
    assert alone["float"]["mean_ap"] != alone["quantized"]["mean_ap"]
    for name, key in (("float", "float"), ("quantized", "four quantized"),
                      ("integer", "four integers")):  # fmt: skip
        assert found[key] == alone[name], key
    assert found["eight quantized"] != found["four quantized"]


def test_what_is_written_says_which_runs_and_how_they_differ(
    runs: Path, result: CompareResult
) -> None:
    config = json.loads((result.folder / "config.json").read_text())
    for entry, name in zip(config["compares"], SETTINGS, strict=True):
        own = json.loads((runs / name / "config.json").read_text())
        assert Path(entry["run"]) == runs / name
        assert entry["sha256"] == own["sha256"]
        assert entry["weight_bits"] == own["weight_bits"]
    written = summary(result.folder)
    assert written["compares"] == config["compares"]
    assert written["notes"] == [
        "apart is not among the integers: ptq --no-fold left batch norms in place."
    ]
    sections = read_sections(result.folder / "page.json")
    html = sections["comparison"].html
    for text in ("four integers", "Weight bits", "Batch norms folded"):
        assert text in html
    headline, _, settings, notes = comparison_text(result.comparison)
    assert [line.split("  ")[0] for line in headline.splitlines()[2:]] == list(
        written["accuracy"]["models"]
    )
    assert settings.splitlines()[0].split() == [
        "run", "weight", "bits", "batch", "norms", "folded", "folder"
    ]  # fmt: skip
    assert "apart is not among the integers" in notes


def test_a_trained_run_is_told_from_the_one_it_began_with() -> None:
    settings = {"method": "mse", "weight_bits": 4}
    runs = tuple(
        ComparedRun(name, name, as_settings(RunSettings, more), integers=False)
        for name, more in (("ptq", settings), ("qat", {**settings, "qat": {"steps": 1}}))
    )
    none: Any = None
    asked = tuple(dataclasses.replace(run, why_not="of this") for run in runs)
    assert Comparison(asked, none).left_out() == ["ptq, qat are not among the integers: of this."]
    assert Comparison(runs, none).differing() == ["trained by qat"]
    assert [run.shown_settings()["trained by qat"] for run in runs] == [False, True]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    folders = [tmp_path / part for part in ("a/eight", "b/eight", "b/four")]
    assert names_of(folders) == [str(folders[0]), str(folders[1]), "four"]


def test_what_is_no_comparison_is_refused(runs: Path, tmp_path: Path) -> None:
    bpu, part, other = (tmp_path / name for name in ("bpu", "part", "other"))
    for folder, change in (
        (bpu, {"target": "bpu"}),
        (part, {"branch": "camera"}),
        (other, {"sha256": {}}),
    ):
        shutil.copytree(runs / "eight", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
    state = load_file(other / "weights.safetensors")
    state["decoder.backbone.blocks.0.0.weight"] *= 1.5
    save_file(state, other / "weights.safetensors")
    eight, target = runs / "eight", tmp_path / "runs"
    for given, match in (
        ([], "no runs to compare"),
        ([eight, eight], "is given twice"),
        ([eight, bpu], "is a run for a BPU"),
        ([eight, part], "holds the camera branch alone, without a head"),
        ([eight, other], "is not the file that the run wrote"),
        ([eight, tmp_path], "cannot be loaded as a run"),
    ):
        with pytest.raises(InputError, match=match):
            run_compare(given, frames()[:1], runs=target)
    unlabelled = [dataclasses.replace(frames()[0], labels=None)]
    with pytest.raises(InputError, match="none of the frames has labels"):
        run_compare([eight], unlabelled, runs=target)
    with pytest.raises(InputError, match="would be replaced"):
        run_compare([eight], frames()[:1], runs=runs, name="eight", overwrite=True)
    assert not target.exists()
    assert (eight / "weights.safetensors").exists()


def test_the_command_refuses_before_frames_are_made(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = f"compare --run {runs / 'eight'} --runs {tmp_path / 'runs'}"
    for options, match in (
        ("--points a.bin", "files of points have no labels"),
        ("--backend torch", "--backend torch goes with --integers"),
        ("--resamples -1", "must be from 0 to"),
    ):
        assert main([*start.split(), *options.split()]) == 2
        assert match in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()

"""The command line's help, and what --config FILE, --dry-run, --quiet and --json do."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
from without_pictures import without_pictures

from bevfusion_quant.cli import main
from bevfusion_quant.commands import COMMANDS
from bevfusion_quant.options._help import GROUPS, OFF_SWITCHES, _help_texts, flat, grouped
from bevfusion_quant.ptq import PtqResult
from bevfusion_quant.verdict import verdict

GROUPED = {name for names in GROUPS.values() for name in names}
PTQ = ["ptq", "--dataset", "street", "--config", "tiny", "--branch", "fuser"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.__name__.lower())
def test_every_option_has_a_group_and_a_help(command: type) -> None:
    texts = _help_texts(command)
    for one in fields(command):
        assert one.name in GROUPED, f"{command.__name__}: {one.name} has no group"
        assert texts[one.name], f"{command.__name__}: {one.name} has no help"
        assert one.default is not True or one.name in OFF_SWITCHES


def test_the_nested_form_gives_the_same_command_back() -> None:
    command = COMMANDS[1]
    read = grouped(command)
    nested = {
        group.name: group.type()  # type: ignore[operator]
        for group in fields(read)
    }
    assert flat(command, read(**nested)) == command()


def test_help_has_titles_and_no_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ptq", "--help"])
    text = capsys.readouterr().out
    for title in ("data", "model", "calibration", "precision", "output"):
        assert f"{title} options" in text
    assert "None" not in text


def test_help_names_everything_that_an_option_takes(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for command in ("", "demo", "ptq", "train", "tree"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        texts[command] = re.sub(r"[│\s]+", "", capsys.readouterr().out)
    assert "--version" in texts[""]
    assert all(",FILE}" in text for command, text in texts.items() if command)
    for command in ("ptq", "tree"):
        assert "mmdet3d:CONFIG.py,openpcdet:CONFIG.yaml,package.module:function}" in texts[command]


@pytest.mark.parametrize("option", ["--weights", "--plan"])
def test_a_missing_file_is_refused_before_anything_is_built(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PTQ, option, "runs/none.pth", "--dry-run"]) == 2
    assert f"{option} runs/none.pth: no such file in {Path('runs').absolute()}" in (
        capsys.readouterr().err
    )
    assert main([*PTQ, option, ".", "--dry-run"]) == 2
    assert f"{option} .: it is a folder; give the file in it" in capsys.readouterr().err


def test_demo_takes_the_settings_of_a_run_with_weights(
    quiet_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((quiet_run / "config.json").read_text("utf-8"))
    weights = quiet_run / "weights.safetensors"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**settings, "weights": str(weights)}), encoding="utf-8")
    assert main(["demo", "--config", str(path), "--dry-run"]) == 0  # warnings are errors
    assert f"weights {weights}" in capsys.readouterr().out


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    assert main([*PTQ, "--count", "3", "--runs", str(runs), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "frames 3" in text
    assert "branch fuser" in text
    assert f"{runs / 'ptq'} (new)" in text
    assert not runs.exists()


def test_dry_run_refuses_what_the_run_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ptq", "--dataset", "kitti", "--dry-run"]) == 2
    assert "--dataset kitti needs --data" in capsys.readouterr().err
    (tmp_path / "file").write_text("no folder, and no plan")
    for options, message in (
        (["--name", "."], "'.' cannot name a run"),
        (["--runs", str(tmp_path / "file")], "it is a file, not a folder of runs"),
        (["--runs", str(tmp_path), "--name", "file"], "exists already"),
        (["--weight-bits", "3"], "weights have 4 to 8 bits"),
        (["--calibration-frames", "9"], "--calibration-frames 9"),
        (["--plan", str(tmp_path / "file")], "no plan of precisions"),
    ):
        assert main([*PTQ, *options, "--dry-run"]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, beside the text that it printed."""
    runs = tmp_path_factory.mktemp("runs")
    arguments = [*PTQ, "--method", "max", "--seed", "3", "--runs", str(runs), "--quiet"]
    with without_pictures(page=True), redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    (runs / "printed.txt").write_text(printed.getvalue(), encoding="utf-8")
    return runs / "ptq"


def test_config_file_gives_defaults_and_options_win(
    quiet_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["ptq", "--dataset", "street", "--config", str(quiet_run), "--dry-run"]
    assert main([*again, "--method", "mse"]) == 0
    text = capsys.readouterr().out
    assert "config tiny" in text
    assert "branch fuser" in text
    assert "seed 3" in text
    assert "method mse" in text


OF_TOMORROW = '{"format": "bevfusion-quant run", "version": 99, "config": "tiny"}'


@pytest.mark.parametrize("content", ["not json", "[]", "{}", OF_TOMORROW, None])
def test_config_file_of_something_else_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["ptq", "--dataset", "street", "--config", str(path)]) == 2
    message = capsys.readouterr().err
    assert f"--config {path}" in message
    assert content is not None or "give one of nuscenes, tiny" in message
    assert content != OF_TOMORROW or "schema is version 99, this program reads 1 to" in message


@pytest.mark.usefixtures("no_pictures")
def test_json_prints_the_summary(quiet_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["evaluate", "--run", str(quiet_run), "--dataset", "street", "--json", "--quiet"]
    assert main([*again, "--runs", str(quiet_run.parent)]) == 0
    printed = json.loads(capsys.readouterr().out)
    folder = Path(printed.pop("folder"))
    assert printed == json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_verdict_of_an_unfolded_model_offers_no_export(tmp_path: Path) -> None:
    made = PtqResult(tmp_path, [], [], [], [], {}, 0.0, quantizers=[], warnings=())
    assert "export --run" in verdict(made)[0]
    assert "need folded batch norms" in verdict(made, folded=False)[0]


def test_quiet_prints_the_verdict_alone(quiet_run: Path) -> None:
    printed = quiet_run.with_name("printed.txt").read_text(encoding="utf-8").splitlines()
    titles = [line.split("  ")[0] for line in printed]
    assert titles == ["Boxes", "Worst layer", "Weights", "Files", "Open"]
    assert f"bevfusion-quant export --run {quiet_run}" in printed[3]
    size = json.loads((quiet_run / "summary.json").read_text("utf-8"))["weight_bytes"]
    assert 0 < size["after"] < size["before"]
    assert f"{size['before'] / 2**20:.1f} MiB float32" in printed[2]

"""A run folder appears whole or not at all, and replaces nothing but a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bevfusion_quant import InputError
from bevfusion_quant.options import free_name
from bevfusion_quant.ptq import run_folder
from bevfusion_quant.report import run_report

OURS = json.dumps({"format": "bevfusion-quant run"})


def write(runs: Path, name: str = "a", *, overwrite: bool = False, text: str = "new") -> None:
    with run_folder(runs, name, overwrite=overwrite) as folder:
        (folder / "config.json").write_text(OURS)
        (folder / "text").write_text(text)


def test_appears_whole(tmp_path: Path) -> None:
    runs = tmp_path / "deep" / "runs"
    with run_folder(runs, "a", overwrite=False) as folder:
        (folder / "text").write_text("x")
        assert not (runs / "a").exists()
    assert [p.name for p in runs.iterdir()] == ["a"]
    assert (runs / "a" / "text").read_text() == "x"
    assert json.loads((runs / "a" / "digests.json").read_text())["sha256"].keys() == {"text"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_leaves_no_trace_when_ended_early(tmp_path: Path, error: type[BaseException]) -> None:
    def end_early() -> None:
        with run_folder(tmp_path / "deep" / "runs", "a", overwrite=False) as folder:
            (folder / "text").write_text("x")
            raise error

    with pytest.raises(error):
        end_early()
    assert list(tmp_path.iterdir()) == []


def test_existing_run_is_refused_before_any_work(tmp_path: Path) -> None:
    write(tmp_path)
    folder = run_folder(tmp_path, "a", overwrite=False)
    with pytest.raises(InputError, match="exists already"), folder:
        pytest.fail("the block must not run")


def test_overwrite_replaces_a_run(tmp_path: Path) -> None:
    write(tmp_path, text="old")
    write(tmp_path, overwrite=True)
    assert (tmp_path / "a" / "text").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("place", ["notes.txt", "maps/notes.txt"])
def test_overwrite_leaves_files_of_the_user_in_a_run(tmp_path: Path, place: str) -> None:
    write(tmp_path, text="old")
    (tmp_path / "a" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "a" / place).write_text("ten years of work")
    with pytest.raises(InputError, match=rf"no run has written, such as {place}"):
        write(tmp_path, overwrite=True)
    assert (tmp_path / "a" / place).read_text() == "ten years of work"
    assert (tmp_path / "a" / "text").read_text() == "old"


def test_what_a_killed_run_left_is_removed_or_put_back(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from bevfusion_quant.ptq import run_folder\n"
        "with run_folder(Path(sys.argv[1]), 'killed', overwrite=False) as folder:\n"
        "    (folder / 'text').write_text('half'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".killed.")
    moved = left.with_name(left.name.replace("killed", "moved").replace(".tmp", ".old"))
    moved.mkdir()
    (moved / "text").write_text("a run that was to be replaced")
    write(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "moved"]
    with run_folder(tmp_path, "b", overwrite=False) as living:
        write(tmp_path, "c")
        assert living.exists()  # of a run that goes on


def test_overwrite_that_fails_keeps_the_old_run(tmp_path: Path) -> None:
    write(tmp_path, text="old")

    def fail() -> None:
        with run_folder(tmp_path, "a", overwrite=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (tmp_path / "a" / "text").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_rename_that_fails_puts_the_old_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, text="old")
    rename, calls = os.rename, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:  # the old run is out of the way by then
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, overwrite=True)
    assert (tmp_path / "a" / "text").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_overwrite_leaves_what_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("ten years of work")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"format": "somebody else\'s"}')
    (tmp_path / "c").write_text("a file")
    write(tmp_path, "real")
    (tmp_path / "d").symlink_to(tmp_path / "real")
    (tmp_path / "e").symlink_to(tmp_path / "nowhere")
    for name in "abcde":
        with pytest.raises(InputError, match="is not a run of bevfusion-quant"):
            write(tmp_path, name, overwrite=True)
    assert (tmp_path / "a" / "thesis.tex").exists()
    assert (tmp_path / "real" / "text").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".hidden", "a b", "-x"])
def test_unusable_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot name a run"):
        write(tmp_path, name)


def test_a_file_in_the_place_of_all_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(InputError, match=r"--runs .*runs: it is a file.*choose another"):
        write(tmp_path / "runs", "x")


def test_a_keyword_that_places_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'overwite'"):
        run_report(tmp_path, runs=tmp_path / "runs", **{"overwite": True})
    assert not (tmp_path / "runs").exists()


def test_free_name_counts_up(tmp_path: Path) -> None:
    assert free_name(tmp_path, "demo") == "demo"
    write(tmp_path, "demo")
    assert free_name(tmp_path, "demo") == "demo-2"
    write(tmp_path, "demo-2")
    assert free_name(tmp_path, "demo") == "demo-3"

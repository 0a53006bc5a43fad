"""A run folder appears whole or not at all, and replaces nothing but a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bevfusion_quant._errors import InputError
from bevfusion_quant.ptq import free_name, run_folder

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
    (tmp_path / "a" / "left over").touch()
    write(tmp_path, overwrite=True)
    assert (tmp_path / "a" / "text").read_text() == "new"
    assert not (tmp_path / "a" / "left over").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


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
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".a.") and target == tmp_path / "a":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
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


def test_free_name_counts_up(tmp_path: Path) -> None:
    assert free_name(tmp_path, "demo") == "demo"
    write(tmp_path, "demo")
    assert free_name(tmp_path, "demo") == "demo-2"
    write(tmp_path, "demo-2")
    assert free_name(tmp_path, "demo") == "demo-3"

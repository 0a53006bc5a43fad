"""What the READMEs show is run as it stands."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/*/README.md"))]


def python_blocks(readme: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_examples_run(
    readme: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = python_blocks(readme)
    if any("spconv" in block for block in blocks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("spconv", reason="spconv is not installed")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(readme), "exec"), namespace)


def test_every_package_has_an_example() -> None:
    assert [r.parent.name for r in READMES if not python_blocks(r)] == []


def test_root_example_keeps_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("spconv", reason="spconv is not installed")
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks(ROOT / "README.md")
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert float(re.search(r"SQNR (\S+) dB", printed)[1]) > 25
    assert (tmp_path / "ranges.json").exists()

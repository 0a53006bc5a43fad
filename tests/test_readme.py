"""What the READMEs show is run as it stands, each README from its first example to its last.

Packages whose tests do so themselves are left out.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/*/README.md"))]


def python_blocks(readme: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "readme",
    [
        r
        for r in READMES
        if not (r.parent / "tests" / "test_readme.py").exists() or r.parent == ROOT
    ],
    ids=lambda p: p.parent.name,
)
def test_examples_run(
    readme: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("spconv", reason="spconv is not installed")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    for block in python_blocks(readme):
        exec(compile(block, str(readme), "exec"), names)
    if readme.parent == ROOT:
        found = re.search(r"SQNR (\S+) dB", capsys.readouterr().out)
        assert found
        assert float(found[1]) > 25
        assert (tmp_path / "ranges.json").exists()


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_has_an_example(readme: Path) -> None:
    assert python_blocks(readme)

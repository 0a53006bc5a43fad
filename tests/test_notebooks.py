"""The notebooks in `examples/`: every cell runs, and every stored output is there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
spec = importlib.util.spec_from_file_location("execute", EXAMPLES / "execute.py")
assert spec is not None
assert spec.loader is not None
execute = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)


@pytest.mark.usefixtures("spconv")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # spconv's own dense()
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for cell in execute.code_cells(json.loads(path.read_text(encoding="utf-8"))):
        printed, value = execute.run_cell("".join(cell["source"]), names)
        shows = bool(printed) + (value is not None)
        assert len(cell["outputs"]) == shows, "run examples/execute.py on the notebook again"
    assert "0 of" in str(value) or "lie between the two" in str(value)
    assert list(tmp_path.glob("*.onnx"))

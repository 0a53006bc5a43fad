"""Scripts that import the documented package run as they are."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

import bevquant_hybrid
from bevquant_hybrid.stand_in import stand_in


@pytest.fixture(autouse=True)
def _imports_as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("documented", "horizon_plugin_pytorch"):
            del sys.modules[name]


def test_modules_are_the_same_objects_and_keep_their_names() -> None:
    stand_in("documented")
    stand_in("documented")  # again changes nothing
    for path in ("", ".march", ".quantization.qconfig", ".nn.qat.conv2d", ".utils.onnx_helper"):
        ours = importlib.import_module(f"bevquant_hybrid{path}")
        spec = ours.__spec__
        assert importlib.import_module(f"documented{path}") is ours
        assert ours.__name__ == f"bevquant_hybrid{path}"
        assert ours.__spec__ is spec
        assert spec.name == ours.__name__
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        importlib.import_module("documented.nothing_of_that_name")


def test_a_package_that_is_imported_already_is_left_alone() -> None:
    with pytest.raises(ValueError, match=r"torch is imported already, from .*call this first"):
        stand_in("torch")


SCRIPT = """
import sys
from beside import NAME
import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch.march import March, set_march
set_march(March.BERNOULLI2)
assert horizon.march.get_march() == March.BERNOULLI2
assert __name__ == "__main__"
print(NAME, sys.argv, horizon.__name__)
"""


def test_a_script_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    monkeypatch.setattr(sys, "argv", ["bevquant_hybrid", str(script), "--epochs", "1"])
    runpy.run_module("bevquant_hybrid", run_name="__main__")
    argv = [str(script), "--epochs", "1"]
    assert capsys.readouterr().out == f"beside {argv} bevquant_hybrid\n"
    assert bevquant_hybrid.get_march() == "bernoulli2"
    del sys.modules["beside"]


@pytest.mark.parametrize("given", [[], ["-h"], ["nowhere.py"]])
def test_what_is_no_script_is_refused(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bevquant_hybrid", *given])
    with pytest.raises(SystemExit, match=r"usage: python -m bevquant_hybrid|no file nowhere\.py"):
        runpy.run_module("bevquant_hybrid", run_name="__main__")

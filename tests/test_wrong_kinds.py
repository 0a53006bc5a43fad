"""Public functions name themselves and the argument if it is of a wrong kind."""

from __future__ import annotations

import importlib
import inspect
import pickle
from pathlib import Path

import pytest
from torch import nn

import bevquant_export
from bevquant_graph import checked_kinds

PACKAGES = [
    importlib.import_module(f"bevquant_{name}")
    for name in ("export", "fusion", "int8sim", "qnn", "quantizers")
]
FUNCTIONS = {
    name: getattr(package, name)
    for package in PACKAGES
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
}
RESULTS = ("Module", "QdqFile", "FloatFile", "SparseOnnxModel", "Calibrator", "Target", "Iterable")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_models_and_results_of_another_kind(name: str) -> None:
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    first, others = next(iter(parameters), None), [*parameters][1:]
    if first is None or not any(kind in str(first.annotation) for kind in RESULTS):
        pytest.skip("begins with another argument")
    named = [one for one in others if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [None for one in named if one.default is one.empty]
    for wrong in (None, "a.onnx", Path("a.onnx"), [None], 3, object(), nn.Linear):
        with pytest.raises(TypeError, match=rf"^{name}: {first.name}: expected .*, got "):
            function(wrong, *required)


@pytest.mark.parametrize("name", ["lint_onnx", "lower_to_portable", "note_calibration"])
def test_models_in_place_of_files(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: \w+: expected str .*, got ReLU"):
        FUNCTIONS[name](nn.ReLU(), "a.onnx")


def test_functions_keep_their_identity() -> None:
    for name in ("compare_qdq_onnx", "check_tensors"):
        function = getattr(bevquant_export, name)
        assert pickle.loads(pickle.dumps(function)) is function


def test_what_fits_is_let_through() -> None:
    @checked_kinds
    def taken(
        paths: list[Path] | Path, model: nn.Module | None = None, sizes: tuple[int, ...] = ()
    ) -> bool:
        return True

    assert taken(Path("a"), nn.ReLU(), [1, 2])
    assert taken([Path("a")], sizes=(1,))
    with pytest.raises(TypeError, match=r"taken: paths: expected .*, got list of str"):
        taken(["a"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'paths'"):
        taken()  # type: ignore[call-arg]

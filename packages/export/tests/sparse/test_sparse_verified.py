"""A sparse file is run before it gets its name, by whatever there is; a wrong one gets none."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bevquant_export import export_sparse_onnx


def note(path):
    return next(p.value for p in onnx.load(path).metadata_props if p.key == "verified")


def with_other_weights(content):
    """The file with one weight tensor turned round: right in form, wrong in numbers."""
    proto = onnx.load_from_string(content)
    tensor = max(proto.graph.initializer, key=lambda t: np.prod(t.dims))
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values[::-1]), tensor.name))
    return proto.SerializeToString()


@pytest.mark.parametrize(
    ("dialect", "missing", "runner"),
    [
        ("libspconv", (), "bevquant"),
        ("portable", (), "onnxruntime"),
        ("portable", ("onnxruntime",), "bevquant"),
    ],
)
def test_whatever_is_installed_runs_a_file(nets, monkeypatch, tmp_path, dialect, missing, runner):
    model, example = nets.encoder(), nets.frame(0)
    for library in missing:  # importing it fails, and no search finds it
        monkeypatch.setitem(sys.modules, library, None)
    file = export_sparse_onnx(model, example, tmp_path / "n.onnx", dialect=dialect)
    assert note(tmp_path / "n.onnx").split()[0] == runner
    layers, ran = str(file).splitlines()
    assert layers.startswith(f"{file.path}: layers: ")
    assert ran.startswith(f"run by {file.verified}: 0 of ")
    export = importlib.import_module("bevquant_export.sparse._export")
    real = export.verified
    damaged = lambda content, *rest, **more: real(with_other_weights(content), *rest, **more)  # noqa: E731
    monkeypatch.setattr(export, "verified", damaged)
    with pytest.raises(ValueError, match=r"departs from the integer model.*nothing was written"):
        export_sparse_onnx(model, example, tmp_path / "wrong.onnx", dialect=dialect)
    assert [p.name for p in tmp_path.iterdir()] == ["n.onnx"]

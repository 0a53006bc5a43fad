"""A sparse file is run before it gets its name, by whatever there is; a wrong one gets none."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from bevquant_export import export_sparse_onnx, with_half_constants
from bevquant_int8sim import IntegerModel, simulate


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
    layers, *_, ran = str(file).splitlines()
    assert layers.startswith(f"{file.path}: layers: ")
    assert ran.startswith(f"run by {file.verified}: 0 of ")
    export = importlib.import_module("bevquant_export.sparse._export")
    real = export.verified
    damaged = lambda content, *rest, **more: real(with_other_weights(content), *rest, **more)  # noqa: E731
    monkeypatch.setattr(export, "verified", damaged)
    with pytest.raises(ValueError, match=r"departs from the integer model.*nothing was written"):
        export_sparse_onnx(model, example, tmp_path / "wrong.onnx", dialect=dialect)
    assert [p.name for p in tmp_path.iterdir()] == ["n.onnx"]


@pytest.mark.parametrize("dialect", ["libspconv", "portable"])
def test_integers_of_fewer_voxels_make_the_same_file(nets, tmp_path, dialect):
    model, (features, coords, frames) = nets.encoder(), nets.frame(0)
    few = features[: len(features) // 2], coords[: len(coords) // 2], frames
    integers = simulate(with_half_constants(model), few)
    made = [
        export_sparse_onnx(given, (features, coords, frames), tmp_path / name, dialect=dialect)
        for name, given in (("model.onnx", model), ("integers.onnx", integers))
    ]
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert made[0].differences == made[1].differences
    assert torch.equal(made[0].returned, made[1].returned)


def test_integers_that_a_file_does_not_hold_are_refused(nets, tmp_path):
    model, example = nets.encoder(), nets.frame(0)
    with pytest.raises(ValueError, match=r"float16 does not hold.*with_half_constants"):
        export_sparse_onnx(simulate(model, example), example, tmp_path / "a.onnx")
    simulate(with_half_constants(model), example).save(tmp_path / "model")
    loaded = IntegerModel.load(tmp_path / "model")
    with pytest.raises(ValueError, match=r"loaded from a folder; give the calibrated model"):
        export_sparse_onnx(loaded, example, tmp_path / "a.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]

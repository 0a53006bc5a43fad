"""What exhibits are made of: a builder of small files, and encoders written for the engines."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

_ENCODERS = Path(__file__).parents[2] / "packages/export/tests/sparse/sparse_encoders.py"


class Net:
    """Nodes and constants of a small dense file: x [1, 4, 4, 4] to y."""

    def __init__(self):
        self.nodes, self.tensors, self.domains = [], {}, {}
        self.integer, self.zero, self.opset = np.int8, 0, 13

    def const(self, name, values, dtype=np.float32):
        self.tensors[name] = np.asarray(values, dtype)
        return name

    def add(self, op, inputs, output, domain="", **attributes):
        name = f"{output}.{op}"
        self.nodes.append(helper.make_node(op, inputs, [output], name, domain=domain, **attributes))
        if domain:
            self.domains[domain] = 1
        return output

    def pair(self, x, made, scale=0.1, zero=None, dtype=None, **attributes):
        """QuantizeLinear and DequantizeLinear."""
        dtype, zero = dtype or self.integer, self.zero if zero is None else zero
        s = self.const(f"{made}.s", scale)
        z = self.const(f"{made}.z", np.full(np.shape(scale), zero), dtype)
        self.add("QuantizeLinear", [x, s, z], f"{made}.q", **attributes)
        return self.add("DequantizeLinear", [f"{made}.q", s, z], made, **attributes)

    def weight(self, name, shape=(4, 4, 3, 3), axis=0, scale=0.01, dtype=np.int8, zero=0):
        """Integers behind a DequantizeLinear, a scale for each output channel."""
        integers = np.random.default_rng(1).integers(-100, 100, shape) + zero
        s = self.const(f"{name}.s", np.full(shape[axis], scale))
        z = self.const(f"{name}.z", np.full(shape[axis], zero), dtype)
        self.const(name, integers, dtype)
        return self.add("DequantizeLinear", [name, s, z], f"{name}.dq", axis=axis)

    def conv(self, x, made, op="Conv", bias=None, weight=None, **attributes):
        weight = weight or self.weight(f"{made}.w", axis=int(op == "ConvTranspose"))
        bias = bias or self.const(f"{made}.b", [0.1, 0.2, 0.3, 0.4])
        return self.add(op, [x, weight, bias], made, **{"pads": [1] * 4, **attributes})

    def model(self, y, shape=(1, 4, 4, 4)):
        info = helper.make_tensor_value_info
        used = {name for node in self.nodes for name in node.input}
        graph = helper.make_graph(
            self.nodes, "exhibit",
            [info("x", TensorProto.FLOAT, [1, 4, 4, 4])], [info(y, TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(a, n) for n, a in self.tensors.items() if n in used],
        )  # fmt: skip
        imports = [helper.make_opsetid("", self.opset)]
        imports += [helper.make_opsetid(d, v) for d, v in self.domains.items()]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.fixture
def net():
    return Net()


@pytest.fixture(scope="session")
def encoders():
    """The export package's test encoders: mit-bevfusion's in small, and one that goes back up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("spconv.pytorch", reason="spconv is not installed")
    spec = importlib.util.spec_from_file_location("museum_encoders", _ENCODERS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def files(encoders, tmp_path_factory):
    """Good files of one encoder: "libspconv" and "autoware"."""
    from bevquant_export import export_sparse_onnx
    from bevquant_export.targets.autoware import export_autoware_onnx

    folder = tmp_path_factory.mktemp("museum")
    frame = encoders.frame(0)
    settings = {"rulebook_inputs": True}
    export_sparse_onnx(encoders.encoder(), frame, folder / "libspconv.onnx")
    export_autoware_onnx(encoders.encoder(), frame, folder / "autoware.onnx", **settings)
    return {name: folder / f"{name}.onnx" for name in ("libspconv", "autoware")}


@pytest.fixture
def found(tmp_path):
    """A file and a target to what the linter says, by rule."""
    from bevquant_export import lint_onnx

    def lint(model, target):
        path = tmp_path / "exhibit.onnx"
        onnx.save(model, path)
        findings = lint_onnx(path, target)
        assert all(f.reason and f.remedy and f.node for f in findings)
        return {f.id: str(f) for f in findings}

    return lint

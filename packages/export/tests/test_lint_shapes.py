"""The linter's shapes and types beside ONNX Runtime: it refuses a file where the linter does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from bevquant_export import lint_onnx

node = helper.make_node
F, I64, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(
    nodes: Sequence[onnx.NodeProto],
    outputs: dict[str, int],
    constants: dict[str, Any],
    x: Sequence[int | str] = (1, 3, 8, 8),
) -> onnx.ModelProto:
    """A file with one input ``x``; whole numbers are int64, all others float32."""
    arrays = {n: np.asarray(v) for n, v in constants.items()}
    arrays = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in arrays.items()}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", F, x)],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def one(op: str, inputs: str, x: Sequence[int | str], **given: Any) -> onnx.ModelProto:
    """One node; arrays are constants, everything else is an attribute."""
    constants = {n: v for n, v in given.items() if isinstance(v, np.ndarray)}
    attributes = {n: v for n, v in given.items() if n not in constants}
    return model([node(op, inputs.split(), ["y"], "n", **attributes)], {"y": F}, constants, x)


def accepts(path: Path) -> bool:
    """Whether ONNX Runtime loads a file and runs it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        size = [d if isinstance(d, int) else 1 for d in session.get_inputs()[0].shape]
        session.run(None, {"x": np.ones(size, np.float32)})
    except Exception:
        return False
    return True


def errors(made: onnx.ModelProto, folder: Path, target: str = "onnxruntime") -> list[str]:
    onnx.save(made, folder / "a.onnx")
    return [str(f) for f in lint_onnx(folder / "a.onnx", target) if f.severity == "error"]


ones = np.ones
WRONG = {
    "MatMul": one("MatMul", "x w", (2, 3), w=ones((4, 5))),
    "Add": one("Add", "x w", (2, 3), w=ones(4)),
    "int64": one("Add", "x w", (2, 3), w=ones(3, np.int64)),
    "condition": one("Where", "x x x", (2, 3)),
    "branches": one("Where", "c x w", (2, 3), c=ones(3, bool), w=ones(3, np.int64)),
    "Gemm": one("Gemm", "x w", ("n", 3), w=ones((4, 5))),
    "Gemm bias": one("Gemm", "x w c", (2, 3), w=ones((3, 5)), c=ones(4)),
    "Concat": one("Concat", "x w", (2, 3), w=ones((4, 5)), axis=0),
    "Conv": one("Conv", "x w", (1, 3, 8, 8), w=ones((4, 5, 3, 3))),
    "Conv bias": one("Conv", "x w b", (1, 3, 8, 8), w=ones((4, 3, 3, 3)), b=ones(5)),
    "window": one("Conv", "x w", (1, 3, 2, 2), w=ones((4, 3, 3, 3))),
    "ConvTranspose": one("ConvTranspose", "x w b", (1, 4, 8, 8), w=ones((4, 5, 3, 3)), b=ones(4)),
    "elements": one("Reshape", "x s", (2, 3), s=np.array([4, 2])),
    "rest": one("Reshape", "x s", (2, 3), s=np.array([4, -1])),
    "scale": one("DequantizeLinear", "q s", (1,), q=ones((4, 3), np.int8), s=ones(3), axis=0),
    "slope": one("PRelu", "x s", (1, 3, 8, 8), s=ones(3)),
    "norm": one("LayerNormalization", "x s", (1, 3, 8), s=ones(4)),
    "instance": one("InstanceNormalization", "x s s", (1, 3, 8), s=ones(4)),
    "blocks": one("DepthToSpace", "x", (1, 3, 8, 8), blocksize=2),
    "index": one("Gather", "x i", (1, 3), i=np.array([5]), axis=1),
    "labels": one("Einsum", "x w", (2, 3), w=ones((4, 5)), equation="ij,jk->ik"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_node_that_its_inputs_do_not_fit(tmp_path: Path, kind: str) -> None:
    found = errors(WRONG[kind], tmp_path)
    assert not accepts(tmp_path / "a.onnx")
    assert [text.split(":")[0] for text in found] in (["ONX021 error at n"], ["ONX019 error at n"])


def test_the_shapes_of_a_computed_tensor_and_the_remedy_are_told(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], "conv"),
        node("GlobalAveragePool", ["c"], ["p"], "pool"),
        node("Flatten", ["p"], ["f"], "flat"),
        node("MatMul", ["f", "v"], ["y"], "head"),
    ]
    constants = {"w": ones((4, 3, 3, 3)), "v": ones((5, 2))}
    (text,) = errors(model(nodes, {"y": F}, constants, ("n", 3, 8, 8)), tmp_path, "tensorrt")
    assert "at head: MatMul of f float32 [?, 4], v float32 [5, 2]" in text
    assert "correct the input" in text


@pytest.mark.parametrize(
    ("sizes", "declared"), [((-1, 3), (-1, 3)), ((-7, 3), (-1, -1)), ((2, 3), (2, 9))], ids=str
)
def test_free_sizes_and_declared_ones_that_the_runtime_replaces_are_no_errors(
    tmp_path: Path, sizes: tuple[int, ...], declared: tuple[int, ...]
) -> None:
    made = one("Add", "x w", sizes, w=ones(3))
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", F, declared))
    assert errors(made, tmp_path) == []
    assert accepts(tmp_path / "a.onnx")


def test_types_of_later_operator_sets_are_not_an_error_for_other_engines(tmp_path: Path) -> None:
    half = ones(1, np.float16)
    made = one("QuantizeLinear", "x s z", (2, 3), s=half, z=np.zeros(1, np.int8))
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    made.graph.output[0].type.tensor_type.elem_type = TensorProto.INT8
    assert any("ONX021" in text for text in errors(made, tmp_path))
    assert not any("ONX021" in text for text in errors(made, tmp_path, "tensorrt"))


def net() -> onnx.ModelProto:
    """Twenty operators, shapes computed on the way."""
    rng = np.random.default_rng(0)
    c: dict[str, Any] = {
        "w0": rng.normal(size=(8, 3, 3, 3)), "b0": ones(8), "w1": rng.normal(size=(8, 4, 3, 3)),
        "w2": rng.normal(size=(8, 6, 2, 2)), "w3": ones((64, 5)), "w4": ones((5, 7)),
        "b4": ones(7), "zero": np.array(0), "one": np.array([0]), "rest": np.array([-1, 64]),
        "limit": ones(7), "none": ones(1), "parts": np.array([3, 4]), "k": np.array([3]),
    }  # fmt: skip
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["a"], "c0", pads=[1] * 4),
        node("Conv", ["a", "w1"], ["b"], "c1", pads=[1] * 4, group=2),
        node("Add", ["a", "b"], ["c"], "add"),
        node("MaxPool", ["c"], ["d"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("ConvTranspose", ["d", "w2"], ["e"], "up", strides=[2, 2]),
        node("Concat", ["e", "c"], ["f"], "cat", axis=1),
        node("Shape", ["f"], ["s0"], "shape"),
        node("Gather", ["s0", "zero"], ["s1"], "batch"),
        node("Unsqueeze", ["s1", "one"], ["s2"], "list"),
        node("Concat", ["s2", "rest"], ["s3"], "sizes", axis=0),
        node("Reshape", ["f", "s3"], ["g"], "view"),
        node("Transpose", ["g"], ["y0"], "turn", perm=[0, 2, 1]),
        node("MatMul", ["g", "w3"], ["h"], "product"),
        node("Softmax", ["h"], ["i"], "softmax", axis=-1),
        node("ReduceMean", ["i"], ["j"], "mean", axes=[1], keepdims=0),
        node("Gemm", ["j", "w4", "b4"], ["l"], "gemm"),
        node("Greater", ["l", "limit"], ["m"], "mask"),
        node("Where", ["m", "l", "none"], ["n"], "where"),
        node("Split", ["n", "parts"], ["y1", "y2"], "split", axis=1),
        node("TopK", ["l", "k"], ["y3", "y4"], "topk", axis=1),
    ]
    return model(nodes, {"y0": F, "y1": F, "y2": F, "y3": F, "y4": I64}, c)


def damaged(seed: int) -> onnx.ModelProto:
    """The same file with one or two things changed."""
    r, made = random.Random(seed), net()
    graph = made.graph
    for _ in range(r.choice([1, 1, 2])):
        tensor = r.choice(graph.initializer)
        array, place = numpy_helper.to_array(tensor), r.randrange(len(graph.node))
        change = r.randrange(6)
        if change == 0 and array.ndim:
            sizes = list(array.shape)
            sizes[r.randrange(len(sizes))] += r.choice([1, 2])
            array = np.resize(array, sizes)
        elif change == 1:
            array = array.astype(r.choice([np.int64, np.float32, np.int32, np.float16, bool]))
        elif change == 2:
            array = array.reshape(r.choice([(-1,), (1, -1), (-1, 1)]))
        elif change == 3:
            inputs = graph.node[place].input
            made_before = [name for other in graph.node[:place] for name in other.output]
            inputs[r.randrange(len(inputs))] = r.choice([*made_before, "x"])
        elif change == 4:
            for attribute in graph.node[place].attribute:
                attribute.i += r.choice([-3, 1, 5]) if attribute.type == 2 else 0
        else:
            graph.output[r.randrange(5)].type.tensor_type.elem_type = r.choice([F, I64, B])
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return made


def test_damaged_files_are_refused_by_both_or_by_none(tmp_path: Path) -> None:
    assert errors(net(), tmp_path) == []
    verdicts = []
    for seed in range(80):
        found = errors(damaged(seed), tmp_path)
        verdicts.append((seed, bool(found), not accepts(tmp_path / "a.onnx")))
    assert [seed for seed, ours, theirs in verdicts if ours != theirs] == []
    assert 20 < sum(ours for _, ours, _ in verdicts) < 75

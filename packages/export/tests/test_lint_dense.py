"""Each rule about dense files is broken once, and found by that rule alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from bevquant_export.lint import RULES, lint_onnx

FLOAT = onnx.TensorProto.FLOAT
Damage = Callable[["Builder"], None]


class Builder:
    """Nodes and constants of a small file, named as its target wants them."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.opset = 11 if target == "horizon" else 13
        self.integer = np.uint8 if target == "onnxruntime" else np.int8
        self.zero = 128 if target == "onnxruntime" else 0
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.input_shape = [1, 4, 4, 4]
        self.outputs = {"y": [1, 4, 4, 4]}
        self.domains: dict[str, int] = {}
        self.functions: list[onnx.FunctionProto] = []
        self.yaml = 'model_parameters:\n  onnx_model: "file.onnx"\n'

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> None:
        name = f"{op}_{len(self.nodes)}" if self.target == "horizon" else f"{output}.{op}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))

    def const(self, name: str, values: object, dtype: type = np.float32) -> str:
        self.tensors[name] = np.asarray(values, dtype)
        return name

    def pair(self, source: str, made: str, scale: float) -> str:
        s = self.const(f"{made}.s", [scale] if self.target == "horizon" else scale)
        zeros = self.zero
        z = self.const(f"{made}.z", zeros, self.integer)
        self.add("QuantizeLinear", [source, s, z], f"{made}.q")
        self.add("DequantizeLinear", [f"{made}.q", s, z], made)
        return made

    def weight(self, name: str, shape: tuple[int, ...], axis: int = 0) -> str:
        """A weight for the target: integers for onnxruntime, float and a pair for the others."""
        rng = np.random.default_rng(1)
        scales = np.full(shape[axis], 0.01)
        zeros = np.full(scales.size, self.zero)
        integers = rng.integers(-127, 128, shape)
        s = self.const(f"{name}.s", scales)
        attributes = {} if self.target == "horizon" else {"axis": axis}
        made = f"{name}.dq"
        if self.target == "onnxruntime":
            z = self.const(f"{name}.z", zeros, self.integer)
            source = self.const(name, integers + 128, np.uint8)
        else:
            z = self.const(f"{name}.z", 0 if self.target == "horizon" else zeros, np.int8)
            self.const(name, integers * 0.01)
            source = f"{name}.q"
            self.add("QuantizeLinear", [name, s, z], source, **attributes)
        self.add("DequantizeLinear", [source, s, z], made, **attributes)
        return made

    def conv(self, x: str, y: str, op: str = "Conv", kernel: int = 3, **attributes: object) -> str:
        weight = self.weight(f"{y}.w", (4, 4, kernel, kernel), int(op == "ConvTranspose"))
        bias = self.const(f"{y}.b", [0.1, 0.2, 0.3, 0.4])
        pads = {"pads": [kernel // 2] * 4, **attributes}
        self.add(op, [x, weight, bias], y, **pads)
        return y

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "dense",
            [helper.make_tensor_value_info("x", FLOAT, self.input_shape)],
            [helper.make_tensor_value_info(n, FLOAT, s) for n, s in self.outputs.items()],
            [numpy_helper.from_array(values, name) for name, values in self.tensors.items()],
        )
        opsets = {"": self.opset, **self.domains}
        return helper.make_model(
            graph,
            ir_version=8,
            opset_imports=[helper.make_opsetid(*item) for item in opsets.items()],
            functions=self.functions,
        )

    def node(self, output: str) -> onnx.NodeProto:
        return next(node for node in self.nodes if output in node.output)


def good(target: str) -> Builder:
    """conv, ReLU, conv, sum with the input, ReLU."""
    b = Builder(target)
    x = b.pair("x", "xq", 0.02)
    b.conv(x, "c0")
    before = b.pair("c0", "c0q", 0.03) if target == "onnxruntime" else "c0"
    b.add("Relu", [before], "r0")
    b.conv(b.pair("r0", "r0q", 0.03), "c1")
    branch = b.pair("c1", "c1q", 0.02) if target == "onnxruntime" else "c1"
    b.add("Add", [branch, x], "sum")
    before = b.pair("sum", "sumq", 0.04) if target == "onnxruntime" else "sum"
    b.add("Relu", [before], "r1")
    b.pair("r1", "y", 0.04)
    return b


def write(b: Builder, folder: Path) -> Path:
    path = folder / "file.onnx"
    onnx.save(b.model(), path)
    if b.yaml:
        (folder / "mapper.yaml").write_text(b.yaml)
    return path


def rename(b: Builder, output: str, slot: int, to: str) -> None:
    b.node(output).input[slot] = to


def attributes(b: Builder, output: str, **new: object) -> None:
    node = b.node(output)
    kept = [a for a in node.attribute if a.name not in new]
    made = [helper.make_attribute(k, v) for k, v in new.items() if v is not None]
    del node.attribute[:]
    node.attribute.extend([*kept, *made])


def _second(b: Builder, op: str, *inputs: str, **kwargs: object) -> None:
    """A second output, made in float of the first."""
    b.add(op, ["y", *inputs], "y2", **kwargs)
    b.outputs["y2"] = [1, 4, 4, 4]


def _before(b: Builder, output: str, op: str, source: str, made: str) -> None:
    """A node in front of another one."""
    b.add(op, [source], made)
    place = b.nodes.index(b.node(output))
    b.nodes.insert(place, b.nodes.pop())


def _computed_scale(b: Builder) -> None:
    _before(b, "y.q", "Abs", "y.s", "y.abs")
    rename(b, "y.q", 1, "y.abs")
    rename(b, "y", 1, "y.abs")


def _quantized_bias(b: Builder) -> None:
    b.const("b.i", [1, 2, 3, 4], np.int32)
    # Not the steps of the accumulators: the runtime has to go through float.
    b.const("b.s", 0.001)
    b.add("DequantizeLinear", ["b.i", "b.s"], "b.dq")
    b.nodes.insert(0, b.nodes.pop())
    del b.tensors["c1.b"]
    rename(b, "c1", 2, "b.dq")


def _scale(name: str, values: object) -> Damage:
    return lambda b: b.tensors.update({name: np.asarray(values, np.float32)})


def _zero(name: str, values: object, dtype: type = np.int8) -> Damage:
    return lambda b: b.tensors.update({name: np.asarray(values, dtype)})


def _transposed(b: Builder) -> None:
    b.pair("y", "y.again", 0.04)
    b.conv("y.again", "y2", "ConvTranspose", strides=[2, 2])
    b.outputs["y2"] = [1, 4, 7, 7]


def _no_residual_pair(b: Builder) -> None:
    rename(b, "sum", 1, "x")


def _pair_before_relu(b: Builder) -> None:
    place = b.nodes.index(b.node("r0"))
    tail, b.nodes = b.nodes[place:], b.nodes[:place]
    b.pair("c0", "c0q", 0.03)
    b.nodes += tail
    rename(b, "r0", 0, "c0q")


def _scatter(b: Builder) -> None:
    """Supported, but with a reduction, which entered ONNX in opset 16, it is not."""
    b.opset = 16
    _second(b, "ScatterND", b.const("i", [[0]], np.int64), b.const("u", [0.0]), reduction="add")


def _custom(b: Builder) -> None:
    _second(b, "MyPlugin", domain="mine")
    b.domains["mine"] = 1


def _two_scales(b: Builder) -> None:
    b.pair("c1", "c1q", 0.5)
    place = b.nodes.index(b.node("sum"))
    b.nodes[place:] = b.nodes[-2:] + b.nodes[place:-2]
    rename(b, "sum", 0, "c1q")


def _signed_product(b: Builder) -> None:
    b.const("m", np.ones((4, 4)), np.int8)
    b.const("a", np.ones((4, 4)), np.int8)
    b.add("MatMulInteger", ["a", "m"], "sum8")
    b.add("Cast", ["sum8"], "y2", to=FLOAT)
    b.outputs["y2"] = [4, 4]


def _int8_weights(b: Builder) -> None:
    b.tensors["c1.w"] = (b.tensors["c1.w"].astype(np.int16) - 128).astype(np.int8)
    b.tensors["c1.w.z"] = np.zeros(4, np.int8)


def _int8_pair(b: Builder) -> None:
    b.tensors["y.z"] = np.asarray(0, np.int8)
    b.tensors["sumq.z"] = np.asarray(0, np.int8)


def _relu_alone(b: Builder) -> None:
    rename(b, "r0", 0, "c0")
    b.nodes = [n for n in b.nodes if not {"c0q", "c0q.q"} & set(n.output)]
    del b.tensors["c0q.s"], b.tensors["c0q.z"]


def _hz_scale(b: Builder) -> None:
    b.tensors["y.s"] = np.asarray(0.04, np.float32)


def _bare_quantizer(b: Builder) -> None:
    b.add("Cast", ["r0q.q"], "odd", to=int(FLOAT))
    b.outputs["odd"] = [1, 4, 4, 4]


def _integer_weight(b: Builder) -> None:
    b.nodes.remove(b.node("c1.w.q"))
    b.tensors["c1.w"] = np.zeros((4, 4, 3, 3), np.int8)
    b.node("c1.w.dq").input[0] = "c1.w"


def _float_conv(b: Builder) -> None:
    b.const("f.w", np.zeros((4, 4, 1, 1)))
    b.add("Conv", ["y", "f.w"], "y2")
    b.outputs["y2"] = [1, 4, 4, 4]


def _wide_kernel(b: Builder) -> None:
    b.conv("y", "y2", kernel=33)
    b.outputs["y2"] = [1, 4, 4, 4]


def _two_steps(b: Builder) -> None:
    b.const("other.s", np.full_like(b.tensors["y.s"], 0.05))
    rename(b, "y", 1, "other.s")


def _per_channel_activation(b: Builder) -> None:
    b.tensors["y.s"] = np.full(4, 0.04, np.float32)
    b.tensors["y.z"] = np.zeros(4, np.int8)


def _huge_batch(b: Builder) -> None:
    b.input_shape = [4097, 4, 4, 4]


BREAK: list[tuple[str, str, Damage]] = [
    ("tensorrt", "QDQ001", lambda b: setattr(b, "opset", 12)),
    ("tensorrt", "QDQ002", _scale("y.s", 0.0)),
    ("onnxruntime", "QDQ002", _scale("c1q.s", np.nan)),
    ("tensorrt", "QDQ003", _two_steps),
    ("horizon", "QDQ003", _two_steps),
    ("tensorrt", "QDQ004", _scale("y.s", np.full(65_537, 0.04))),
    ("tensorrt", "TRT001", _scatter),
    ("tensorrt", "TRT001", lambda b: _second(b, "Unique")),
    ("tensorrt", "TRT002", _custom),
    ("tensorrt", "TRT003", _zero("y.z", 1)),
    ("tensorrt", "TRT004", _zero("y.z", 0, np.uint8)),
    ("tensorrt", "TRT005", _zero("c0.w.z", [0, 0])),
    ("tensorrt", "TRT007", _computed_scale),
    ("tensorrt", "TRT008", _per_channel_activation),
    ("tensorrt", "TRT009", lambda b: [attributes(b, f"c0.w.{n}", axis=2) for n in ("q", "dq")]),
    ("tensorrt", "TRT010", _quantized_bias),
    ("tensorrt", "TRT011", _transposed),
    ("tensorrt", "TRT012", _two_scales),
    ("tensorrt", "TRT013", _no_residual_pair),
    ("tensorrt", "TRT014", _pair_before_relu),
    ("onnxruntime", "ORT001", _relu_alone),
    ("onnxruntime", "ORT002", _int8_pair),
    ("onnxruntime", "ORT003", _scale("c0q.s", 0.05)),
    ("onnxruntime", "ORT004", _int8_weights),
    ("onnxruntime", "ORT005", _signed_product),
    ("onnxruntime", "ORT006", _quantized_bias),
    ("onnxruntime", "ORT008", _scatter),
    ("horizon", "HRZ001", lambda b: setattr(b, "opset", 10)),
    ("horizon", "HRZ002", lambda b: _second(b, "Mean")),
    ("horizon", "HRZ004", _zero("y.z", 1)),
    ("horizon", "HRZ005", _zero("y.z", 0, np.uint8)),
    ("horizon", "HRZ006", _hz_scale),
    ("horizon", "HRZ007", _bare_quantizer),
    ("horizon", "HRZ008", _integer_weight),
    ("horizon", "HRZ009", lambda b: setattr(b.node("c0"), "name", "layer0.conv")),
    ("horizon", "HRZ010", _float_conv),
    ("horizon", "HRZ011", lambda b: setattr(b, "yaml", "")),
    ("horizon", "HRZ012", _wide_kernel),
    ("horizon", "HRZ013", _huge_batch),
    ("horizon", "HRZ003", lambda b: [attributes(b, f"c0.w.{n}", axis=0) for n in ("q", "dq")]),
]


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime", "horizon"])
def test_a_good_file_has_no_finding(tmp_path: Path, target: str) -> None:
    found = lint_onnx(write(good(target), tmp_path), target)
    assert found == [], [str(f) for f in found]


@pytest.mark.parametrize(("target", "rule", "damage"), BREAK, ids=[f"{t}-{r}" for t, r, _ in BREAK])
def test_a_broken_file_is_caught_by_its_rule(
    tmp_path: Path, target: str, rule: str, damage: Damage
) -> None:
    b = good(target)
    damage(b)
    found = lint_onnx(write(b, tmp_path), target)
    assert {finding.id for finding in found} == {rule}, [str(f) for f in found]


def test_every_rule_has_a_broken_file() -> None:
    dense = {rule.id for rule in RULES if rule.id[:3] in ("QDQ", "TRT", "ORT", "HRZ")}
    # Rules of one CPU or one version are broken in test_lint_engines.py, those of half precision in
    # dense/test_dense_half.py, those of FP8 and INT16 in dense/test_dense_{fp8,int16}.py, that
    # of an attention in dense/test_attention_files.py.
    engines = {"ORT007", "TRT015", "TRT016", "TRT017", "TRT018", "TRT019"}
    engines |= {"ORT009", "QDQ005", "QDQ006", "QDQ007", "TRT020", "TRT021", "TRT022"}
    assert {rule for _, rule, _ in BREAK} == dense - engines


def _runs_as(b: Builder, folder: Path) -> Counter[str]:
    """Operators that onnxruntime makes of a file."""
    path = write(b, folder)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.graph_optimization_level = level
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def test_the_good_file_runs_in_integers(tmp_path: Path) -> None:
    made = _runs_as(good("onnxruntime"), tmp_path)
    assert (made["QLinearConv"], made["QLinearAdd"], made["Conv"]) == (2, 1, 0)


@pytest.mark.parametrize("damage", [_relu_alone, _quantized_bias])
def test_files_with_a_finding_run_in_float(tmp_path: Path, damage: Damage) -> None:
    b = good("onnxruntime")
    damage(b)
    assert _runs_as(b, tmp_path)["QLinearConv"] == 1


def test_int8_activations_run_in_float(tmp_path: Path) -> None:
    b = good("onnxruntime")
    for name in [n for n in b.tensors if n.endswith(".z")]:
        b.tensors[name] = np.zeros(b.tensors[name].shape, np.int8)
    for name in ("c0.w", "c1.w"):
        b.tensors[name] = (b.tensors[name].astype(np.int16) - 128).astype(np.int8)
    # The pair that a conv and the sum both read stays INT8, and both run in float.
    made = _runs_as(b, tmp_path)
    assert (made["QLinearConv"], made["QLinearAdd"]) == (1, 0)
    assert {f.id for f in lint_onnx(tmp_path / "file.onnx", "onnxruntime")} == {"ORT002"}


def test_a_bias_in_the_steps_of_the_sums_is_as_good_as_a_float_one(tmp_path: Path) -> None:
    b = good("onnxruntime")
    inputs = [b.const("b.i", [1, 2, 3, 4], np.int32), b.const("b.s", np.full(4, 0.02 * 0.01))]
    inputs.append(b.const("b.z", np.zeros(4), np.int32))
    b.add("DequantizeLinear", inputs, "b.dq", axis=0)
    b.nodes.insert(0, b.nodes.pop())
    del b.tensors["c0.b"]
    rename(b, "c0", 2, "b.dq")
    assert _runs_as(b, tmp_path)["QLinearConv"] == 2
    assert lint_onnx(tmp_path / "file.onnx", "onnxruntime") == []


def test_constants_may_be_nodes(tmp_path: Path) -> None:
    b = good("horizon")
    values = numpy_helper.from_array(b.tensors.pop("y.s"))
    b.nodes.insert(0, helper.make_node("Constant", [], ["y.s"], name="Constant_99", value=values))
    assert lint_onnx(write(b, tmp_path), "horizon") == []
    b.nodes[0].attribute[0].t.CopyFrom(numpy_helper.from_array(np.asarray([0.0], np.float32)))
    assert {f.id for f in lint_onnx(write(b, tmp_path), "horizon")} == {"QDQ002"}


def test_a_float_conv_may_be_listed_for_the_cpu(tmp_path: Path) -> None:
    b = good("horizon")
    _float_conv(b)
    name = b.nodes[-1].name
    b.yaml += f'calibration_parameters:\n  run_on_cpu: "Conv_0;{name}"\n'
    assert lint_onnx(write(b, tmp_path), "horizon") == []


def test_the_later_dialect_of_horizon_is_known(tmp_path: Path) -> None:
    b = good("horizon")
    for node in b.nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            new = "HzQuantize" if node.op_type == "QuantizeLinear" else "HzDequantize"
            node.name = node.name.replace(node.op_type, new)
            node.op_type, node.domain = new, "horizon"
            node.attribute.extend([helper.make_attribute("bits", 8)])
    b.domains["horizon"] = 1
    assert lint_onnx(write(b, tmp_path), "horizon") == []
    b.tensors["y.z"] = np.asarray(3, np.int8)
    assert {f.id for f in lint_onnx(write(b, tmp_path), "horizon")} == {"HRZ004"}

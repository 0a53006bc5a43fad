"""Files that are damaged, hostile or no ONNX at all give a finding; the command says it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bevquant_export import lint_onnx
from bevquant_export.lint import RULES, TARGETS, main

FLOAT = TensorProto.FLOAT


def good() -> onnx.ModelProto:
    """Three nodes that keep the rules of TensorRT and onnxruntime."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Add", ["b", "c"], ["y"], name="add"),
    ]
    tensors = [
        numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w"),
        numpy_helper.from_array(np.ones((1,), np.float32), "c"),
    ]
    graph = helper.make_graph(
        nodes,
        "three",
        [helper.make_tensor_value_info("x", FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info("y", FLOAT, [1, 2, 4, 4])],
        tensors,
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])


def lint(model: onnx.ModelProto | bytes, folder: Path, target: str = "tensorrt") -> list[str]:
    data = model if isinstance(model, bytes) else model.SerializeToString()
    (folder / "file.onnx").write_bytes(data)
    return [finding.id for finding in lint_onnx(folder / "file.onnx", target)]


def external(model: onnx.ModelProto, **entries: str) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def _conv(model: onnx.ModelProto, **settings: object) -> None:
    node = model.graph.node[0]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in settings.items())


def _other_channels(model: onnx.ModelProto) -> None:
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[1].dim_value += 1


def _negative_batch(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1


def _huge_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 2**62


def _cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def _order(model: onnx.ModelProto) -> None:
    nodes = [model.graph.node[i] for i in (1, 0, 2)]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _inner_order(model: onnx.ModelProto) -> None:
    """Nodes of a branch, the last one first: onnxruntime refuses it."""
    nodes = [helper.make_node("Neg", ["m"], ["o"], name="n"), helper.make_node("Abs", ["a"], ["m"])]
    output = helper.make_tensor_value_info("o", onnx.TensorProto.FLOAT, None)
    branch = helper.make_graph(nodes, "g", [], [output])
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
    chosen = {"then_branch": branch, "else_branch": _sorted(branch)}
    model.graph.node.append(helper.make_node("If", ["yes"], ["chosen"], name="if", **chosen))
    value = helper.make_tensor_value_info("chosen", onnx.TensorProto.FLOAT, None)
    model.graph.output.append(value)


def _sorted(graph: onnx.GraphProto) -> onnx.GraphProto:
    return helper.make_graph(list(graph.node)[::-1], "h", [], list(graph.output))


def _deep(model: onnx.ModelProto) -> None:
    """A loop in a loop in a loop …: deeper than is followed, less deep than protobuf allows."""
    inner = helper.make_graph([helper.make_node("Relu", ["x"], ["r"], name="i")], "g", [], [])
    for level in range(12):
        node = helper.make_node("If", ["x"], ["r"], name=f"if{level}", then_branch=inner)
        inner = helper.make_graph([node], "g", [], [])
    model.graph.node.extend(inner.node)


def _opset_twice(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("", 12))


def _twice(model: onnx.ModelProto) -> None:
    attribute = helper.make_attribute("group", 1)
    model.graph.node[0].attribute.extend([attribute, attribute])


def _tensor(model: onnx.ModelProto, **fields: object) -> None:
    tensor = model.graph.initializer[0]
    for name, value in fields.items():
        if isinstance(value, list):
            del tensor.dims[:]
            tensor.dims.extend(value)
        else:
            setattr(tensor, name, value)


def _unread(model: onnx.ModelProto) -> None:
    array = np.asarray(3, np.int64)
    model.graph.initializer.append(numpy_helper.from_array(array, "bn.num_batches_tracked"))


def _double(model: onnx.ModelProto) -> None:
    array = np.ones((1,), np.float64)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(array, "c"))


BREAK: list[tuple[str, Callable[[onnx.ModelProto], object]]] = [
    ("ONX002", lambda m: m.ClearField("graph")),
    ("ONX002", lambda m: m.graph.ClearField("node")),
    ("ONX003", lambda m: m.graph.node[1].output.append("a")),
    ("ONX003", lambda m: m.graph.initializer.append(m.graph.initializer[0])),
    ("ONX004", lambda m: setattr(m.graph.node[1], "name", "conv")),
    ("ONX005", lambda m: m.graph.initializer.pop()),
    ("ONX006", _order),
    ("ONX025", _inner_order),
    ("ONX007", _cycle),
    ("ONX008", lambda m: setattr(m.graph.output[0], "name", "z")),
    ("ONX009", lambda m: external(m, location="../w.bin")),
    ("ONX009", lambda m: external(m, location="/etc/passwd")),
    ("ONX009", lambda m: external(m, location="C:\\w.bin")),
    ("ONX009", lambda m: external(m, location="link.bin")),
    ("ONX009", lambda m: external(m)),
    ("ONX010", lambda m: external(m, location="missing.bin")),
    ("ONX010", lambda m: external(m, location="w.bin", offset="8")),
    ("ONX010", lambda m: external(m, location="w.bin", offset="-4")),
    ("ONX010", lambda m: external(m, location="w.bin", offset="many")),
    ("ONX010", lambda m: external(m, location="w.bin", length="99999999999999")),
    ("ONX011", lambda m: _tensor(m, dims=[2**62, 2**62])),
    ("ONX011", lambda m: _tensor(m, dims=[2**30])),
    ("ONX011", lambda m: _tensor(m, dims=[-2, -2])),
    ("ONX011", lambda m: _tensor(m, dims=[1] * 1000)),
    ("ONX011", lambda m: _tensor(m, data_type=99)),
    ("ONX011", lambda m: _tensor(m, raw_data=b"")),
    ("ONX012", _deep),
    ("ONX013", _twice),
    ("ONX014", lambda m: m.ClearField("ir_version")),
    ("ONX014", lambda m: m.ClearField("opset_import")),
    ("ONX014", _opset_twice),
    ("ONX015", lambda m: setattr(m.graph.node[1], "op_type", "SparseConvolution")),
    ("ONX016", _double),
    ("ONX017", _unread),
    ("ONX018", lambda m: _conv(m, strides=[0, 1])),
    ("ONX018", lambda m: _conv(m, pads=[0, 0, 1])),
    ("ONX019", _other_channels),
    ("ONX020", _huge_input),
    ("ONX024", lambda m: m.metadata_props.add(key="bevquant.guards", value="[")),
    ("ONX024", lambda m: m.metadata_props.add(key="bevquant.frames", value="[1]")),
    ("ONX024", lambda m: m.metadata_props.add(key="bevquant.frames", value='{"none": 1}')),
    ("ONX018", lambda m: _conv(m, dilations=[1, -1])),
    ("ONX018", lambda m: _conv(m, pads=[0, 0, -1, 0])),
    ("ONX018", lambda m: _conv(m, kernel_shape=[2**62, 1])),
    ("ONX018", lambda m: _conv(m, kernel_shape=[3, 3])),
    ("ONX018", lambda m: _conv(m, group=0)),
    ("ONX018", lambda m: _conv(m, group=3)),
    ("ONX021", lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", 7)),
    ("ONX022", _negative_batch),
    ("ONX023", lambda m: _conv(m, auto_pad=3)),
]


def test_a_good_file_has_no_finding(tmp_path: Path) -> None:
    assert lint(good(), tmp_path) == lint(good(), tmp_path, "onnxruntime") == []


@pytest.mark.parametrize(("rule", "damage"), BREAK, ids=[rule for rule, _ in BREAK])
def test_a_broken_file_is_caught_by_its_rule(
    tmp_path: Path, rule: str, damage: Callable[[onnx.ModelProto], object]
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (outside / "w.bin").write_bytes(bytes(16))
    (folder / "w.bin").write_bytes(bytes(16))
    (folder / "link.bin").symlink_to(outside / "w.bin")
    model = good()
    damage(model)
    assert set(lint(model, folder)) == {rule}


@pytest.mark.parametrize(("damage", "severity"), [(_order, "warning"), (_inner_order, "error")])
def test_order_is_an_error_where_onnxruntime_refuses_it(
    tmp_path: Path, damage: Callable[[onnx.ModelProto], object], severity: str
) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = good()
    damage(model)
    onnx.save(model, tmp_path / "m.onnx")
    assert {finding.severity for finding in lint_onnx(tmp_path / "m.onnx", "tensorrt")} == {
        severity
    }
    if severity == "warning":
        ort.InferenceSession(model.SerializeToString())
    else:
        with pytest.raises(Exception, match="INVALID_GRAPH"):
            ort.InferenceSession(model.SerializeToString())


def test_every_rule_has_a_broken_file() -> None:
    of_files = {rule.id for rule in RULES if rule.id.startswith("ONX")}
    assert {rule for rule, _ in BREAK} | {"ONX001"} == of_files
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_external_data_in_the_folder_is_fine(tmp_path: Path) -> None:
    model = good()
    external(model, location="w.bin", offset="16", length="16")
    (tmp_path / "w.bin").write_bytes(bytes(32))
    assert lint(model, tmp_path) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a protobuf",
        bytes(64),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        good().SerializeToString()[:-7],
        b"\x3a\xff\xff\xff\xff\x0f" + bytes(8),
        b"\x3a" + b"\x80" * 40,
        b"\x12\x04\xff\xfe\xfd\xfc",
    ],
    ids=["empty", "text", "zeros", "lfs", "cut", "long", "varint", "not-utf8"],
)
def test_what_is_no_model_is_one_finding(tmp_path: Path, data: bytes) -> None:
    assert lint(data, tmp_path) == ["ONX001"]


def _message(field: int, body: bytes) -> bytes:
    size, length = len(body), b""
    while True:
        length += bytes([size & 127 | (128 if size > 127 else 0)])
        size >>= 7
        if not size:
            return bytes([field << 3 | 2]) + length + body


def test_nesting_without_end_is_one_finding(tmp_path: Path) -> None:
    body = b""
    for _ in range(2000):  # graph, node, attribute, graph, …
        body = _message(1, _message(5, _message(6, body)))
    assert lint(_message(7, body), tmp_path) == ["ONX001"]


def test_empty_nodes_by_the_million_are_not_unpacked(tmp_path: Path) -> None:
    # Two bytes each in the file, a hundred times that in memory.
    assert lint(_message(7, b"\x0a\x00" * 600_000), tmp_path) == ["ONX001"]


@pytest.mark.parametrize("dims", [[2**30], [2**20, 2**19], [2**62, 2**62]], ids=str)
def test_memory_goes_by_the_file_and_not_by_what_it_claims(tmp_path: Path, dims: list[int]) -> None:
    model = good()
    _tensor(model, dims=dims)
    lint(model, tmp_path)
    tracemalloc.start()
    found = [f for target in TARGETS for f in lint_onnx(tmp_path / "file.onnx", target)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "ONX011" in {finding.id for finding in found}
    assert peak < 4e6


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    model = good()
    for i in range(500):
        model.graph.node.add(op_type="Relu", name=f"r{i}", input=[f"no{i}"], output=[f"o{i}"])
    (tmp_path / "file.onnx").write_bytes(model.SerializeToString())
    found = [f for f in lint_onnx(tmp_path / "file.onnx", "tensorrt") if f.id == "ONX005"]
    assert len(found) == 101
    assert "400 more" in found[-1].reason


def test_a_hundred_thousand_attributes_are_read_once(tmp_path: Path) -> None:
    model = good()
    for i in range(100_000):
        model.graph.node[0].attribute.add(name=f"a{i % 50_000}", i=i, type=2)
    found = lint(model, tmp_path)
    assert set(found) == {"ONX013"}


def test_subgraphs_see_the_names_around_them(tmp_path: Path) -> None:
    model = good()
    body = helper.make_graph([helper.make_node("Relu", ["a"], ["t"], name="in")], "then", [], [])
    body.output.add(name="t")
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
    model.graph.node.append(
        helper.make_node("If", ["yes"], ["z"], name="if", then_branch=body, else_branch=body)
    )
    assert lint(model, tmp_path) == []
    model.graph.node[-1].attribute[0].g.node[0].input[0] = "nowhere"
    assert lint(model, tmp_path) == ["ONX005"]


def test_functions_are_operators_of_their_model(tmp_path: Path) -> None:
    model = good()
    reference = onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR)
    reference.ref_attr_name = "zero"
    nodes = [
        helper.make_node("Constant", [], ["z"], name="constant"),
        helper.make_node("MatMulInteger", ["a", "b", "z", "z"], ["c"], name="product"),
    ]
    nodes[0].attribute.append(reference)
    imports = [helper.make_opsetid("", 13)]
    function = helper.make_function("own", "Product", ["a", "b"], ["c"], nodes, imports, ["zero"])
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    zero = numpy_helper.from_array(np.asarray(128, np.uint8))
    call = helper.make_node("Product", ["p", "q"], ["r"], "call", domain="own", zero=zero)
    model.graph.node.append(call)
    for name in ("p", "q"):
        value = helper.make_tensor_value_info(name, TensorProto.UINT8, [4, 4])
        model.graph.input.append(value)
    assert lint(model, tmp_path, "onnxruntime") == []
    assert lint(model, tmp_path, "tensorrt") == ["TRT001"]
    assert "HRZ002" in lint(model, tmp_path, "horizon")
    model.functions[0].name = "Other"
    assert lint(model, tmp_path, "onnxruntime") == ["ONX015"]


def test_names_that_would_drive_a_terminal_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = good()
    model.graph.node[1].name = "\x1b[2J\nSPC000"
    model.graph.node[1].input[0] = "\x1b[31m"
    lint(model, tmp_path)
    assert main([str(tmp_path / "file.onnx"), "--target", "tensorrt"]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2J\\nSPC000" in printed


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_files_never_crash(tmp_path: Path, target: str) -> None:
    rng = random.Random(5)
    original = good().SerializeToString()
    for _ in range(150):
        data = bytearray(original)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 9)]
                case 2:
                    data[at:at] = data[: rng.randint(1, 40)]
                case 3:
                    data[at] ^= 1 << rng.randrange(8)
            data = data or bytearray(1)
        for finding in lint_onnx(_written(tmp_path, bytes(data)), target):
            assert finding.reason
            assert finding.remedy


def _written(folder: Path, data: bytes) -> Path:
    (folder / "file.onnx").write_bytes(data)
    return folder / "file.onnx"


def test_the_command_exits_by_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "file.onnx", good()
    lint(model, tmp_path)
    assert main([str(path), "--target", "tensorrt"]) == 0
    assert capsys.readouterr().out == "file.onnx for tensorrt: 0 errors, 0 warnings\n"
    _unread(model)
    lint(model, tmp_path)
    assert main([str(path), "--target", "tensorrt"]) == 0
    assert "ONX017  warning   bn.num_batches_tracked" in capsys.readouterr().out
    _cycle(model)
    lint(model, tmp_path)
    assert main([str(path), "--target", "tensorrt", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [set(f) for f in found] == [{"id", "severity", "node", "reason", "remedy"}] * 2
    assert [f["id"] for f in found] == ["ONX007", "ONX017"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["file.onnx"], ["--target", "tensorrt"], ["file.onnx", "--target", "tpu"]],
    ids=["nothing", "no-target", "no-file", "unknown-target"],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_what_cannot_be_read_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "missing.onnx", tmp_path, Path("/dev/null")):
        assert main([str(path), "--target", "tensorrt"]) == 2
        assert str(path) in capsys.readouterr().err
        with pytest.raises(OSError, match=str(path.name)):
            lint_onnx(path, "tensorrt")
    with pytest.raises(ValueError, match="'tpu'; expected one of libspconv"):
        lint_onnx(tmp_path / "missing.onnx", "tpu")


def test_every_rule_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rules"]) == 0
    printed = capsys.readouterr().out
    assert all(rule.id in printed for rule in RULES)
    assert main(["--rules", "--json", "--target", "horizon"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {r["id"][:3] for r in listed} == {"ONX", "QDQ", "HRZ", "CAL"}
    assert all(r["means"] and r["remedy"] for r in listed)


def test_the_command_is_installed_under_its_name() -> None:
    script = "from importlib.metadata import entry_points as e; print(*e(name='bevquant-lint'))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    if not run.stdout.strip():
        pytest.skip("the package was installed before it had the command; install it again")
    assert "bevquant_export.lint._cli:main" in run.stdout

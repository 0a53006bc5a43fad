"""Portable files: what is in them, what runs them, what they refuse."""

import functools
import json

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from bevquant_export import (
    compare_sparse_onnx,
    cpu_at_hand,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
)
from bevquant_qnn import QuantConfig

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.fixture(scope="module")
def files(nets, tmp_path_factory):
    """The encoder in both dialects, and the portable one with every layer."""
    folder = tmp_path_factory.mktemp("files")
    model, example = nets.encoder(), nets.frame(0)
    batches = [nets.frame(0, share=1.0)]
    for dialect in ("libspconv", "portable"):
        export_sparse_onnx(
            model, example, folder / f"{dialect}.onnx", dialect=dialect, batches=batches,
            weights="uint8" if dialect == "portable" else "auto",
        )  # fmt: skip
    lower_to_portable(
        folder / "libspconv.onnx", folder / "layers.onnx", all_layers=True, weights="uint8"
    )
    return folder


@pytest.fixture(scope="module")
def runtime(files):
    return load_sparse_onnx(files / "portable.onnx", backend="onnxruntime")


@functools.cache
def session(path):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def feed(features, coords, batch_size):
    return {
        "features": features.numpy(),
        "coords": coords.numpy(),
        "batch_size": np.array([batch_size], np.int64),
    }


def unnoted(path):
    """A file without the note on what ran it, which lowering a file does not write."""
    model = onnx.load(path)
    kept = [entry for entry in model.metadata_props if entry.key != "verified"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return model.SerializeToString(deterministic=True)


def test_int8_weights_give_the_same_outputs(files, nets, tmp_path):
    lower_to_portable(files / "libspconv.onnx", tmp_path / "int8.onnx", weights="int8")
    lower_to_portable(tmp_path / "int8.onnx", tmp_path / "again.onnx", weights="uint8")
    assert unnoted(tmp_path / "again.onnx") == unnoted(files / "portable.onnx")
    assert {f.id for f in lint_onnx(files / "portable.onnx", "portable", cpu="vnni")} == {"ORT007"}
    assert lint_onnx(tmp_path / "int8.onnx", "portable") == []
    assert {f.id for f in lint_onnx(tmp_path / "int8.onnx", "portable", cpu="any")} == {"ORT004"}
    if cpu_at_hand() != "vnni":
        pytest.skip("this CPU saturates sums of pairs")
    given = feed(*nets.frame(1))
    made = [session(folder / name).run(None, given) for folder, name in
            ((files, "portable.onnx"), (tmp_path, "int8.onnx"))]  # fmt: skip
    for want, got in zip(*made, strict=True):
        assert np.array_equal(want, got)
    file = load_sparse_onnx(tmp_path / "int8.onnx", backend="onnxruntime")
    assert file.graph.weights == "int8"


def test_weights_of_seven_bits_are_int8_for_any_cpu(nets, tmp_path):
    model = nets.calibrated(nets.Encoder(), [nets.frame(0)], QuantConfig(weight_bits=7))
    file = export_sparse_onnx(model, nets.frame(0), tmp_path / "seven.onnx", dialect="portable")
    kinds = {t.data_type for t in onnx.load(file.path).graph.initializer if len(t.dims) == 2}
    assert onnx.TensorProto.INT8 in kinds
    assert onnx.TensorProto.UINT8 not in kinds
    assert lint_onnx(file.path, "portable", cpu="any") == []
    assert lint_onnx(file.path, "portable", cpu="vnni") == []
    read = load_sparse_onnx(file.path, backend="onnxruntime")
    rows = compare_sparse_onnx(read, model, nets.frame(1))
    assert max(row.different for row in rows) == 0


def test_a_file_that_does_not_say_how_it_stores_weights_is_read(files, tmp_path):
    """As they were written before: all uint8."""
    model = onnx.load(files / "portable.onnx")
    (record,) = (entry for entry in model.metadata_props if entry.key == "bevquant.sparse")
    content = json.loads(record.value)
    assert content.pop("weights") == "uint8"
    record.value = json.dumps(content, separators=(",", ":"))
    onnx.save(model, tmp_path / "before.onnx")
    assert load_sparse_onnx(tmp_path / "before.onnx").graph.weights == "all uint8"
    record.value = json.dumps({**content, "weights": "int4"}, separators=(",", ":"))
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(ValueError, match="operators are not those that its metadata describe"):
        load_sparse_onnx(tmp_path / "other.onnx")


def test_other_weights_are_refused(files, tmp_path):
    with pytest.raises(ValueError, match="weights='int4': expected one of 'auto', 'uint8', 'int8'"):
        lower_to_portable(files / "libspconv.onnx", tmp_path / "x.onnx", weights="int4")
    assert list(tmp_path.iterdir()) == []


def test_both_ways_to_a_portable_file_are_one(files, tmp_path):
    lower_to_portable(files / "libspconv.onnx", tmp_path / "a.onnx", weights="uint8")
    assert unnoted(tmp_path / "a.onnx") == unnoted(files / "portable.onnx")
    lower_to_portable(files / "portable.onnx", tmp_path / "b.onnx", weights="uint8")
    assert unnoted(tmp_path / "b.onnx") == unnoted(files / "portable.onnx")


@pytest.mark.parametrize("name", ["portable", "layers"])
def test_checker_and_linter_have_nothing_to_say(files, name):
    path = files / f"{name}.onnx"
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert lint_onnx(path, "onnxruntime") == []


def test_functions_of_the_file_hold_standard_operators_only(files):
    model = onnx.load(files / "portable.onnx")
    own = {function.name for function in model.functions}
    assert {n.op_type for n in model.graph.node if n.domain} == own
    inside = [node for function in model.functions for node in function.node]
    assert {node.domain for node in inside} == {""}
    # Numbers of a layer come from its call.
    named = {a.ref_attr_name for node in inside for a in node.attribute if a.ref_attr_name}
    assert {"kernel_size", "stride", "input_range", "output_range"} <= named
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    assert kinds == {
        onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT64,
    }  # fmt: skip
    assert {n.doc_string for n in model.graph.node} >= {"conv_input.0", "conv_out.0"}


def test_inputs_and_outputs(files):
    run = session(files / "portable.onnx")
    assert [(v.name, v.type, v.shape) for v in run.get_inputs()] == [
        ("features", "tensor(float)", ["voxels", 5]),
        ("coords", "tensor(int32)", ["voxels", 4]),
        ("batch_size", "tensor(int64)", [1]),
    ]
    assert [(v.name, v.shape) for v in run.get_outputs()] == [("output", ["batch", 32, 6, 5])]
    layers = {value.name for value in session(files / "layers.onnx").get_outputs()}
    assert {"conv0", "add0", "relu0", "conv5", "conv5.coords", "output"} <= layers


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_plain_file_in_plain_onnxruntime(nets, files, batch_size):
    run = session(files / "portable.onnx")
    reference = load_sparse_onnx(files / "libspconv.onnx")
    for seed, share in ((1, 0.2), (2, 1.0), (3, 0.002)):
        inputs = nets.frame(seed, share, batch_size)
        (made,) = run.run(None, feed(*inputs))
        assert np.array_equal(made, reference(*inputs).numpy())


def test_voxels_in_another_order_give_the_same_grid(nets, files):
    run = session(files / "portable.onnx")
    features, coords, _ = nets.frame(1)
    order = torch.randperm(len(coords))
    (first,) = run.run(None, feed(features, coords, 1))
    (second,) = run.run(None, feed(features[order], coords[order], 1))
    assert np.array_equal(first, second)


def put_twice(features, coords):
    coords[5] = coords[9]


def put_behind(features, coords):
    coords[5, 2] = 10


def put_before(features, coords):
    coords[5, 3] = -1


def put_in_another_frame(features, coords):
    coords[5, 0] = 1


def put_nan(features, coords):
    features[7, 2] = float("nan")


@pytest.mark.parametrize(
    ("damage", "rule", "message"),
    [
        (put_twice, "voxels_occur_once", "a voxel occurs twice"),
        (put_behind, "voxels_lie_in_the_grid_and_the_batch", "outside of the grid or the batch"),
        (put_before, "voxels_lie_in_the_grid_and_the_batch", "outside of the grid or the batch"),
        (put_in_another_frame, "voxels_lie_in_the_grid", "outside of the grid or the batch"),
        (put_nan, "features_are_numbers", "features contain NaN"),
    ],
)
def test_what_the_model_refuses(nets, files, runtime, damage, rule, message):
    features, coords, batch_size = nets.frame(4)
    damage(features, coords)
    with pytest.raises(Exception, match=rule):
        session(files / "portable.onnx").run(None, feed(features, coords, batch_size))
    with pytest.raises(ValueError, match=message):
        runtime(features, coords)
    with pytest.raises(ValueError):  # noqa: PT011 - in words of its own
        load_sparse_onnx(files / "portable.onnx")(features, coords)


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_read_back(nets, files, mode):
    plain, portable = (
        load_sparse_onnx(files / f"{name}.onnx") for name in ("libspconv", "portable")
    )
    assert [n.path for n in portable.nodes] == [n.path for n in plain.nodes]
    wanted, dump = plain.run(*nets.frame(6), mode=mode)
    made, found = portable.run(*nets.frame(6), mode=mode)
    assert torch.equal(made, wanted)
    assert found.keys() == dump.keys()
    assert all(torch.equal(found[name].value, dump[name].value) for name in dump)


def changed(path, target, change):
    model = onnx.load(path)
    change(model)
    target.write_bytes(model.SerializeToString())
    return target


def of(model, kind):
    return next(node for node in model.graph.node if node.op_type == kind)


def other_range(model):
    node = of(model, "Requantize")
    kept = [a for a in node.attribute if a.name != "output_range"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("output_range", 3.0)])


def other_body(model):
    function = next(f for f in model.functions if f.name == "Requantize")
    next(node for node in function.node if node.op_type == "Round").op_type = "Floor"


def other_record(**changes):
    def change(model):
        entry = model.metadata_props[0]
        content = json.loads(entry.value)
        for name, value in changes.items():
            if name in content:
                content[name] = value
            else:
                content["nodes"][0]["attributes"][name] = value
        entry.value = json.dumps(content)

    return change


def no_record(model):
    del model.metadata_props[:]


def broken_record(model):
    model.metadata_props[0].value = "{"


def no_weight(model):
    names = [tensor.name for tensor in model.graph.initializer]
    del model.graph.initializer[names.index("conv1.weight")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_range, "operators are not those that its metadata describe"),
        (other_body, "operators are not those that its metadata describe"),
        (other_record(activation="None"), "operators are not those that its metadata describe"),
        (other_record(all_layers=True), "operators are not those that its metadata describe"),
        (other_record(output_precision="int4"), "conv0: output_precision is 'int4'"),
        (other_record(kernel_size=[3, 3, 2]), "conv0: a weight of shape"),
        (other_record(kernel_size="3"), "damaged"),
        (other_record(version=9), "metadata of version 9"),
        (other_record(nodes=[]), "no nodes or no outputs"),
        (other_record(nodes=3), "damaged"),
        (no_record, "0 metadata entries"),
        (broken_record, "Expecting"),
        (no_weight, r"conv1\.weight is missing"),
    ],
)
def test_a_changed_file_is_not_believed(files, tmp_path, change, message):
    path = changed(files / "portable.onnx", tmp_path / "a.onnx", change)
    with pytest.raises(ValueError, match=rf"load_sparse_onnx: a\.onnx: .*{message}"):
        load_sparse_onnx(path)


@pytest.mark.parametrize(
    "off",
    [("conv_input.0",), ("encoder_layers.encoder_layer1.0.conv2", "conv_out.0")],
    ids=["first fp16", "conv2 and last fp16"],
)
def test_layers_in_fp16(nets, tmp_path, off):
    """Floats are summed in another order; integers behind them differ by a step at most."""
    model = nets.switch_off(nets.encoder(), *off)
    path, inputs = tmp_path / "a.onnx", nets.frame(7, batch_size=2)
    export_sparse_onnx(model, nets.frame(0), path, dialect="portable")
    rows = compare_sparse_onnx(load_sparse_onnx(path, backend="onnxruntime"), model, inputs)
    assert len(rows) == 11 + 4 + 1
    assert {row.form for row in rows} == {"int8", "float"}
    assert max(row.largest for row in rows if row.form == "float") < 1e-4
    assert sum(row.different for row in rows if row.form == "int8") <= 3
    assert max(row.largest for row in rows if row.form == "int8") <= 1


@pytest.mark.parametrize("order", ["xyz", "zyx"])
def test_no_integer_differs_in_either_order(nets, tmp_path, order):
    model = nets.encoder(tail="none")
    path = tmp_path / "a.onnx"
    export_sparse_onnx(model, nets.frame(0), path, dialect="portable", order=order)
    file = load_sparse_onnx(path, backend="onnxruntime")
    rows = compare_sparse_onnx(file, model, nets.frame(8), reversed_axes=order == "zyx")
    assert len(rows) == 11 + 4 + 1
    assert {row.different for row in rows} == {0}


def test_a_sparse_result(nets, tmp_path):
    path, inputs = tmp_path / "a.onnx", nets.frame(3, batch_size=2)
    model = nets.hourglass()
    export_sparse_onnx(model, nets.frame(0), path, dialect="portable")
    rows = compare_sparse_onnx(load_sparse_onnx(path, backend="onnxruntime"), model, inputs)
    assert [row.node for row in rows] == ["conv0", "conv1", "conv2", "conv3", "conv4", "output"]
    assert {row.different for row in rows} == {0}
    made = session(path)
    assert [v.name for v in made.get_outputs()] == ["output", "output.coords"]
    _, voxels = made.run(None, feed(*inputs))
    assert np.array_equal(voxels, inputs[1].numpy())  # the inverse convolution went back to them


def test_float_models(nets, tmp_path):
    torch.manual_seed(0)
    model = nets.folded(nets.Encoder(), nets.frame(0))
    path, inputs = tmp_path / "a.onnx", nets.frame(4)
    export_sparse_onnx(model, nets.frame(0), path, dialect="portable")
    assert lint_onnx(path, "onnxruntime") == []
    (made,) = session(path).run(None, feed(*inputs))
    wanted = load_sparse_onnx(path)(*inputs)
    np.testing.assert_allclose(made, wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_settings(nets, tmp_path):
    arguments = (nets.encoder(), nets.frame(0), tmp_path / "a.onnx")
    with pytest.raises(ValueError, match="all_layers=True needs dialect='portable'"):
        export_sparse_onnx(*arguments, all_layers=True)
    with pytest.raises(ValueError, match=r"lower_to_portable: no\.onnx: no such file"):
        lower_to_portable(tmp_path / "no.onnx", tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
    export_sparse_onnx(*arguments, dialect="portable")
    file = load_sparse_onnx(tmp_path / "a.onnx", backend="onnxruntime")
    with pytest.raises(ValueError, match="a portable file has one"):
        file(*nets.frame(0), spatial_shape=(20, 20, 20))


def test_floats_of_an_integer_file(nets, files, runtime):
    inputs = nets.frame(4, batch_size=2)
    wanted = load_sparse_onnx(files / "libspconv.onnx")(*inputs, mode="float")
    made = runtime(*inputs, mode="float")
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.equal(made, runtime(*inputs))


def test_drawn_voxels_may_be_more_than_the_engines_bound(nets, tmp_path):
    """A portable file has none; the voxels that it is verified on lie apart, and spread."""
    layers = [
        nets.spconv.SparseConv3d(5, 4, 5, 1, padding=2),
        nets.spconv.SparseConv3d(4, 4, 5, 1, padding=2),
    ]

    class Spreading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nets.spconv.SparseSequential(*layers)

        def forward(self, features, coords, batch_size):
            return self.layers(
                nets.spconv.SparseConvTensor(features, coords, [40, 40, 40], batch_size)
            )

    model = nets.calibrated(Spreading().eval(), [nets.frame(0)])
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")
    made = lower_to_portable(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert made.verified == "onnxruntime"


@pytest.mark.parametrize(("cpu", "weights"), [("vnni", "int8"), ("any", "uint8")])
def test_weights_by_default_are_those_of_the_cpu_at_hand(
    cpu, weights, files, nets, tmp_path, monkeypatch
):
    monkeypatch.setenv("BEVQUANT_CPU", cpu)
    lowered = lower_to_portable(files / "libspconv.onnx", tmp_path / "net.onnx", verify=False)
    assert (lowered.figures.weights, lowered.figures.cpu) == (weights, cpu)
    read = load_sparse_onnx(lowered.path)
    assert read.graph.weights == weights
    made = export_sparse_onnx(
        nets.encoder(), nets.frame(0), tmp_path / "a.onnx", dialect="portable", verify=False
    )
    assert (made.figures.weights, made.figures.cpu) == (weights, cpu)


def test_onnxruntime_runs_the_weights_that_a_file_has(files, nets, tmp_path, monkeypatch):
    path = tmp_path / "int8.onnx"
    lower_to_portable(files / "libspconv.onnx", path, weights="int8", verify=False)
    running = load_sparse_onnx(path, backend="onnxruntime")
    monkeypatch.setenv("BEVQUANT_CPU", "any")
    with pytest.raises(ValueError, match=r"load_sparse_onnx: .* this CPU does not"):
        running(*nets.frame(1))


def test_a_portable_file_is_timed_beside_float32(nets, tmp_path):
    given = {"dialect": "portable", "measure": True}
    made = export_sparse_onnx(nets.encoder(), nets.frame(0), tmp_path / "a.onnx", **given)
    assert made.figures.timing.float_milliseconds > 0
    assert "times as fast as float32" in str(made)
    assert made.figures.size == (tmp_path / "a.onnx").stat().st_size
    with pytest.raises(ValueError, match="measure=True needs dialect='portable'"):
        export_sparse_onnx(nets.encoder(), nets.frame(0), tmp_path / "b.onnx", measure=True)

"""Files for Autoware's plugin: what they hold, that they run as the simulator, what is refused."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from bevquant_export import export_float_onnx, lint_onnx
from bevquant_export.targets import find_target
from bevquant_export.targets.autoware import (
    PLUGIN_OPERATORS,
    compare_autoware_onnx,
    export_autoware_onnx,
    run_autoware_onnx,
)
from bevquant_sparse import build_rulebook

FORMS = {
    "int8": {},
    "rulebooks": {"rulebook_inputs": True, "do_sort": True},
    "fp16": {"precision": "fp16"},
    "apart": {"precision": "fp16", "fused": False},
    "zyx": {"model_order": "zyx"},
    "yxz": {"model_order": "yxz"},
}


def written(nets, path, model=None, **settings):
    model = nets.encoder() if model is None else model
    return export_autoware_onnx(model, nets.frame(0), path, batches=[nets.frame(5)], **settings)


@pytest.mark.parametrize("form", FORMS)
def test_no_value_differs_from_the_simulator(nets, form, tmp_path):
    file = written(nets, tmp_path / "a.onnx", **FORMS[form])
    onnx.checker.check_model(onnx.load(file.path), full_check=True)
    assert [str(finding) for finding in lint_onnx(file.path, "autoware")] == []
    rows = compare_autoware_onnx(file, nets.frame(5))
    assert len(rows) == 11 + 4 + 1
    assert [row.path for row in rows if row.different] == []
    assert min(row.elements for row in rows) > 0


def test_a_forward_of_a_dict_with_two_scales(nets, tmp_path):
    class Scales(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder = encoder

        def forward(self, batch):
            out = self.encoder(batch["voxels"], batch["coords"], batch["batch_size"])
            return {"map": out, "half": out.flatten(1)}

    model = Scales(nets.encoder()).eval()
    frame = [
        dict(zip(("voxels", "coords", "batch_size"), nets.frame(i), strict=True)) for i in (0, 5)
    ]
    file = export_autoware_onnx(model, (frame[0],), tmp_path / "a.onnx", batches=[(frame[1],)])
    assert file.outputs == ("lidar_bev_0", "lidar_bev_1")
    rows = compare_autoware_onnx(file, nets.frame(5))
    assert [row.path for row in rows if row.different] == []
    assert [row.node for row in rows].count("output") == 2
    twice = frame[0] | {"batch_size": 2}
    with pytest.raises(ValueError, match="a batch of 2 frames"):
        export_autoware_onnx(model, (twice,), tmp_path / "b.onnx")


def test_pairs_are_made_once_for_voxels_and_geometry(nets, tmp_path):
    ops = lambda path: [node.op_type for node in onnx.load(path).graph.node]  # noqa: E731
    whole = written(nets, tmp_path / "a.onnx")
    assert whole.pair_generations == (4, 11)  # two submanifold, one down, one out
    assert whole.notes == ("4 pair generations for 11 layers",)
    assert ops(whole.path).count("GetIndicePairsImplicitGemm") == 4
    held = written(nets, tmp_path / "b.onnx", rulebook_inputs=True)
    assert held.pair_generations == (2, 11)
    names = [value.name for value in onnx.load(held.path).graph.input]
    slots = ("out_indices", "pair_fwd", "pair_mask", "mask_argsort")
    keys = ("spconv1", "out")
    assert names[3:] == [f"rulebook/{key}/{slot}" for key in keys for slot in slots]


def test_the_integers_of_the_file_are_those_of_the_model(nets, tmp_path):
    file = written(nets, tmp_path / "a.onnx", nets.switch_off(nets.encoder(), "conv_input.0"))
    assert [form for _, form in file.layers.values()] == ["fp16"] + ["int8"] * 10
    nodes = [n for n in onnx.load(file.path).graph.node if n.op_type == "ImplicitGemm"]
    assert [len(node.input) for node in nodes] == [6] + [7] * 10


@pytest.mark.parametrize("subm", [True, False])
def test_pairs_are_those_of_the_rulebook(nets, subm):
    _, coords, _ = nets.frame(3)
    size, step, pad = (3, 3, 3), (1, 1, 1) if subm else (2, 2, 1), (1, 1, 1)
    attributes = {
        "spatial_shape": nets.GRID, "ksize": size, "stride": step, "padding": pad,
        "dilation": (1, 1, 1), "out_padding": (0, 0, 0), "subm": int(subm), "do_sort": 1,
    }  # fmt: skip
    made, pairs, mask, order, count = operator(
        "GetIndicePairsImplicitGemm", [coords.numpy()], 5, **attributes
    )
    book = build_rulebook(coords, nets.GRID, size, step, pad, subm=subm, batch_size=1)
    assert int(count) == len(made) == book.num_out
    offsets = np.arange(len(pairs), dtype=np.uint32)[:, None]
    assert np.array_equal(pairs >= 0, (mask[:, 0].view(np.uint32) >> offsets) & 1)
    assert np.array_equal(order, np.argsort(mask[:, 0].view(np.uint32), kind="stable"))

    def triples(neighbours, outputs):
        rows = coords.numpy()
        return {
            (k, *rows[i], *outputs[o])
            for o, k in itertools.product(range(len(outputs)), range(27))
            if (i := neighbours[o, k]) >= 0
        }

    want = triples(book.neighbours.numpy(), book.out_indices.numpy())
    assert triples(pairs.T, made) == want


def operator(name, inputs, outputs, **attributes):
    names = [f"i{n}" for n in range(len(inputs))]
    made = [f"o{n}" for n in range(outputs)]
    kinds = [helper.np_dtype_to_tensor_dtype(value.dtype) for value in inputs]
    graph = helper.make_graph(
        [helper.make_node(name, names, made, domain="autoware", **attributes)],
        "g",
        [helper.make_tensor_value_info(n, k, None) for n, k in zip(names, kinds, strict=True)],
        [helper.make_tensor_value_info(n, TensorProto.INT32, None) for n in made],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("autoware", 1)])
    evaluator = ReferenceEvaluator(model, new_ops=list(PLUGIN_OPERATORS))
    return evaluator.run(None, dict(zip(names, inputs, strict=True)))


def test_ties_go_away_from_zero_and_values_saturate():
    x = np.array([[0.5], [-0.5], [1.5], [-2.5], [300.0], [-300.0]], np.float16)
    pairs = np.arange(6, dtype=np.int32)[None]
    common = (pairs, np.ones((6, 1), np.int32), np.arange(6, dtype=np.int32))
    filters = np.ones((1, 1, 1, 1, 1), np.float16)
    scale, bias = np.ones(1, np.float32), np.array([0.25], np.float32)
    (made,) = operator(
        "ImplicitGemm", [x, filters, *common, scale, bias], 1, precision=1, input_scale=1.0
    )
    assert made[:, 0].tolist() == [1.25, -0.75, 2.25, -2.75, 127.25, -127.75]
    (clamped,) = operator(
        "ImplicitGemm", [x, filters, *common, scale, bias], 1, precision=1, input_scale=1.0,
        act_type=1,
    )  # fmt: skip
    assert clamped[:, 0].tolist() == [1.25, 0, 2.25, 0, 127.25, 0]


def test_points_are_averaged_and_columns_permuted(nets, tmp_path):
    file = written(nets, tmp_path / "a.onnx")
    features, coords, _ = nets.frame(5)
    zyx = coords[:, [3, 2, 1]].numpy()
    points = np.zeros((len(coords), 10, 5), np.float32)
    points[:, 0], points[:, 1] = features.numpy() - 1, features.numpy() + 1
    made = run_autoware_onnx(file.path, points, zyx, np.full(len(coords), 2, np.int32))
    assert np.array_equal(made["coors.indices"], coords.numpy())
    assert np.allclose(made["voxels.mean"], features.numpy(), atol=1e-6)


def test_a_tail_becomes_part_of_the_file(nets, tmp_path):
    encoder = written(nets, tmp_path / "encoder.onnx")
    shape = [
        d.dim_value for d in onnx.load(encoder.path).graph.output[0].type.tensor_type.shape.dim
    ]
    tail = nn.Conv2d(shape[1], 3, 1).eval()
    export_float_onnx(tail, torch.rand(shape), tmp_path / "tail.onnx", output_names=["score"])
    file = written(nets, tmp_path / "whole.onnx", tails=[tmp_path / "tail.onnx"])
    model = onnx.load(file.path)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.output] == ["score"]
    assert [str(finding) for finding in lint_onnx(file.path, "autoware")] == []
    features, coords, _ = nets.frame(5)
    given = features.numpy()[:, None], coords[:, [3, 2, 1]].numpy()
    made = run_autoware_onnx(file.path, *given, np.ones(len(coords), np.int32))
    with torch.no_grad():
        wanted = tail(torch.from_numpy(made["lidar_bev"].astype(np.float32)))
    assert np.allclose(made["score"], wanted.numpy(), atol=1e-5)


REFUSALS = {
    "inverse convolution": lambda nets: (nets.hourglass(), nets.frame(0), {}),
    "a batch of 2": lambda nets: (nets.encoder(), nets.frame(0, batch_size=2), {}),
    "fused=False": lambda nets: (nets.encoder(), nets.frame(0), {"fused": False}),
    "256,000": lambda nets: (nets.encoder(), nets.frame(0), {"head_room": 2000.0}),
    "precision='int4'": lambda nets: (nets.encoder(), nets.frame(0), {"precision": "int4"}),
    "model_order='zxy'": lambda nets: (nets.encoder(), nets.frame(0), {"model_order": "zxy"}),
    "output names": lambda nets: (nets.encoder(), nets.frame(0), {"output_names": ("a", "b")}),
}


@pytest.mark.parametrize("said", REFUSALS)
def test_refusals_name_what_is_wrong(nets, said, tmp_path):
    model, example, settings = REFUSALS[said](nets)
    with pytest.raises(ValueError, match=said):
        export_autoware_onnx(model, example, tmp_path / "a.onnx", **settings)
    assert not (tmp_path / "a.onnx").exists()


def test_what_makes_the_features_is_not_left_out(nets, tmp_path):
    class Ordered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nets.spconv.SubMConv3d(5, 8, 3, indice_key="stem")

        def forward(self, features, coords, batch_size):
            order = torch.argsort(coords[:, 3], stable=True)
            given = (features[order], coords[order], list(nets.GRID), batch_size)
            return self.stem(nets.spconv.SparseConvTensor(*given))

    model = nets.calibrated(Ordered().eval(), [nets.frame(0)])
    with pytest.raises(
        ValueError, match=r"test_autoware\.py:\d+\) makes the features of the voxels"
    ):
        export_autoware_onnx(model, nets.frame(0), tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


def test_integers_that_float16_does_not_carry_are_refused(nets, tmp_path):
    model = nets.encoder()
    layer = model.get_submodule("encoder_layers.encoder_layer1.0.conv1")
    with torch.no_grad():
        layer.weight.mul_(1e-6)
        layer.bias.zero_()
    layer._weight_quantizer.amax = layer._weight_quantizer.amax * 1e-6
    with pytest.raises(ValueError, match=r"encoder_layer1\.0\.conv1"):
        written(nets, tmp_path / "a.onnx", model)


def gemm(model, number=1):
    return [node for node in model.graph.node if node.op_type == "ImplicitGemm"][number]


def pair(model, number=0):
    return [n for n in model.graph.node if n.op_type == "GetIndicePairsImplicitGemm"][number]


def attribute(node, name):
    return next(item for item in node.attribute if item.name == name)


def replaced(model, name, change):
    tensor = next(item for item in model.graph.initializer if item.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))


def without(node, name):
    node.attribute.remove(attribute(node, name))


def prop(model, key, value):
    props = {p.key: p.value for p in model.metadata_props} | {key: value}
    del model.metadata_props[:]
    helper.set_model_props(model, props)


def integer_as_list(model):
    item = attribute(pair(model), "algo")
    item.CopyFrom(helper.make_attribute("algo", [1]))


def swapped(node, a, b):
    node.input[a], node.input[b] = node.input[b], node.input[a]


def half_written(model):
    weight = gemm(model).input[1]
    replaced(model, weight, lambda a: a.astype(np.float32))


def repeated(model):
    first = pair(model)
    copied = helper.make_node(
        first.op_type, list(first.input), [f"{name}2" for name in first.output], "again",
        domain="autoware",
    )  # fmt: skip
    copied.attribute.extend(first.attribute)
    model.graph.node.insert(list(model.graph.node).index(first) + 1, copied)


DAMAGE = {
    "AWF001": lambda m: setattr(gemm(m), "op_type", "ImplicitGemmInt8"),
    "AWF002": lambda m: without(pair(m), "algo"),
    "AWF002 type": integer_as_list,
    "AWF003": lambda m: without(pair(m), "do_sort"),
    "AWF004": lambda m: setattr(attribute(pair(m), "batch_size"), "i", 2),
    "AWF005": lambda m: attribute(pair(m), "ksize").ints.__setitem__(slice(None), [5, 5, 5]),
    "AWF006": lambda m: gemm(m).input.pop(),
    "AWF007": lambda m: swapped(gemm(m), 2, 3),
    "AWF008": lambda m: replaced(m, gemm(m).input[1], lambda a: a.transpose(1, 2, 3, 4, 0).copy()),
    "AWF009": half_written,
    "AWF010": lambda m: replaced(m, gemm(m).input[5], lambda a: a * 0),
    "AWF011": lambda m: replaced(m, gemm(m).input[5], lambda a: a * np.float32(1e-7)),
    "AWF012": lambda m: replaced(m, gemm(m).input[5], lambda a: a / 2),
    "AWF013": lambda m: prop(m, "bevquant_voxel_bounds", '{"conv_out.0": 300000}'),
    "AWF014": repeated,
    "AWF015": lambda m: prop(m, "rulebook_coors_permutation", "1,2,0"),
    "AWF016": lambda m: prop(m, "rulebook_stages", "[]"),
    "AWF017": lambda m: setattr(m.graph.input[1].type.tensor_type, "elem_type", 7),
    "AWF018": lambda m: setattr(attribute(gemm(m), "is_subm"), "i", 0),
    "AWF019": lambda m: attribute(pair(m, 1), "spatial_shape").ints.__setitem__(0, 100),
    "AWF020": lambda m: setattr(attribute(gemm(m), "act_type"), "i", 2),
    "AWF021": lambda m: gemm(m).attribute.append(helper.make_attribute("fp32_accum", 1)),
}


@pytest.fixture(scope="module")
def right(nets, tmp_path_factory):
    return written(nets, tmp_path_factory.mktemp("right") / "a.onnx", rulebook_inputs=True)


@pytest.mark.parametrize("rule", DAMAGE)
def test_each_rule_is_found_where_it_is_broken(right, rule, tmp_path):
    model = onnx.load(right.path)
    DAMAGE[rule](model)
    onnx.save(model, tmp_path / "b.onnx")
    found = lint_onnx(tmp_path / "b.onnx", "autoware")
    assert rule.split()[0] in {finding.id for finding in found}, [str(f) for f in found]
    assert all(finding.remedy for finding in found)


def test_every_rule_is_broken_above():
    own = {rule.id for rule in find_target("autoware").rules if rule.id.startswith("AWF")}
    assert own == {name.split()[0] for name in DAMAGE}


def test_a_real_frame_through_a_thin_slice(nets, real_frame, tmp_path):
    features, coords = real_frame
    first, width = 704, 32
    near = (coords[:, 1] >= first) & (coords[:, 1] < first + width)
    slice_at = coords[near] - torch.tensor([0, first, 0, 0], dtype=coords.dtype)
    few = (features[near], slice_at.contiguous(), 1)
    torch.manual_seed(0)
    model = nets.calibrated(nets.Encoder((8, 16), (width, 1440, 41)), [few], method="max")
    file = export_autoware_onnx(model, few, tmp_path / "a.onnx")
    rows = compare_autoware_onnx(file, few)
    assert sum(row.elements for row in rows) > 200_000
    assert [row.path for row in rows if row.different] == []


def test_a_frame_of_another_form_is_refused_by_name(nets):
    features, coords, _ = nets.frame(0)
    with pytest.raises(TypeError, match=r"features, coordinates .* got \(dict\); of a model that"):
        compare_autoware_onnx(None, {"voxel_features": features, "voxel_coords": coords})

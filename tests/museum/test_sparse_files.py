"""Sparse files that libspconv or Autoware's plugin refused, crashed on, or misread."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper


def named(model, name):
    return next(node for node in model.graph.node if node.name == name)


def convs(model):
    return [n for n in model.graph.node if n.op_type in ("SparseConvolution", "ImplicitGemm")]


def change(node, **attributes):
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(
        helper.make_attribute(k, v) for k, v in attributes.items() if v is not None
    )


def array(model, name, edit):
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(edit(numpy_helper.to_array(tensor).copy()), name))


def behind(model, node, op, **attributes):
    """A node that takes over the output of another."""
    made = node.output[0]
    node.output[0] = f"{made}.before"
    new = helper.make_node(op, [f"{made}.before"], [made], f"{op.lower()}_new", **attributes)
    model.graph.node.insert(list(model.graph.node).index(node) + 1, new)


def relu_node(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#37: a ReLU of its own behind a convolution."""
    behind(model, convs(model)[1], "Relu")


def relu_before_the_grid(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#325: a ReLU between the last convolution and the grid."""
    behind(model, convs(model)[-1], "Relu")


def two_inputs(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#146: "CHECK failed: (index) < (current_size_)"."""
    convs(model)[1].input.pop()


def no_bias(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#181: a convolution without bias, its batch norm unfolded."""
    convs(model)[2].input[2] = ""


def overflow(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#297: folded weights beyond float16, accuracy is lost."""
    array(model, convs(model)[1].input[1], lambda w: np.full_like(w, np.inf))


def one_weight_range(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#186: "weight_scales_.size()==bias.numel" asserted."""
    change(convs(model)[1], weight_dynamic_ranges=[1.0])


def ranges_of_nan(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#205: ranges that no calibration has filled."""
    node = convs(model)[1]
    count = len(next(a.floats for a in node.attribute if a.name == "weight_dynamic_ranges"))
    change(node, weight_dynamic_ranges=[float("nan")] * count)


def branches(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#319: both inputs of an Add must have one type."""
    change(convs(model)[2], output_precision="fp16")


def bound_beyond_int32(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#338: voxels are cut off without a word."""
    change(convs(model)[1], output_bound=2**31)


def no_bound(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#204: the default bound is too small for the frame."""
    change(convs(model)[1], output_bound=None)


def first_key(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#225: the first convolution has another rulebook's key."""
    change(convs(model)[0], rulebook="subm_input")


def shared_key(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#302: another kernel under the same indice_key."""
    change(convs(model)[-1], rulebook="subm1")


def inverse_without_partner(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#305: an inverse convolution, "points do not match"."""
    change(convs(model)[-1], inverse=1, rulebook="nowhere")


def coordinates_as_input(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#220: coordinates among the graph's inputs."""
    info = helper.make_tensor_value_info("coords", onnx.TensorProto.INT32, [1, 4])
    model.graph.input.append(info)


def concatenation(model):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#120: "Unsupport operator" Concat, and a null engine."""
    behind(model, convs(model)[1], "Concat", axis=1)


def no_do_sort(model):
    """autowarefoundation/autoware_universe#12631: sorting costs more than it saves."""
    pairs = next(n for n in model.graph.node if n.op_type == "GetIndicePairsImplicitGemm")
    change(pairs, do_sort=None)


def turned_grid(model):
    """autowarefoundation/autoware_universe#12837: right pairs of a transposed grid."""
    entry = next(p for p in model.metadata_props if p.key == "rulebook_coors_permutation")
    entry.value = "1,2,0"


def lost_stage(model):
    """autowarefoundation/autoware_universe#13370: pairs as inputs, without what they come of."""
    entry = next(p for p in model.metadata_props if p.key == "rulebook_stages")
    entry.value = "[]"


def float_bias(model):
    """autowarefoundation/autoware_universe#12658: a bias must have the type of the features."""
    node = convs(model)[1]
    change(node, precision=0)
    del node.input[6:]


def int8_with_six_inputs(model):
    """autowarefoundation/autoware_universe#13369: int8 without its scales or its bias."""
    convs(model)[1].input.pop()


def kind_as_float(model):
    """autowarefoundation/autoware_universe#12734: is_subm of another type than the creator's."""
    change(convs(model)[1], is_subm=1.0)


def no_activation_field(model):
    """autowarefoundation/autoware_universe#13067: "Attribute act_type not found"."""
    change(convs(model)[1], act_type=None)


EXHIBITS = {
    relu_node: ("libspconv", "SPC022"),
    relu_before_the_grid: ("libspconv", "SPC022"),
    two_inputs: ("libspconv", "SPC002"),
    no_bias: ("libspconv", "SPC002"),
    overflow: ("libspconv", "SPC021"),
    one_weight_range: ("libspconv", "SPC015"),
    ranges_of_nan: ("libspconv", "SPC016"),
    branches: ("libspconv", "SPC024"),
    bound_beyond_int32: ("libspconv", "SPC032"),
    no_bound: ("libspconv", "SPC029"),
    first_key: ("libspconv", "SPC026"),
    shared_key: ("libspconv", "SPC027"),
    inverse_without_partner: ("libspconv", "SPC028"),
    coordinates_as_input: ("libspconv", "SPC033"),
    concatenation: ("libspconv", "SPC001"),
    no_do_sort: ("autoware", "AWF003"),
    turned_grid: ("autoware", "AWF015"),
    lost_stage: ("autoware", "AWF016"),
    float_bias: ("autoware", "AWF009"),
    int8_with_six_inputs: ("autoware", "AWF006"),
    kind_as_float: ("autoware", "AWF002"),
    no_activation_field: ("autoware", "AWF002"),
}


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.__name__)
def test_the_linter_names_cause_and_remedy(exhibit, files, found):
    target, rule = EXHIBITS[exhibit]
    model = onnx.load(files[target])
    assert found(model, target) == {}
    exhibit(model)
    said = found(model, target)
    assert rule in said, said

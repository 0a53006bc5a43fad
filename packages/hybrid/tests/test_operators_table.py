"""The table against the document's rows, and its reader against bad data."""

import copy
import dataclasses
import inspect
import re
from importlib import resources
from math import inf

import pytest
import torch
import torch.nn.functional as F

from bevquant_hybrid.operators import (
    Expression,
    OperatorCall,
    _attributes,
    build_table,
    find_advice,
    find_violations,
    is_identity,
    load_support_table,
    render_support_table,
)

# The document's rows, copied by hand: which of the two columns support each.
BOTH = """
torch.add torch.argmax torch.argmin torch.cat torch.exp torch.matmul torch.max torch.mean torch.mul
torch.split torch.sub torch.sum torch.nn.functional.interpolate torch.nn.functional.relu
torch.nn.functional.relu6(fused) torch.nn.AvgPool2d torch.nn.BatchNorm2d torch.nn.BatchNorm3d
torch.nn.ChannelShuffle torch.nn.ConstantPad2d torch.nn.Conv2d torch.nn.ConvTranspose2d
torch.nn.Dropout torch.nn.Dropout2d torch.nn.GELU torch.nn.Identity torch.nn.MaxPool2d
torch.nn.PixelShuffle torch.nn.PixelUnshuffle torch.nn.ReLU torch.nn.ReLU6
torch.nn.ReplicationPad2d torch.nn.Sigmoid torch.nn.SiLU torch.nn.SyncBatchNorm torch.nn.Tanh
torch.nn.Upsample torch.nn.UpsamplingBilinear2d torch.nn.UpsamplingNearest2d torch.nn.ZeroPad2d
torch.quantization.DeQuantStub torch.quantization.QuantStub torch.Tensor.getitem
torch.Tensor.argmax torch.Tensor.argmin torchvision.models.detection.rpn.AnchorGenerator
torchvision.ops.MultiScaleRoIAlign torchvision.ops.RoIAlign
""".split()
BAYES_ALONE = """
torch.abs torch.acos torch.acosh torch.asin torch.asinh torch.atan torch.atanh torch.ceil
torch.clamp torch.clip torch.cos torch.cosh torch.div torch.eq torch.erf torch.floor torch.gather
torch.ge torch.greater torch.greater_equal torch.gt torch.le torch.less torch.less_equal torch.log
torch.lt torch.maximum torch.min torch.minimum torch.pow torch.reciprocal torch.selu torch.sin
torch.sinh torch.sqrt torch.tan torch.topk torch.nn.functional.grid_sample torch.nn.functional.pad
torch.nn.AdaptiveAvgPool2d torch.nn.Conv3d torch.nn.ELU torch.nn.GLU torch.nn.HardSigmoid
torch.nn.LayerNorm torch.nn.LeakyReLU torch.nn.Linear torch.nn.LSTMCell torch.nn.MultiheadAttention
torch.nn.PReLU torch.nn.Softmax torch.nn.Softplus torch.Tensor.transpose torch.Tensor.clamp
torch.Tensor.clip torch.Tensor.eq torch.Tensor.expand torch.Tensor.ge torch.Tensor.greater
torch.Tensor.greater_equal torch.Tensor.gt torch.Tensor.le torch.Tensor.less
torch.Tensor.less_equal torch.Tensor.max torch.Tensor.min torch.Tensor.repeat torch.Tensor.reshape
torch.Tensor.tile torch.Tensor.abs
""".split()
# Of the documents' first edition: modules for which torch has no operator.
OWN = {
    "horizon.nn.Correlation": {"bayes"},
    "horizon.nn.PointPillarsScatter": {"bayes"},
    "horizon.nn.RcnnPostProcess": {"bayes"},
    "horizon.nn.DetectionPostProcess": {"bernoulli2", "bayes"},
    "horizon.nn.DetectionPostProcessV1": {"bernoulli2"},
    "horizon.nn.functional.point_pillars_preprocess": {"bernoulli2", "bayes"},
}


def test_every_row_of_the_document_is_there_with_its_columns():
    table = load_support_table()
    assert sorted(table.operators) == sorted([*BOTH, *BAYES_ALONE, *OWN])
    for name, columns in OWN.items():
        assert set(table.operators[name].support) == columns, name
    for name in BOTH:
        assert set(table.operators[name].support) - {"nash"} == {"bernoulli2", "bayes"}, name
    for name in BAYES_ALONE:
        assert set(table.operators[name].support) - {"nash"} == {"bayes"}, name


def test_the_rows_are_those_that_the_document_prints(document):
    """Cells run into one another in the text: a name ends where what may follow it begins."""
    text = document("001")
    both, bayes = set(), set()
    for line in text[text.index("torch function 类") :].splitlines():
        row = re.match(r"torch(vision)?\.[A-Za-z0-9_.()]+", line)
        if row is None or line.endswith("类"):
            continue
        name = re.sub(r"(BatchNorm\dd)\1", r"\1", row[0])
        name = re.match(r"torch.+?(?=horizon\.|torch\.|qint|input|float32|$)", name)[0]
        cells = re.sub(r"^[A-Za-z0-9_.()]+( 或 [A-Za-z0-9_.]+)?", "", line)
        (bayes if cells.startswith("不支持") else both).add(name.replace("Layernorm", "LayerNorm"))
    assert both == set(BOTH)
    assert bayes == set(BAYES_ALONE)


@pytest.mark.parametrize("spelling", ["BAYES_E", "bayes-e", "Bayes", "bernoulli2"])
def test_marches_are_found_in_any_spelling(spelling):
    assert load_support_table().march(spelling).title.replace("_", "-").lower() == (
        spelling.lower().replace("_", "-")
    )


def test_unknown_march_is_named():
    with pytest.raises(ValueError, match="march 'nash'; expected one of bernoulli2, bayes"):
        find_violations([], "nash")


Q8, Q16, Q32, F32 = "qint8", "qint16", "qint32", "float32"
CONV = {
    **{"in_channels": 8, "out_channels": 8, "kernel_size": (3, 3), "stride": (1, 1)},
    **{"padding": (1, 1), "dilation": (1, 1), "groups": 1, "sumin": False},
}
CONV3D = {**CONV, "kernel_size": (3, 3, 3), "stride": (1, 1, 1), "padding": 1, "dilation": 1}
DECONV = {**CONV, "kernel_size": 4, "stride": 2, "padding": 1, "output_padding": 0}
POOL = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1}
RESIZE = {
    **{"mode": "bilinear", "align_corners": None, "scale_factor": None},
    "recompute_scale_factor": None,
}
MAX = {"index_is_output": True}
MHA = {"add_bias_kv": False, "add_zero_attn": False, "embed_dim": 8, "kdim": 8, "vdim": 8}
CORRELATION = {
    **{"kernel_size": 3, "max_displacement": 4, "stride1": 2, "stride2": 3, "pad_size": 0},
}
ROI = {"feature_count": 2, "boxes": "list of [1, n, 4]"}


def call(operator, attributes=None, **fields):
    fields = {
        **{"input_shapes": ((1, 8, 16, 16),), "output_shape": (1, 8, 16, 16)},
        **{"input_dtypes": None, "output_dtype": Q8, **fields},
    }
    fields["input_dtypes"] = fields["input_dtypes"] or (Q8,) * len(fields["input_shapes"])
    return OperatorCall("block.op", operator, attributes or {}, **fields)


def shaped(*inputs, out=None):
    return {"input_shapes": inputs, "output_shape": out or inputs[0]}


def typed(*inputs, out):
    shape = (1, 8, 16, 16)
    return {"input_shapes": (shape,) * len(inputs), "input_dtypes": inputs, "output_dtype": out}


# operator, attributes, record fields, quantity at fault on BERNOULLI2 and on BAYES ("" = passes,
# None = not looked at). Values on both sides of each bound, from the document.
NO = "operator"
CASES = [
    ("torch.nn.AvgPool2d", {**POOL, "kernel_size": 8}, {}, "kernel_size", ""),
    ("torch.nn.AvgPool2d", {**POOL, "kernel_size": (7, 1)}, {}, "", ""),
    ("torch.nn.AvgPool2d", {**POOL, "kernel_size": 257}, {}, "kernel_size", "kernel_size"),
    ("torch.nn.AvgPool2d", {**POOL, "stride": 186}, {}, "stride", ""),
    ("torch.nn.AvgPool2d", {**POOL, "stride": 257}, {}, "stride", "stride"),
    ("torch.nn.AvgPool2d", {**POOL, "padding": 257}, {}, "", "padding"),
    ("torch.nn.AvgPool2d", POOL, shaped((8, 16, 16)), "input_rank output_rank", ""),
    ("torch.nn.MaxPool2d", {**POOL, "kernel_size": 65}, {}, "kernel_size", ""),
    ("torch.nn.MaxPool2d", {**POOL, "kernel_size": 64}, {}, "", ""),
    ("torch.nn.MaxPool2d", {**POOL, "stride": 257}, {}, "stride", "stride"),
    ("torch.nn.MaxPool2d", {**POOL, "padding": 256}, {}, "", "padding"),
    ("torch.nn.MaxPool2d", {**POOL, "dilation": 2}, {}, "", "dilation"),
    ("torch.nn.MaxPool2d", POOL, shaped((1, 8193, 4, 4)), "", "channels"),
    ("torch.nn.Conv2d", CONV, {}, "", ""),
    ("torch.nn.Conv2d", {**CONV, "kernel_size": (8, 3)}, {}, "kernel_size", ""),
    ("torch.nn.Conv2d", {**CONV, "kernel_size": 32}, {}, "kernel_size", "kernel_size"),
    ("torch.nn.Conv2d", {**CONV, "kernel_size": 31}, {}, "kernel_size", ""),
    ("torch.nn.Conv2d", {**CONV, "dilation": 3}, {}, "dilation", ""),
    ("torch.nn.Conv2d", {**CONV, "dilation": 17}, {}, "dilation", "dilation"),
    ("torch.nn.Conv2d", {**CONV, "dilation": 2, "stride": 2}, {}, "stride", "stride"),
    ("torch.nn.Conv2d", {**CONV, "dilation": (1, 2), "stride": (2, 1)}, {}, "stride", "stride"),
    ("torch.nn.Conv2d", {**CONV, "padding": 257}, {}, "", "padding"),
    ("torch.nn.Conv2d", {**CONV, "out_channels": 8193}, {}, "", "out_channels"),
    ("torch.nn.Conv2d", {**CONV, "out_channels": 16384}, {"is_model_output": True}, "", ""),
    *[
        ("torch.nn.Conv2d", {**CONV, "out_channels": n}, {"is_model_output": True}, None, fault)
        for n, fault in [(16384, ""), (16385, "out_channels")]
    ],
    ("torch.nn.Conv2d", {**CONV, "sumin": True, "stride": 3}, {}, "", "stride"),
    ("torch.nn.Conv2d", {**CONV, "sumin": True, "stride": (1, 2)}, {}, "", "distinct_strides"),
    ("torch.nn.Conv2d", {**CONV, "sumin": True, "stride": 2}, {}, "", ""),
    ("torch.nn.Conv2d", {**CONV, "in_channels": 7281}, {}, None, ""),
    ("torch.nn.Conv2d", {**CONV, "in_channels": 7282}, {}, None, "filter_size"),
    ("torch.nn.Conv2d", {**CONV, "in_channels": 7282, "groups": 2}, {}, None, ""),
    ("torch.nn.Conv2d", CONV, typed(Q16, out=Q16), "dtype of input 0, dtype of the output", ""),
    *[
        ("torch.nn.Conv2d", {**CONV, "weight_l1": n}, typed(Q16, out=Q16), None, fault)
        for n, fault in [(65535, ""), (65536, "accumulator_bound")]
    ],
    ("torch.nn.Conv2d", {**CONV, "in_channels": 64}, typed(Q16, out=Q8), None, "accumulator_bound"),
    ("torch.nn.Conv2d", CONV, typed(Q8, out=Q32), "", ""),
    ("torch.nn.Conv2d", {**CONV, "weight_dtype": Q16}, {}, "", "weight_dtype"),
    ("torch.nn.Conv2d", CONV, typed(F32, out=F32), "dtype of input 0", "dtype of input 0"),
    ("torch.nn.Conv3d", CONV3D, shaped((1, 8, 4, 4, 4)), NO, ""),
    ("torch.nn.Conv3d", {**CONV3D, "groups": 2}, shaped((1, 8, 4, 4, 4)), NO, "groups"),
    ("torch.nn.Conv3d", {**CONV3D, "stride": (1, 2, 1)}, shaped((1,) * 5), NO, "distinct_strides"),
    ("torch.nn.Conv3d", {**CONV3D, "stride": 3}, shaped((1,) * 5), NO, "stride"),
    ("torch.nn.Conv3d", {**CONV3D, "padding": 2}, shaped((1,) * 5), NO, "padding, kernel_size"),
    ("torch.nn.Conv3d", {**CONV3D, "kernel_size": (3, 9, 100)}, shaped((1,) * 5), NO, ""),
    (
        "torch.nn.Conv3d",
        {**CONV3D, "kernel_size": (10, 3, 3)},
        shaped((1,) * 5),
        NO,
        "kernel_depth",
    ),
    ("torch.nn.Conv3d", CONV3D, shaped((129, 1, 4, 4, 4)), NO, "batch"),
    ("torch.nn.ConvTranspose2d", DECONV, {}, "", ""),
    ("torch.nn.ConvTranspose2d", {**DECONV, "kernel_size": 1, "stride": 1}, {}, None, None),
    ("torch.nn.ConvTranspose2d", {**DECONV, "stride": 1}, {}, "stride", ""),
    ("torch.nn.ConvTranspose2d", {**DECONV, "stride": 5}, {}, "stride", None),
    ("torch.nn.ConvTranspose2d", {**DECONV, "kernel_size": 15}, {}, "kernel_size", "kernel_size"),
    ("torch.nn.ConvTranspose2d", {**DECONV, "padding": 2}, {}, "padding, kernel_size", ""),
    ("torch.nn.ConvTranspose2d", {**DECONV, "dilation": 2}, {}, "dilation", "dilation"),
    ("torch.nn.ConvTranspose2d", {**DECONV, "output_padding": 2}, {}, "", "output_padding"),
    ("torch.nn.ConvTranspose2d", {**DECONV, "groups": 3}, {}, "", "ungrouped_channels"),
    ("torch.nn.ConvTranspose2d", {**DECONV, "in_channels": 2049}, {}, "in_channels", "in_channels"),
    ("torch.nn.Linear", {"in_features": 8192, "out_features": 9}, {}, NO, ""),
    ("torch.nn.Linear", {"in_features": 8193, "out_features": 9}, {}, NO, "in_features"),
    (
        "torch.nn.Linear",
        {"in_features": 9, "out_features": 9},
        typed(Q8, out=Q32),
        NO,
        "is_model_output",
    ),
    ("torch.matmul", {}, typed(Q8, Q8, out=Q32), "", ""),
    ("torch.matmul", {}, typed(Q8, Q8, out=Q16), "dtype of the output", ""),
    ("torch.matmul", {}, shaped((1, 1, 1, 8193)), "", "width"),
    ("torch.add", {"method": "add"}, shaped((1, 2049, 1, 1)), "channels", ""),
    ("torch.add", {"method": "add_scalar", "scalars": 1}, {}, "constant_operands", ""),
    ("torch.add", {"method": "", "scalars": 1}, {}, "constant_operands", "method"),
    ("torch.mul", {"method": ""}, shaped((1, 8, 4, 4), (1, 8, 1, 1)), "", ""),
    (
        "torch.mul",
        {"method": ""},
        shaped((1, 8, 4, 1), (1, 8, 1, 4), out=(1, 8, 4, 4)),
        "",
        "broadcast_inputs",
    ),
    ("torch.add", {"method": ""}, shaped((2, 8, 4, 4), (1, 8, 4, 4)), "", "batch_broadcasts"),
    ("torch.sub", {}, shaped((1, 2049, 1, 1)), "channels", ""),
    ("torch.div", {}, typed(Q16, Q16, out=Q16), NO, ""),
    ("torch.div", {}, typed(Q8, Q8, out=Q16), NO, "dtype of input 0, dtype of input 1"),
    ("torch.maximum", {}, typed(Q8, Q16, out=Q16), NO, ""),
    ("torch.ceil", {"input_amax": 1_000_001}, {}, NO, "input_amax"),
    ("torch.floor", {"input_amax": 1_000_001}, typed(Q16, out=Q16), NO, ""),
    ("torch.clamp", {}, shaped((65536,)), NO, ""),
    ("torch.Tensor.clamp", {}, shaped((65536,)), NO, "sizes"),
    ("torch.Tensor.clip", {}, shaped((1,) * 11), NO, "input_rank"),
    ("torch.eq", {}, typed(Q8, Q8, out="qbool"), NO, ""),
    ("torch.eq", {}, typed(Q8, Q8, out=Q8), NO, "dtype of the output"),
    ("torch.abs", {}, typed(Q16, out=Q8), NO, "dtype of the output"),
    ("torch.exp", {}, typed(Q16, out=Q16), "dtype of input 0, dtype of the output", ""),
    ("torch.acos", {}, {}, NO, ""),
    ("torch.max", MAX, {"is_model_output": True}, "", ""),
    ("torch.max", MAX, {}, "is_model_output", ""),
    ("torch.max", {"index_is_output": False}, {}, None, "index_is_output"),
    ("torch.Tensor.max", MAX, {}, NO, ""),
    ("torch.argmax", MAX, {**typed(Q8, out=Q32), "is_model_output": True}, "", ""),
    ("torch.mean", {"reduced_axes": ("C",)}, {}, "", ""),
    ("torch.mean", {"reduced_axes": ("H", "W")}, {}, "reduced_axes", ""),
    ("torch.mean", {"reduced_axes": ("N",)}, {}, "reduced_axes", "reduced_axes"),
    ("torch.sum", {"reduced_axes": ("N", "C")}, {}, "", "reduced_axes"),
    ("torch.sum", {"reduced_axes": ("H",)}, {}, "reduced_axes", ""),
    ("torch.cat", {}, {}, "", "input_count"),
    ("torch.cat", {}, shaped((1, 1, 1, 65537), (1, 1, 1, 1)), "width", "width"),
    ("torch.gather", {}, typed(Q32, F32, out=Q32), NO, ""),
    ("torch.topk", {}, typed(F32, out=F32), NO, "dtype of input 0"),
    (
        "torch.nn.functional.grid_sample",
        {"mode": "bicubic", "padding_mode": "zeros"},
        typed(Q8, Q16, out=Q8),
        NO,
        "mode",
    ),
    (
        "torch.nn.functional.grid_sample",
        {"mode": "nearest", "padding_mode": "reflection"},
        typed(Q8, Q16, out=Q8),
        NO,
        "padding_mode",
    ),
    (
        "torch.nn.functional.grid_sample",
        {"mode": "nearest", "padding_mode": "border"},
        shaped((1, 1, 720, 1024), (1, 2, 2, 2)),
        NO,
        "",
    ),
    (
        "torch.nn.functional.grid_sample",
        {"mode": "nearest", "padding_mode": "border"},
        shaped((1, 1, 721, 1024), (1, 2, 2, 2)),
        NO,
        "height, width",
    ),
    ("torch.nn.functional.interpolate", RESIZE, {}, "", ""),
    ("torch.nn.Upsample", {**RESIZE, "mode": "bicubic"}, {}, "mode", "mode"),
    ("torch.nn.Upsample", {**RESIZE, "align_corners": True}, {}, "", "align_corners"),
    ("torch.nn.Upsample", {**RESIZE, "scale_factor": 2.0}, {}, "", "recompute_scale_factor"),
    (
        "torch.nn.functional.interpolate",
        RESIZE,
        shaped((1, 1, 1, 1), out=(1, 1, 257, 257)),
        "resize",
        "",
    ),
    ("torch.nn.functional.pad", {"mode": "reflect"}, {}, NO, "mode"),
    ("torch.nn.functional.pad", {"mode": "replicate"}, {}, NO, ""),
    ("torch.nn.ConstantPad2d", {}, typed(Q16, out=Q16), "dtype of input 0", ""),
    ("torch.nn.ReLU", {}, typed(Q16, out=Q16), "dtype of input 0", ""),
    ("torch.Tensor.transpose", {"moved_axes": ("C", "N")}, {}, NO, "moved_axes"),
    ("torch.Tensor.transpose", {"moved_axes": ("H", "W")}, {}, NO, ""),
    ("torch.Tensor.view", {}, shaped((1, 65536)), NO, "sizes"),
    ("torch.nn.ChannelShuffle", {"shuffle_index": (0, 1, 1)}, {}, "", "repeated_shuffle_indices"),
    ("torch.nn.ChannelShuffle", {"shuffle_index": (2, 0, 1)}, {}, "", ""),
    ("torch.nn.Softmax", {}, typed(Q8, out=Q16), NO, ""),
    ("torch.nn.LayerNorm", {"normalized_shape": (16383,)}, {}, NO, ""),
    ("torch.nn.LayerNorm", {"normalized_shape": (128, 128)}, {}, NO, "normalized_size"),
    ("torch.nn.LayerNorm", {"normalized_shape": 8}, shaped((1, 1, 129, 128)), NO, "height, width"),
    ("torch.nn.LSTMCell", {}, {}, NO, "input_rank"),
    ("torch.nn.LSTMCell", {}, shaped((4, 8)), NO, ""),
    ("torch.nn.MultiheadAttention", MHA, shaped((4, 1, 8)), NO, ""),
    ("torch.nn.MultiheadAttention", {**MHA, "kdim": 4}, shaped((4, 1, 8)), NO, "kdim, embed_dim"),
    ("torch.nn.MultiheadAttention", {**MHA, "add_bias_kv": True}, {}, NO, "add_bias_kv"),
    ("torch.nn.MultiheadAttention", {**MHA, "add_zero_attn": True}, {}, NO, "add_zero_attn"),
    ("torchvision.ops.RoIAlign", ROI, shaped((1, 8, 4, 4), (1, 9, 4)), "", ""),
    ("torchvision.ops.RoIAlign", {**ROI, "feature_count": 6}, {}, "", "feature_count"),
    ("torchvision.ops.RoIAlign", {**ROI, "boxes": "[9, 5]"}, {}, "", "boxes"),
    ("horizon.nn.Correlation", CORRELATION, shaped((1, 8, 10, 11), (1, 8, 10, 11)), NO, ""),
    (
        "horizon.nn.Correlation",
        {**CORRELATION, "stride1": 3},
        shaped((1, 8, 10, 11), (1, 8, 10, 11)),
        NO,
        "correlation_room, stride1",
    ),
    ("horizon.nn.Correlation", {**CORRELATION, "kernel_size": 2}, {}, NO, "kernel_parity"),
    ("horizon.nn.Correlation", CORRELATION, shaped((1, 1025, 16, 16)), NO, "channels"),
    (
        "horizon.nn.Correlation",
        CORRELATION,
        typed(Q16, Q16, out=Q8),
        NO,
        "dtype of input 0, dtype of input 1",
    ),
    ("horizon.nn.PointPillarsScatter", {}, {**shaped((9, 4), (9, 4))}, NO, ""),
    ("horizon.nn.PointPillarsScatter", {}, typed(Q16, F32, out=Q16), NO, ""),
    ("horizon.nn.PointPillarsScatter", {}, typed(Q16, F32, out=Q8), NO, "dtype of the output"),
    ("horizon.nn.RcnnPostProcess", {}, typed(F32, Q8, F32, out=F32), NO, ""),
    ("horizon.nn.DetectionPostProcess", {}, typed(F32, F32, F32, out=F32), "", ""),
    ("horizon.nn.DetectionPostProcessV1", {}, typed(Q8, Q8, F32, F32, out=F32), "", NO),
    ("horizon.nn.DetectionPostProcessV1", {}, typed(F32, F32, out=F32), "dtype of input 0", NO),
    ("torch.nn.BatchNorm2d", {}, {}, "", ""),
    ("torch.nn.BatchNorm3d", {}, shaped((1, 8, 4, 4, 4)), "", ""),
    ("torch.quantization.QuantStub", {}, typed(F32, out=Q16), "", ""),
    (
        "torch.quantization.QuantStub",
        {},
        {**shaped((1, 8)), **{"input_dtypes": (F32,)}},
        "input_rank output_rank",
        "",
    ),
    ("torch.quantization.DeQuantStub", {}, typed(Q32, out=F32), "", ""),
    ("torch.nn.Identity", {}, typed(Q32, out=Q32), "", ""),
    ("torch.cumsum", {}, {}, NO, NO),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}")
def test_limits_on_both_sides_of_their_bounds(case):
    operator, attributes, fields, *expected = case
    record = call(operator, attributes, **fields)
    for march, faults in zip(("bernoulli2", "bayes"), expected, strict=True):
        if faults is None:
            continue
        found = find_violations([record], march)
        names = [v.constraint for v in found]
        wanted = faults.split(" ") if faults.endswith("_rank") else [faults]
        if faults.startswith("dtype"):
            wanted = faults.split(", ")
        assert names == [name for name in wanted if name], [str(v) for v in found]
        assert all(v.path == "block.op" and v.remedy and v.actual for v in found)


def test_bayes_e_has_the_column_of_bayes():
    for operator, attributes, fields, *_ in CASES:
        record = call(operator, attributes, **fields)
        one, other = (find_violations([record], march) for march in ("bayes", "bayes-e"))
        assert [dataclasses.replace(v, march="BAYES_E") for v in one] == [
            dataclasses.replace(v, expected=v.expected.replace("BAYES_E", "BAYES")) for v in other
        ]


def test_every_limit_is_broken_by_some_case():
    """No limit of the table is dead: for each there is a case above or here that breaks it."""
    more = [
        call("torch.nn.MaxPool2d", {**POOL, "padding": -1, "kernel_size": 0, "stride": 0}),
        call("torch.nn.AvgPool2d", {**POOL, "padding": -1, "kernel_size": 0, "stride": 0}),
        call("torch.nn.MaxPool2d", POOL, **shaped((1, 1, 8193, 8193))),
        call("torch.nn.Conv2d", {**CONV, "in_channels": 2049 * 16}),
        call("torch.nn.Conv3d", {**CONV3D, "in_channels": 65537, "out_channels": 65537,
             "dilation": 2, "kernel_size": (3, 10, 8192), "weight_dtype": Q16},
             **shaped((1, 1, 1, 1, 65537))),
        call("torch.nn.ConvTranspose2d", {**DECONV, "out_channels": 2049, "stride": 15,
             "padding": 9, "in_channels": 2049, "weight_dtype": Q16, "kernel_size": 14},
             **shaped((129, 1, 1, 1))),
        call("torch.nn.Linear", {"in_features": 1, "out_features": 8193, "weight_dtype": Q16}),
        call("torch.matmul", **shaped((4097, 8193, 8193, 8193))),
        call("torch.cat", **shaped((4097, 65537, 65537, 65537))),
        call("torch.max", MAX, **shaped((4097, 65536, 65536, 65536))),
        call("torch.sub", **shaped((2, 1, 2, 1), (1, 1, 1, 2), out=(2, 1, 2, 2))),
        call("torch.ceil", {"input_amax": 1e9}, **typed(Q16, out=Q16)),
        call("torch.nn.BatchNorm2d", **shaped((1, 8193, 1, 1))),
        call("torch.nn.BatchNorm3d", **shaped((1, 8193, 1, 1, 1))),
        call("torch.nn.functional.interpolate", RESIZE, **shaped((1, 8193, 8193, 8193))),
        call("torch.nn.functional.grid_sample", {"mode": "", "padding_mode": ""},
             **shaped((1, 1, 1025, 1025))),
        call("torch.Tensor.reshape", **shaped((1,) * 11)),
        call("torch.nn.MultiheadAttention", {**MHA, "vdim": 4}),
        call("torch.nn.ReLU", **shaped((4097, 65537, 65537, 65537))),
    ]  # fmt: skip
    records = more + [call(o, a, **f) for o, a, f, *_ in CASES]
    table = load_support_table()
    for column in ("bernoulli2", "bayes"):
        broken = {v.expected for r in records for v in find_violations([r], column)}
        limits = {limit.text for limit in table.march(column).limits}
        for row in table.operators.values():
            if column in row.support:
                limits |= {limit.text for limit in row.support[column].limits}
        assert limits - broken == set()


def test_all_violations_of_all_calls_come_at_once():
    conv = {**CONV, "kernel_size": 9, "dilation": 3, "stride": 2}
    calls = [call("torch.nn.Conv2d", conv), call("torch.erf"), call("torch.nn.ReLU")]
    found = find_violations(calls, "bernoulli2")
    assert [v.constraint for v in found] == ["kernel_size", "dilation", "stride", "operator"]
    assert str(found[0]) == (
        "block.op (torch.nn.Conv2d) on BERNOULLI2: kernel_size is 9, expected kernel_size <= 7; "
        "use a smaller kernel, or several in a row"
    )
    assert "BAYES and BAYES_E alone" in found[3].actual


def test_missing_attribute_is_named():
    with pytest.raises(ValueError, match=r"block.op: a call of torch.nn.AvgPool2d needs .*stride"):
        find_violations([call("torch.nn.AvgPool2d", {"kernel_size": 2})], "bayes")


def test_advice_is_no_violation_and_names_what_is_unknown():
    record = call("torch.ceil")
    assert find_violations([record], "bayes") == []
    [advice] = find_advice([record], "bayes")
    assert "input_amax <= 1000000" in advice.text
    assert "precision" in find_advice([call("torch.nn.Softmax")], "bayes")[0].text
    assert find_advice([call("torch.nn.Softmax"), call("torch.none")], "bernoulli2") == []


def test_records_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="1 input shapes but 2 input dtypes"):
        call("torch.abs", input_dtypes=(Q8, Q8))
    with pytest.raises(ValueError, match=r"block\.op: dtype 'int8'"):
        call("torch.abs", output_dtype="int8")


def test_renderer_shows_every_operator_and_limit():
    for text in (render_support_table(), render_support_table(markdown=True)):
        table = load_support_table()
        for row in table.operators.values():
            assert row.name in text
            for support in row.support.values():
                assert all(limit.text in text for limit in support.limits)
    assert "BERNOULLI2" not in render_support_table("bayes-e")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kernel_size", "no comparison"),
        ("kernel_size <=", "no expression"),
        ("__import__('os') == 1", "not allowed"),
        ("a.b == 1", "not allowed"),
        ("a is None", "Is is not allowed"),
        ("a ** 9 == 1", "not allowed"),
    ],
)
def test_the_language_of_limits_is_small(text, reason):
    with pytest.raises(ValueError, match=reason):
        Expression.parse(text)


def test_expressions_compare_number_by_number():
    assert Expression.parse("a <= b / 2").holds_for_all({"a": (1, 2), "b": (2, 4)})
    assert not Expression.parse("a <= b / 2").holds_for_all({"a": (1, 3), "b": (2, 4)})
    assert Expression.parse("a != 1").holds_for_any({"a": (1, 2)})
    assert Expression.parse("0 < a < b").holds_for_all({"a": 1, "b": inf})
    assert Expression.parse("a in {None, False}").holds_for_all({"a": None})
    with pytest.raises(ValueError, match="differ in length"):
        Expression.parse("a < b").holds_for_all({"a": (1, 2), "b": (1, 2, 3)})
    with pytest.raises(ValueError, match="cannot be computed of None and 3"):
        Expression.parse("a < 3").holds_for_all({"a": None})


ROW = {"rows": ["torch.x"], "bayes": {"input": ["qint8"], "output": "same"}}


def altered(**changes):
    row = copy.deepcopy(ROW)
    row["bayes"].update(changes.pop("bayes", {}))
    return {**row, **changes}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([altered(bayse={})], "unknown key 'bayse'"),
        ([altered(bayes={"outputs": []})], "unknown key 'outputs'"),
        ([altered(bayes={"input": ["int8"]})], r"dtypes \['int8'\]"),
        ([altered(bayes={"limits": [{"require": "size < 3", "remedy": ""}]})], "names 'size'"),
        ([altered(bayes={"limits": [{"require": "batch", "remedy": ""}]})], "no comparison"),
        ([altered(bayes={"limits": [{"must": "batch < 3"}]})], "unknown key 'must'"),
        ([altered(bayes={"like": "torch.y"})], "like 'torch.y', which describes nothing"),
        ([altered(), altered()], "listed twice"),
        ([altered(aliases=["torch.x"])], "listed twice"),
    ],
)
def test_the_reader_refuses_bad_data(rows, reason):
    marches = dict(load_support_table().marches)
    assert build_table({"family": {"operator": [ROW]}}, marches).find("torch.Tensor.x")
    with pytest.raises(ValueError, match=reason):
        build_table({"family": {"operator": rows}}, marches)


def test_data_files_travel_with_the_package():
    folder = resources.files("bevquant_hybrid.operators") / "tables"
    assert (folder / "marches.toml").is_file()


def test_integer_forms_of_rows_are_registered_operators() -> None:
    spellings = [name for row in load_support_table().operators.values() for name in row.aliases]
    operators = [name.split("::") for name in spellings if "::" in name]
    assert ["bevquant_hybrid", "matmul"] in operators
    for space, name in operators:
        assert hasattr(getattr(torch.ops, space), name), name


def test_arguments_are_those_of_torch_in_its_order() -> None:
    signatures = torch.overrides.get_testing_overrides()
    for name, known in _attributes._arguments().items():
        function = getattr(F, name, None) or getattr(torch, name)
        parameters = inspect.signature(signatures[function]).parameters.values()
        if list(known) == ["dim"]:  # which torch's own list of signatures does not have for all
            continue
        assert [p.name for p in parameters][1 : 1 + len(known)] == list(known), name
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert all(defaults.get(given) == default for given, default in known.items()), name


def test_a_column_says_what_is_the_identity() -> None:
    assert is_identity("torch.nn.Dropout2d")
    assert is_identity("torch.Tensor.contiguous")
    assert not is_identity("torch.nn.ReLU")
    assert not is_identity("torch.no_such_operator")

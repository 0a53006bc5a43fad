"""Dense files that TensorRT or ONNX Runtime refused, ran in float, or ran to other numbers."""

from __future__ import annotations

import numpy as np
import pytest


def scale_of_zero(net):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#182: "Scale coefficients must all be positive"."""
    return net.model(net.conv(net.pair("x", "a", scale=0.0), "y"))


def scale_of_nan(net):
    """onnx/onnx-tensorrt#764: percentile calibration of a tensor without values; same message."""
    return net.model(net.conv(net.pair("x", "a", scale=np.nan), "y"))


def dead_channel(net):
    """NVIDIA/TensorRT#2267: a weight channel of zeros gets the scale 0."""
    weight = net.weight("w")
    net.tensors["w.s"][2] = 0
    return net.model(net.conv(net.pair("x", "a"), "y", weight=weight))


def pair_between_conv_and_relu(net):
    """NVIDIA/TensorRT#1992: int8 is not faster, conv and ReLU do not fuse."""
    c = net.conv(net.pair("x", "a"), "c")
    return net.model(net.pair(net.add("Relu", [net.pair(c, "b")], "r"), "y"))


def residual_in_float(net):
    """NVIDIA/TensorRT#4412: the shortcut has no pair, so the sum and its conv leave int8."""
    c = net.conv(net.pair("x", "a"), "c")
    return net.model(net.add("Add", [c, net.add("Tanh", ["x"], "t")], "y"))


def transposed_axis(net):
    """NVIDIA/TensorRT#2380: a ConvTranspose quantized along axis 0 is quantized by input."""
    weight = net.weight("w", (4, 8, 3, 3), axis=0)
    bias = net.const("b", np.zeros(8))
    y = net.conv(net.pair("x", "a"), "y", "ConvTranspose", bias, weight)
    return net.model(y, (1, 8, 4, 4))


def transposed_per_channel(net):
    """NVIDIA/TensorRT#1694: a ConvTranspose with scales per channel gives other values."""
    return net.model(net.conv(net.pair("x", "a"), "y", "ConvTranspose"))


def transposed_upsampling(net):
    """NVIDIA/TensorRT#1699: ConvTranspose2d is wrong after the conversion, all before is right."""
    y = net.conv(net.pair("x", "a"), "y", "ConvTranspose", strides=[2, 2], output_padding=[1, 1])
    return net.model(y, (1, 4, 8, 8))


def grouped_transposed(net):
    """NVIDIA/TensorRT#1934: trtexec rejects a grouped quantized ConvTranspose."""
    weight = net.weight("w", (4, 2, 3, 3), axis=1)
    bias = net.const("b", np.zeros(4))
    y = net.conv(net.pair("x", "a"), "y", "ConvTranspose", bias, weight, group=2)
    return net.model(y)


def transposed_3d(net):
    """NVIDIA/Model-Optimizer#688: ConvTranspose3d runs in fp16 once it is explicitly quantized."""
    shape = net.const("shape", [1, 4, 2, 2, 4], np.int64)
    weight = net.weight("w", (4, 4, 3, 3, 3), axis=1)
    x = net.add("Reshape", [net.pair("x", "a"), shape], "v")
    y = net.conv(x, "y", "ConvTranspose", weight=weight, pads=[1] * 6)
    return net.model(y, (1, 4, 2, 2, 4))


def activation_per_channel(net):
    """NVIDIA/TensorRT#2462: "Assertion scales.size() == 1 failed"."""
    return net.model(net.conv(net.pair("x", "a", scale=[0.1, 0.2, 0.3, 0.4], axis=1), "y"))


def bias_behind_dequantize(net):
    """microsoft/onnxruntime#14229: "only activation types allowed as input to this layer"."""
    net.const("b.q", [1, 2, 3, 4], np.int32)
    net.const("b.s", np.full(4, 0.001))
    net.add("DequantizeLinear", ["b.q", "b.s"], "b", axis=0)
    return net.model(net.conv(net.pair("x", "a"), "y", bias="b"))


def integer_bias(net):
    """microsoft/onnxruntime#17738: quantize_static makes int32 biases, TensorRT's parser fails."""
    net.const("b.q", [1, 2, 3, 4], np.int32)
    net.const("b.s", np.full(4, 0.001))
    net.const("b.z", np.zeros(4), np.int32)
    net.add("DequantizeLinear", ["b.q", "b.s", "b.z"], "b", axis=0)
    return net.model(net.conv(net.pair("x", "a"), "y", bias="b"))


def plugin_not_loaded(net):
    """open-mmlab/mmdeploy#128: onnx2tensorrt fails, the operator is one of mmdeploy's own."""
    return net.model(net.add("grid_sampler", ["x", "x"], "y", "mmdeploy"))


def plugin_for_boxes(net):
    """open-mmlab/mmdeploy#2080: TRTBatchedNMS, "plugin not found"."""
    return net.model(net.add("TRTBatchedNMS", ["x", "x"], "y", "mmdeploy"))


def bias_of_transposed(net):
    """microsoft/onnxruntime#19694: per_channel=True takes axis 0 of a ConvTranspose's weight."""
    weight = net.weight("w", (4, 6, 3, 3), axis=0)
    bias = net.const("b", np.zeros(6))
    y = net.conv(net.pair("x", "a"), "y", "ConvTranspose", bias, weight)
    return net.model(y, (1, 6, 4, 4))


def saturates_without_vnni(net):
    """microsoft/onnxruntime#6004: wrong predictions on a CPU that has AVX2 alone."""
    net.integer, net.zero = np.uint8, 128
    return net.model(net.conv(net.pair("x", "a"), "y"))


def differs_between_cpus(net):
    """microsoft/onnxruntime#14642: the same int8 file gives other results on another Xeon."""
    a = net.const("a", np.ones((4, 4)), np.uint8)
    w = net.const("w", np.full((4, 4), 127), np.int8)
    zeros = [net.const("za", 0, np.uint8), net.const("zw", 0, np.int8)]
    net.add("MatMulInteger", [a, w, *zeros], "m")
    net.add("Cast", ["m"], "f", to=1)
    return net.model(net.add("Add", ["x", "f"], "y"))


def slower_than_float(net):
    """microsoft/onnxruntime#20052: INT8 runs slower than FP32: activations are INT8."""
    c = net.pair(net.conv(net.pair("x", "a"), "c"), "b")
    return net.model(net.pair(net.add("Relu", [c], "r"), "y"))


def conv_integer(net):
    """microsoft/onnxruntime#12854: ConvInteger takes most of the time."""
    a = net.const("a", np.ones((1, 4, 4, 4)), np.int8)
    w = net.const("w", np.ones((4, 4, 1, 1)), np.int8)
    net.add("ConvInteger", [a, w], "m")
    net.add("Cast", ["m"], "f", to=1)
    return net.model(net.add("Add", ["x", "f"], "y"))


def relu_behind_conv(net):
    """microsoft/onnxruntime#26143: quantize_static to uint8, and inference is slower."""
    net.integer, net.zero = np.uint8, 128
    weight = net.weight("w", dtype=np.uint8, zero=128)
    c = net.conv(net.pair("x", "a"), "c", weight=weight)
    return net.model(net.pair(net.add("Relu", [c], "r"), "y"))


# What the linter says of each, for the engine of the thread.
EXHIBITS = {
    scale_of_zero: ("tensorrt", "QDQ002"),
    scale_of_nan: ("tensorrt", "QDQ002"),
    dead_channel: ("tensorrt", "QDQ002"),
    pair_between_conv_and_relu: ("tensorrt", "TRT014"),
    residual_in_float: ("tensorrt", "TRT013"),
    transposed_axis: ("tensorrt", "TRT011"),
    transposed_per_channel: ("tensorrt", "TRT011"),
    transposed_upsampling: ("tensorrt", "TRT011"),
    grouped_transposed: ("tensorrt", "TRT011"),
    transposed_3d: ("tensorrt", "TRT011"),
    activation_per_channel: ("tensorrt", "TRT008"),
    bias_behind_dequantize: ("tensorrt", "TRT010"),
    integer_bias: ("tensorrt", "TRT010"),
    plugin_not_loaded: ("tensorrt", "TRT002"),
    plugin_for_boxes: ("tensorrt", "TRT002"),
    bias_of_transposed: ("tensorrt", "TRT011"),
    saturates_without_vnni: ("onnxruntime", "ORT004"),
    differs_between_cpus: ("onnxruntime", "ORT004"),
    slower_than_float: ("onnxruntime", "ORT002"),
    conv_integer: ("onnxruntime", "ORT005"),
    relu_behind_conv: ("onnxruntime", "ORT001"),
}


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.__name__)
def test_the_linter_names_cause_and_remedy(exhibit, net, found):
    target, rule = EXHIBITS[exhibit]
    said = found(exhibit(net), target)
    assert rule in said, said

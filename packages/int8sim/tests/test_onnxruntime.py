"""Dense kernels against ONNX Runtime's integer operators."""

import numpy as np
import pytest
import torch

from bevquant_int8sim import int8_conv1d, int8_conv2d, int8_conv3d, int8_linear

onnx = pytest.importorskip("onnx", reason="onnx is not installed (the test extra)")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (the test extra)")


def run(operator, inputs, **attributes):
    """The output of one node; `inputs` are arrays, the first of them fed."""
    names = [f"i{i}" for i in range(len(inputs))]
    kinds = {np.int8: 3, np.int32: 6, np.float32: 1, np.uint8: 2}
    node = onnx.helper.make_node(operator, names, ["y"], **attributes)
    first = onnx.helper.make_tensor_value_info("i0", kinds[inputs[0].dtype.type], inputs[0].shape)
    out = onnx.helper.make_tensor_value_info("y", 3 if operator.startswith("QLinear") else 6, None)
    constants = [
        onnx.numpy_helper.from_array(a, n) for a, n in zip(inputs[1:], names[1:], strict=True)
    ]
    graph = onnx.helper.make_graph([node], "g", [first], [out], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 8
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"i0": inputs[0]})[0]


def numbers(generator, *shape):
    return generator.integers(-128, 128, shape).astype(np.int8)


def shifted(x):
    """The same numbers as uint8 with a zero point of 128.

    ConvInteger wants uint8 inputs, and with int8 weights it saturates on CPUs without VNNI.
    """
    return (x.astype(np.int16) + 128).astype(np.uint8)


ZERO = np.uint8(128).reshape(())


CONVS = [
    ((2, 16, 9, 8), (33, 16, 3, 3), dict(padding=1)),
    ((1, 12, 9, 8), (24, 4, 3, 3), dict(padding=1, groups=3, stride=2)),
    ((1, 8, 12, 11), (16, 8, 3, 5), dict(padding=((1, 2), (0, 3)), dilation=(2, 1), stride=(1, 2))),
    ((1, 24, 8, 8), (24, 1, 3, 3), dict(padding=1, groups=24)),
]


def attributes(settings, ndim):
    def expand(name, default):
        value = settings.get(name, default)
        return [value] * ndim if isinstance(value, int) else list(value)

    sides = [(p, p) if isinstance(p, int) else p for p in expand("padding", 0)]
    return dict(
        strides=expand("stride", 1),
        dilations=expand("dilation", 1),
        group=settings.get("groups", 1),
        pads=[p[0] for p in sides] + [p[1] for p in sides],
    )


OTHER_AXES = [
    ((2, 6, 20), (18, 6, 3), dict(padding=2, stride=2)),
    ((1, 6, 20), (9, 2, 3), dict(padding=((0, 2),), groups=3, dilation=2)),
    ((1, 6, 5, 6, 7), (20, 6, 3, 3, 3), dict(padding=1)),
    ((1, 4, 5, 6, 7), (6, 2, 1, 3, 2), dict(groups=2, stride=(1, 2, 1), padding=(0, 1, 1))),
]


@pytest.mark.parametrize("case", range(len(CONVS) + len(OTHER_AXES)))
def test_conv_integer(backend, case):
    shape, weight_shape, settings = (CONVS + OTHER_AXES)[case]
    generator = np.random.default_rng(case)
    x, w = numbers(generator, *shape), numbers(generator, *weight_shape)
    ndim = len(shape) - 2
    theirs = run("ConvInteger", [shifted(x), w, ZERO], **attributes(settings, ndim))
    conv = (int8_conv1d, int8_conv2d, int8_conv3d)[ndim - 1]
    acc = conv(torch.from_numpy(x), torch.from_numpy(w), backend=backend, **settings)
    assert (acc.numpy() == theirs).all()


def test_matmul_integer(backend):
    generator = np.random.default_rng(1)
    x, w = numbers(generator, 50, 130), numbers(generator, 130, 40)
    theirs = run("MatMulInteger", [x, w])
    acc = int8_linear(torch.from_numpy(x), torch.from_numpy(w.T.copy()), backend=backend)
    assert (acc.numpy() == theirs).all()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("case", range(len(CONVS)))
def test_qlinear_conv_with_exact_scales(backend, case, relu):
    """Powers of two: ONNX Runtime's float32 multiplier is exact, so ties must agree as well."""
    shape, weight_shape, settings = CONVS[case]
    generator = np.random.default_rng(case)
    x, w = numbers(generator, *shape) // 8, numbers(generator, *weight_shape)  # few saturate
    bias = generator.integers(-900, 900, len(w)).astype(np.int32)
    weight_scale = 2.0 ** -generator.integers(4, 7, len(w)).astype(np.float32)
    scales = [np.float32(s).reshape(()) for s in (0.25, 0.5)]
    zero = np.int8(0).reshape(())
    theirs = run(
        "QLinearConv",
        [x, scales[0], zero, w, weight_scale, np.zeros(len(w), np.int8), scales[1], zero, bias],
        **attributes(settings, 2),
    )
    q = int8_conv2d(
        *(torch.from_numpy(v) for v in (x, w, bias)),
        multiplier=torch.from_numpy(weight_scale).double() * 0.5,
        relu=relu,
        backend=backend,
        **settings,
    )
    assert (q.numpy() == (theirs.clip(0) if relu else theirs)).all()
    acc = int8_conv2d(*(torch.from_numpy(v) for v in (x, w, bias)), backend=backend, **settings)
    products = acc.double() * (torch.from_numpy(weight_scale).double() * 0.5).view(-1, 1, 1)
    inside = products.abs() < 127
    assert int(((products % 1 == 0.5) & inside).sum()) > 0  # there were ties

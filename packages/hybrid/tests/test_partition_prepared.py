"""Table, tracer, estimate and partition on what this package itself makes of models."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid import get_march, quantization, set_march
from bevquant_hybrid.operators import find_violations, trace_calls
from bevquant_hybrid.partition import partition


@pytest.fixture(autouse=True)
def bayes():
    before = get_march()
    set_march("bayes")
    yield
    if before is not None:
        set_march(before)


class SeluModule(nn.Module):
    def forward(self, x):
        return F.selu(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.prelu = nn.Conv2d(3, 3, 1), nn.PReLU()

    def forward(self, x):
        return F.selu(self.prelu(self.conv(x)))


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv0, self.block, self.conv1 = nn.Conv2d(3, 3, 1), Block(), nn.Conv2d(3, 3, 1)
        self.conv2, self.selu, self.identity = nn.Conv2d(3, 3, 1), SeluModule(), nn.Identity()

    def forward(self, x):
        x = self.block(self.identity(self.conv0(self.quant(x))))
        return self.dequant(self.selu(self.conv2(self.identity(self.conv1(x)))))


WISHES = {"module_name": ["block.conv", "conv1"], "module_type": [SeluModule]}


def prepared():
    qconfig = quantization.get_default_qat_qconfig()
    return quantization.prepare_qat_fx(Hybrid(), {"": qconfig}, hybrid=True, hybrid_dict=WISHES)


def test_the_plan_has_the_nodes_that_prepare_inserts():
    plan = partition(quantization.fuse_fx(Hybrid()), "bayes", WISHES)
    assert [node.name for node in plan.nodes] == [node.name for node in prepared().graph.nodes]


def test_a_prepared_graph_says_itself_where_everything_runs():
    plan = partition(quantization.fuse_fx(Hybrid()), "bayes", WISHES)
    again = partition(prepared(), "bayes")
    assert [(n.name, n.kind, n.place) for n in again.nodes] == [
        (n.name, n.kind, n.place) for n in plan.nodes
    ]
    assert again.segments == plan.segments
    assert not any(node.inserted for node in again.nodes)
    assert again.node("conv1").reason == "the prepared model leaves it in float"
    assert again.warnings == ()


class Sized(nn.Module):
    """Resizes to the size of what it read: two nodes of the graph hold numbers, no tensors."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv = nn.Conv2d(3, 3, 3, 2, 1)

    def forward(self, x):
        x = self.quant(x)
        return self.dequant(F.interpolate(self.conv(x), size=x.shape[2:], mode="nearest"))


def test_sizes_are_no_operators_on_the_cpu():
    qconfig = quantization.get_default_qat_qconfig()
    fused = quantization.fuse_fx(Sized())
    qat = quantization.prepare_qat_fx(Sized(), {"": qconfig}, hybrid=True)
    for graph in (fused, qat):
        plan = partition(graph, "bayes", example_inputs=torch.ones(1, 3, 8, 8))
        names = [node.name for node in plan.nodes]
        assert names == ["x", "quant", "conv", "interpolate", "dequant", "output"]
        assert [segment.place for segment in plan.segments] == ["BPU"]
        assert plan.transfer_bytes == 2 * 3 * 8 * 8


class Residual(nn.Module):
    """Fused additions, tables, a cat, resizing, a mean: a call of each kind."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x):
        x = F.relu(self.first(self.quant(x)))
        x = torch.cat([F.relu(self.second(x) + x), x], dim=1) * 2.0
        x = torch.sigmoid(x) * x
        x = F.interpolate(x, scale_factor=2, mode="bilinear", recompute_scale_factor=True)
        return self.dequant(x.mean(1, keepdim=True))


def forms(dtype="qint8"):
    qconfig = quantization.get_default_qat_qconfig(dtype=dtype)
    qat = quantization.prepare_qat_fx(Residual(), {"": qconfig})
    qat(torch.rand(2, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return qat, quantization.convert_fx(qat)


def test_calls_of_the_qat_and_the_fixed_point_model_are_the_same():
    example = torch.rand(2, 3, 8, 8)
    qat, fixed = (trace_calls(model, example) for model in forms())
    for one, other in zip(qat, fixed, strict=True):
        for name in ("path", "operator", "input_shapes", "input_dtypes", "output_shape", "inputs",
                     "output_dtype", "weight_count", "bias_count", "is_model_output"):  # fmt: skip
            assert getattr(one, name) == getattr(other, name), (one.path, name)
    assert find_violations(qat, "bayes") == find_violations(fixed, "bayes") == []
    [violation] = find_violations(fixed, "bernoulli2")
    assert violation.constraint == "constant_operands"
    add = next(call for call in fixed if "generated_add" in call.path)
    assert (add.operator, add.attributes["sumin"], add.attributes["kernel_size"]) == (
        *("torch.nn.Conv2d", True),
        (3, 3),
    )


def test_the_estimate_takes_a_fixed_point_model(tools):
    estimate_performance = tools.performance.estimate_performance
    qat, fixed = (trace_calls(model, torch.rand(2, 3, 8, 8)) for model in forms())
    summary = estimate_performance(fixed, "bayes", layer_details=True)["summary"]
    assert summary["BPU OPs per run (effective)"] == 2 * 2 * 64 * 8 * 9 * (3 + 8)
    assert summary == estimate_performance(qat, "bayes", layer_details=True)["summary"]


def test_16_bit_models_fail_where_the_march_has_none():
    qat, fixed = (trace_calls(model, torch.rand(2, 3, 8, 8)) for model in forms("qint16"))
    for calls in (qat, fixed):
        assert calls[1].input_dtypes == ("qint16",)
        faults = {v.path for v in find_violations(calls, "bernoulli2")}
        assert {"first", "interpolate"} <= faults
        found = [(v.path, v.constraint) for v in find_violations(calls, "bayes")]
        assert found == [  # resizing takes and gives qint8 alone
            ("interpolate", "dtype of input 0"),
            ("interpolate", "dtype of the output"),
        ]


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(1 / 128), quantization.DeQuantStub()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4), nn.ReLU())
        self.pool, self.classifier = nn.AvgPool2d(8, 8), nn.Conv2d(4, 10, 3)

    def forward(self, x):
        return self.dequant(self.classifier(self.pool(self.conv(self.quant(x)))))


def test_eager_models_in_all_their_forms():
    model = Digits()
    torch.ao.quantization.fuse_modules(
        model.conv, ["0", "1", "2"], inplace=True, fuser_func=quantization.fuse_known_modules
    )
    example = torch.rand(1, 1, 28, 28)
    calls = [trace_calls(model, example)]
    model.qconfig = quantization.get_default_qat_qconfig()
    model.classifier.qconfig = quantization.get_default_qat_out_qconfig()
    quantization.prepare_qat(model, inplace=True)
    model(example)
    calls.append(trace_calls(model, example))
    calls.append(trace_calls(quantization.convert(model.eval(), inplace=False), example))
    for form, last in zip(calls, ("qint8", "qint32", "qint32"), strict=True):
        assert find_violations(form, "bayes") == []
        [violation] = find_violations(form, "bernoulli2")
        assert (violation.path, violation.constraint) == ("pool", "kernel_size")
        assert form[-1].input_dtypes == (last,)

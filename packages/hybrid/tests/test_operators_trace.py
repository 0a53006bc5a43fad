"""The tracer: what a run of a model is written down as."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QConfig, QuantStub, default_weight_fake_quant

from bevquant_hybrid.operators import find_violations, trace_calls


class Digits(nn.Module):
    """The documents' network for handwritten digits, as they print it, after fusing."""

    def __init__(self):
        super().__init__()
        self.quant = QuantStub()
        self.conv0 = nn.Sequential(nn.Conv2d(1, 10, 5), nn.ReLU())
        self.max_pool = nn.MaxPool2d(kernel_size=2)
        self.conv1 = nn.Sequential(nn.Conv2d(10, 20, 5), nn.ReLU())
        self.avg_pool = nn.AvgPool2d(kernel_size=8)
        self.classifier = nn.Conv2d(20, 10, 1)
        self.classifier.qconfig = QConfig(activation=None, weight=default_weight_fake_quant)
        self.dequant = DeQuantStub()

    def forward(self, x):
        x = self.conv1(self.max_pool(self.conv0(self.quant(x))))
        return self.dequant(self.classifier(self.avg_pool(x)))


class StubTracer(fx.Tracer):
    def is_leaf_module(self, module, path):
        return isinstance(module, QuantStub | DeQuantStub) or super().is_leaf_module(module, path)


@pytest.mark.parametrize("traced", [False, True])
def test_the_documents_network_passes_on_bayes_and_fails_on_bernoulli2(traced):
    model = Digits()
    if traced:
        model = fx.GraphModule(model, StubTracer().trace(model))
    calls = trace_calls(model, torch.ones(1, 1, 28, 28))
    assert find_violations(calls, "bayes") == []
    [violation] = find_violations(calls, "bernoulli2")
    assert (violation.path, violation.constraint, violation.actual) == (
        "avg_pool",
        "kernel_size",
        "8",
    )


def test_dtypes_follow_stubs_and_qconfigs():
    calls = trace_calls(Digits(), [torch.ones(2, 1, 28, 28)])
    flow = {call.path: (call.input_dtypes, call.output_dtype) for call in calls}
    assert flow["quant"] == (("float32",), "qint8")
    assert flow["conv1.0"] == (("qint8",), "qint8")
    assert flow["classifier"] == (("qint8",), "qint32")
    assert flow["dequant"] == (("qint32",), "float32")
    ends = [call.path for call in calls if call.is_model_output]
    assert ends == ["classifier", "dequant"]


def test_a_model_without_stubs_is_told_to_insert_one():
    calls = trace_calls(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.ones(1, 3, 8, 8))
    [violation] = find_violations(calls, "bayes")
    assert violation.path == "0"
    assert "QuantStub" in violation.remedy


def test_input_of_three_dimensions_is_named_on_bernoulli2():
    model = nn.Sequential(QuantStub(), nn.ReLU(), DeQuantStub())
    calls = trace_calls(model, torch.ones(3, 8, 8))
    assert [v.path for v in find_violations(calls, "bernoulli2")] == ["0", "0", "1", "1", "2", "2"]
    assert find_violations(calls, "bayes") == []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding="same", dilation=2)
        self.skip = FloatFunctional()

    def forward(self, x):
        y = self.conv(x)
        if y.shape[2] > 4:  # fx could not trace this
            y = F.relu(y)
        return self.skip.add(y, x)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self, x):
        y = self.second(self.first(x))
        y = y * self.scale + 1
        return torch.cat([y, x], dim=1), y.flatten(1)


def test_calls_say_where_their_inputs_come_from():
    calls = trace_calls(Branches(), torch.ones(1, 4, 8, 8), input_dtype="qint8")
    graph = {call.path: call.inputs for call in calls}
    assert graph == {
        "first.conv": ("",),
        "first.relu": ("first.conv",),
        "first.skip": ("first.relu", ""),
        "second.conv": ("first.skip",),
        "second.relu": ("second.conv",),
        "second.skip": ("second.relu", "first.skip"),
        "mul": ("second.skip", ""),
        "add": ("mul",),
        "cat": ("add", ""),
        "flatten": ("add",),
    }
    found = {call.path: call for call in calls}
    assert found["mul"].input_dtypes == ("qint8", "constant")
    assert found["add"].attributes["scalars"] == 1
    assert found["first.conv"].attributes["padding"] == (2, 2)
    assert found["first.conv"].weight_count == 4 * 4 * 9
    assert found["first.conv"].bias_count == 4
    assert not found["add"].is_model_output
    assert found["cat"].is_model_output
    assert found["flatten"].is_model_output


def test_nodes_of_a_graph_give_functions_their_names():
    class Sum(nn.Module):
        def forward(self, x):
            return (x + x) + x

    calls = trace_calls(fx.symbolic_trace(Sum()), torch.ones(1, 2, 2, 2))
    assert [(call.path, call.operator) for call in calls] == [
        ("add", "torch.add"),
        ("add_1", "torch.add"),
    ]


def test_methods_of_a_functional_are_one_call_each_with_its_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.op = FloatFunctional()

        def forward(self, x):
            return self.op.cat([self.op.mul_scalar(x, 2.0), self.op.add_relu(x, x)], dim=1)

    model = Scaled()
    calls = trace_calls(model, torch.ones(1, 4, 8, 8), input_dtype="qint8")
    assert [(call.path, call.operator) for call in calls] == [
        ("op", "torch.mul"),
        ("op_1", "torch.add"),
        ("op_2", "torch.cat"),
    ]
    assert calls[0].attributes["method"] == "mul_scalar"
    assert find_violations(calls, "bayes") == []
    assert "mul_scalar" not in vars(model.op)


def test_a_module_called_twice_makes_two_calls():
    relu = nn.ReLU()
    calls = trace_calls(nn.Sequential(relu, nn.Conv2d(1, 1, 1), relu), torch.ones(1, 1, 2, 2))
    assert [call.path for call in calls] == ["0", "1", "0_1"]


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout())
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    trace_calls(model, torch.randn(2, 1, 4, 4))
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_failing_module_is_named_and_unhooked():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.ReLU())
    with pytest.raises(RuntimeError, match=r"0\.0 does not run on the example inputs: Runtime"):
        trace_calls(model, torch.ones(1, 5, 8, 8))
    assert not model[0][0]._forward_hooks


class Picks(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        value, index = torch.max(x, dim=1, keepdim=True)
        return (value, index + 1) if self.inside else (value, index)


@pytest.mark.parametrize(("inside", "faults"), [(False, []), (True, ["index_is_output"])])
def test_the_index_of_a_maximum_may_only_leave(inside, faults):
    calls = trace_calls(Picks(inside), torch.ones(1, 4, 8, 8), input_dtype="qint8")
    found = [v.constraint for v in find_violations(calls[:1], "bayes")]
    assert found == faults


def test_16_bit_inputs_are_held_against_the_actual_weights():
    """Σ|w| decides, not the worst that weights of that shape could be."""
    sparse, full = nn.Conv2d(64, 1, 3, bias=False), nn.Conv2d(64, 1, 3, bias=False)
    with torch.no_grad():
        sparse.weight.zero_()
        sparse.weight[0, :8] = 1.0  # 72 weights of 127.5 steps: 72 · 127.5 · 32768 < 2³¹
        full.weight.fill_(1.0)  # 576 weights
    for conv, faults in ((sparse, []), (full, ["accumulator_bound"])):
        calls = trace_calls(
            nn.Sequential(conv),
            torch.ones(1, 64, 8, 8),
            input_dtype="qint16",
            dtype_of=lambda path, module: "qint8",
        )
        assert [v.constraint for v in find_violations(calls, "bayes")] == faults
    assert (
        trace_calls(nn.Sequential(sparse), torch.ones(1, 64, 8, 8), input_dtype="qint16")[
            0
        ].attributes["weight_l1"]
        == 9180
    )


FUNCTIONS = [
    (lambda x: x.permute(0, 2, 3, 1), "torch.Tensor.transpose", {"moved_axes": ("H", "W", "C")}),
    (lambda x: x.transpose(-1, 0), "torch.Tensor.transpose", {"moved_axes": ("W", "N")}),
    (lambda x: x.mT, "torch.Tensor.transpose", {"moved_axes": ("W", "H")}),
    (lambda x: x.mean((2, 3)), "torch.mean", {"reduced_axes": ("H", "W")}),
    (lambda x: torch.sum(x, dim=1), "torch.sum", {"reduced_axes": ("C",)}),
    (lambda x: x.amax(1), "torch.Tensor.amax", {}),
    (lambda x: torch.max(x, x), "torch.maximum", {}),
    (lambda x: F.avg_pool2d(x, 2), "torch.nn.AvgPool2d", {"kernel_size": 2, "stride": 2}),
    (lambda x: F.max_pool2d(x, 3, 1), "torch.nn.MaxPool2d", {"stride": 1, "dilation": 1}),
    (lambda x: F.conv2d(x, torch.ones(6, 2, 3, 1), groups=2), "torch.nn.Conv2d",
     {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 1), "groups": 2}),
    (lambda x: F.conv_transpose2d(x, torch.ones(4, 3, 2, 2), stride=2), "torch.nn.ConvTranspose2d",
     {"in_channels": 4, "out_channels": 3, "stride": 2}),
    (lambda x: F.linear(x, torch.ones(3, 8)), "torch.nn.Linear",
     {"in_features": 8, "out_features": 3}),
    (lambda x: F.interpolate(x, scale_factor=2.0), "torch.nn.functional.interpolate",
     {"mode": "nearest", "scale_factor": 2.0}),
    (lambda x: F.pad(x, (1,) * 4, "reflect"), "torch.nn.functional.pad", {"mode": "reflect"}),
    (lambda x: F.layer_norm(x, (8, 8)), "torch.nn.LayerNorm", {"normalized_shape": (8, 8)}),
    (lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2), align_corners=False),
     "torch.nn.functional.grid_sample", {"mode": "bilinear", "padding_mode": "zeros"}),
    (lambda x: 1 / x, "torch.div", {"scalars": 1}),
    (lambda x: x.exp(), "torch.exp", {}),
    (lambda x: torch.relu(x), "torch.nn.functional.relu", {}),
    (lambda x: x > x, "torch.Tensor.gt", {}),
    (lambda x: x[:, :2], "torch.Tensor.getitem", {}),
    (lambda x: x.view(1, -1), "torch.Tensor.reshape", {}),
    (lambda x: x.softmax(1), "torch.nn.Softmax", {}),
    (lambda x: torch.cumsum(x, 1), "torch.cumsum", {}),
]  # fmt: skip


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case[1])
def test_functions_and_methods_find_their_rows(case):
    function, operator, attributes = case

    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    [call] = trace_calls(Model(), torch.ones(1, 4, 8, 8), input_dtype="qint8")
    assert call.operator == operator
    assert {key: call.attributes[key] for key in attributes} == attributes
    assert find_violations([call], "bayes") is not None  # every attribute of the row is there


MODULES = [
    nn.AvgPool2d(2), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.PReLU(), nn.SELU(), nn.GELU(),
    nn.UpsamplingBilinear2d(scale_factor=2), nn.ConvTranspose2d(4, 4, 2, 2), nn.Softmax(1),
    nn.LayerNorm((8, 8)), nn.PixelShuffle(2), nn.ChannelShuffle(2), nn.ZeroPad2d(1), nn.Flatten(),
    nn.Linear(8, 2), nn.Hardsigmoid(), nn.AdaptiveAvgPool2d(1), nn.Dropout2d(), nn.BatchNorm2d(4),
    nn.SyncBatchNorm(4), nn.ReplicationPad2d(1), nn.Sigmoid(),
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_modules_carry_what_their_rows_need(module):
    [call] = trace_calls(nn.Sequential(module), torch.ones(1, 4, 8, 8), input_dtype="qint8")
    assert not [v for v in find_violations([call], "bayes") if v.constraint == "operator"]


def test_modules_without_a_row_are_violations_not_gaps():
    model = nn.Sequential(nn.InstanceNorm2d(4), nn.Hardswish())
    calls = trace_calls(model, torch.ones(1, 4, 8, 8), input_dtype="qint8")
    found = find_violations(calls, "bayes")
    assert [(v.path, v.actual) for v in found] == [
        ("0", "torch.nn.InstanceNorm2d"),
        ("1", "torch.nn.Hardswish"),
    ]


def test_attention_and_cells_are_single_calls():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, add_zero_attn=True)
            self.cell = nn.LSTMCell(8, 8)

        def forward(self, x):
            y, _ = self.attention(x, x, x)
            return self.cell(y[0])

    calls = trace_calls(Model(), torch.ones(3, 2, 8), input_dtype="qint8")
    assert [call.path for call in calls] == ["attention", "getitem", "cell"]
    assert [v.constraint for v in find_violations(calls, "bayes")] == ["add_zero_attn"]

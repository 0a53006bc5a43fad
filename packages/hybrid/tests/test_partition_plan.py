"""The partition as a library: the documented hybrid example, the rules one by one, JSON."""

import json
import warnings
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub

from bevquant_hybrid import quantization
from bevquant_hybrid.operators import load_support_table
from bevquant_hybrid.partition import Plan, PlanNode, partition, place_operator


class StubTracer(fx.Tracer):
    def is_leaf_module(self, module, path):
        return isinstance(module, QuantStub | DeQuantStub) or super().is_leaf_module(module, path)


def traced(model):
    return fx.GraphModule(model, StubTracer().trace(model))


class SeluModule(nn.Module):
    def forward(self, x):
        return F.selu(x)


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.prelu = nn.PReLU()

    def forward(self, x):
        return F.selu(self.prelu(self.conv(x)))


class HybridModel(nn.Module):
    """The network of the documents' hybrid example."""

    def __init__(self, channels=3):
        super().__init__()
        self.quant = QuantStub()
        self.conv0 = nn.Conv2d(channels, channels, 1)
        self.prelu = nn.PReLU()
        self.conv1 = ConvBlock(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)
        self.conv3 = nn.Conv2d(channels, channels, 1)
        self.conv4 = nn.Conv2d(channels, channels, 1)
        self.selu = SeluModule()
        self.dequant = DeQuantStub()
        self.identity = nn.Identity()

    def forward(self, input):
        x = self.identity(self.conv0(self.quant(input)))
        x = self.conv1(F.selu(self.prelu(x)))
        x = self.identity(self.conv3(self.conv2(x)))
        return self.dequant(self.selu(self.conv4(x)))


WISHES = {"module_name": ["conv1.conv", "conv3"], "module_type": [SeluModule]}

# The printed forward of the example, line by line: name and what it reads.
PRINTED = """
quant input_1
conv0 quant
identity conv0
prelu_input_dequant_0 identity
prelu prelu_input_dequant_0
selu prelu
conv1_conv selu
conv1_prelu conv1_conv
selu_1 conv1_prelu
selu_1_activation_post_process selu_1
conv2 selu_1_activation_post_process
conv3_input_dequant_0 conv2
conv3 conv3_input_dequant_0
conv3_activation_post_process conv3
identity_1 conv3_activation_post_process
conv4 identity_1
selu_2_input_dequant_0 conv4
selu_2 selu_2_input_dequant_0
dequant selu_2
""".split()


@pytest.mark.parametrize("march", ["bayes", "bernoulli2"])
def test_the_documented_example_line_by_line(march):
    plan = partition(traced(HybridModel()), march, WISHES)
    lines = [(n.name, *n.inputs) for n in plan.nodes if n.kind not in ("input", "output")]
    assert [word for line in lines for word in line] == PRINTED
    on_bpu = [n.name for n in plan.nodes if n.place == "BPU" and n.kind == "operator"]
    assert on_bpu == ["conv0", "conv2", "conv4"]
    assert plan.warnings == ()


def test_reasons_say_who_decided():
    plan = partition(traced(HybridModel()), "bayes", WISHES)
    reasons = {name: plan.node(name).reason for name in ("conv1_conv", "selu_2", "prelu", "conv0")}
    assert reasons == {
        "conv1_conv": "hybrid_dict names conv1.conv",
        "selu_2": "hybrid_dict names the class SeluModule of selu",
        "prelu": "torch.nn.PReLU: the documents' hybrid example runs it on the CPU",
        "conv0": "torch.nn.Conv2d: the mapper runs it on the BPU",
    }


def test_segments_and_bytes_of_the_example():
    plan = partition(traced(HybridModel()), "bayes", WISHES, example_inputs=torch.ones(1, 3, 8, 8))
    assert [(s.place, s.nodes) for s in plan.segments] == [
        ("BPU", ("conv0", "identity")),
        ("CPU", ("prelu", "selu", "conv1_conv", "conv1_prelu", "selu_1")),
        ("BPU", ("conv2",)),
        ("CPU", ("conv3",)),
        ("BPU", ("identity_1", "conv4")),
        ("CPU", ("selu_2",)),
    ]
    # The model's own DeQuantStub at the end reads floats: nothing crosses there.
    assert [b.transfer_bytes for b in plan.boundaries] == [192] * 6 + [0]
    assert plan.transfer_bytes == 6 * 192
    inserted = [b.name for b in plan.boundaries if b.inserted]
    assert len(inserted) == 5
    assert plan.boundaries[2].readers == ("conv2",)


def test_without_shapes_the_bytes_are_unknown_not_zero():
    plan = partition(traced(HybridModel()), "bayes", WISHES)
    assert plan.transfer_bytes is None


def test_a_name_covers_everything_inside():
    plan = partition(traced(HybridModel()), "bayes", {"module_name": ["conv1", "conv3"]})
    assert plan.node("conv1_conv").place == plan.node("selu_1").place == "CPU"
    assert plan.node("selu_1").reason == "hybrid_dict names conv1"


def test_names_and_classes_that_match_nothing_are_warned_of():
    with pytest.warns(UserWarning, match="^hybrid_dict: no module") as caught:
        plan = partition(
            traced(HybridModel()), "bayes", {"module_name": ["conv5"], "module_type": [nn.GRU]}
        )
    assert [str(w.message) for w in caught] == list(plan.warnings)
    assert plan.warnings[0].startswith("hybrid_dict: no module is called 'conv5'; names near it: ")
    assert "conv4" in plan.warnings[0]
    assert plan.warnings[1] == "hybrid_dict: no module of class GRU is called"


@pytest.mark.parametrize(
    ("wishes", "kind", "reason"),
    [
        ({"modules": []}, ValueError, "unknown key 'modules'"),
        ({"module_name": [nn.Conv2d]}, TypeError, "expected a module's path"),
        ({"module_type": ["conv"]}, TypeError, "expected a class"),
        ({"module_name": "conv3"}, TypeError, "module_name is 'conv3'; expected a list"),
        ({"module_type": nn.Conv2d}, TypeError, "module_type is <class .*; expected a list"),
    ],
)
def test_bad_wishes_are_refused(wishes, kind, reason):
    with pytest.raises(kind, match=reason):
        partition(traced(HybridModel()), "bayes", wishes)
    with pytest.raises(kind, match=reason):
        quantization.prepare_qat_fx(HybridModel(), {}, hybrid=True, hybrid_dict=wishes)


def test_an_input_that_nothing_quantizes_is_warned_of():
    with pytest.warns(UserWarning, match="_0 runs on the BPU and reads input_1, which is float"):
        partition(traced(nn.Sequential(nn.Conv2d(3, 3, 1))), "bayes")


class Branches(nn.Module):
    """A CPU node with readers on both sides, and an add of both."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.prelu, self.selu = nn.PReLU(), nn.SELU()
        self.skip = FloatFunctional()

    def forward(self, x):
        x = self.conv(self.quant(x))
        y = self.prelu(x)
        z = self.skip.add(x, self.second(y))
        return self.dequant(z), self.selu(y) + z


def test_readers_on_the_cpu_keep_the_float_value():
    plan = partition(traced(Branches()), "bayes")
    assert plan.node("second").inputs == ("prelu_activation_post_process",)
    assert plan.node("selu").inputs == ("prelu",)


def test_methods_of_a_functional_are_its_own():
    """As graphs of prepared models have them: the object first, then the call of its method."""
    graph = fx.Graph()
    x = graph.create_node("call_module", "quant", (graph.placeholder("x"),))
    owner = graph.get_attr("skip")
    graph.output(graph.call_method("add", (owner, x, x)))
    plan = partition(fx.GraphModule(Branches(), graph), "bayes", {"module_name": ["skip"]})
    assert [node.name for node in plan.nodes] == ["x", "quant", "add_input_dequant_0", "add",
                                                  "output"]  # fmt: skip
    assert plan.node("add").operator == "torch.add"
    assert plan.node("add").reason == "hybrid_dict names skip"


def test_segments_never_wait_for_one_another():
    """conv feeds add directly and by way of the CPU: one segment of both could not run."""
    plan = partition(traced(Branches()), "bayes")
    of = {node.name: node.segment for node in plan.nodes}
    assert of["conv"] != of["add"]
    by_name = {node.name: node for node in plan.nodes}

    def earlier(name):
        found = set()
        for source in by_name[name].inputs:
            found |= {of[source]} if of[source] is not None else earlier(source)
        return found

    for node in plan.nodes:
        if node.segment is not None:
            assert all(number <= node.segment for number in earlier(node.name))


def test_a_qconfig_of_none_means_float():
    model = Branches()
    model.second.qconfig = None
    plan = partition(traced(model), "bayes")
    assert plan.node("second").reason == "the qconfig of second is None"


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.conv, self.tail = QuantStub(), nn.Conv2d(4, 4, 1), nn.PReLU()

    def forward(self, x):
        return self.tail(self.conv(self.quant(x)).permute(0, 2, 3, 1).reshape(1, -1, 4))


@pytest.mark.parametrize(("march", "kind"), [("bayes", "pass"), ("bernoulli2", "operator")])
def test_views_pass_values_on_where_the_march_has_them(march, kind):
    plan = partition(traced(Views()), march, example_inputs=torch.ones(1, 4, 2, 2))
    assert plan.node("permute").kind == kind
    assert plan.node("permute").place == ("BPU" if kind == "pass" else "CPU")
    [boundary] = [b for b in plan.boundaries if b.inserted]
    assert boundary.name == ("tail" if kind == "pass" else "permute") + "_input_dequant_0"
    assert boundary.transfer_bytes == 16


def test_every_row_of_the_support_table_has_a_place():
    table = load_support_table()
    stubs = {"torch.quantization.QuantStub", "torch.quantization.DeQuantStub"}
    for row in set(table.operators) - stubs:
        for march in ("bernoulli2", "bayes", "bayes-e"):
            assert "not among" not in place_operator(row, march).because, row
    assert place_operator("torch.nn.GRU", "bayes").place == "CPU"
    assert place_operator("torch.Tensor.exp", "bernoulli2").place == "BPU"
    with pytest.raises(ValueError, match="march 'x'"):
        place_operator("torch.add", "x")


def example_plan():
    return partition(traced(HybridModel()), "bayes", WISHES, example_inputs=torch.ones(1, 3, 8, 8))


def test_json_there_and_back(tmp_path):
    plan = example_plan()
    assert Plan.from_json(plan.to_json()) == plan
    path = plan.save(tmp_path / "plan.json")
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads(plan.to_json())["segments"][0]["nodes"] == ["conv0", "identity"]


def broken(**changes):
    data = json.loads(example_plan().to_json())
    for key, value in changes.items():
        if key.startswith("node_"):
            data["nodes"][2][key.removeprefix("node_")] = value
        else:
            data[key] = value
    return data


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "x"}, "not a partition plan: schema 'x', expected"),
        ({"version": 3}, "version 3, expected 1 or 2"),
        ({"version": True}, "version True"),
        ({"nodes": {}}, "nodes: expected `array`"),
        ({"warnings": [1]}, r"warnings\[.\]: expected `str`"),
        ({"node_place": "GPU"}, "conv0: kind 'operator' at 'GPU'"),
        ({"node_kind": "op"}, "conv0: kind 'op'"),
        ({"node_name": "quant"}, "two nodes are called 'quant'"),
        ({"node_inputs": ["later"]}, "conv0 reads 'later'"),
        ({"node_inputs": "quant"}, r"nodes\[2\].inputs: expected `array`"),
        ({"node_shape": [1.5]}, r"nodes\[2\].shape\[0\]: expected `int`"),
        ({"node_segment": True}, r"nodes\[2\].segment: expected `int"),
        ({"node_inserted": 1}, "inserted: expected `bool`"),
        ({"node_extra": 1}, "unknown field `extra`"),
        ({"node_dtype": "int8"}, "conv0: dtype 'int8'; expected one of"),
        ({"node_shape": [-1, 3]}, r"shape\[0\]: expected `int` >= 0"),
        ({"node_segment": 1}, r"segment 1 \(conv0, prelu.* all on the BPU or all on the CPU"),
        ({"node_segment": 9}, "its segments are not those of its nodes"),
        ({"boundaries": []}, "its boundaries are not those of its nodes"),
    ],
)
def test_plans_that_are_wrong_are_refused(changes, reason, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(broken(**changes)), encoding="utf-8")
    with pytest.raises(ValueError, match=reason) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_plan_is_drawn_with_its_reasons(tools):
    root = ET.fromstring(example_plan().draw())
    text = " ".join(element.text or "" for element in root.iter())
    assert "hybrid_dict names conv1.conv" in text
    assert "1×3×8×8" in text


def test_the_graph_is_left_as_it_was():
    graph_module = traced(HybridModel()).train()
    code = graph_module.code
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition(graph_module, "bayes", WISHES, example_inputs=[torch.ones(1, 3, 8, 8)])
    assert graph_module.code == code
    assert all(module.training for module in graph_module.modules())


ODD = [
    Plan("bayes", ()),
    Plan("", (PlanNode("é/量", "input", reason='a "quote"\n', shape=()),), ("ä\u2028",)),
    Plan("bayes", (PlanNode("q", "quantize", dtype="qint16", shape=(0, 3)),)),
    Plan("bayes", (PlanNode("x", "input"), PlanNode("y", "dequantize", inputs=("x", "x")))),
    Plan("bayes", (PlanNode("x", "operator", "BPU", segment=7), PlanNode("y", "pass", "BPU"))),
]


@pytest.mark.parametrize("plan", ODD)
def test_odd_plans_come_back_from_json(plan, tools, tmp_path):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.load(plan.save(tmp_path / "a.b")) == plan
    assert isinstance(plan.transfer_bytes, int) or plan.transfer_bytes is None
    assert plan.draw().startswith("<")


def test_a_plan_of_the_first_version_is_read():
    plan = example_plan()
    data = json.loads(plan.to_json()) | {"version": 1}
    for node in data["nodes"]:
        del node["dtype"]
    assert Plan.from_json(json.dumps(data)) == plan
    data["version"] = 2
    with pytest.raises(ValueError, match="a node has no dtype"):
        Plan.from_json(json.dumps(data))


def test_a_name_that_no_node_has_is_warned_of_though_a_module_has_it():
    model = HybridModel()
    model.spare = nn.Conv2d(3, 3, 1)
    graph = traced(model)
    graph.add_module("spare", model.spare)
    with pytest.warns(UserWarning, match="no node is in the module 'spare'"):
        partition(graph, "bayes", {"module_name": ["spare"]})
    with pytest.warns(UserWarning, match="called 'conv1.cnv'; names near it: conv1.conv"):
        partition(graph, "bayes", {"module_name": ["conv1.cnv"]})


class Chains(nn.Module):
    """A convolution with an addition behind it, and one with a ReLU."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), DeQuantStub()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.conv, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.block(self.quant(x))
        return self.dequant(self.last(self.conv(x) + x))


@pytest.mark.parametrize(
    "wishes",
    [
        {"module_name": ["conv"]},
        {"module_name": ["block.0"]},
        {"module_name": ["block"]},
        {"module_name": ["_generated_add_0"]},
        {"module_type": [nn.Conv2d]},
    ],
)
def test_fused_layers_go_by_the_names_and_classes_that_prepare_knows(wishes):
    fused = quantization.fuse_fx(Chains())
    assert len([n for n in fused.graph.nodes if n.op == "call_module"]) == 5  # the sum is fused
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = partition(fused, "bayes", wishes)
    qconfig = {"": quantization.get_default_qat_qconfig()}
    prepared = quantization.prepare_qat_fx(fused, qconfig, hybrid=True, hybrid_dict=wishes)
    assert [node.name for node in plan.nodes] == [node.name for node in prepared.graph.nodes]
    assert any(node.inserted for node in plan.nodes)


def test_a_module_with_two_names_is_found_under_both():
    graph = traced(HybridModel())
    graph.add_module("again", graph.conv3)
    for node in graph.graph.nodes:
        if node.target == "conv3":
            node.target = "again"
    plan = partition(graph, "bayes", {"module_name": ["again"]})
    assert plan.node("conv3").reason == "hybrid_dict names again"


def prepared_chains(dtype, **settings):
    qconfig = {"": quantization.get_default_qat_qconfig(dtype=dtype)}
    out = ("last", quantization.get_default_qat_out_qconfig())
    qconfig["module_name"] = [out]
    wishes = {"module_name": ["conv"]}
    model = quantization.prepare_qat_fx(Chains(), qconfig, hybrid=True, hybrid_dict=wishes)
    model(torch.rand(2, 4, 5, 5))
    return model


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("form", ["prepared", "converted"])
def test_integers_that_cross_are_counted_with_their_width(dtype, form):
    model = prepared_chains(dtype)
    width = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("q"))).element_size()
    count = 2 * 4 * 5 * 5
    if form == "converted":
        model = quantization.convert_fx(model)
    plan = partition(model, "bayes", example_inputs=torch.rand(2, 4, 5, 5))
    # Stub, block to conv and the sum's other input, the sum to last; last gives 32 bits.
    sizes = [count * width] * (len(plan.boundaries) - 1) + [count * 4]
    assert [b.transfer_bytes for b in plan.boundaries] == sizes
    assert Plan.from_json(plan.to_json()) == plan


def test_what_is_prepared_has_seen_nothing_of_the_example_inputs():
    model = prepared_chains("qint8")
    quantization.set_fake_quantize(model, quantization.FakeQuantState.QAT)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    partition(model.train(), "bayes", example_inputs=100 * torch.rand(2, 4, 5, 5))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_a_plan_can_be_made_by_hand():
    plan = Plan("bayes", (PlanNode("x", "input"), PlanNode("y", "output", inputs=("x",))))
    assert plan.segments == plan.boundaries == ()
    assert plan.transfer_bytes == 0
    with pytest.raises(KeyError, match="no node 'z'"):
        plan.node("z")

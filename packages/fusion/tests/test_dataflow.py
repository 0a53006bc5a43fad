"""trace_dataflow: values, readers, producers, regions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bevquant_fusion import trace_dataflow


def module_of(forward, **children):
    net = type("Net", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(net, name, child)
    return net.eval()


def only(calls):
    (call,) = calls
    return call


def test_readers_producers_and_scopes():
    def inner(self, x):
        return F.relu(self.a(x)) + x

    def outer(self, x):
        y = self.block(x)
        return torch.cat([self.b(y), y], 1)

    block = module_of(inner, a=nn.Conv2d(3, 3, 1))
    flow = trace_dataflow(module_of(outer, block=block, b=nn.Conv2d(3, 3, 1)))
    assert [(c.kind, c.name, c.path, c.scope) for c in flow.calls] == [
        ("module", "Conv2d", "block.a", "block"),
        ("function", "relu", "", "block"),
        ("function", "add", "", "block"),
        ("module", "Conv2d", "b", ""),
        ("function", "cat", "", ""),
    ]
    conv, relu, add, b, cat = flow.calls
    assert flow.inputs == {*conv.inputs}
    assert [c.name for c in flow.readers(conv.inputs[0])] == ["Conv2d", "add"]
    assert [c.name for c in flow.readers(add.outputs[0])] == ["Conv2d", "cat"]
    assert flow.producer(relu.inputs[0]) is conv
    assert flow.producer(conv.inputs[0]) is None
    assert cat.inputs == (b.outputs[0], add.outputs[0])
    assert flow.outputs == {*cat.outputs}
    assert flow.regions == ("",)


def test_names_of_one_value():
    def forward(self, x):
        out = self.a(x)
        out = out.replace_feature(self.bn(out.features))
        size = out.features.shape
        copied = out.shadow_copy()
        return self.b(copied.features).view(size), out.indices

    flow = trace_dataflow(
        module_of(forward, a=nn.Linear(2, 2), bn=nn.BatchNorm1d(2), b=nn.Linear(2, 2))
    )
    assert flow.calls == ()  # nn.Linear makes a tensor, which has no replace_feature
    assert "has no attribute 'replace_feature'" in flow.untraced[""]


def test_sparse_aliases(spconv):
    def forward(self, x):
        out = self.a(x)
        out = out.replace_feature(self.bn(out.features))
        copied = out.shadow_copy()
        rows = out.features.shape[0]
        return self.b(copied), rows, out.indices

    net = module_of(
        forward, a=spconv.SubMConv3d(2, 2, 3), bn=nn.BatchNorm1d(2), b=spconv.SubMConv3d(2, 2, 3)
    )
    flow = trace_dataflow(net)
    a, bn, b = flow.calls
    assert (a.outputs, bn.outputs) == (bn.inputs, b.inputs)
    assert flow.readers(bn.outputs[0]) == (b,)
    assert flow.outputs == {*b.outputs}


def test_inplace_steps_make_new_values():
    def forward(self, x):
        first = self.a(x)
        second = self.relu(first)
        return self.b(first) + second

    net = module_of(forward, a=nn.Linear(2, 2), relu=nn.ReLU(inplace=True), b=nn.Linear(2, 2))
    flow = trace_dataflow(net)
    a, relu, b, add = flow.calls
    assert flow.readers(a.outputs[0]) == (relu,)
    assert b.inputs == relu.outputs
    assert add.inputs == (b.outputs[0], relu.outputs[0])
    assert flow.inplace_seen == {"relu"}
    net.relu.inplace = False
    a, relu, b, _ = trace_dataflow(net).calls
    assert b.inputs == a.outputs


def test_identity_is_no_reader():
    net = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
    flow = trace_dataflow(net)
    first, same, last = flow.calls
    assert same.same
    assert last.inputs == first.outputs
    assert flow.readers(first.outputs[0]) == (last,)


def test_lists_and_tuples_pass_between_modules():
    def backbone(self, x):
        first = self.a(x)
        return first, self.b(first)

    def neck(self, xs):
        assert len(xs) == 2
        return [self.up(xs[1]), xs[0]]

    def whole(self, x):
        return torch.cat(self.neck(self.backbone(x)), 1)

    net = module_of(
        whole,
        backbone=module_of(backbone, a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1)),
        neck=module_of(neck, up=nn.ConvTranspose2d(3, 3, 1)),
    )
    flow = trace_dataflow(net)
    a, _, up, cat = flow.calls
    assert flow.regions == ("",)
    assert cat.inputs == (up.outputs[0], a.outputs[0])


def test_example_inputs_tell_the_structure():
    def forward(self, xs, options):
        return [self.a(x) * options["scale"] for x in xs] if isinstance(xs, list) else None

    net = module_of(forward, a=nn.Linear(2, 2))
    assert trace_dataflow(net).regions == ()
    example = {"xs": [torch.ones(1, 2), torch.ones(1, 2)], "options": {"scale": 2}}
    assert len(trace_dataflow(net, example).calls_of("a")) == 2
    assert len(trace_dataflow(net, (example["xs"], {"scale": 2})).calls_of("a")) == 2


def test_regions_where_the_top_cannot_be_followed():
    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)

    chain = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    flow = trace_dataflow(module_of(forward, a=chain[0], b=chain[1], c=nn.Linear(2, 2)))
    assert flow.regions == ("a", "b")
    assert "branches on the value" in flow.untraced[""]
    assert flow.calls_of("c") == ()
    assert len(flow.outputs) == 2
    assert only(flow.calls_of("a.0")).inputs[0] in flow.inputs


def test_modules_that_cannot_be_entered_are_one_call():
    def branchy(self, x):
        return self.a(x) if x.sum() > 0 else x

    def whole(self, x):
        return self.last(self.odd(self.first(x)))

    odd = module_of(branchy, a=nn.Sequential(nn.Linear(2, 2)))
    net = module_of(whole, first=nn.Linear(2, 2), odd=odd, last=nn.Linear(2, 2))
    flow = trace_dataflow(net)
    first, call, last = flow.calls[:3]
    assert (call.path, call.inputs, call.outputs) == ("odd", first.outputs, last.inputs)
    assert set(flow.untraced) == {"odd"}
    assert flow.regions == ("", "odd.a")


def test_shared_modules_go_by_their_first_path():
    linear = nn.Linear(2, 2)
    flow = trace_dataflow(nn.Sequential(linear, nn.ReLU(), linear))
    assert [c.path for c in flow.calls] == ["0", "1", "0"]
    assert len(flow.calls_of("0")) == 2


def test_hooks_stand_between():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    net[0].register_forward_hook(lambda *_: pytest.fail("hooks see no symbols"))
    first, seen, hook, last = trace_dataflow(net).calls
    assert (seen.name, seen.inputs) == ("hook", first.inputs)
    assert (hook.name, hook.inputs, hook.outputs) == ("hook", first.outputs, last.inputs)


def test_parameters_read_by_a_forward():
    def forward(self, x):
        return F.linear(x, self.a.weight) + self.a(x)

    flow = trace_dataflow(module_of(forward, a=nn.Linear(2, 2)))
    assert flow.parameters_read == {"a.weight"}


def test_the_model_is_not_changed():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.ReLU()).train()
    before = {path: {k: str(v) for k, v in vars(m).items()} for path, m in net.named_modules()}
    trace_dataflow(net, torch.ones(1, 2))
    after = {path: {k: str(v) for k, v in vars(m).items()} for path, m in net.named_modules()}
    assert before == after


def test_a_replaced_forward_is_not_entered():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    net[0].forward = lambda x: x
    flow = trace_dataflow(net)
    assert [c.path for c in flow.calls] == ["0", "1"]
    assert "replaced on the instance" in flow.untraced["0"]

"""trace_forward: what is followed, what is refused, and that nothing is changed or printed."""

import copy
import operator

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from bevquant_fusion import UntraceableError, rebuild_forward, trace_forward


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(3) * 2)
        self.register_buffer("shift", torch.ones(3))
        self.kept = []


def module_of(forward):
    return type("Net", (Base,), {"forward": forward})().eval()


def inplace_add(self, x):
    out = self.linear(x)
    alias = out
    out += x
    return out, alias


def inplace_on_numbers(self, x):
    rows = x.shape[0]
    more = rows
    more += 1
    return self.linear(x).reshape(rows, 3) + more


def parameters_and_buffers(self, x):
    return self.linear(x) * (self.scale * self.shift)


def training_as_a_value(self, x):
    return F.dropout(self.linear(x), 0.5, self.training)


def defaults(self, x, y=None, *, factor=2.0, **unused):
    return self.linear(x) * factor if y is None else y


def keyword_only(self, x, *, y):
    return self.linear(x) + y


def setitem(self, x):
    out = self.linear(x)
    out[0] = 1.0
    return out


def checks(self, x):
    assert x.dim() == 2, f"{x.dim()} axes"
    if x.shape[1] != 3:
        raise ValueError(f"expected 3 columns, got {x.shape[1]}")
    return self.linear(x)


def known_class(self, x):
    out = self.linear(x)
    return out * 2 if isinstance(out, torch.Tensor) and torch.is_tensor(out) else out


def dicts_and_unpacking(self, x):
    rows, columns = x.shape
    return {"out": self.linear(x).view(rows, columns), "sum": [x.sum(), None]}


FOLLOWED = [
    inplace_add,
    inplace_on_numbers,
    parameters_and_buffers,
    training_as_a_value,
    defaults,
    keyword_only,
    setitem,
    checks,
    known_class,
    dicts_and_unpacking,
]


@pytest.mark.parametrize("forward", FOLLOWED)
def test_the_rebuilt_forward_is_the_same(forward):
    net = module_of(forward)
    x = torch.randn(4, 3)
    extra = {"y": torch.ones(3)} if forward is keyword_only else {}
    with torch.no_grad():
        expected = net(x.clone(), **extra)
        graph = trace_forward(net)
        rebuilt = copy.deepcopy(net)
        rebuild_forward(rebuilt, graph)
        rebuild_forward(rebuilt, trace_forward(rebuilt))
        torch.testing.assert_close(rebuilt(x.clone(), **extra), expected, rtol=0, atol=0)


def test_training_stays_live():
    net = module_of(training_as_a_value)
    rebuild_forward(net, trace_forward(net))
    x = torch.ones(50, 3)
    assert torch.equal(net(x), net(x))
    net.train()
    assert (net(x) == 0).any()


def test_checks_go_on_checking():
    net = module_of(checks)
    rebuild_forward(net, trace_forward(net))
    with pytest.raises(AssertionError, match="a check of the forward failed"):
        net(torch.ones(3))
    with pytest.raises(AssertionError, match="a check of the forward failed"):
        net(torch.ones(2, 4))


def test_children_are_leaves_and_steps_are_recorded():
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
    assert [n.target for n in trace_forward(net).nodes if n.op == "call_module"] == ["0", "1"]
    targets = [n.target for n in trace_forward(module_of(inplace_add)).nodes]
    assert operator.iadd in targets


def test_attribute_writes_stay_in_order():
    def forward(self, x):
        before = x.features
        x.features = self.linear(before)
        middle = x.features
        x.features += 1
        return x.features + middle + before

    class Holder:
        def __init__(self, features):
            self.features = features

    net = module_of(forward)
    x = torch.randn(2, 3)
    expected = net(Holder(x.clone()))
    rebuild_forward(net, trace_forward(net))
    torch.testing.assert_close(net(Holder(x.clone())), expected, rtol=0, atol=0)


def branches_on_data(self, x):
    return x if x.sum() > 0 else self.linear(x)


def branches_on_training(self, x):
    return x if self.training else self.linear(x)


def loops_over_input(self, x):
    return [self.linear(y) for y in x]


def counts_input(self, x):
    return self.linear(x[0]) if len(x) == 1 else x


def asks_class(self, x):
    return self.linear(x) if isinstance(x, torch.Tensor) else x


def asks_is_tensor(self, x):
    return self.linear(x) if torch.is_tensor(x) else x


def asks_attribute(self, x):
    return self.linear(x.dense()) if hasattr(x, "dense") else x


def stores_on_self(self, x):
    self.last = self.linear(x)
    return self.last


def appends_to_list(self, x):
    self.kept.append(x)
    return self.linear(x)


def makes_noise(self, x):
    return self.linear(x) + torch.rand(3)


def uses_checkpoint(self, x):
    return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


def uses_reentrant_checkpoint(self, x):
    return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)


def without_gradient(self, x):
    with torch.no_grad():
        return self.linear(x)


def under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(x)


def takes_anything(self, *xs):
    return self.linear(xs[0])


def deletes(self, x):
    out = self.linear(x)
    del x.features
    return out


def converts(self, x):
    return self.linear(x) * int(x.sum())


class TensorQuantizer(nn.Module):
    def forward(self, x):
        return x.clone()


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.1), TensorQuantizer()], ids=repr)
def test_the_class_is_known_behind_what_hands_its_input_on(module):
    def forward(self, x):
        y = self.between(self.linear(x))
        return y if isinstance(y, torch.Tensor) else x

    net = module_of(forward)
    net.between = module
    called = [n.target for n in trace_forward(net).nodes if n.op == "call_module"]
    assert called == ["linear", "between"]


REFUSED = {
    branches_on_data: "branches on the value",
    branches_on_training: "another path in training mode",
    loops_over_input: "loops over the value",
    counts_input: "'len' is not supported",
    asks_class: "asks for the class of the value `x`",
    asks_is_tensor: "asks for the class of the value `x`",
    asks_attribute: "tests for the attribute 'dense'",
    stores_on_self: "assigns self.last",
    appends_to_list: "writes to self.kept",
    makes_noise: "not computed from its inputs",
    uses_checkpoint: "uses torch.utils.checkpoint",
    uses_reentrant_checkpoint: "checkpoint",
    without_gradient: "switches the gradient",
    under_autocast: "autocast",
    takes_anything: "variable number of inputs",
    deletes: "deletes the attribute 'features'",
    converts: "int",
}


@pytest.mark.parametrize(("forward", "reason"), list(REFUSED.items()))
def test_refused_with_the_reason(forward, reason, capfd):
    net = module_of(forward)
    before = {k: v for k, v in vars(net).items()}
    with pytest.raises(UntraceableError, match=f"^Net.forward .*{reason}"):
        trace_forward(net)
    assert vars(net) == before
    assert net.kept == []
    assert capfd.readouterr() == ("", "")


def test_forward_replaced_on_the_instance_is_refused():
    net = module_of(checks)
    net.forward = lambda x: x
    with pytest.raises(UntraceableError, match="replaced on the instance"):
        trace_forward(net)


def test_helpers_and_nested_functions_are_followed():
    def forward(self, x):
        def inner(y):
            return self.relu(self.linear(y))

        return inner(x) + x

    graph = trace_forward(module_of(forward))
    assert [n.target for n in graph.nodes if n.op == "call_module"] == ["linear", "relu"]

"""Joins that are sent to children while the author's own forward runs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import bevquant_qnn as qnn
from bevquant_graph import capture
from bevquant_quantizers import TensorQuantizer, calibrate


def conv(channels=3):
    return nn.Conv2d(channels, channels, 1)


def images(batch=1):
    return torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def added(x, y):
    return x + y


def added_in_float(x, y):
    return x + y


torch.fx.wrap("added_in_float")


class Branching(nn.Module):
    """A residual sum on either way, by a helper that both ways call."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x, other=False):
        if other:
            return added(self.b(x), x)
        return added(self.a(x), x)


def test_a_way_that_the_example_did_not_take_stays_float():
    model, x = Branching().eval(), images()
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert model.residual_quantizer is model.a._input_quantizer
    seen = []
    model.residual_quantizer.register_forward_hook(lambda *call: seen.append(call[1]))
    model.a(x)
    seen.clear()
    assert torch.equal(model(x, other=True), model.b(x) + x)
    assert seen == []
    model(x)
    assert len(seen) == 2  # as the input of the convolution, and in the sum


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = conv()

    def forward(self, x):
        return added_in_float(self.conv(x), x)


@pytest.mark.parametrize("observed", [True, False])
def test_what_fx_was_told_not_to_look_into_stays_float(observed):
    result = qnn.quantize_model(Told().eval(), example_inputs=images() if observed else None)
    assert [item.path for item in result.quantized] == ["conv"]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(conv() for _ in range(3))

    def forward(self, x, depth=2):
        for layer in list(self.convs)[:depth]:
            x = layer(x) + x
        return x


def test_a_loop_of_another_length_is_refused():
    model, x = Chain().eval(), images()
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert isinstance(model.residual_quantizer_1, TensorQuantizer)
    assert model.residual_quantizer_1 is model.convs[1]._input_quantizer
    for depth in (1, 3):
        with pytest.raises(ValueError, match=rf"Chain: .* runs {depth} times .* ran 2 times"):
            model(x, depth=depth)
    assert torch.isfinite(model(x)).all()


def test_modules_are_copied_and_pickled_and_stay_what_they_are():
    model, x = nn.Sequential(Branching(), Branching()).eval(), images()
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    wanted = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), wanted)
        assert type(twin[0]) is type(model[0])
        assert isinstance(twin[0], Branching)
        assert twin[0].residual_quantizer is twin[0].a._input_quantizer
        assert twin[0].residual_quantizer is not model[0].residual_quantizer


def test_sums_of_children_are_not_the_parents():
    class Inner(nn.Module):
        def forward(self, x):
            return x + x.relu()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.inner = conv(), Inner()

        def forward(self, x):
            return self.conv(x) + self.inner(x)

    model, x = Outer().eval(), images()
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert [item.path for item in result.quantized] == ["conv", "residual_quantizer"]
    quantizer = model.residual_quantizer
    assert torch.equal(model(x), model.conv(x) + quantizer(x + x.relu()))


def test_the_graph_of_a_quantized_model_shows_the_quantizers():
    model, x = nn.Sequential(Branching(), Branching()).eval(), images()
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    for module in model.modules():
        if isinstance(module, TensorQuantizer) and module.axis is None:
            module.amax = 3.0
    graph = capture(model, x)
    paths = [graph.path(node) for node in graph.operations]
    assert paths.count("0.residual_quantizer") == paths.count("1.residual_quantizer") == 1
    assert torch.equal(graph.replay(images(2)), model(images(2)))


def test_a_compiled_model_adds_as_the_model_does():
    model, x = nn.Sequential(conv(), Branching(), nn.ReLU()).eval(), images()
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    for module in model.modules():
        if isinstance(module, TensorQuantizer) and module.axis is None:
            module.amax = 0.5
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_gradients_reach_both_operands():
    model, x = Branching(), images().requires_grad_()
    qnn.quantize_model(model, example_inputs=x.detach(), inplace=True)
    model.train()(x).sum().backward()
    assert (x.grad != 0).all()
    assert (model.a.weight.grad != 0).any()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = conv()

    def forward(self, x):
        def inner(x):
            return self.conv(x) + x

        return checkpoint.checkpoint(inner, x, use_reentrant=False) if self.training else inner(x)


def test_a_quantized_sum_in_a_checkpoint_is_refused_in_training():
    model, x = Checkpointed().eval(), images()
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert hasattr(model, "residual_quantizer")
    with pytest.raises(ValueError, match=r"Checkpointed computes .* inside torch.utils.checkpoint"):
        model.train()(x)


def test_a_graph_that_is_there_already_is_read():
    model, x = nn.Sequential(Branching(), Branching()).eval(), images()
    twin = copy.deepcopy(model)
    result = qnn.quantize_model(model, example_inputs=x, graph=capture(model, x))
    other = qnn.quantize_model(twin, example_inputs=x, inplace=True)
    assert result.quantized == other.quantized
    assert result.shared == other.shared
    with pytest.raises(ValueError, match="a graph of another Sequential"):
        qnn.quantize_model(
            twin, example_inputs=x, graph=capture(nn.Sequential(conv()), x), inplace=True
        )


class Dense(nn.ModuleDict):
    """Goes through its children, as DenseNet's blocks do."""

    def __init__(self, count):
        super().__init__({f"layer{i}": nn.Conv2d(4 + 2 * i, 2, 1) for i in range(count)})

    def forward(self, x, inner=None):
        kept = [x if inner is None else inner(x)]
        for layer in self.values():
            kept.append(layer(torch.cat(kept, 1)))
        return torch.cat(kept, 1)


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.last = Dense(3), nn.Conv2d(10, 4, 1)

    def forward(self, x):
        return self.last(self.block(x))


class Fuser(nn.Sequential):
    """Joins its inputs and goes through its children, as a chain does."""

    def forward(self, x):
        return super().forward(torch.cat([x, x * 2], 1))


@pytest.mark.parametrize("net", [DenseNet(), Fuser(nn.Conv2d(8, 4, 1), nn.ReLU())])
def test_the_graph_does_not_meet_the_joins_as_children(net):
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    quantized = qnn.quantize_model(net.eval(), example_inputs=x).model
    calibrate(quantized, [x])
    graph = capture(quantized, x)  # which holds it against the model, bit for bit
    paths = {graph.path(n) for n in graph.operations if "cat" in str(n.target)}
    assert paths
    assert all("quant_concat" in path for path in paths)


def test_a_forward_that_goes_through_its_children_does_not_meet_the_joins():
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    net = DenseNet().eval()
    wanted = net(x)
    quantized = qnn.quantize_model(net, example_inputs=x).model
    assert isinstance(quantized.block.quant_concat, qnn.QuantConcat)
    calibrate(quantized, [x])
    assert (quantized(x) - wanted).abs().max() < 0.05 * wanted.abs().max()

    def fails(_):
        raise KeyError("in the middle")

    keys = list(quantized.state_dict())
    with pytest.raises(KeyError, match="in the middle"):
        quantized.block(x, inner=fails)
    assert list(quantized.state_dict()) == keys
    nested = quantized.block(x, inner=lambda y: quantized.block(y)[:, :4])
    assert torch.equal(nested, quantized.block(x))


class Gate(nn.Module):
    """Decides by a value, around parts that do not."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = conv(), Branching(), conv()

    def forward(self, x):
        y = self.stem(x)
        if float(y.sum()) > 1e9:
            return y
        return self.left(y).relu(), self.right(y)


@pytest.mark.parametrize("whole", [True, False])
def test_parts_of_what_cannot_be_captured_are_followed_by_themselves(whole):
    model = Gate().eval() if whole else nn.Sequential(conv(), Gate()).eval()
    gate = model if whole else model[1]
    result = qnn.quantize_model(model, example_inputs=images(), inplace=True)
    # Both read what the stem makes, and so does the sum inside the left branch.
    shared = gate.right._input_quantizer
    assert gate.left.a._input_quantizer is shared
    assert gate.left.residual_quantizer is shared
    assert gate.stem._input_quantizer is not shared
    (note,) = [i.reason for i in result.skipped if "branches on the values" in i.reason]
    assert "test_join_calls.py" in note


def test_a_model_of_inference_tensors_is_as_it_was():
    with torch.inference_mode():
        model, x = Branching().eval(), images()
        result = qnn.quantize_model(model, example_inputs=x)
    assert [item.path for item in result.quantized] == ["a", "b", "residual_quantizer"]

"""Convolutions that follow each other run as one: nothing of it can be seen from outside."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_int8sim import AccumulatorOverflowError, IntegerModel, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Block(nn.Module):
    """A bottleneck, whose sum is rounded once."""

    def __init__(self, channels, inner, stride=1, groups=1):
        super().__init__()
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.middle = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups)
        self.expand = nn.Conv2d(inner, channels, 1)
        self.shortcut = nn.Conv2d(channels, channels, 1, stride)
        self.add = None

    def forward(self, x):
        y = F.relu(self.middle(F.relu(self.reduce(x))))
        return F.relu(self.expand(y) + self.shortcut(x))


class Net(nn.Module):
    """Blocks, an output in the middle, channels that fill no vector, and a way up again."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        self.first, self.second = Block(64, 32), Block(64, 64, 2, groups=4)
        self.narrow, self.wide = nn.Conv2d(64, 24, 3, padding=1), nn.Conv2d(24, 40, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(40, 32, 2, 2), nn.Conv2d(32, 8, 1)

    def forward(self, x):
        first = self.first(F.relu(self.stem(x)))
        y = F.relu(self.narrow(self.second(first)))
        return first, self.head(F.relu(self.up(F.relu(self.wide(y)))))


@pytest.fixture(scope="module")
def quantized():
    torch.manual_seed(0)
    x = torch.randn(1, 3, 24, 28)
    net = quantize_model(Net().eval(), example_inputs=(x,)).model
    with torch.no_grad():
        calibrate(net, [(x,)], method="max")
    return net, x


def chains(model):
    """How many convolutions each chain has."""
    return [
        len(part.steps)
        for row in model._convolutions.values()
        for _, parts in row._known.values()
        for part in parts
        if part.chain is not None
    ]


def same(made, expected):
    return all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_called_again_and_again(quantized, backend, threads):
    net, x = quantized
    model = simulate(net, (x,), backend=backend)
    inputs = [x, torch.randn(2, 3, 24, 28), torch.randn(1, 3, 40, 24), -x]
    kept = []
    for _ in range(4):
        for given in inputs:
            made = model(given)
            expected, _ = model.run((given,))
            assert same(made, expected)
            kept.append((made, expected))
    assert all(same(*pair) for pair in kept)  # nothing is written over later
    found = chains(model)
    assert (sum(found) >= 3 * 8 and max(found) >= 5) == (backend != "torch")


def test_weights_written_to(quantized, backend):
    net, x = quantized
    model = simulate(net, (x,), backend=backend)
    for _ in range(3):
        before = model(x)
    step = next(s for s in model._fast.steps if s.path == "first.middle")
    step.tensors["weight"].neg_()
    for _ in range(3):
        made = model(x)
        assert same(made, model.run((x,))[0])
    assert not torch.equal(made[0], before[0])
    step.tensors["weight"].neg_()
    assert same(model(x), before)


def test_copies_and_other_backends(quantized):
    net, x = quantized
    model = IntegerModel(simulate(net, (x,)).program)  # the traced source cannot be copied
    expected = model(x)
    for _ in range(2):
        model(x)
    twin = copy.deepcopy(model)
    del model
    assert not chains(twin)
    for _ in range(3):
        assert same(twin(x), expected)
    for backend in ("torch", "auto"):
        twin.backend = backend
        assert same(twin(x), expected)


def test_several_threads_call(quantized):
    net, x = quantized
    model = simulate(net, (x,))
    inputs = [x, torch.randn(1, 3, 40, 24), -x]
    expected = [model.run((given,))[0] for given in inputs]
    wrong = []

    def caller(number):
        for _ in range(20):
            if not same(model(inputs[number]), expected[number]):
                wrong.append(number)

    callers = [threading.Thread(target=caller, args=(i % 3,)) for i in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert not wrong


def test_sums_that_may_overflow_are_checked_each_time(quantized):
    net, x = quantized
    model = simulate(net, (x,))
    step = next(s for s in model._fast.steps if s.path == "stem")
    step.tensors["bias"].fill_(2**31 - 1001)
    for _ in range(3):
        assert same(model(0 * x), model.run((0 * x,))[0])
    with pytest.raises(AccumulatorOverflowError, match="stem"):
        model(x)


def test_a_thread_meets_the_groups_of_a_place_one_behind_the_other(monkeypatch):
    launch = pytest.importorskip("bevquant_int8sim._compiled.launch")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    groups = [(1, 960, 10**8, 0), (2, 960, 10**8, 8)]
    border = (3, 480, 10**7, 16)
    tasks = launch.cut([[*groups, border], groups[:1]])
    layer, (end, _) = tasks.rows[: tasks.stops[0]], tasks.stops
    for kernel, tiles, *_ in (*groups, border):
        starts, stops = layer[layer[:, 0] == kernel, 1:3].T.tolist()
        assert starts == [0, *stops[:-1]]
        assert stops[-1] == tiles
    first, second = (layer[layer[:, 0] != border[0]][number::2] for number in (0, 1))
    assert len(first) > 4
    assert first[:, 1:3].tolist() == second[:, 1:3].tolist()
    assert set(tasks.rows[end:, 0]) == {1}

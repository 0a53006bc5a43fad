"""Random networks: what is folded is exactly what may be, and the result is the same."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bevquant_fusion import fuse_model

CHANNELS = 3


class Program(nn.Module):
    """Runs steps ``(kind, module index, sources)`` on earlier results; the last is the output."""

    def __init__(self, steps, extra_output):
        super().__init__()
        kinds = {
            "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
            "deconv": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 1, groups=3),
            "bn": lambda: nn.BatchNorm2d(CHANNELS),
            "relu": lambda: nn.ReLU(),
            "same": lambda: nn.Identity(),
        }
        self.steps = steps
        self.extra_output = extra_output
        self.layers = nn.ModuleDict()
        for kind, index, _ in steps:
            if kind in kinds and f"{kind}{index}" not in self.layers:
                self.layers[f"{kind}{index}"] = kinds[kind]()

    def forward(self, x):
        values = [x]
        for kind, index, (a, b) in self.steps:
            if kind == "add":
                values.append(values[a % len(values)] + values[b % len(values)])
            else:
                values.append(self.layers[f"{kind}{index}"](values[a % len(values)]))
        return values[-1], values[self.extra_output % len(values)]


def foldable(net):
    """The pairs that may be folded, told from the program alone."""
    aliases, readers, made_by = {0: 0}, {}, {}
    count = 1
    calls = {}
    for kind, index, (a, b) in net.steps:
        sources = [aliases[a % count]] + ([aliases[b % count]] if kind == "add" else [])
        if kind == "same":
            aliases[count] = sources[0]
        else:
            aliases[count] = count
            made_by[count] = f"{kind}{index}"
            for source in set(sources):
                readers.setdefault(source, []).append(f"{kind}{index}")
            calls.setdefault(f"{kind}{index}", []).append(sources)
        count += 1
    outputs = {aliases[count - 1], aliases[net.extra_output % count]}
    pairs = set()
    for name, uses in calls.items():
        if not name.startswith("bn") or len(uses) != 1:
            continue
        source = uses[0][0]
        conv = made_by.get(source, "")
        single = readers[source] == [name] and source not in outputs
        if conv.startswith(("conv", "deconv")) and single and len(calls[conv]) == 1:
            pairs.add((f"layers.{conv}", f"layers.{name}"))
    return pairs


KINDS = ("conv", "conv", "bn", "bn", "deconv", "relu", "same", "add")
# Mostly the newest value, so that chains come up as often as branches.
SOURCE = st.one_of(st.just(-1), st.just(-1), st.integers(0, 12))
STEP = st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.tuples(SOURCE, SOURCE))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=1, max_size=12), st.sampled_from([-1, -1, 0, 3, 5]))
def test_random_network(randomise, steps, extra_output):
    torch.manual_seed(len(steps))
    net = randomise(Program(steps, extra_output))
    result = fuse_model(net)
    assert {(f.conv, f.bn) for f in result.fused} == foldable(net)
    norms = {n for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    listed = [f.bn for f in result.fused] + [s.bn for s in result.skipped]
    assert sorted(listed) == sorted(norms)
    x = torch.randn(2, CHANNELS, 4, 4).double()
    for actual, expected in zip(result.model(x), net(x), strict=True):
        scale = expected.abs().max().clamp_min(1.0)
        assert ((actual - expected).abs().max() / scale).item() <= 1e-10

"""Three forms of a dense model: what each operator's row says is what the values say."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from bevquant_hybrid.march import use_march
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import DeQuantStub, QuantStub, fuse_fx
from bevquant_hybrid_tools.account import Folded, folded_norms, nodes_on_cpu, quantized_modules
from bevquant_hybrid_tools.forms import (
    Forms,
    FormsComparison,
    compare_forms,
    quantize_dense,
    run_noting,
)


class Net(nn.Module):
    """A sum of two convolutions' results, and a layer that may run on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.side, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        return self.dequant(self.head(self.side(x) + x))


@pytest.fixture(autouse=True)
def march() -> Iterator[None]:
    with use_march("bayes"):
        yield


@pytest.fixture(scope="module")
def images() -> list[Tensor]:
    return [torch.rand(2, 3, 12, 12, generator=torch.manual_seed(i)) for i in range(2)]


@pytest.fixture(scope="module")
def forms(images: list[Tensor]) -> Forms:
    torch.manual_seed(0)
    with use_march("bayes"):
        return quantize_dense(Net(), images[:1], method="max", prefix="neck.")


def values(graph: fx.GraphModule, *inputs: Tensor) -> dict[str, Tensor]:
    told: dict[str, Tensor] = {}
    with torch.no_grad():
        run_noting(graph, lambda node, value: told.setdefault(node.name, value), *inputs)
    return told


def test_rows_are_what_the_values_say(forms: Forms, images: list[Tensor]) -> None:
    rows = {row.layer: row for row in compare_forms(forms, images)}
    assert list(rows) == ["neck.conv.0", "neck.side", "neck.head"]
    graphs = (forms.float_graph, forms.fake_graph, forms.integer_graph)
    both = [[values(graph, image) for image in images] for graph in graphs]
    names = {label.path: node for node, label in forms.labels.items()}
    for path, row in rows.items():
        real, fake, got = (torch.cat([as_is(v[names[path]]) for v in told]) for told in both)
        for found, value in ((row.fake_sqnr_db, fake), (row.integer_sqnr_db, got)):
            noise = (value.double() - real.double()).square().sum()
            wanted = 10 * math.log10(float(real.double().square().sum() / noise))
            assert found == pytest.approx(wanted, rel=1e-6)
        step = float(both[1][0][names[path]].scale)
        apart = ((got - fake).double() / step).round().abs()
        assert row.max_steps == int(apart.max())
        assert row.mean_steps == pytest.approx(float(apart.mean()))
        assert row.differ == pytest.approx(float((apart > 0).double().mean()))
        assert (row.channels, row.cells) == (real.shape[1], real[:, 0].numel() / len(images))
    # Calibrated on the first batch alone: of the second, some lie beyond.
    amax = float(both[1][0]["quant"].scale) * 127.5
    assert rows["neck.conv.0"].input_amax == pytest.approx(amax)
    beyond = float((torch.cat(images).abs() > amax).double().mean())
    assert rows["neck.conv.0"].saturated == pytest.approx(beyond)


def as_is(value: Tensor) -> Tensor:
    return value.dequantize() if isinstance(value, QTensor) else value


def test_what_runs_on_the_cpu_has_no_row_and_its_reason_in_the_plan(images: list[Tensor]) -> None:
    forms = quantize_dense(Net(), images[:1], method="max", on_cpu=["head"])
    assert [row.layer for row in compare_forms(forms, images[:1])] == ["conv.0", "side"]
    plan = forms.plan("bayes", [(2, 3, 12, 12)], "a user said so")
    (head,) = [node for node in plan.nodes if node.path == "head"]
    assert (head.place, head.reason) == ("CPU", "a user said so")
    estimate = forms.estimate("bayes", [(2, 3, 12, 12)])
    assert [layer.path for layer in estimate.layers] == ["conv.0", "side"]
    assert estimate.layers[0].operations == 2 * 2 * 100 * 8 * 3 * 9
    assert estimate.seconds == sum(layer.seconds for layer in estimate.layers)


def test_other_values_are_compared_in_step(forms: Forms, images: list[Tensor]) -> None:
    """Each of the three tells a value of its own; what nobody watches is not asked for."""
    seen: list[tuple[float, ...]] = []
    comparison = FormsComparison({}, {"end": lambda *three: seen.append(tuple(map(float, three)))})
    made = comparison.run(
        [
            lambda note, value=value: [note("end", torch.tensor(value)), note("x", torch.ones(1))]
            for value in (1.0, 2.0, 3.0)
        ]
    )
    assert seen == [(1.0, 2.0, 3.0)]
    assert len(made) == 3
    assert comparison.layers() == ()


def test_a_method_without_observer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"median: .*percentile, max, mse, entropy"):
        quantize_dense(Net(), [], method="median")


def test_what_became_of_its_modules(images: list[Tensor]) -> None:
    net = Net().eval()
    assert list(folded_norms(net, fuse_fx(net), "neck.")) == [
        Folded("neck.conv.0", "neck.conv.1", done=True)
    ]
    assert [found.done for found in folded_norms(net, net)] == [False]
    forms = quantize_dense(net, images[:1], method="max", on_cpu=["side"], prefix="neck.")
    found = {module.path: module.was for module in quantized_modules(forms)}
    assert found["neck.conv.0"] == "Conv2d + ReLU"
    assert "neck.side" not in found
    plan = forms.plan("bayes", [(1, 3, 12, 12)], "the test says so")
    assert [(n.path, n.reason) for n in nodes_on_cpu(plan)] == [("neck.side", "the test says so")]

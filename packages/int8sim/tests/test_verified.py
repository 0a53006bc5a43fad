"""`simulate` hands out no integer model that it has not held against the fake-quantized one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bevquant_int8sim import compare, simulate
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate


class Head(nn.Module):
    """Two layers, and a write of some kind to what the second one makes."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def forward(self, x: Any) -> Any:
        return self.write(x, self.b(torch.relu(self.a(x))))


def columns(x: Any, y: Any) -> Any:
    y[..., [0, 1, 2]] = y[..., [0, 1, 2]] + x[..., [0, 1, 2]]
    return y


def part_sigmoid(x: Any, y: Any) -> Any:
    y[..., 3:5].sigmoid_()
    return y


def out(x: Any, y: Any) -> Any:
    torch.add(y, 1, out=y)
    return y


def masked(x: Any, y: Any) -> Any:
    y.masked_fill_(x > 0, 0.5)
    return y


def put(x: Any, y: Any) -> Any:
    y.index_put_((torch.tensor([0]),), x[0])
    return y


def copied(x: Any, y: Any) -> Any:
    y[0].copy_(x[0])
    return y


def through_a_view(x: Any, y: Any) -> Any:
    view = y.view(-1)
    view[0] = 3.0
    return y


def input_written(x: Any, y: Any) -> Any:
    x.mul_(2)
    return y + x


def read_before(x: Any, y: Any) -> Any:
    old = y
    y.add_(1)
    return old * 2


WRITES = [columns, part_sigmoid, out, masked, put, copied, through_a_view, input_written]
WRITES += [read_before]


def calibrated(net: nn.Module, x: torch.Tensor) -> nn.Module:
    quantized = quantize_model(net.eval(), example_inputs=x.clone()).model
    calibrate(quantized, [x.clone()])
    return quantized


@torch.no_grad()
@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
def test_a_write_is_followed(write: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    net = calibrated(Head(write), x)
    wanted = net(x.clone())
    model = simulate(net, x)
    assert float((model(x.clone()) - wanted).abs().max()) < 0.1


def test_a_step_with_other_integers_is_named() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 1))
    right = copy.deepcopy(net)
    net = calibrated(net, x)
    from bevquant_int8sim.model import _simulate

    lower = _simulate.lower

    def wrong(*given: Any) -> Any:
        program, held = lower(*given)
        step = next(step for step in program.steps if step.path == "2")
        step.tensors["weight"][0, 0, 0, 0] += 20
        return program, held

    named = r"(simulate|compare): 2 \(conv\) differs by \d+ steps"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_simulate, "lower", wrong)
        with pytest.raises(ValueError, match=named):
            simulate(net, x)
        model = simulate(net, x, verify=False)
    with pytest.raises(ValueError, match=named):
        compare(right, model, [x], verify=True)
    assert compare(right, model, [x]).wrong
    assert not compare(right, simulate(net, x, verify=False), [x], verify=True).wrong


class Upsampled(nn.Module):
    def __init__(self, returned: bool = False, moved: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.returned, self.moved = returned, moved

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x).relu()
        y = torch.cat([y, y.flip(3)]) if self.moved else y
        larger = nn.functional.interpolate(y, scale_factor=2, mode="bilinear")
        return larger if self.returned else y, self.second(larger)


def test_a_relu_behind_a_resize_is_judged_by_what_it_reads() -> None:
    x = torch.randn(1, 3, 8)
    net = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Upsample(13), nn.ReLU(), nn.Conv1d(4, 2, 1))
    assert [step.op for step in simulate(calibrated(net, x), x).steps][2] == "resize"


@pytest.mark.parametrize(
    ("clip", "returned", "moved"),
    [(0.2, False, False), (1.0, False, False), (0.2, True, False), (0.2, False, True)],
)
def test_a_resize_reads_clamped_integers(clip: float, returned: bool, moved: bool) -> None:
    """And a resize that is itself off by two steps is found.

    With its result read in floats, too, as GLPN's decoder does, each is made of its own operand.
    The operand may be a move of integers, as in UniAD's decoder of stacked maps.
    """
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    net = calibrated(Upsampled(returned, moved), x)
    amax: Any = net.second._input_quantizer.amax
    net.second._input_quantizer.amax = amax * clip
    simulate(net, x)
    from bevquant_int8sim.model import _integer_steps

    def shifted(*given: Any, **settings: Any) -> torch.Tensor:
        return resize(*given, **settings).clamp(max=125) + 2

    with pytest.MonkeyPatch.context() as patch:
        resize = _integer_steps.resize
        patch.setattr(_integer_steps, "resize", shifted)
        with pytest.raises(ValueError, match=r"<resize> \(resize\) differs by (up to )?[23]"):
            simulate(net, x)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e4])
def test_no_alarm_on_other_inputs(scale: float) -> None:
    """Zeros, next to nothing, and values far beyond the ranges."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.SiLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 6), nn.Softmax(1)),
    )
    net = calibrated(net, x)
    assert simulate(net, x * scale)(x).shape == (2, 6)


def test_the_model_and_the_inputs_are_left_alone() -> None:
    x = torch.randn(5, 8)
    with torch.no_grad():
        net = calibrated(Head(input_written), x)
    kept, state = x.clone(), copy.deepcopy(net.state_dict())
    simulate(net, x)
    assert torch.equal(x, kept)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize("inplace", [False, True])
def test_compare_takes_what_it_records_before_it_is_written_over(inplace: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(inplace=inplace), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(2, 3, 16, 16)
    table = compare(net, calibrated(copy.deepcopy(net), x), [x])
    rows = {row.path: row for row in table.rows}
    assert (rows["0"].integer_sqnr_db or 0) > 40
    assert table.wrong == ()


def test_compare_of_a_tensor_in_integers_of_two_scales() -> None:
    """Each reader has rounded the accumulators by its own scale, and that is no departure."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.near, self.far = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.stem(x))
            wide = torch.cat([x, x * 30], 1).chunk(2, 1)[0]
            return self.near(x), self.far(wide)

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    net = Two().eval()
    assert compare(net, calibrated(copy.deepcopy(net), x), [x]).wrong == ()


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_on_a_tie_are_those_of_fake_quantization(bits: int) -> None:
    """−amax/2 lies on a tie at every number of bits, and float64 would break some of them."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 500, bias=False)
    largest = torch.rand(500) + 0.5
    layer.weight.copy_(torch.stack([largest, -largest / 2], 1))
    config = QuantConfig(weight_bits=bits)
    net = quantize_model(nn.Sequential(layer).eval(), config).model
    calibrate(net, [torch.eye(2)])
    (step,) = [s for s in simulate(net, torch.eye(2)).steps if s.op == "linear"]
    quantizer = net[0]._weight_quantizer
    amax = net[0].weight.abs().amax(1, keepdim=True)
    wanted = (quantizer(net[0].weight) * (2 ** (bits - 1) - 1) / amax).round()
    assert torch.equal(step.tensors["weight"].float(), wanted)


class Frames(nn.Module):
    """As a scatter of pillars does: as many maps as the largest index says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, index: Any) -> Any:
        rows = torch.relu(self.a(x))
        count = index.max().int().item() + 1
        return torch.stack([self.b(rows[index == i]).sum(0) for i in range(count)])


def test_a_number_from_a_tensor_is_taken_where_a_layer_is_quantized() -> None:
    inputs = torch.randn(6, 8), torch.tensor([0, 0, 1, 1, 1, 0])
    quantized = quantize_model(Frames().eval(), example_inputs=inputs).model
    calibrate(quantized, [inputs])
    model = simulate(quantized, inputs)
    assert [
        fallback.what for fallback in model.float_fallbacks if "followed" in fallback.reason
    ] == []
    assert {step.op for step in model.steps if step.path in ("a", "b")} == {"linear"}
    others = torch.randn(5, 8), torch.tensor([1, 0, 0, 0, 1])
    assert model(*others).shape == (2, 8)
    with pytest.raises(ValueError, match=r"decides by a number.*torch\.where"):
        model(others[0], torch.tensor([2, 0, 1, 0, 1]))

"""What simulate() and an integer model refuse, and what their messages say."""

import copy

import pytest
import torch
from torch import nn

from bevquant_int8sim import AccumulatorOverflowError, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate

X = torch.linspace(-1, 1, 96).view(2, 3, 4, 4)


def calibrated(net, x=X):
    quantized = quantize_model(net.eval(), example_inputs=x).model
    calibrate(quantized, [x], method="max")
    return quantized


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))


def test_uncalibrated():
    net = quantize_model(small().eval(), example_inputs=X).model
    with pytest.raises(ValueError, match=r"2 quantizers .*0\._input_quantizer .*not calibrated"):
        simulate(net, X)


def test_a_layer_that_is_not_reached_does_not_hide_why_the_model_is_refused():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.aux = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 1, 1)

        def forward(self, x, test_mode=False):
            y = self.conv(x)
            return y * float(y.detach().numpy().max()) if test_mode else self.aux(y)

    given = {"x": X, "test_mode": True}
    net = quantize_model(Auxiliary().eval(), example_inputs=given).model
    calibrate(net, [given])
    with pytest.raises(ValueError, match=r"test_model_refusals\.py:\d+"):
        simulate(net, given)


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), 0.0, -1.0, 1e-40])
def test_unusable_range(amax):
    net = calibrated(small())
    net[2]._input_quantizer._amax.fill_(amax)
    with pytest.raises(ValueError, match=r"2\._input_quantizer .*calibrate"):
        simulate(net, X)


def test_zero_range_of_a_weight_that_is_not_zero():
    net = calibrated(small())
    net[0]._weight_quantizer.amax = torch.tensor([1.0, 0.0, 1.0, 1.0]).view(4, 1, 1, 1)
    with pytest.raises(ValueError, match=r"0: the weight's range of channel 1 is zero"):
        simulate(net, X)


def test_training_mode():
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        simulate(calibrated(small()).train(), X)


class FirstOf(nn.Module):
    """A decoder's heads, of which evaluation calls the last alone (RT-DETR)."""

    def __init__(self):
        super().__init__()
        self.stem, self.heads = nn.Conv2d(3, 4, 3), nn.ModuleList(nn.Conv2d(4, 2, 1) for _ in "ab")

    def forward(self, x):
        return self.heads[-1](self.stem(x))


class Deciding(FirstOf):
    """The same, where the heads' module is one node: it decides by values."""

    def forward(self, x):
        y = super().forward(x)
        return y * 2 if bool(y.mean() > 0) else y - 1


def test_heads_that_a_module_of_one_node_does_not_call_need_no_range():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Deciding(), nn.ReLU())
    model = calibrated(net)
    assert model[1].heads[0]._input_quantizer.amax is None
    assert simulate(model, X)(X).shape == (2, 2, 2, 2)
    model[1].heads[1]._input_quantizer._amax.fill_(0.0)
    with pytest.raises(ValueError, match=r"1 quantizers .*heads\.1\._input_quantizer"):
        simulate(model, X)


def test_layers_that_the_forward_does_not_call_need_no_range():
    net = calibrated(FirstOf())
    assert net.heads[0]._input_quantizer.amax is None
    assert [step.path for step in simulate(net, X).steps if step.op == "conv"] == [
        "stem",
        "heads.1",
    ]
    net.heads[1]._input_quantizer.amax = 0.0
    with pytest.raises(ValueError, match=r"1 quantizers .*heads\.1\._input_quantizer"):
        simulate(net, X)


class Rows(nn.Module):
    """A layer that is made anew where it is copied, as those of einops are."""

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__()

    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class Dropped(Rows):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_a_copied_layer_in_training_mode_that_never_asks_for_it():
    net = copy.deepcopy(calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), Rows(), nn.Linear(4, 2))))
    assert net[1].training
    assert simulate(net, X)(X).shape == (2, 4, 2)
    net = copy.deepcopy(calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), Dropped(), nn.Linear(4, 2))))
    with pytest.raises(ValueError, match=r"1 \(Dropped\) is in training mode"):
        simulate(net, X)


def test_a_quantizer_that_still_collects_is_named():
    net = copy.deepcopy(calibrated(small()))
    first = next(m for m in net.modules() if isinstance(m, TensorQuantizer))
    first.enable_calib()
    with pytest.raises(ValueError, match=r"^simulate: 0\._input_quantizer collects.*disable_calib"):
        simulate(net, X)
    first.disable()  # a float layer's
    simulate(net, X)


def test_forward_hooks_are_part_of_the_forward():
    net = calibrated(small())
    plain = simulate(net, X)(X)
    net.register_forward_hook(lambda module, given, out: 2 * out)
    assert torch.equal(simulate(nn.Sequential(net).eval(), X)(X), 2 * plain)


def test_forward_that_cannot_be_followed():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()

        def forward(self, x):
            return self.net(x) if float(x.sum()) > 0 else x

    with pytest.raises(ValueError, match="Branching cannot be followed"):
        simulate(calibrated(Branching(), X + 1), X)


def test_other_inputs_than_the_examples():
    model = simulate(calibrated(small()), X)
    with pytest.raises(TypeError, match=r"expected 1 positional inputs .* got 2"):
        model(X, X)
    with pytest.raises(TypeError, match="expected a tensor"):
        model("image")
    with pytest.raises(TypeError, match=r"^input input: expected a tensor with values"):
        model(X.to("meta"))
    with pytest.raises(TypeError, match=r"^input input: .* layout torch\.sparse_coo; .*to_dense"):
        model(X.to_sparse())


@pytest.mark.parametrize("size", [4, 128])  # plain operations, and one pass of compiled ones
def test_nan_names_the_place(size):
    model = simulate(calibrated(small()), X)
    with pytest.raises(ValueError, match=r"^input: values contain NaN"):
        model(torch.full((1, 3, size, size), float("nan")))


def test_inputs_of_other_types_and_shapes_name_the_layer():
    model = simulate(calibrated(small()), X)
    with pytest.raises(TypeError, match=r"^input: values must be a float tensor, got int8"):
        model(X.to(torch.int8))
    with pytest.raises(ValueError, match=r"^0: x of shape \(2, 4, 4, 4\)"):
        model(torch.zeros(2, 4, 4, 4))
    with pytest.raises(TypeError, match=r"expected 1 positional inputs .* named ones image"):
        model(image=X)


@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite(what, value):
    net = calibrated(small())
    getattr(net[2], what).data.view(-1)[-1] = value
    with pytest.raises(ValueError, match=rf"2: .*{what} of channel 1 is"):
        simulate(net, X)


def test_bias_beyond_the_accumulator():
    net = calibrated(small())
    net[2].bias.data[1] = 1e9
    with pytest.raises(ValueError, match=r"2: bias 1000000000\.0 of channel 1 .* leaves int32"):
        simulate(net, X)


def test_overflow_names_the_layer():
    net = calibrated(small())
    quantizer = net[2]._input_quantizer
    step = float(quantizer.amax) / 127 * float(net[2].weight.detach()[1].abs().amax()) / 127
    net[2].bias.data[1] = (2**31 - 200) * step
    net[2].weight.data[1].abs_()
    net[0].bias.data.fill_(100.0)
    with pytest.raises(AccumulatorOverflowError, match=r"^2: .* output channel 1 reaches"):
        simulate(net, X)(X)


def test_what_is_no_model_no_input_no_backend():
    net = calibrated(small())
    with pytest.raises(TypeError, match="simulate: model: expected a torch module, got a list of"):
        simulate([net], X)
    for nothing in (None, (), {}):
        with pytest.raises(ValueError, match="example_inputs hold no tensor"):
            simulate(net, nothing)
    with pytest.raises(ValueError, match="backend='cuda': expected one of auto, amx, vnni"):
        simulate(net, X, backend="cuda")


class Compared(nn.Module):
    """As the attention of old releases of torch: it asks whether tensors are equal."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a, b):
        return self.query(a) if torch.equal(a, b) else self.query(a) + self.key(b)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x))


def test_layers_beside_a_module_that_is_not_followed_stay_in_integers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(4, 4), nn.Sequential(Block(), nn.Linear(4, 4))
            self.compared = Compared()

        def forward(self, x):
            y = self.first(x)
            return self.blocks(y), self.compared(y, x)

    x = torch.linspace(-1, 1, 24).view(2, 3, 4)
    model = simulate(calibrated(Net(), x), x)
    assert [note.path for note in model.float_fallbacks] == ["compared"]


def test_uncalibrated_on_an_example_without_rows():
    rows = torch.zeros(0, 5)
    net = quantize_model(nn.Sequential(nn.Linear(5, 4)).eval(), example_inputs=rows).model
    with pytest.raises(ValueError, match=r"0\._input_quantizer \(not calibrated\)"):
        simulate(net, rows)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)

    def forward(self, x):
        return self.norm(self.conv(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_float_layers_of_a_model_in_another_type(dtype):
    net = calibrated(Norm().to(dtype), X.to(dtype))
    with pytest.raises(ValueError, match=rf"conv\.weight is {dtype}; call model\.float\(\)"):
        simulate(net, X.to(dtype))


def test_layers_of_a_bfloat16_model_are_float_for_its_type():
    net = calibrated(small().bfloat16(), X.bfloat16())
    reasons = [f.reason for f in simulate(net, X.bfloat16()).float_fallbacks if f.what == "conv2d"]
    assert len(reasons) == 2
    assert all("its input is bfloat16" in reason for reason in reasons)


def test_inference_mode():
    net = calibrated(small())
    with torch.inference_mode():
        given = X.clone()
        made = simulate(net, given)(given)
    assert torch.equal(made, simulate(net, X)(X))

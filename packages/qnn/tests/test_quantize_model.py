"""quantize_model on whole networks: what is replaced, what is shared, and that it still learns."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import TensorQuantizer, calibrate

FLOWS = pytest.mark.parametrize("observed", [True, False], ids=["observed", "static"])


def _quantize(model, x, observed, config=None):
    return qnn.quantize_model(model, config, x if observed else None, inplace=True)


def _groups(result):
    return {frozenset(reader.replace("._input_quantizer", "") for reader in item.readers)
            for item in result.shared}  # fmt: skip


@FLOWS
def test_resnet_with_concat_neck_shares_what_cuda_bevfusion_wires_by_name(nets, observed):
    model, x = nets.ResNetFPN().eval(), torch.randn(1, 3, 64, 64)
    reference = model(x)
    result = _quantize(model, x, observed)
    assert _groups(result) == {
        # Block inputs: conv1 with the downsample convolution, or with the residual.
        frozenset({"deep.0.conv1", "deep.0.downsample.0"}),
        frozenset({"deep.1.conv1", "deep.1.residual_quantizer"}),
        frozenset({"deeper.1.conv1", "deeper.1.residual_quantizer"}),
        # A stage's output is read by the next stage and by the neck's concatenation, whose
        # output is read by the lateral convolution.
        frozenset({"deeper.0.conv1", "deeper.0.downsample.0", "neck.quant_concat_1",
                   "neck.lateral_convs.0.0"}),
        frozenset({"deepest.0.conv1", "deepest.0.downsample.0", "neck.quant_concat",
                   "neck.lateral_convs.1.0"}),
    }  # fmt: skip
    assert model.deeper[0].conv1._input_quantizer is model.neck.quant_concat_1._input_quantizer
    assert model.deep[1].residual_quantizer is model.deep[1].conv1._input_quantizer
    assert model.deep[0].residual_quantizer is not model.deep[0].conv1._input_quantizer
    for got, expected in zip(model(x), reference, strict=True):
        assert (got - expected).norm() < 0.1 * expected.norm()


def test_every_convolution_is_accounted_for(nets):
    model = nets.ResNetFPN()
    float_layers = {
        path for path, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.MaxPool2d)
    }
    result = qnn.quantize_model(model, example_inputs=torch.randn(1, 3, 64, 64), inplace=True)
    assert float_layers <= {item.path for item in result.quantized}
    assert not any(type(m) is nn.Conv2d for m in model.modules())


def test_bottleneck_prints_as_the_listing(nets):
    block = nets.Bottleneck(64, 64, 256)
    for name in ("bn1", "bn2", "bn3"):
        setattr(block, name, nn.Identity())
    block.downsample[1] = nn.Identity()
    qnn.quantize_model(block, example_inputs=torch.randn(1, 64, 4, 4), inplace=True)

    def layer(name, ends, arguments, indent=2):
        pad = " " * indent
        return [
            f"{pad}({name}): QuantConv2d(",
            f"{pad}  {ends}, {arguments}, bias=False",
            f"{pad}  (_input_quantizer): {_ACTIVATION}",
            f"{pad}  (_weight_quantizer): {_WEIGHT.format(0)}",
            f"{pad})",
        ]

    one = "kernel_size=(1, 1), stride=(1, 1)"
    assert repr(block).splitlines() == [
        "Bottleneck(",
        *layer("conv1", "64, 64", one),
        "  (bn1): Identity()",
        *layer("conv2", "64, 64", "kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)"),
        "  (bn2): Identity()",
        *layer("conv3", "64, 256", one),
        "  (bn3): Identity()",
        "  (relu): ReLU(inplace=True)",
        "  (downsample): Sequential(",
        *layer("0", "64, 256", one, indent=4),
        "    (1): Identity()",
        "  )",
        f"  (residual_quantizer): {_ACTIVATION}",
        ")",
    ]


_ACTIVATION = (
    "TensorQuantizer(8bit fake per-tensor amax=dynamic calibrator=HistogramCalibrator scale=1.0 "
    "quant)"
)
_WEIGHT = "TensorQuantizer(8bit fake axis={} amax=dynamic calibrator=MaxCalibrator scale=1.0 quant)"


@FLOWS
def test_trap_18_swin_shares_by_data_flow(nets, observed):
    model, x = nets.SwinNet().eval(), torch.randn(1, 3, 32, 32)
    reference = model(x)
    result = _quantize(model, x, observed)
    assert _groups(result) == {frozenset({"up", "aux"}), frozenset({"quant_concat", "head"})}
    linears = [p for p, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 13
    assert all(isinstance(model.get_submodule(p), qnn.QuantLinear) for p in linears)
    for got, expected in zip(model(x), reference, strict=True):
        assert (got - expected).norm() < 0.1 * expected.norm()
    reasons: dict[str, str] = {}
    for item in result.skipped:
        reasons[item.path] = reasons.get(item.path, "") + item.reason
    assert "neither fed nor read" in reasons["merge"]
    assert "not behind a quantized convolution" in reasons["stage1.0"]
    assert not observed or "computes a matrix product" in reasons["stage1.0.attn"]


def test_readers_behind_views_copies_and_identities_share():
    class Readers(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)
            self.drop = nn.Sequential(nn.Identity(), nn.Dropout(0.5))
            self.a, self.b = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)
            self.c, self.d = nn.Linear(4, 2), nn.Linear(4, 2)
            self.e = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = self.stem(x)
            rows = x.permute(0, 2, 3, 1)
            shifted = torch.roll(rows.contiguous(), 1, 1)
            return (
                self.a(x), self.b(self.drop(x)), self.c(rows), self.d(shifted.flatten(0, 2)),
                self.e(x.relu()),
            )  # fmt: skip

    for observed in (True, False):
        model = Readers()
        result = _quantize(model, torch.randn(1, 3, 4, 4), observed)
        assert _groups(result) == {frozenset("abcd")}
        assert model.training
        assert "output of stem" in result.shared[0].tensor


def test_an_inplace_change_makes_another_tensor():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.before = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
            self.relu, self.after = nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = self.stem(x)
            first = self.before(x)
            self.relu(x)
            return first, self.after(x)

    for observed in (True, False):
        result = _quantize(Changed(), torch.randn(1, 3, 4, 4), observed)
        assert result.shared == ()


def test_observation_works_under_inference_mode_and_on_inference_tensors(nets):
    with torch.inference_mode():
        model, x = nets.ResNetFPN().eval(), torch.randn(1, 3, 64, 64)
        result = qnn.quantize_model(model, example_inputs=x)
    assert len(result.shared) == 5


def test_example_that_does_not_fit_is_an_error_that_says_what_became_of_the_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    with pytest.raises(RuntimeError, match="to have 3 channels") as caught:
        qnn.quantize_model(model, example_inputs=torch.randn(1, 5, 4, 4), inplace=True)
    assert "does not run on these example_inputs" in caught.value.__notes__[0]
    assert "as it was before" in caught.value.__notes__[0]
    assert type(model[0]) is nn.Conv2d
    assert [name for name, _ in model.named_modules()] == ["", "0"]
    assert not model[0]._forward_hooks


def test_slices_of_one_tensor_are_different_tensors():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.a(x[:, 0::2]), self.b(x[:, :4])

    result = qnn.quantize_model(Halves(), example_inputs=torch.randn(2, 8))
    assert result.shared == ()


def test_a_layer_used_twice_joins_the_tensors_it_reads():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.x, self.y = (nn.Conv2d(3, 3, 1) for _ in range(3))
            self.again = self.shared

        def forward(self, x, y):
            return self.shared(x), self.x(x), self.again(y), self.y(y)

    model = Twice()
    inputs = (torch.randn(1, 3, 4, 4), torch.randn(1, 3, 4, 4))
    result = qnn.quantize_model(model, example_inputs=inputs, inplace=True)
    assert model.again is model.shared
    assert model.x._input_quantizer is model.y._input_quantizer
    assert [item.path for item in result.quantized] == ["shared", "x", "y"]


@FLOWS
def test_quantizing_twice_changes_nothing(nets, observed):
    model, x = nets.ResNetFPN().eval(), torch.randn(1, 3, 64, 64)
    first = _quantize(model, x, observed)
    tree, modules = repr(model), list(model.modules())
    second = _quantize(model, x, observed)
    assert repr(model) == tree
    assert [id(m) for m in model.modules()] == [id(m) for m in modules]
    assert second.quantized == ()
    assert second.shared == first.shared


def test_parameters_stay_the_optimizers(nets):
    model = nets.ResNetFPN()
    before = {id(p) for p in model.parameters()}
    qnn.quantize_model(model, example_inputs=torch.randn(1, 3, 64, 64), inplace=True)
    assert {id(p) for p in model.parameters()} == before


def test_trap_15_dense_quantization_aware_training_learns(nets):
    model = nets.ResNetFPN()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x = torch.randn(2, 3, 32, 32)
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    goal = [torch.randn_like(y) for y in model(x)]
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.dim() == 4}
    losses = []
    for _ in range(6):
        outputs = model(x)
        loss = sum((y - g).square().mean() for y, g in zip(outputs, goal, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    current = dict(model.named_parameters())
    assert all(not torch.equal(current[name], weight) for name, weight in weights.items())


def test_deepcopy_and_state_dict_keep_sharing(nets):
    model, x = nets.ResNetFPN().eval(), torch.randn(1, 3, 64, 64)
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    for index, module in enumerate(m for m in model.modules() if isinstance(m, TensorQuantizer)):
        if module.axis is None:
            module.amax = 1.0 + index
    twin = copy.deepcopy(model)
    assert twin.deep[1].residual_quantizer is twin.deep[1].conv1._input_quantizer
    assert twin.deep[1].residual_quantizer is not model.deep[1].residual_quantizer
    state = model.state_dict()
    names = ("deep.1.residual_quantizer._amax", "deep.1.conv1._input_quantizer._amax")
    assert state[names[0]].item() == state[names[1]].item()
    fresh = nets.ResNetFPN().eval()
    qnn.quantize_model(fresh, inplace=True)
    fresh.load_state_dict(state)
    for other in (twin, fresh):
        assert all(map(torch.equal, other(x), model(x)))


def test_batch_norm_behind_a_quantized_convolution_is_noted(nets):
    result = qnn.quantize_model(nets.Bottleneck(4, 4, 4), example_inputs=torch.randn(1, 4, 4, 4))
    notes = {item.path: item.reason for item in result.skipped}
    assert set(notes) == {"bn1", "bn2", "bn3"}
    assert "behind the quantized conv3 is not folded" in notes["bn3"]


def test_layers_that_cannot_be_replaced_are_reported():
    class Own(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight * 2, self.bias)

    model = nn.Sequential(Own(3, 3, 1), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)))
    result = qnn.quantize_model(model, example_inputs=torch.randn(1, 3, 2, 2))
    reasons = {item.path: item.reason for item in result.skipped}
    assert "has a forward of its own" in reasons["0"]
    assert "its weight is computed" in reasons["1"]
    assert not result.quantized


def test_torchs_fused_encoder_layer_does_not_go_past_quantized_layers():
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        wanted = net(x)
        quantized = qnn.quantize_model(net, example_inputs=x).model
        calibrate(quantized, [x])
        made = quantized(x)
    assert quantized.linear1._input_quantizer.amax is not None
    # Past its layers it would be the float model, but for the last bits of the sums.
    assert 1e-4 < (made - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_products_by_function_calls_are_reported():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            self.register_buffer("kernel", torch.randn(2, 2, 1, 1))

        def forward(self, x):
            x = F.conv2d(self.conv(x), self.kernel)
            return F.scaled_dot_product_attention(x, x, x) + x @ x

    model = nn.Sequential(Calls())
    result = qnn.quantize_model(model, example_inputs=torch.randn(1, 2, 4, 4))
    reasons = [item.reason for item in result.skipped if item.path == "0"]
    for product in ("a convolution", "attention", "a matrix product"):
        assert f"computes {product} by a function call" in "\n".join(reasons)
    plain = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(32, 2))
    assert qnn.quantize_model(plain, example_inputs=torch.randn(1, 2, 4, 4)).skipped == ()


def test_a_layer_not_reached_is_reported(nets):
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers["used"](x)

    result = qnn.quantize_model(Uses(), example_inputs=torch.randn(1, 2))
    assert {i.path for i in result.skipped} == {"layers.spare._input_quantizer"}


def test_a_single_layer_is_returned_quantized():
    layer = nn.Linear(2, 2)
    result = qnn.quantize_model(layer, example_inputs=torch.randn(1, 2), inplace=True)
    assert isinstance(result.model, qnn.QuantLinear)
    assert result.model.weight is layer.weight


def test_upstream_quantizers_are_adopted_with_their_ranges(upstream):
    theirs = nn.Sequential(upstream.nn.QuantConv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    theirs[0]._input_quantizer.amax = 3.0
    expected = copy.deepcopy(theirs)
    x = torch.randn(1, 3, 4, 4)
    result = qnn.quantize_model(theirs, example_inputs=x, inplace=True)
    assert isinstance(theirs[0]._input_quantizer, TensorQuantizer)
    assert theirs[0]._input_quantizer.amax.item() == 3.0
    assert [i.path for i in result.quantized] == [
        "0._input_quantizer", "0._weight_quantizer", "2"
    ]  # fmt: skip
    assert torch.equal(theirs[0](x), expected[0](x))


def test_ranges_that_meet_are_widened():
    model = nn.ModuleList([qnn.QuantLinear(2, 2), qnn.QuantLinear(2, 2)])

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers[0](x) + self.layers[1](x)

    both = Both()
    model[0].input_quantizer.amax, model[1].input_quantizer.amax = 1.0, 3.0
    qnn.quantize_model(both, example_inputs=torch.randn(1, 2), inplace=True)
    assert model[0].input_quantizer is model[1].input_quantizer
    assert model[0].input_quantizer.amax.item() == 3.0


def test_statistics_collected_before_are_merged():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = qnn.QuantLinear(2, 2), qnn.QuantLinear(2, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    model = Both()
    for layer, largest in ((model.a, 2.0), (model.b, -5.0)):
        layer.input_quantizer.enable_calib()
        layer(torch.tensor([[0.5, largest]]))
        layer.input_quantizer.disable_calib()
    qnn.quantize_model(model, example_inputs=torch.randn(1, 2), inplace=True)
    model.a.input_quantizer.load_calib_amax()
    assert model.b.input_quantizer.amax.item() == 5.0


def test_quantizers_with_other_settings_stay_apart():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = qnn.QuantLinear(2, 2), qnn.QuantLinear(2, 2)
            self.b.input_quantizer.num_bits = 4

        def forward(self, x):
            return self.a(x), self.b(x)

    result = qnn.quantize_model(Both(), example_inputs=torch.randn(1, 2))
    assert result.shared == ()
    assert "their settings differ" in result.skipped[0].reason


def test_observation_leaves_no_trace(nets):
    model, x = nets.ResNetFPN(), torch.randn(1, 3, 64, 64)
    statistics = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}
    copied = x.clone()
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert model.training
    assert torch.equal(x, copied)
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in statistics.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(m._disabled for m in model.modules() if isinstance(m, TensorQuantizer))


def test_the_account_can_be_printed(nets):
    result = qnn.quantize_model(nets.Bottleneck(4, 4, 4), example_inputs=torch.randn(1, 4, 4, 4))
    text = str(result)
    assert "conv1: Conv2d -> QuantConv2d" in text
    assert "they read the same tensor" in text


class Computed(nn.Module):
    """A function is given what is computed of a layer's weight, and nobody calls the layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.qkv, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        weight = self.qkv.weight / self.qkv.weight.norm(dim=1, keepdim=True)
        return self.head(nn.functional.linear(self.stem(x), weight, self.qkv.bias))


def test_layers_whose_weight_is_read_without_a_call_stay_float():
    model = Computed().eval()
    qkv = model.qkv
    result = qnn.quantize_model(model, example_inputs=torch.randn(2, 4), inplace=True)
    assert [item.path for item in result.quantized] == ["stem", "head"]
    assert model.qkv is qkv
    (note,) = [item for item in result.skipped if item.path == "qkv"]
    assert "reads its weight without calling it" in note.reason
    assert "test_quantize_model.py:" in note.reason
    report = calibrate(model, [torch.randn(64, 4)])
    assert all(entry.amax is not None for entry in report.quantizers)


@FLOWS
def test_layers_in_a_plain_list_are_called_in_their_quantized_form(observed):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)]
            self.by_name = {"side": nn.Conv2d(3, 2, 1)}
            for index, layer in enumerate(self.layers):
                self.add_module(str(index), layer)
            self.add_module("side", self.by_name["side"])

        def forward(self, x):
            y = self.by_name["side"](x)
            for layer in self.layers:
                x = layer(x)
            return x, y

    model, x = Listed().eval(), torch.randn(1, 3, 8, 8)
    model = _quantize(model, x, observed, qnn.QuantConfig(exclude=("2",))).model
    assert [type(layer).__name__ for layer in model.layers] == [
        "QuantConv2d", "QuantMaxPool2d", "Conv2d",
    ]  # fmt: skip
    assert model.by_name["side"] is model.side
    calibrate(model, [x])
    assert all(
        module.amax is not None for module in model.modules() if isinstance(module, TensorQuantizer)
    )

"""fuse_model on dense networks: what is folded, what is kept and why."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bevquant_fusion import fuse_model


class BasicBlock(nn.Module):
    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """mmdetection's style: norms under a name made at run time, registered out of order."""

    def __init__(self, channels, middle, out, groups=1):
        super().__init__()
        self.names = ("bn1", "bn2", "bn3")
        self.bn3 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(middle, middle, 3, padding=1, groups=groups, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, out, 1, bias=False)
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out))

    @property
    def norm1(self):
        return getattr(self, self.names[0])

    def forward(self, x):
        def inner(x):
            out = F.relu(self.norm1(self.conv1(x)))
            out = F.relu(self.bn2(self.conv2(out)))
            return self.bn3(self.conv3(out)) + self.downsample(x)

        return F.relu(inner(x))


class Backbone(nn.Module):
    def __init__(self, out_indices=(0, 1)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, 2))
        self.layer2 = nn.Sequential(Bottleneck(16, 8, 16, groups=2))
        self.out_indices = out_indices

    def forward(self, x):
        x = self.maxpool(self.relu(self.norm1(self.conv1(x))))
        outs = []
        for i, name in enumerate(("layer1", "layer2")):
            x = getattr(self, name)(x)
            if i in self.out_indices:
                outs.append(x)
        return tuple(outs)


class SecondFPN(nn.Module):
    """Counts its inputs, as mmdet3d's does."""

    def __init__(self):
        super().__init__()
        self.in_channels = [16, 16]
        self.deblocks = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(16, 8, s, s, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            for s in (1, 2)
        )

    def forward(self, x):
        assert len(x) == len(self.in_channels)
        ups = [deblock(x[i]) for i, deblock in enumerate(self.deblocks)]
        return [torch.cat([ups[0], F.interpolate(ups[1], ups[0].shape[-2:])], dim=1)]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.neck = SecondFPN()
        self.shared = nn.Sequential(nn.Conv2d(16, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, n, 1)
                )
                for name, n in (("center", 2), ("size", 3))
            }
        )

    def forward(self, image, metas=None):
        x = self.shared(self.neck(self.backbone(image))[0])
        return {name: head(x) for name, head in self.heads.items()}


def batch_norms(model):
    return [p for p, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def assert_accounted(model, result):
    """Every batch norm of the model is in exactly one list."""
    listed = [f.bn for f in result.fused] + [s.bn for s in result.skipped]
    assert sorted(listed) == sorted(batch_norms(model))
    assert all(s.reason for s in result.skipped)


def test_detector_is_folded_whole(randomise, error_of):
    model = randomise(Detector())
    image = torch.randn(2, 3, 16, 16).double()
    result = fuse_model(model)
    assert_accounted(model, result)
    assert result.skipped == ()
    assert result.untraced == {}
    assert batch_norms(result.model) == []
    assert result.max_error is None
    expected, actual = model(image), result.model(image)
    for name in expected:
        assert error_of(actual[name], expected[name]) <= 1e-10
    block = result.model.backbone.layer1[0]
    assert isinstance(block.bn1, nn.Identity)
    assert type(block) is BasicBlock
    assert block.relu.inplace  # only sparse encoders lose it
    assert f"{len(result.fused)} batch norms folded, 0 kept" in str(result)


def test_copy_by_default_and_in_place_on_request(randomise):
    model = randomise(Backbone())
    kept = copy.deepcopy(model)
    result = fuse_model(model)
    assert result.model is not model
    assert model.state_dict().keys() == kept.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), kept.parameters(), strict=True)
    )
    again = fuse_model(model, torch.randn(1, 3, 8, 8).double(), inplace=True)
    assert again.model is model
    assert batch_norms(model) == []
    assert again.max_error <= 1e-10


def test_modes_gradients_and_hooks_are_kept(randomise):
    model = randomise(Backbone())
    model.maxpool.train()
    model.conv1.weight.requires_grad_(False)
    seen = []
    model.layer2.register_forward_hook(lambda *_: seen.append(1))
    result = fuse_model(model)
    assert seen == []
    result.model(torch.randn(1, 3, 8, 8).double())
    assert seen == [1]
    assert result.model.maxpool.training
    assert not result.model.conv1.weight.requires_grad
    assert result.model.layer1[0].conv1.weight.requires_grad
    assert result.skipped == ()


class Refusals(nn.Module):
    def __init__(self):
        super().__init__()
        c = nn.Conv2d
        self.two, self.two_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.relu, self.relu_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.a, self.b, self.shared_bn = c(3, 3, 1), c(3, 3, 1), nn.BatchNorm2d(3)
        self.shared, self.bn_a, self.bn_b = c(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.tied, self.tied_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.other = c(3, 3, 1)
        self.other.weight = self.tied.weight
        self.hooked, self.hooked_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.hooked.register_forward_hook(lambda *_: None)
        self.padded, self.padded_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.read, self.read_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.out, self.out_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.view, self.view_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.late, self.late_bn = c(3, 3, 1), nn.BatchNorm2d(3)
        self.input_bn, self.unused_bn = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.training_bn, self.trained = nn.BatchNorm2d(3), c(3, 3, 1)
        self.block = nn.Sequential(c(3, 3, 1))
        self.block.register_forward_hook(lambda *_: None)
        self.block_bn = nn.BatchNorm2d(3)

    def forward(self, x):
        two = self.two(x)
        x = self.two_bn(two) + two.sum()
        x = self.relu_bn(F.relu(self.relu(x)))
        x = self.shared_bn(self.a(x)) + self.shared_bn(self.b(x))
        x = self.bn_a(self.shared(x)) + self.bn_b(self.shared(x + 1))
        x = self.other(self.tied_bn(self.tied(x)))
        x = self.hooked_bn(self.hooked(x))
        x = self.padded_bn(F.pad(self.padded(x), (1, 1)))
        x = self.read_bn(self.read(x)) * self.read.weight.mean()
        out = self.out(x)
        x = self.out_bn(out)
        view = self.view(x)
        flat = view.flatten()
        x = self.view_bn(view) + flat.mean()
        late = self.late(x)
        late2 = late
        late += 1
        x = self.late_bn(late2)
        x = self.training_bn(self.trained(self.input_bn(x)))
        return self.block_bn(self.block(x)), out


REASONS = {
    "two_bn": "two's output is also read by .sum()",
    "relu_bn": "follows relu(), not a convolution or linear layer",
    "shared_bn": "is shared: it is called 2 times",
    "bn_a": "shared is shared: it is called 2 times",
    "bn_b": "shared is shared: it is called 2 times",
    "tied_bn": "tied.weight is tied to other.weight",
    "hooked_bn": "hooked: Conv2d has hooks",
    "padded_bn": "follows pad(), not a convolution or linear layer",
    "read_bn": "read.weight is read by a forward itself",
    "out_bn": "out's output is also read by the outside of the traced part",
    "view_bn": "view's output is also read by .flatten()",
    "late_bn": "late's output is also read by add()",
    "input_bn": "follows late_bn (BatchNorm2d), not a convolution or linear layer",
    "unused_bn": "is never called by the forward of the model",
    "training_bn": "BatchNorm2d is in training mode",
    "block_bn": "follows hook()",
}


def test_nothing_is_folded_wrongly_and_nothing_in_silence(randomise):
    model = randomise(Refusals())
    model.training_bn.train()
    result = fuse_model(model)
    assert_accounted(model, result)
    assert result.fused == ()
    assert [s.bn for s in result.skipped if not s.reason.startswith(REASONS[s.bn])] == []
    x = torch.randn(2, 3, 5, 5).double()
    model.eval(), result.model.eval()
    assert all(torch.equal(a, b) for a, b in zip(model(x), result.model(x), strict=True))


def test_hooks_that_see_the_convolution_keep_it(randomise):
    """A forward hook is given the inputs too: here the raw output of the convolution."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    assert len(fuse_model(randomise(model)).fused) == 1
    model[1].register_forward_hook(lambda *_: None)
    seen = fuse_model(model, torch.randn(1, 3, 4, 4).double())
    assert seen.skipped[0].reason == "0's output is also read by hook() in 1"
    assert fuse_model(model).fused == ()


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.chain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
        self.block = BasicBlock(3, 3)
        self.starts = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x):
        x = self.chain(self.bn(self.conv(x)))
        return self.block(self.starts(x)) if float(x.sum()) > 0 else self.block(x)


def test_documented_rule_where_a_forward_cannot_be_followed(randomise, error_of):
    model = randomise(Untraceable())
    x = torch.randn(2, 3, 5, 5).double()
    result = fuse_model(model, x)
    assert_accounted(model, result)
    assert [f.bn for f in result.fused] == ["chain.1", "block.bn1", "block.bn2"]
    reasons = {s.bn: s.reason for s in result.skipped}
    assert "the model cannot be followed" in reasons["bn"]
    assert "branches on the values of a tensor" in reasons["bn"]
    assert reasons["starts.0"] == "normalises an input of the traced part of the model"
    assert error_of(result.model(x), model(x)) <= 1e-10
    assert list(result.untraced) == [""]
    assert [f.bn for f in fuse_model(model).fused] == ["chain.1", "block.bn1", "block.bn2"]
    assert "example_inputs would let forwards be followed" in str(fuse_model(model))


class UsesTheMiddleOfAChain(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x):
        if float(x.sum()) > 1e9:
            return x
        x = self.chain[0](x)
        return x + self.chain[1](x)


def test_example_inputs_catch_what_the_rule_takes_for_granted(randomise):
    model = randomise(UsesTheMiddleOfAChain())
    kept = copy.deepcopy(model.state_dict())
    for inplace in (False, True):
        with pytest.raises(ValueError, match="differ from the model's by"):
            fuse_model(model, torch.randn(2, 3, 5, 5).double(), inplace=inplace)
        assert all(torch.equal(kept[k], v) for k, v in model.state_dict().items())


def test_loop_over_the_members_of_a_chain_is_followed(randomise):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())

        def forward(self, x):
            outs = []
            for layer in self.layers:
                x = layer(x)
                outs.append(x)
            return outs

    result = fuse_model(randomise(Loop()))
    assert "also read by the outside" in result.skipped[0].reason


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("index", torch.arange(4))
        self.table = nn.Parameter(torch.randn(4))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, c).permute(2, 0, 1, 3).unbind(0)
        attention = (q @ k.transpose(-2, -1) + self.table[self.index].view(1, 1, n)).softmax(-1)
        return x + self.proj(F.dropout(attention @ v, 0.1, self.training))


def test_swin_like_network_has_nothing_to_fold(randomise):
    model = randomise(nn.Sequential(Attention(), nn.LayerNorm(8), nn.Linear(8, 2)))
    x = torch.randn(2, 4, 8).double()
    result = fuse_model(model, x)
    assert (result.fused, result.skipped) == ((), ())
    assert torch.equal(result.model(x), model(x))
    assert str(result).startswith("0 batch norms folded, 0 kept")


def test_no_noise_on_stderr(capfd, randomise):
    fuse_model(randomise(Untraceable()))
    fuse_model(randomise(Refusals()))
    assert capfd.readouterr() == ("", "")


def test_what_layers_of_torch_do_with_a_bias_is_known(monkeypatch):
    """A full-size network runs each of its convolutions no more than it must."""
    monkeypatch.setattr("bevquant_fusion._products._products", None)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).eval()
    assert [f.bn for f in fuse_model(net, torch.ones(1, 3, 5, 5)).fused] == ["1"]


def test_a_layer_that_reads_a_buffer_takes_its_batch_norm():
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.randn(1, 2, 5))
            self.embed = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU())

        def forward(self, x):
            return x + self.embed(self.positions)

    model = Embeds()
    model.embed[1].running_mean += 0.5
    model = model.double().eval()
    result = fuse_model(model, torch.randn(2, 3, 5, dtype=torch.float64))
    assert [item.bn for item in result.fused] == ["embed.1"]
    assert result.max_error < 1e-12


class Picks(nn.Module):
    """Reads a table at the largest of values that are nearly equal."""

    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1))
        self.register_buffer("table", torch.arange(1.0, 1001.0))

    def forward(self, x):
        return self.table[self.chain(x).flatten(1).argmax(1)]


class ThenInFloat32(nn.Module):
    """A softmax in float32, whatever comes in, as in many transformers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = (1e5 * self.inner(x)).sin()  # makes the difference that folding makes a larger one
        return y.softmax(1, dtype=torch.float32).to(x.dtype)


def test_what_a_forward_computes_in_float32_is_held_to_that(randomise):
    x = torch.randn(2, 3, 100, 100, dtype=torch.float64)
    errors = []
    for seed in range(4):
        torch.manual_seed(seed)
        chain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        result = fuse_model(randomise(ThenInFloat32(chain)), x)
        assert result.fused
        errors.append(result.max_error)
    assert 1e-10 < max(errors) < 1e-6  # or nothing was put to the test
    wrong = randomise(ThenInFloat32(UsesTheMiddleOfAChain()))
    with pytest.raises(ValueError, match="differ from the model's by"):
        fuse_model(wrong, x)


def test_a_choice_that_rounding_turns_is_judged_in_float64(randomise):
    # Neighbouring float32 numbers: which one comes out largest depends on how they are rounded.
    x = (3 + torch.randperm(1000) * 2.0**-22).view(1, 1, 10, 100)
    turned = 0
    for seed in range(20):
        torch.manual_seed(seed)
        model = Picks().eval()
        nn.init.uniform_(model.chain[0].weight, 0.5, 1.5)
        model.chain[1].running_mean.uniform_(-2, 2)
        model.chain[1].running_var.uniform_(0.5, 2)
        result = fuse_model(model, x)
        assert result.max_error <= 1e-3
        turned += bool(model(x) != result.model(x))
    assert turned
    wrong = randomise(UsesTheMiddleOfAChain()).float()
    with pytest.raises(ValueError, match="differ from the model's by"):
        fuse_model(wrong, torch.randn(2, 3, 5, 5))


class Levels(nn.Module):
    """Levels that share a convolution and have norms of their own, as RTMDet's head."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)
        )
        for level in self.levels:
            level[0] = self.levels[0][0]

    def forward(self, *maps):
        return [level(x) for level, x in zip(self.levels, maps, strict=True)]


class Again(nn.Module):
    """One convolution behind the other, the same, each with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second = (
            nn.Conv2d(3, 3, 1),
            nn.BatchNorm2d(3),
            nn.BatchNorm2d(3),
        )

    def forward(self, x):
        return self.second(self.conv(self.first(self.conv(x))))


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bn = nn.Parameter(torch.randn(4, 3, 1, 1)), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(nn.functional.conv2d(x, self.weight))


class Arithmetic(nn.BatchNorm2d):
    def forward(self, x):
        scale = (self.running_var + self.eps).rsqrt() * self.weight
        return (x - self.running_mean[:, None, None]) * scale[:, None, None]


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval()]

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


@pytest.mark.parametrize(
    ("net", "count", "reason"),
    [
        (Unregistered(), 1, "modules of a list in an nn.ModuleList"),
        (Levels(), 3, "levels.0.0 is shared: it is called 3 times, and serves 3 batch norms"),
        (Again(), 1, "conv is shared: it is called 2 times, and serves 2 batch norms"),
        (Function(), 1, "a product by a function"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), Arithmetic(4)), 1, "computes something else than F.b"),
    ],
)
def test_reasons_are_what_was_seen(net, count, reason):
    result = fuse_model(net.eval(), tuple(torch.randn(1, 3, 4, 4) for _ in range(count)))
    assert not result.fused
    assert all(reason in item.reason for item in result.skipped)
    assert result.skipped


def test_the_batch_norm_that_changed_is_named():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
            self.parts[1].running_var.fill_(9.0)

        def forward(self, x):
            if float(x.sum()) > 1e9:  # so that it is not captured
                return x
            return self.parts[1](self.parts[0](x) + 1)

    with pytest.raises(ValueError, match=r"another result is parts\.1, folded into parts\.0"):
        fuse_model(Hidden().eval(), torch.randn(1, 3, 4, 4))

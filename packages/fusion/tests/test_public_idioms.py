"""What public forwards do, and what fuse_model makes of it with example inputs."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bevquant_fusion import fuse_model
from bevquant_graph import capture
from bevquant_sparse import WeightLayout, register_layout


def chain(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class DictBackbone(nn.Module):
    """A dict in and out, a ModuleList of Sequentials, a stride from Python arithmetic."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([chain(4, 4), chain(4, 6)])
        self.deblocks = nn.ModuleList([chain(4, 3), chain(6, 3)])

    def forward(self, batch_dict):
        x = first = batch_dict["features"]
        ups, found = [], {}
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
            found[f"stride_{int(first.shape[2] / x.shape[2])}x"] = x
            ups.append(self.deblocks[i](x))
        assert len(ups) > 1 and x.shape[0] > 0  # noqa: PT018 (as public forwards write it)
        batch_dict["out"] = torch.cat(ups, dim=1)
        return batch_dict


class PointLayer(nn.Module):
    """Linear, permute, BatchNorm1d, permute; long inputs go through the Linear in parts."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.part = nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), 3

    def forward(self, x):
        if x.shape[0] > self.part:
            parts = [self.linear(x[i * 3 : i * 3 + 3]) for i in range(x.shape[0] // 3 + 1)]
            x = torch.cat(parts, dim=0)
        else:
            x = self.linear(x)
        x = self.norm(x.permute(0, 2, 1)).permute(0, 2, 1)
        return F.relu(x).max(dim=1)[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = chain(4, 4)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class Rearranged(nn.Module):
    """Images of all cameras in one batch, as einops would write it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm3d(4)

    def forward(self, x):
        y = self.conv(x)
        grouped = y.reshape(1, -1, *y.shape[1:]).permute(0, 2, 1, 3, 4)
        return self.norm(grouped)


class Levels(nn.Module):
    """One convolution and its batch norm on several maps."""

    def __init__(self):
        super().__init__()
        self.head = chain(4, 4)

    def forward(self, x):
        return [self.head(level) for level in (x, x[..., ::2])]


def image():
    return torch.randn(2, 4, 6, 6).double()


CASES = {
    "dict": (DictBackbone, lambda: ({"features": image()},), 4),
    "points": (PointLayer, lambda: torch.randn(2, 6, 5).double(), 1),
    "points in parts": (PointLayer, lambda: torch.randn(8, 6, 5).double(), 1),
    "checkpoint": (Checkpointed, image, 1),
    "cameras": (Rearranged, image, 1),
    "levels": (Levels, image, 1),
}


def tensors(value):
    if isinstance(value, dict):
        return [value["out"]]
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", list(CASES))
def test_folded_as_it_stands(name, randomise, error_of):
    make, inputs, count = CASES[name]
    model, given = randomise(make()), inputs()
    result = fuse_model(model, copy.deepcopy(given))
    assert (len(result.fused), result.skipped) == (count, ())
    args = given if isinstance(given, tuple) else (given,)
    for wanted, made in zip(
        tensors(model(*copy.deepcopy(args))), tensors(result.model(*args)), strict=True
    ):
        assert error_of(made, wanted) <= 1e-12


class NormAct(nn.BatchNorm2d):
    """Batch norm, dropout and activation in one class."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.1), nn.SiLU()

    def forward(self, x):
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps
        )
        return self.act(self.drop(x))


class NormRelu(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x)) + 1


class Frozen(nn.Module):
    """Buffers alone, and F.batch_norm."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x):
        stats = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *stats, training=False, eps=1e-5)


@pytest.mark.parametrize(
    ("norm", "how", "left"),
    [
        (NormAct, "rest", "Sequential"),
        (NormRelu, "neutral", "NormRelu"),
        (Frozen, "identity", "Identity"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_else_a_batch_norm_does_is_kept(norm, how, left, dtype, randomise):
    model = randomise(nn.Sequential(nn.Conv2d(4, 4, 3), norm(4), nn.Conv2d(4, 2, 1))).to(dtype)
    x = image().to(dtype)
    result = fuse_model(model, x)
    assert [(f.conv, f.bn, f.how) for f in result.fused] == [("0", "1", how)]
    assert type(result.model[1]).__name__ == left
    assert result.max_error <= (1e-12 if dtype is torch.float64 else 1e-5)
    if how == "rest":
        assert [n for n, _ in result.model[1].named_children()] == ["drop", "act"]
        assert not any("running" in key for key in result.model.state_dict())
    else:  # the normalisation gives exactly what it gets
        free = copy.deepcopy(result.model[1])
        probe = torch.randn(3, 4, 5, 5).to(dtype)
        wanted = F.relu(probe) + 1 if norm is NormRelu else probe
        assert torch.equal(free(probe), wanted)


def frozen(channels, parameters, eps):
    """A frozen batch norm in arithmetic, as torchvision's; DETR's has its ε in the forward."""

    class FrozenBatchNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("weight", "bias", "running_mean", "running_var"):
                value = torch.rand(channels) + 0.5
                if parameters:
                    self.register_parameter(name, nn.Parameter(value, requires_grad=False))
                else:
                    self.register_buffer(name, value)
            if eps:
                self.eps = eps

        def forward(self, x):
            w, b, mean, var = (
                getattr(self, name).reshape(1, -1, 1, 1)
                for name in ("weight", "bias", "running_mean", "running_var")
            )
            scale = w * (var + (eps or 1e-5)).rsqrt()
            return x * scale + (b - mean * scale)

    return FrozenBatchNorm2d()


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(("parameters", "eps"), [(False, 2e-3), (False, None), (True, 1e-5)])
def test_frozen_norms_in_arithmetic_are_folded(parameters, eps, traced, error_of):
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, bias=False), frozen(6, parameters, eps), nn.ReLU(), nn.Conv2d(6, 2, 1)
    ).double()
    x = image()
    result = fuse_model(model, x if traced else None)  # in training mode: it is frozen there too
    assert [(f.conv, f.bn, f.how) for f in result.fused] == [("0", "1", "identity")]
    assert error_of(result.model(x), model(x)) <= 1e-12
    assert "1.running_var" in model.state_dict()


class NormLike(nn.Module):
    """The tensors of a batch norm, and something else in its forward."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x):
        w, b = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        return (x - self.running_mean.reshape(1, -1, 1, 1)) * w + b


def test_what_only_looks_like_a_frozen_norm_stays(error_of):
    model = nn.Sequential(nn.Conv2d(4, 6, 3), NormLike(6), nn.Conv2d(6, 2, 1)).double()
    result = fuse_model(model, image())
    assert (result.fused, result.skipped) == ((), ())
    assert isinstance(result.model[1], NormLike)


def test_a_frozen_norm_that_nothing_takes_stays_as_it_was(error_of):
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), frozen(6, False, 1e-5)).double()
    result = fuse_model(model, image())
    assert [s.bn for s in result.skipped] == ["2"]
    assert type(result.model[2]).__name__ == "FrozenBatchNorm2d"


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.a_bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.b, self.b_bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.c, self.d, self.cd_bn = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.e, self.e_bn, self.f_bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.g, self.g_bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.h, self.h_bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        a = self.a(x)
        x = self.a_bn(a) + a
        x = self.b_bn(F.relu(self.b(x)))
        x = self.cd_bn(self.c(x)) + self.cd_bn(self.d(x))
        x = self.e_bn(self.e(x)) + self.f_bn(self.e(x))
        x = self.g_bn(F.pad(self.g(x), (1, 1)))[..., :4].sigmoid()
        h = self.h(x[..., :4, :])
        return self.h_bn(h.transpose(1, 2))


WHY = {
    "a_bn": "a's output is also read by add()",
    "b_bn": "follows relu(), not a convolution",
    "cd_bn": "is shared: it is called 2 times",
    "e_bn": "e is shared: it is called 2 times",
    "f_bn": "e is shared: it is called 2 times",
    "g_bn": "follows pad(), which probably mixes",
    "h_bn": "normalises another axis than that of the channels h makes",
}


def test_never_folded_and_always_said_where(randomise):
    model = randomise(Refused())
    result = fuse_model(model, image())
    assert result.fused == ()
    assert {s.bn: s.reason for s in result.skipped if not s.reason.startswith(WHY[s.bn])} == {}
    assert len(result.skipped) == len(WHY)
    assert all("test_public_idioms.py:" in s.location for s in result.skipped)


def test_a_graph_that_is_there_already_is_read(randomise):
    model, x = randomise(DictBackbone()), {"features": image()}
    graph = capture(model, (copy.deepcopy(x),))
    assert len(fuse_model(model, graph=graph).fused) == 4
    with pytest.raises(ValueError, match="of another DictBackbone"):
        fuse_model(copy.deepcopy(model), graph=graph)


def test_inside_of_what_cannot_be_captured_chains_are_folded(randomise, error_of):
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = chain(4, 4)

        def forward(self, x):
            return self.body(x) if x.sum() < 1e9 else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.choice = nn.ModuleList([chain(4, 4)]), Chooses()

        def forward(self, x):
            return self.choice(self.first[0](x))

    model, x = randomise(Model()), image()
    result = fuse_model(model, x)
    assert [f.bn for f in result.fused] == ["first.0.1", "choice.body.1"]
    assert "test_public_idioms.py:" in result.untraced["choice"]
    assert error_of(result.model(x), model(x)) <= 1e-12


class TokenLayer(nn.Module):
    """LeViT's: a batch norm over flattened tokens, put back into the shape of what it reads."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.linear(x)
        return self.norm(x.flatten(0, 1)).reshape_as(x)


def test_a_value_of_which_only_the_shape_is_read_has_one_reader(randomise, error_of):
    model, x = randomise(TokenLayer()), torch.randn(2, 3, 4, dtype=torch.float64)
    result = fuse_model(model, x)
    assert [f.bn for f in result.fused] == ["norm"]
    assert error_of(result.model(x), model(x)) <= 1e-12


class Rows(nn.Module):
    """A sparse convolution of one kernel element."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(1, 1, 1, 4, 4)), None

    def forward(self, x):
        x = x @ self.weight[0, 0, 0]
        return x if self.bias is None else x + self.bias


register_layout(Rows, WeightLayout.RSCK)


class SparseLike(nn.Module):
    """A block of this file, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = Rows(), nn.BatchNorm1d(4)

    @property
    def norm1(self):
        return self.bn1

    def forward(self, x, scale=1.0):
        # The rewritten forward is on the lines of this one.
        out = self.norm1(self.conv1(x))
        return out * scale


def test_a_forward_without_its_call(randomise, error_of):
    block, x = randomise(SparseLike()), torch.randn(5, 4).double()
    wanted = block(x, scale=2)
    line = SparseLike.forward.__code__.co_firstlineno
    result = fuse_model(block, inplace=True)
    assert [(f.bn, f.how) for f in result.fused] == [("bn1", "rebuilt")]
    assert not hasattr(block, "bn1")
    assert type(block).__name__ == "SparseLike"
    assert isinstance(block, SparseLike)
    assert type(block).forward.__code__.co_firstlineno == line
    for copied in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert error_of(copied(x, scale=2), wanted) <= 1e-12
    assert hasattr(SparseLike(), "bn1")


class Listed(nn.Module):
    """Layers in a plain list, each registered by add_module, as in UPerNet's pyramids."""

    def __init__(self):
        super().__init__()
        self.layers = [*chain(3, 4), nn.Conv2d(4, 2, 1)]
        for index, layer in enumerate(self.layers):
            self.add_module(str(index), layer)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_batch_norm_in_a_plain_list_is_taken_out_of_it():
    model, x = Listed().eval(), torch.randn(2, 3, 5, 5)
    nn.init.uniform_(model.layers[1].running_var, 0.5, 2)
    result = fuse_model(model, x)
    assert [(fused.conv, fused.bn) for fused in result.fused] == [("0", "1")]
    assert result.model.layers[1] is getattr(result.model, "1")
    assert isinstance(result.model.layers[1], nn.Identity)
    torch.testing.assert_close(result.model(x), model(x))


class PaddedConv(nn.Conv2d):
    """Pads more behind than in front, as TensorFlow's "same" does."""

    def forward(self, x):
        return F.conv2d(
            F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, 1, self.groups
        )


class HalvedConv(PaddedConv):
    def forward(self, x):
        return super().forward(x) / 2


class DeafConv(nn.Conv2d):
    """Never looks at its bias."""

    def forward(self, x):
        return F.conv2d(x, self.weight)


class UngroupedConv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.repeat(1, 2, 1, 1), self.bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_that_pads_by_itself_takes_its_batch_norm(bias, groups, randomise):
    conv = PaddedConv(4, 6, 3, 2, bias=bias, groups=groups)
    model = randomise(nn.Sequential(conv, nn.BatchNorm2d(6), nn.ReLU())).double()
    x = torch.randn(1, 4, 8, 8, dtype=torch.float64)
    result = fuse_model(model, x)
    assert [(f.conv, f.bn) for f in result.fused] == [("0", "1")]
    assert type(result.model[0]) is PaddedConv
    torch.testing.assert_close(result.model(x), model(x))


@pytest.mark.parametrize("conv", [
    HalvedConv(4, 6, 1), DeafConv(4, 6, 1, bias=False), UngroupedConv(4, 6, 1, groups=2),
], ids=lambda c: type(c).__name__)  # fmt: skip
def test_a_convolution_that_does_more_than_apply_its_weight_keeps_its_batch_norm(conv, randomise):
    model = randomise(nn.Sequential(conv, nn.BatchNorm2d(6)))
    result = fuse_model(model, torch.randn(1, 4, 8, 8, dtype=torch.float64))
    assert not result.fused
    assert "forward of its own" in result.skipped[0].reason or "follows" in result.skipped[0].reason


class NormedConv(nn.Conv2d):
    """Calls its norm and its activation by itself, as detectron2's layer does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm, self.activation = nn.BatchNorm2d(self.out_channels), nn.ReLU()

    def forward(self, x):
        return self.activation(self.norm(super().forward(x)))


class ActBeforeNorm(NormedConv):
    def forward(self, x):
        return self.norm(self.activation(F.conv2d(x, self.weight, self.bias)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_takes_the_batch_norm_that_its_own_forward_calls(bias, randomise):
    model = randomise(nn.Sequential(NormedConv(4, 6, 3, bias=bias))).double()
    x = torch.randn(1, 4, 8, 8, dtype=torch.float64)
    result = fuse_model(model, x)
    assert [(f.conv, f.bn) for f in result.fused] == [("0", "0.norm")]
    torch.testing.assert_close(result.model(x), model(x))
    kept = fuse_model(randomise(nn.Sequential(ActBeforeNorm(4, 6, 3, bias=bias))).double(), x)
    assert not kept.fused


class Choosing(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def test_a_norm_that_cannot_be_followed_is_not_called_unused():
    net = nn.Sequential(nn.Linear(4, 4), Choosing(4)).eval()
    (skipped,) = fuse_model(net, torch.ones(2, 4)).skipped
    assert re.match(r"cannot be followed: .*test_public_idioms\.py:\d+", skipped.reason)


class Ahead(nn.Module):
    """Batch norms that no layer feeds and layers read, as BEVDepth's of the camera parameters."""

    def __init__(self):
        super().__init__()
        self.bn, self.depth, self.context = nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(6, 8)
        self.before, self.grouped = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, 2, groups=2, bias=False)
        self.padded, self.same = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.seen, self.point = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, numbers, x):
        numbers = self.bn(numbers.reshape(-1, numbers.shape[-1]))
        x = self.grouped(self.before(F.silu(x * self.context(numbers)[..., None, None])))
        x = F.silu(self.same(self.padded(F.silu(x * self.depth(numbers)[..., None, None]))))
        x = self.seen(x)
        return x + self.point(x)


def test_norms_before_layers_that_pad_nothing_are_folded_into_all_of_them(randomise):
    inputs = torch.randn(1, 2, 6).double(), torch.randn(2, 8, 9, 9).double()
    result = fuse_model(randomise(Ahead()), inputs)
    assert [(f.bn, f.conv, f.how) for f in result.fused] == [
        ("bn", "context", "identity"), ("before", "grouped", "identity"),
    ]  # fmt: skip
    assert [s.bn for s in result.skipped] == ["padded", "seen"]
    assert result.max_error < 1e-14


class Between(nn.Module):
    """Slices, shuffled channels, averages and dropout between batch norms and layers."""

    def __init__(self):
        super().__init__()
        self.qk, self.q_bn = nn.Conv2d(8, 10, 1, groups=2, bias=False), nn.BatchNorm2d(4)
        self.pre, self.one = nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1, bias=False)
        self.wide, self.up = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 3)
        self.pooled = nn.BatchNorm2d(6)
        self.norm, self.down, self.kv = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.Conv2d(8, 3, 1)
        self.fine, self.fine_bn = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(2)
        self.q, self.head_bn, self.head = nn.Conv2d(6, 3, 1), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        fine = torch.sin(self.fine_bn(F.pixel_shuffle(self.fine(x), 2))).mean()
        a, b = self.qk(x).split([3, 7], 1)
        b = F.channel_shuffle(b[:, :4], 2)
        x = F.gelu(self.q_bn(b)) + a.mean(1, keepdim=True)
        x = F.max_pool2d(self.one(self.pre(x)), 2, 1) * self.wide(F.max_pool2d(x, 2, 1)).tanh()
        up = F.interpolate(self.up(x[:, :4]), scale_factor=2, mode="bilinear")
        other = F.adaptive_avg_pool2d(torch.cos(x), (2, 2))
        x = self.norm(torch.sin(x) + torch.sin(self.pooled(up)).mean((2, 3), keepdim=True))
        less = self.down(F.adaptive_avg_pool2d(x, (2, 2)))
        kv = self.kv(torch.cat((other[:, :1], less, other[:, 1:2]), 1))
        x = self.q(x) * kv.mean((2, 3), keepdim=True) * fine
        return self.head(F.dropout(self.head_bn(torch.sin(x).mean((2, 3))), 0.5, self.training))


class NotBetween(nn.Module):
    """An average with padded zeros in it; channels that somebody else reads as well; a ReLU."""

    def __init__(self):
        super().__init__()
        self.conv, self.zeros, self.seen = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(2)
        self.relu, self.point = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = torch.sin(self.zeros(F.avg_pool2d(self.conv(x), 3, 1, 1)))
        y = self.point(self.relu(F.relu(x)))
        return self.seen(y[:, :2]) * y[:, 1:3]


def test_between_a_norm_and_its_layer_channels_are_followed_one_by_one(randomise):
    result = fuse_model(randomise(Between()), torch.randn(2, 8, 7, 7).double())
    folded = {f.bn: f.conv for f in result.fused}
    assert folded == {
        "fine_bn": "fine", "q_bn": "qk", "pre": "one", "pooled": "up",
        "norm": "kv", "down": "kv", "head_bn": "head",
    }  # fmt: skip
    assert result.max_error < 1e-14
    kept = fuse_model(randomise(NotBetween()), torch.randn(2, 4, 6, 6).double())
    assert {s.bn: s.reason for s in kept.skipped} == {
        "zeros": "follows avg_pool2d(), which probably mixes channels, or adds values of its own "
        "as padding does: the channels of conv could not be followed through it",
        "seen": "point's output is also read by slice()",
        "relu": "follows relu(), not a convolution or linear layer",
    }


class Standardised(nn.Conv2d):
    """Scaled weight standardisation by a batch norm over the weight, as NF-ResNets have it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels) + 0.5)

    def forward(self, x):
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = F.batch_norm(rows, None, None, weight=self.gain * 0.3, training=True, momentum=0.0)
        weight = rows.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class StandardisedSame(Standardised):
    def forward(self, x):
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class Centred(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


def test_weights_computed_from_parameters_alone_become_plain_ones(randomise):
    net = nn.Sequential(
        Standardised(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        StandardisedSame(4, 4, 3), Standardised(4, 6, 3, groups=2), nn.Flatten(), Centred(24, 3),
    )  # fmt: skip
    result = fuse_model(randomise(net), torch.randn(2, 3, 9, 9).double())
    assert result.plain == ("0", "4", "6")
    assert [type(result.model[int(i)]) for i in result.plain] == [nn.Conv2d, nn.Conv2d, nn.Linear]
    assert [f.bn for f in result.fused] == ["1"]
    assert result.max_error < 1e-14
    assert type(net[0]) is Standardised


class Parallel(nn.Module):
    """RepVGG's block, RepViT's, and YOLOv4's CSP, which has one norm of a concatenation."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.one = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.identity = nn.BatchNorm2d(4)
        self.wide, self.narrow = chain(4, 4)[:2], nn.Conv2d(4, 4, 1, groups=4)
        self.residual = nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 3, 1, bias=False), nn.ConvTranspose2d(4, 5, 1)
        self.both = nn.BatchNorm2d(8)

    def forward(self, x):
        x = F.relu(sum([self.identity(x), self.dense(x), self.one(x)]))
        x = F.gelu(self.residual((self.wide(x) + self.narrow(x)) + x))
        return self.both(torch.cat((self.left(x), self.right(x)), 1))


class TwoConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = chain(4, 4)[:2], nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.two(x) + self.one(x))


def test_norms_among_parallel_layers_are_folded_or_become_depthwise(randomise):
    result = fuse_model(randomise(Parallel()), image())
    how = {f.bn: (f.conv, f.how) for f in result.fused}
    assert how["identity"] == ("identity", "depthwise")
    assert how["residual"] == ("residual", "depthwise")
    assert how["both"] == ("left", "identity")
    assert not result.skipped
    assert result.max_error < 1e-14
    assert (
        repr(result.model.identity) == "Conv2d(4, 4, kernel_size=(1, 1), stride=(1, 1), groups=4)"
    )
    result = fuse_model(randomise(TwoConvolutions()), image())
    assert [(f.bn, f.conv) for f in result.fused] == [("one.1", "one.0"), ("norm", "two")]
    assert result.max_error < 1e-14


class Differences(nn.Module):
    """FastViT's RepMixer, whose identity is subtracted, and a norm of a difference."""

    def __init__(self):
        super().__init__()
        self.mixer, self.identity = chain(4, 4)[:2], nn.BatchNorm2d(4)
        self.one, self.two, self.both = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        x = x + 0.3 * (self.mixer(x) - self.identity(x))
        return self.both(self.one(x) - self.two(x))


def test_norms_in_differences_and_of_differences_are_folded(randomise):
    result = fuse_model(randomise(Differences()), image())
    how = {f.bn: (f.conv, f.how) for f in result.fused}
    assert how["identity"] == ("identity", "depthwise")
    assert how["both"] == ("one", "identity")
    assert not result.skipped
    assert result.max_error < 1e-14


class Apart(nn.Module):
    """Sums in which a norm has no part: read twice, of another size, of a layer called twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.n1, self.n2, self.n3 = (nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        seen = self.a(x) + self.b(x)
        again = self.n2(self.c(x) + self.c(x[..., :1]))
        return self.n1(seen) + seen, again, self.n3(x + x)


def test_norms_of_sums_that_somebody_else_reads_stay(randomise):
    result = fuse_model(randomise(Apart()), image())
    assert [s.bn for s in result.skipped] == ["n2", "n1", "n3"]
    assert not result.fused


def test_weights_too_large_for_one_of_several_layers_leave_all_as_they_are(randomise):
    net = randomise(TwoConvolutions()).float()
    with torch.no_grad():
        net.norm.weight.fill_(1e30)
        net.one[0].weight.fill_(1e10)
    result = fuse_model(net, torch.zeros(2, 4, 6, 6))  # on which its outputs are finite
    assert [f.bn for f in result.fused] == ["one.1"]
    assert [(s.bn, "is not finite in torch.float32" in s.reason) for s in result.skipped] == [
        ("norm", True)
    ]
    assert torch.equal(result.model.two.weight, net.two.weight)

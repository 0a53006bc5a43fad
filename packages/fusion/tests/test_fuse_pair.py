"""fuse_conv_bn on torch modules: every kind, and everything that is refused."""

import copy

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_conv_bn, fuse_sparse_conv_bn

DENSE = [
    (nn.Conv1d(8, 12, 3), nn.BatchNorm1d(12)),
    (nn.Conv2d(8, 12, 3, groups=4, padding=1), nn.BatchNorm2d(12)),
    (nn.Conv3d(8, 12, 3, bias=False), nn.BatchNorm3d(12)),
    (nn.ConvTranspose1d(8, 12, 3, stride=2, groups=2), nn.BatchNorm1d(12)),
    (nn.ConvTranspose2d(8, 12, 2, stride=2, bias=False, groups=4), nn.BatchNorm2d(12)),
    (nn.ConvTranspose3d(8, 12, 3, stride=2, output_padding=1), nn.BatchNorm3d(12, affine=False)),
    (nn.Conv2d(8, 12, 3, dilation=2, padding_mode="reflect", padding=1), nn.SyncBatchNorm(12)),
    (nn.Linear(8, 12), nn.BatchNorm1d(12)),
    (nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12, affine=False)),
]


@pytest.mark.parametrize(("conv", "bn"), DENSE)
def test_dense_pairs(conv, bn, randomise, error_of):
    conv, bn = randomise(nn.ModuleList([copy.deepcopy(conv), copy.deepcopy(bn)]))
    rank = 0 if isinstance(conv, nn.Linear) else conv.weight.ndim - 2
    x = torch.randn(3, 8, *(6,) * rank).double()
    normal = bn
    if isinstance(bn, nn.SyncBatchNorm):  # torch refuses to run it without a process group
        normal = nn.BatchNorm2d(12).double().eval()
        normal.load_state_dict(bn.state_dict())
    expected = normal(conv(x))
    fused = fuse_conv_bn(conv, bn)
    assert error_of(fused(x), expected) <= 1e-12
    assert type(fused) is type(conv)
    assert fused is not conv


def test_lazy_modules_once_initialised(randomise, error_of):
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="not initialised"):
        fuse_conv_bn(net[0], net[1].eval())
    net(torch.randn(2, 3, 5, 5))
    randomise(net)
    x = torch.randn(2, 3, 5, 5).double()
    assert error_of(fuse_conv_bn(net[0], net[1])(x), net(x)) <= 1e-12


def test_original_is_untouched_and_state_is_kept():
    conv, bn = nn.Conv2d(3, 4, 1, bias=False).eval(), nn.BatchNorm2d(4).eval()
    conv.weight.requires_grad_(False)
    before = copy.deepcopy(conv.state_dict())
    fused = fuse_conv_bn(conv, bn)
    assert conv.bias is None
    assert torch.equal(conv.weight, before["weight"])
    assert not fused.weight.requires_grad
    assert not fused.bias.requires_grad
    assert not fused.training


class DoubledConv(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class NormAndRelu(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def refused():
    conv, bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval()
    hooked, hooked_bn = copy.deepcopy(conv), copy.deepcopy(bn)
    hooked.register_forward_hook(lambda *_: None)
    hooked_bn.register_forward_pre_hook(lambda *_: None)
    replaced = copy.deepcopy(conv)
    replaced.forward = lambda x: x
    activated = copy.deepcopy(conv)
    activated.activation = nn.ReLU()
    huge = copy.deepcopy(bn).half()
    huge.weight.data.fill_(6e4)
    huge.running_var.fill_(1e-4)
    yield conv, nn.BatchNorm2d(4), "training mode"
    yield conv, nn.BatchNorm2d(4, track_running_stats=False).eval(), "no running statistics"
    yield conv, nn.BatchNorm2d(5).eval(), "Conv2d makes 4 channels but BatchNorm2d normalises 5"
    yield conv, nn.BatchNorm1d(4).eval(), "does not fit"
    yield conv, nn.InstanceNorm2d(4).eval(), "not a batch norm"
    yield conv, NormAndRelu(4).eval(), "forward of its own"
    yield DoubledConv(3, 4, 1), bn, "forward of its own"
    yield hooked, bn, "hooks"
    yield conv, hooked_bn, "hooks"
    yield replaced, bn, "replaced on the instance"
    yield activated, bn, "activation of its own"
    yield nn.utils.parametrizations.weight_norm(copy.deepcopy(conv)), bn, "parametrized"
    yield nn.utils.spectral_norm(copy.deepcopy(conv)), bn, "hooks"
    yield nn.ReLU(), bn, "not a convolution"
    yield copy.deepcopy(conv).half(), huge, "not finite in torch.float16"


@pytest.mark.parametrize(("conv", "bn", "message"), list(refused()))
def test_refused(conv, bn, message):
    with pytest.raises(ValueError, match=message):
        fuse_conv_bn(conv, bn)


def test_unknown_class_is_not_a_sparse_convolution():
    with pytest.raises(TypeError, match="register_layout"):
        fuse_sparse_conv_bn(nn.Conv3d(2, 2, 3), nn.BatchNorm1d(2).eval())

"""fuse_sparse_conv_bn on spconv's modules, run in float64 through bevquant_sparse."""

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_sparse_conv_bn
from bevquant_sparse import WeightLayout, get_weight, register_layout, use_bevquant_kernels

KINDS = [(kind, rank) for kind in ("SubMConv", "SparseConv") for rank in (1, 2, 3, 4)]
KINDS += [("SparseConvTranspose", rank) for rank in (1, 2, 3, 4)]


def shape_of(rank):
    return (6, 5, 4, 4)[:rank]


@pytest.mark.parametrize(("kind", "rank"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_kinds(kind, rank, bias, spconv, cloud, randomise, error_of):
    extra = {} if kind == "SubMConv" else {"stride": 2, "padding": 1}
    conv = getattr(spconv, f"{kind}{rank}d")(3, 5, 3, bias=bias, **extra)
    conv, bn = randomise(nn.ModuleList([conv, nn.BatchNorm1d(5)]))
    fused = fuse_sparse_conv_bn(conv, bn)
    use_bevquant_kernels(conv)
    use_bevquant_kernels(fused)
    x = cloud(3, shape_of(rank))
    expected = bn(conv(x).features)
    assert error_of(fused(x).features, expected) <= 1e-12
    assert type(fused) is type(conv)
    assert (fused.indice_key, fused.stride) == (conv.indice_key, conv.stride)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_inverse(rank, spconv, cloud, randomise, error_of):
    down = getattr(spconv, f"SparseConv{rank}d")(3, 4, 3, stride=2, indice_key="k")
    up = getattr(spconv, f"SparseInverseConv{rank}d")(4, 5, 3, indice_key="k")
    down, up, bn = randomise(nn.ModuleList([down, up, nn.BatchNorm1d(5)]))
    fused = fuse_sparse_conv_bn(up, bn)
    for module in (down, up, fused):
        use_bevquant_kernels(module)
    x = down(cloud(3, shape_of(rank)))
    assert error_of(fused(x).features, bn(up(x).features)) <= 1e-12


def test_batch_norm_classes(spconv, cloud, randomise, error_of):
    conv = spconv.SubMConv3d(3, 4, 3)
    sparse_bn = spconv.SparseBatchNorm(4)
    conv, sparse_bn = randomise(nn.ModuleList([conv, sparse_bn]))
    fused = fuse_sparse_conv_bn(conv, sparse_bn)
    for module in (conv, fused):
        use_bevquant_kernels(module)
    x = cloud(3)
    assert error_of(fused(x).features, sparse_bn(conv(x)).features) <= 1e-12


def test_fused_activation_is_refused(spconv):
    conv = spconv.SubMConv3d(3, 4, 3)
    conv.act_type = type(conv.act_type).ReLU
    with pytest.raises(ValueError, match="activation of its own"):
        fuse_sparse_conv_bn(conv, nn.BatchNorm1d(4).eval())


class RegisteredConv(nn.Module):
    """A convolution of a library that this project does not know."""

    def __init__(self, layout, in_channels=4, out_channels=4):
        super().__init__()
        shapes = {
            WeightLayout.RSCK: (3, 3, 3, in_channels, out_channels),
            WeightLayout.KRSC: (out_channels, 3, 3, 3, in_channels),
            WeightLayout.KCRS: (out_channels, in_channels, 3, 3, 3),
            WeightLayout.VCK: (27, in_channels, out_channels),
        }
        self.weight = nn.Parameter(torch.randn(shapes[layout]))
        self.kernel_size = (3, 3, 3)
        self.bias = None


@pytest.mark.parametrize("layout", list(WeightLayout))
def test_registered_layouts(layout):
    cls = type(f"Registered{layout.name}", (RegisteredConv,), {})
    conv, bn = cls(layout).double(), nn.BatchNorm1d(4, eps=0.0).double().eval()
    bn.weight.data = torch.tensor([2.0, 0.0, -1.0, 1.0]).double()
    with pytest.raises(TypeError, match="not a known sparse convolution"):
        fuse_sparse_conv_bn(conv, bn)
    register_layout(cls, layout)
    fused = fuse_sparse_conv_bn(conv, bn)
    before, after = (get_weight(c, WeightLayout.RSCK) for c in (conv, fused))
    torch.testing.assert_close(after, before * bn.weight, rtol=1e-14, atol=0)


def test_a_subclass_with_its_own_forward_is_refused(spconv):
    class Activated(spconv.SubMConv3d):
        def forward(self, x):
            out = super().forward(x)
            return out.replace_feature(out.features.relu())

    with pytest.raises(ValueError, match="has a forward of its own"):
        fuse_sparse_conv_bn(Activated(3, 4, 3), nn.BatchNorm1d(4).eval())

"""fuse_model on spconv models: SparseSequential, residual blocks in every style, an encoder."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bevquant_fusion import fuse_model
from bevquant_sparse import use_bevquant_kernels


def replace_feature(out, new_features):
    """mmdet3d's helper: spconv 2 by what the tensor offers, spconv 1 otherwise."""
    if "replace_feature" in out.__dir__():
        return out.replace_feature(new_features)
    out.features = new_features
    return out


class OldTensor:
    """A sparse tensor of spconv 1: features are written to, there is no replace_feature."""

    def __init__(self, features, indices, spatial_shape, batch_size):
        self.features, self.indices = features, indices
        self.spatial_shape, self.batch_size = list(spatial_shape), batch_size
        self.indice_dict = {}


def with_spconv2_method(self, x):
    identity = x.features
    out = self.conv1(x)
    out = out.replace_feature(self.bn1(out.features))
    out = out.replace_feature(self.relu(out.features))
    out = self.conv2(out)
    out = out.replace_feature(self.bn2(out.features))
    if self.downsample is not None:
        identity = self.downsample(x).features
    out = out.replace_feature(out.features + identity)
    return out.replace_feature(self.relu(out.features))


def with_helper(self, x):
    identity = x.features
    assert x.features.dim() == 2, f"x.features.dim()={x.features.dim()}"
    out = self.conv1(x)
    out = replace_feature(out, self.norm1(out.features))
    out = replace_feature(out, F.relu(out.features))
    out = self.conv2(out)
    out = replace_feature(out, self.bn2(out.features))
    if self.downsample is not None:
        identity = self.downsample(x).features
    out = replace_feature(out, out.features + identity)
    out = replace_feature(out, F.relu(out.features))
    return out


def with_assignment(self, x):
    identity = x.features
    out = self.conv1(x)
    out.features = self.bn1(out.features)
    out.features = F.relu(out.features)
    out = self.conv2(out)
    out.features = self.bn2(out.features)
    if self.downsample is not None:
        identity = self.downsample(x).features
    out.features += identity
    out.features = self.relu(out.features)
    return out


STYLES = {f.__name__: f for f in (with_spconv2_method, with_helper, with_assignment)}


def make_block(spconv, style, channels=4, downsample=False):
    class SparseBasicBlock(spconv.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv1 = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="k")
            self.bn1 = nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)
            self.conv2 = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="k")
            self.bn2 = nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)
            self.relu = nn.ReLU(inplace=True)
            self.downsample = None
            if downsample:
                self.downsample = spconv.SparseSequential(
                    spconv.SubMConv3d(channels, channels, 1, bias=False), nn.BatchNorm1d(channels)
                )

        @property
        def norm1(self):
            return self.bn1

        forward = STYLES[style]

    return SparseBasicBlock()


def old_style(x):
    return OldTensor(x.features, x.indices, x.spatial_shape, x.batch_size)


@pytest.mark.parametrize("downsample", [False, True])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("style", list(STYLES))
def test_block_in_every_style(style, old, downsample, spconv, cloud, randomise, error_of):
    if (style == "with_assignment") != old and style != "with_helper":
        return  # spconv 2 tensors cannot be assigned to; spconv 1 tensors lack the method
    if old and downsample:
        return  # spconv 2's SparseSequential does not pass spconv 1 tensors' features on
    block = randomise(make_block(spconv, style, downsample=downsample))
    use_bevquant_kernels(block)
    x = cloud(4)
    convert = old_style if old else (lambda tensor: tensor)
    expected = block(convert(x)).features
    x = x.replace_feature(x.features)
    result = fuse_model(block)
    assert result.skipped == ()
    assert {f.how for f in result.fused if "downsample" not in f.bn} == {"rebuilt"}
    fused = result.model
    assert not hasattr(fused, "bn1")
    assert not hasattr(fused, "bn2")
    assert type(fused).__name__ == "SparseBasicBlock"
    assert isinstance(fused, type(block))
    assert error_of(fused(convert(x)).features, expected) <= 1e-10
    assert error_of(copy.deepcopy(fused)(convert(x)).features, expected) <= 1e-10
    assert not fused.relu.inplace
    assert "norm" not in str(fused).lower()


def make_encoder(spconv, style="with_helper"):
    """mit-bevfusion's SparseEncoder, with its names and block types, narrower."""
    channels = (4, 6, 8, 8)

    def layer(kind, i, o, k, **kw):
        conv = getattr(spconv, kind)(i, o, k, bias=False, **kw)
        return spconv.SparseSequential(
            conv, nn.BatchNorm1d(o, eps=1e-3, momentum=0.01), nn.ReLU(inplace=True)
        )

    class SparseEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse_shape = [12, 12, 11]
            self.conv_input = layer("SubMConv3d", 5, 4, 3, padding=1, indice_key="subm1")
            self.encoder_layers = spconv.SparseSequential()
            for i, c in enumerate(channels, start=1):
                blocks = [make_block(spconv, style, c) for _ in range(2)]
                for block in blocks:
                    block.conv1.indice_key = block.conv2.indice_key = f"subm{i}"
                if i < len(channels):
                    pad = (1, 1, 0) if i == 3 else 1
                    down = dict(stride=2, padding=pad, indice_key=f"spconv{i}")
                    blocks.append(layer("SparseConv3d", c, channels[i], 3, **down))
                stage = spconv.SparseSequential(*blocks)
                self.encoder_layers.add_module(f"encoder_layer{i}", stage)
            self.conv_out = layer(
                "SparseConv3d", 8, 8, (1, 1, 1), stride=(1, 1, 1), indice_key="spconv_down2"
            )

        def forward(self, voxel_features, coors, batch_size, **kwargs):
            coors = coors.int()
            x = spconv.SparseConvTensor(voxel_features, coors, self.sparse_shape, batch_size)
            x = self.conv_input(x)
            encode_features = []
            for encoder_layer in self.encoder_layers:
                x = encoder_layer(x)
                encode_features.append(x)
            out = self.conv_out(encode_features[-1])
            spatial_features = out.dense()
            n, c, h, w, d = spatial_features.shape
            spatial_features = spatial_features.permute(0, 1, 4, 2, 3).contiguous()
            return spatial_features.view(n, c * d, h, w)

    return SparseEncoder()


def names_and_classes(module):
    return {path: type(m).__name__ for path, m in module.named_modules()}


@pytest.mark.parametrize("with_inputs", [False, True])
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # spconv's dense()
def test_encoder(with_inputs, spconv, cloud, randomise, error_of):
    encoder = randomise(make_encoder(spconv))
    use_bevquant_kernels(encoder)
    x = cloud(5, (12, 12, 11), voxels=150)
    inputs = (x.features, x.indices, 2)
    result = fuse_model(encoder, inputs if with_inputs else None)
    assert result.skipped == ()
    assert with_inputs is False or result.untraced == {}
    assert len(result.fused) == 21
    assert error_of(result.model(*inputs), encoder(*inputs)) <= 1e-10
    expected = {"": "SparseEncoder", "encoder_layers": "SparseSequential"}
    for chain in ("conv_input", "conv_out"):
        kind = "SubMConv3d" if chain == "conv_input" else "SparseConv3d"
        expected |= {chain: "SparseSequential", f"{chain}.0": kind, f"{chain}.1": "ReLU"}
    for i in (1, 2, 3, 4):
        stage = f"encoder_layers.encoder_layer{i}"
        expected[stage] = "SparseSequential"
        for b in (0, 1):
            block = f"{stage}.{b}"
            expected |= {block: "SparseBasicBlock", f"{block}.relu": "ReLU"}
            expected |= {f"{block}.conv{k}": "SubMConv3d" for k in (1, 2)}
        if i < 4:
            expected |= {f"{stage}.2": "SparseSequential", f"{stage}.2.0": "SparseConv3d"}
            expected |= {f"{stage}.2.1": "ReLU"}
    assert names_and_classes(result.model) == expected
    assert not any(m.inplace for m in result.model.modules() if isinstance(m, nn.ReLU))
    assert len(result.not_inplace) == 13


def test_untraceable_encoder_keeps_the_rule(spconv, cloud, randomise, error_of):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = spconv.SparseSequential(spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4))
            self.block = make_block(spconv, "with_helper")
            self.conv, self.bn = spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.block(self.chain(x))
            if float(x.features.sum()) > 1e9:
                return x
            x = self.conv(x)
            return x.replace_feature(self.bn(x.features))

    model = randomise(Encoder())
    use_bevquant_kernels(model)
    x = cloud(4)
    result = fuse_model(model, x)
    assert [f.bn for f in result.fused] == ["chain.1", "block.bn1", "block.bn2"]
    assert "the model cannot be followed" in result.skipped[0].reason
    assert error_of(result.model(x).features, model(x).features) <= 1e-10


def test_members_called_by_their_index_stay_in_place(spconv, cloud, randomise, error_of):
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = spconv.SparseSequential(
                spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Tanh()
            )

        def forward(self, x):
            out = self.chain(x)
            return self.chain[3](out.features)

    model = randomise(Indexed())
    use_bevquant_kernels(model)
    x = cloud(4)
    result = fuse_model(model, x)
    assert [f.how for f in result.fused] == ["identity"]
    assert error_of(result.model(x), model(x)) <= 1e-10


def test_block_called_with_an_option_keeps_the_option(spconv, cloud, randomise, error_of):
    class Block(spconv.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x, scale=1.0):
            out = self.conv(x)
            return out.replace_feature(self.bn(out.features) * scale)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            return self.second(self.first(x, scale=2.0))

    model = randomise(Model())
    use_bevquant_kernels(model)
    x = cloud(4)
    result = fuse_model(model, x)
    assert [f.how for f in result.fused] == ["rebuilt", "rebuilt"]
    assert error_of(result.model(x).features, model(x).features) <= 1e-10


def test_two_readers_of_sparse_features(spconv, cloud, randomise):
    class Two(spconv.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x):
            out = self.conv(x)
            return out.replace_feature(self.bn(out.features) + out.features)

    model = randomise(Two())
    use_bevquant_kernels(model)
    result = fuse_model(model, cloud(4))
    assert result.skipped[0].reason == "conv's output is also read by add()"


def test_batch_norm_after_dense_is_not_the_convolutions(spconv, randomise):
    model = randomise(
        spconv.SparseSequential(spconv.SubMConv2d(4, 4, 3), spconv.ToDense(), nn.BatchNorm2d(4))
    )
    assert fuse_model(model).skipped[0].reason.startswith("follows 1 (ToDense)")


def test_a_sparse_forward_of_its_own_is_not_guessed_at(spconv, randomise):
    class Residual(spconv.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x):
            out = self.conv(x, x)
            return out.replace_feature(self.bn(out.features * 1))

    class Added(Residual):
        def forward(self, x, y):
            out = self.conv(x, y)
            return out.replace_feature(self.bn(out.features))

    for model in (Residual(), Added()):
        result = fuse_model(randomise(model))
        assert result.fused == ()
        assert "followed with example inputs only" in result.skipped[0].reason


def test_inplace_activation_that_is_seen_elsewhere_is_left(spconv, cloud, randomise):
    class Seen(spconv.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv, self.relu = spconv.SubMConv3d(4, 4, 3), nn.ReLU(inplace=True)
            self.plain = nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.conv(x)
            features = out.features
            activated = self.relu(features)
            return out.replace_feature(self.plain(activated - features))

    model = randomise(Seen())
    use_bevquant_kernels(model)
    x = cloud(4)
    result = fuse_model(model, x)
    assert result.not_inplace == ("plain",)
    assert torch.equal(result.model(x).features, model(x).features)


def test_fused_models_without_bevquant_kernels_say_what_to_do(spconv_numbers, cloud, randomise):
    spconv = spconv_numbers
    model = randomise(
        spconv.SparseSequential(spconv.SubMConv3d(4, 4, 3, bias=False), nn.BatchNorm1d(4))
    )
    with warnings.catch_warnings(), pytest.raises(ValueError, match="use_bevquant_kernels"):
        fuse_model(model, cloud(4))
    assert len(model) == 2


class MmcvConv(nn.Module):
    """A SubM convolution of mmcv's copy of spconv 1."""

    __module__, __qualname__ = "mmcv.ops.sparse_conv", "SparseConvolution"

    def __init__(self, kernel, key):
        super().__init__()
        self.ndim, self.in_channels, self.out_channels, self.groups = 3, 4, 4, 1
        self.kernel_size, self.stride, self.padding = list(kernel), [1] * 3, [1] * 3
        self.dilation, self.output_padding = [1] * 3, [0] * 3
        self.subm, self.inverse, self.transposed, self.indice_key = True, False, False, key
        self.weight, self.bias = nn.Parameter(torch.randn(*kernel, 4, 4)), None

    def forward(self, x):
        raise AssertionError("mmcv's kernel ran")


class Asymmetric(nn.Module):
    """Kernels of several sizes under one key, as in mmdetection3d's Cylinder3D."""

    def __init__(self):
        super().__init__()
        self.up = MmcvConv((1, 3, 3), "up")
        self.convs = nn.ModuleList([self.up, MmcvConv((3, 1, 3), "up"), MmcvConv((3, 3, 3), "up")])
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in self.convs)

    def forward(self, features, coords):
        x = OldTensor(features, coords.int(), (6, 7, 8), 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x)
            x.features = F.leaky_relu(norm(x.features))
        return x.features


@pytest.mark.parametrize("inplace", [False, True])
def test_a_kernel_along_another_ones_rulebook_becomes_its_own(inplace, cloud, randomise) -> None:
    net = randomise(Asymmetric())
    use_bevquant_kernels(net)
    x = cloud(4)
    inputs = (x.features, x.indices)
    before = net(*inputs)
    result = fuse_model(net, inputs, inplace=inplace)
    assert (result.model is net) is inplace
    assert set(result.plain) == {"convs.1", "convs.2"}
    assert [len(result.fused), result.skipped] == [3, ()]
    assert {conv.kernel_size for conv in map(result.model.get_submodule, result.plain)} == {
        (1, 3, 3)
    }
    torch.testing.assert_close(result.model(*inputs), before, rtol=1e-4, atol=1e-4)
    assert inplace or net.convs[2].weight.shape == (3, 3, 3, 4, 4)
    again = fuse_model(result.model, inputs)
    assert again.plain == ()

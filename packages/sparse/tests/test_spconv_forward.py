"""conv_forward on spconv modules and on modules and tensors that only look like them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from bevquant_sparse import (
    WeightLayout,
    adopt_kernels,
    borrowed_kernels,
    build_rulebook,
    conv_forward,
    get_weight,
    register_layout,
    sparse_conv,
    to_dense,
    use_bevquant_kernels,
)

SHAPE = (8, 9, 7)


class OldTensor:
    """A tensor as in spconv 1: no replace_feature, no shadow_copy."""

    def __init__(self, features, indices, spatial_shape, batch_size, grid=None):
        self.features, self.indices = features, indices
        self.spatial_shape, self.batch_size = spatial_shape, batch_size
        self.grid, self.indice_dict = grid, {}


class OldConv(nn.Module):
    """A convolution as in spconv 1: weight [k1, k2, k3, in, out]."""

    def __init__(self, channels_in, channels_out, kernel, stride=1, padding=0, **said):
        super().__init__()
        self.ndim, self.in_channels, self.out_channels = 3, channels_in, channels_out
        self.kernel_size, self.stride, self.padding = [kernel] * 3, [stride] * 3, [padding] * 3
        self.dilation, self.output_padding, self.groups = [1] * 3, [0] * 3, 1
        self.subm = self.inverse = self.transposed = False
        self.indice_key = None
        vars(self).update(said)
        self.conv1x1 = kernel == 1
        self.weight = nn.Parameter(torch.randn(*self.kernel_size, channels_in, channels_out))
        self.bias = nn.Parameter(torch.randn(channels_out))


register_layout(OldConv, WeightLayout.RSCK)


@pytest.fixture
def x(random_voxels):
    indices = random_voxels(0, 2, SHAPE, 200)
    return OldTensor(torch.randn(200, 4), indices, list(SHAPE), 2)


def dense_of(x):
    return to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (1, 2, 0)])
def test_strided_equals_dense(x, kernel, stride, padding):
    module = OldConv(4, 6, kernel, stride, padding)
    module.bias.data.zero_()
    out = conv_forward(module, x)
    weight = get_weight(module, WeightLayout.KCRS)
    expected = functional.conv3d(dense_of(x), weight, None, stride, padding)
    # Outputs without any input voxel are absent, hence zero in both.
    torch.testing.assert_close(dense_of(out), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [1, 3])
def test_subm_equals_dense_at_the_voxels(x, kernel):
    module = OldConv(4, 6, kernel, padding=kernel // 2, subm=True)
    out = conv_forward(module, x)
    weight = get_weight(module, WeightLayout.KCRS)
    dense = functional.conv3d(dense_of(x), weight, module.bias, padding=kernel // 2)
    batch, *place = x.indices.long().unbind(1)
    torch.testing.assert_close(out.features, dense[(batch, slice(None), *place)])
    assert out.indices is x.indices


def test_trap_04_pointwise_kernels_take_every_kernels_path(x):
    """Stride, padding and bias of a 1×1×1 convolution count, in spconv 1 as well."""
    module = OldConv(4, 6, 1, stride=2, padding=1)
    out = conv_forward(module, x)
    assert out.spatial_shape == [5, 6, 5]
    weight = get_weight(module, WeightLayout.KCRS)
    dense = functional.conv3d(dense_of(x), weight, module.bias, 2, 1)
    batch, *place = out.indices.long().unbind(1)
    torch.testing.assert_close(out.features, dense[(batch, slice(None), *place)])


def test_operands_can_be_replaced(x):
    module = OldConv(4, 6, 3, 2, 1)
    features, bias = torch.randn(200, 4), torch.randn(6)
    krsc = torch.randn(6, 3, 3, 3, 4)
    out = conv_forward(
        module, x, features=features, weight=krsc, layout=WeightLayout.KRSC, bias=bias
    )
    other = copy.deepcopy(module)
    other.weight.data.copy_(krsc.movedim(0, -1))
    other.bias.data.copy_(bias)
    replaced = OldTensor(features, x.indices, x.spatial_shape, 2)
    assert torch.equal(out.features, conv_forward(other, replaced).features)
    same_layout = conv_forward(other, x, weight=module.weight, bias=None)
    module.bias = None
    assert torch.equal(same_layout.features, conv_forward(module, x).features)


def test_nothing_is_mutated(x):
    before = (x.features.clone(), x.indices.clone(), list(x.spatial_shape), dict(x.indice_dict))
    module = OldConv(4, 6, 3, 2, 1, indice_key="down")
    out = conv_forward(module, x)
    assert torch.equal(x.features, before[0])
    assert torch.equal(x.indices, before[1])
    assert (x.spatial_shape, x.indice_dict) == before[2:]
    assert list(out.indice_dict) == ["down"]


def test_rulebooks_are_shared_by_key(x):
    first = OldConv(4, 4, 3, subm=True, indice_key="a")
    out = conv_forward(first, x)
    again = conv_forward(OldConv(4, 6, 3, subm=True, indice_key="a"), out)
    assert again.indice_dict["a"] is out.indice_dict["a"]


def test_what_a_module_does_not_say_is_no(x):
    """One without flags is a plain convolution, whatever key it shares."""
    out = conv_forward(OldConv(4, 4, 3, padding=1, indice_key="a"), x)
    bare = OldConv(4, 4, 3, padding=1, indice_key="a")
    for flag in ("inverse", "transposed", "subm"):
        delattr(bare, flag)
    wanted = conv_forward(OldConv(4, 4, 3, padding=1), x)
    again = conv_forward(bare, x)
    assert torch.equal(again.indices, wanted.indices)
    shared = OldTensor(torch.randn(200, 4), x.indices, list(SHAPE), 2)
    shared.indice_dict = out.indice_dict
    assert torch.equal(conv_forward(bare, shared).indices, wanted.indices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(x, dtype):
    module = OldConv(4, 6, 3, 2, 1)
    half = OldTensor(x.features.to(dtype), x.indices, x.spatial_shape, 2)
    out = conv_forward(module, half)
    wide = OldTensor(half.features.float(), x.indices, x.spatial_shape, 2)
    assert out.features.dtype == dtype
    assert torch.equal(out.features, conv_forward(module, wide).features.to(dtype))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("None_", lambda v: v),
        ("ReLU", functional.relu),
        ("Sigmoid", torch.sigmoid),
        ("LeakyReLU", lambda v: functional.leaky_relu(v, 0.3)),
    ],
)
def test_trap_17_fused_activations_are_executed(x, name, function):
    module = OldConv(4, 6, 3, 2, 1)
    plain = conv_forward(module, x).features
    module.act_type, module.act_alpha = SimpleNamespace(name=name), 0.3
    assert torch.equal(conv_forward(module, x).features, function(plain))
    addend = SimpleNamespace(features=torch.randn_like(plain))
    fused = conv_forward(module, x, add_input=addend).features
    assert torch.equal(fused, function(plain + addend.features))


def test_unknown_activation(x):
    module = OldConv(4, 6, 3, act_type=SimpleNamespace(name="Swish"), name="encoder.conv1")
    with pytest.raises(ValueError, match=r"encoder.conv1 \(OldConv\): act_type"):
        conv_forward(module, x)


def test_zero_voxels(x):
    empty = OldTensor(torch.zeros(0, 4), x.indices[:0], x.spatial_shape, 2)
    out = conv_forward(OldConv(4, 6, 3, 2, 1), empty)
    assert out.features.shape == (0, 6)
    assert out.spatial_shape == [4, 5, 4]


def test_inverse_gives_back_the_input_coordinates(x):
    down = conv_forward(OldConv(4, 6, 3, 2, 1, indice_key="d"), x)
    up = conv_forward(OldConv(6, 4, 3, inverse=True, indice_key="d"), down)
    assert torch.equal(up.indices, x.indices)
    assert up.spatial_shape == list(SHAPE)


def test_trap_04_pointwise_inverse_undoes_its_stride(x):
    down = conv_forward(OldConv(4, 6, 1, 2, 0, indice_key="d"), x)
    up = conv_forward(OldConv(6, 4, 1, inverse=True, indice_key="d"), down)
    assert torch.equal(up.indices, x.indices)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kernel": 5}, r"'k'.*kernel_size=\(3, 3, 3\).*kernel_size=\(5, 5, 5\)"),
        ({"kernel": 3, "dilation": [2] * 3}, r"dilation=\(2, 2, 2\) where \(1, 1, 1\)"),
        ({"kernel": 3, "subm": False, "stride": 2}, "subm=False where True"),
        ({"kernel": 3, "inverse": True, "subm": False}, "belongs to a SubM convolution"),
    ],
)
def test_conflicting_use_of_a_key(x, said, words):
    out = conv_forward(OldConv(4, 4, 3, subm=True, indice_key="k"), x)
    said = {"subm": True} | said
    module = OldConv(4, 4, said.pop("kernel"), said.pop("stride", 1), indice_key="k", **said)
    with pytest.raises(ValueError, match=words):
        conv_forward(module, out)


class MmcvConv(OldConv):
    """mmcv's copy of spconv 1."""

    __module__, __qualname__ = "mmcv.ops.sparse_conv", "SparseConvolution"

    def forward(self, x):
        raise AssertionError("mmcv's kernel ran")


def subm(kernel, dilation=1, key="k"):
    said = {"kernel_size": list(kernel), "dilation": [dilation] * 3}
    return MmcvConv(4, 4, 3, subm=True, indice_key=key, **said)


@pytest.mark.parametrize(("kernel", "dilation"), [((3, 1, 3), 1), ((3, 3, 3), 2), ((1, 3, 3), 2)])
def test_kernels_of_one_key_run_along_the_first_one(x, caplog, kernel, dilation):
    """Element k of the weight meets the neighbour k of the first kernel; the rest is not read."""
    model = nn.Sequential(subm((1, 3, 3)), subm(kernel, dilation))
    with torch.no_grad():
        expected = conv_forward(model[0], x).features
    rulebook = build_rulebook(x.indices, SHAPE, (1, 3, 3), subm=True, batch_size=2)
    expected = sum(
        expected[neighbour.clamp(min=0).long()] * (neighbour >= 0)[:, None] @ weight
        for neighbour, weight in zip(
            rulebook.neighbours.unbind(1), model[1].weight.flatten(0, 2), strict=False
        )
    )
    expected += model[1].bias
    use_bevquant_kernels(model)
    assert "indice_key='k' is shared by kernels of different sizes" in caplog.text
    assert "0, 1" in caplog.text
    out = model(x)
    torch.testing.assert_close(out.features, expected)
    borrowed = borrowed_kernels(model, lambda: model(x))
    assert borrowed == {"1": ((1, 3, 3), (1, 1, 1))}
    adopt_kernels(model, borrowed)
    assert model[1].weight.shape == (1, 3, 3, 4, 4)
    assert torch.equal(model(x).features, out.features)
    assert borrowed_kernels(model, lambda: model(x)) == {}


def test_another_kernel_along_spconvs_pairs(x, spconv_numbers):
    """spconv multiplies a weight of 3×1×3 along its own pairs of 1×3×3."""
    from spconv.core import ConvAlgo
    from spconv.pytorch import functional as spconv_functional

    _, table, counts = spconv_numbers.ops.get_indice_pairs(
        x.indices, 2, list(SHAPE), ConvAlgo.Native, [1, 3, 3], [1] * 3, [0] * 3, [1] * 3, [0] * 3,
        subm=True,
    )  # fmt: skip
    first, second = subm((1, 3, 3)), subm((3, 1, 3))
    with torch.no_grad():
        middle = conv_forward(first, x)
        krsc = second.weight.movedim(-1, 0).contiguous()
        expected = spconv_functional.indice_subm_conv(
            middle.features, krsc, table, counts, 200, ConvAlgo.Native
        )
        found = conv_forward(second, middle).features - second.bias
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_kernels_that_spconv_1_cannot_share(x):
    small, large = subm((1, 3, 3)), subm((3, 3, 3))
    with pytest.raises(ValueError, match=r"kernel_size=\(1, 3, 3\) where \(3, 3, 3\) is expected"):
        conv_forward(small, conv_forward(large, x))
    model = nn.ModuleList([subm((1, 3, 3)), subm((3, 1, 3))])
    use_bevquant_kernels(model)

    def alone_and_behind():
        model[1](model[0](x))
        model[1](OldTensor(x.features, x.indices, x.spatial_shape, 2))

    with pytest.raises(ValueError, match=r"1 runs along .* sizes \(1, 3, 3\) and \(3, 1, 3\)"):
        borrowed_kernels(model, alone_and_behind)


def test_key_of_other_coordinates(x):
    out = conv_forward(OldConv(4, 4, 3, subm=True, indice_key="k"), x)
    module = OldConv(4, 4, 3, subm=True, indice_key="k")
    out.indices = out.indices.flip(0)
    with pytest.raises(ValueError, match="the coordinates differ"):
        conv_forward(module, out)
    out.indices = out.indices[1:]
    out.features = out.features[1:]
    with pytest.raises(ValueError, match="voxels=199 where 200"):
        conv_forward(module, out)
    out.spatial_shape = [9, 9, 9]
    with pytest.raises(ValueError, match=r"spatial_shape=\(9, 9, 9\)"):
        conv_forward(module, out)


def test_inverse_without_its_convolution(x):
    module = OldConv(4, 4, 3, inverse=True, indice_key="down2", _sparse_unique_name="up.0")
    with pytest.raises(ValueError, match=r"up.0 \(OldConv\): no rulebook under.*'down2'"):
        conv_forward(module, x)


def test_refusals_name_the_module(x):
    with pytest.raises(ValueError, match=r"OldConv: expected features \[rows, 5\]"):
        conv_forward(OldConv(5, 4, 3), x)
    with pytest.raises(TypeError, match="OldConv: expected floating-point features"):
        conv_forward(OldConv(4, 4, 3), x, features=x.features.int())
    x.indices = torch.cat((x.indices[:-1], x.indices[:1]))
    with pytest.raises(ValueError, match=r"OldConv: indices\[199\]"):
        conv_forward(OldConv(4, 4, 3), x)


def test_use_bevquant_kernels_on_old_modules(x, caplog):
    caplog.set_level("WARNING", logger="bevquant_sparse")

    class Stock(OldConv):
        def forward(self, x):
            raise AssertionError("the old kernel ran")

    class Own(Stock):
        def forward(self, x):
            return super().forward(x)

    register_layout(Stock, WeightLayout.RSCK)
    model = nn.ModuleDict({"a": Stock(4, 4, 3, subm=True), "b": Own(4, 4, 3, subm=True)})
    assert use_bevquant_kernels(model) == ["a"]
    assert "b: " in caplog.text
    assert torch.equal(model["a"](x).features, conv_forward(model["a"], x).features)


@pytest.mark.parametrize("subm", [False, True])
def test_a_pointwise_layer_searches_for_nothing(x, monkeypatch, subm):
    """Its rulebook is written down; results are those of the one that would be built."""
    layer = OldConv(4, 4, 1, subm=subm)
    shape = tuple(int(size) for size in x.spatial_shape)
    searched = build_rulebook(x.indices, shape, 1, subm=True, batch_size=x.batch_size)
    x.features.requires_grad_()
    leaves = x.features, layer.weight, layer.bias
    expected = sparse_conv(*leaves, searched, layout=WeightLayout.RSCK)
    monkeypatch.setattr(
        "bevquant_sparse._rulebook_cache.build_from_geometry", lambda *_: pytest.fail("a search")
    )
    out = conv_forward(layer, x)
    assert torch.equal(out.features, expected)
    assert torch.equal(out.indices, x.indices)
    assert (tuple(out.spatial_shape), out.batch_size) == (shape, x.batch_size)
    made, wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (out.features, expected))
    assert all(map(torch.equal, made, wanted))

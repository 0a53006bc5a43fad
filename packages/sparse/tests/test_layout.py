"""Weight layouts: permutations, and what a module's class says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bevquant_sparse import (
    WeightLayout,
    get_weight,
    is_sparse_conv,
    layout_of,
    library_name,
    permute_weight,
    register_layout,
    set_weight,
)

kernels = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
layouts = st.sampled_from(list(WeightLayout))


def shape_in(layout, kernel, channels_in, channels_out):
    return {
        WeightLayout.RSCK: (*kernel, channels_in, channels_out),
        WeightLayout.KRSC: (channels_out, *kernel, channels_in),
        WeightLayout.KCRS: (channels_out, channels_in, *kernel),
        WeightLayout.VCK: (math.prod(kernel), channels_in, channels_out),
    }[layout]


@settings(deadline=None)
@given(kernels, st.integers(1, 4), st.integers(1, 4), layouts, layouts, layouts)
def test_permutations_compose(kernel, channels_in, channels_out, src, through, dst):
    shape = shape_in(src, kernel, channels_in, channels_out)
    weight = torch.arange(math.prod(shape)).view(shape)
    direct = permute_weight(weight, src, dst, kernel_size=kernel)
    assert tuple(direct.shape) == shape_in(dst, kernel, channels_in, channels_out)
    assert direct.is_contiguous()
    between = permute_weight(weight, src, through, kernel_size=kernel)
    assert torch.equal(permute_weight(between, through, dst, kernel_size=kernel), direct)
    assert torch.equal(permute_weight(direct, dst, src, kernel_size=kernel), weight)


def test_every_element_lands_where_the_axes_say():
    weight = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)  # KRSC: out, k1, k2, in
    rsck = permute_weight(weight, WeightLayout.KRSC, WeightLayout.RSCK)
    kcrs = permute_weight(weight, WeightLayout.KRSC, WeightLayout.KCRS)
    vck = permute_weight(weight, WeightLayout.KRSC, WeightLayout.VCK)
    for o, a, b, c in torch.cartesian_prod(*map(torch.arange, (2, 3, 4, 5))).tolist():
        value = weight[o, a, b, c]
        assert rsck[a, b, c, o] == kcrs[o, c, a, b] == vck[a * 4 + b, c, o] == value


def test_permute_weight_is_differentiable():
    weight = torch.randn(2, 3, 3, 4, requires_grad=True)
    out = permute_weight(weight, WeightLayout.KRSC, WeightLayout.RSCK)
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    assert weight.grad[1, 2, 0, 3] == ((2 * 3 + 0) * 4 + 3) * 2 + 1


@pytest.mark.parametrize("wrong", [None, 3, "KRSC"])
def test_permute_weight_names_what_is_of_another_type(wrong):
    weight, layout = torch.zeros(2, 3, 3, 3, 2), WeightLayout.KRSC
    with pytest.raises(TypeError, match="weight: expected a tensor"):
        permute_weight(wrong, layout, WeightLayout.RSCK)
    with pytest.raises(TypeError, match=r"src=.*: expected a WeightLayout"):
        permute_weight(weight, wrong, layout)
    with pytest.raises(TypeError, match=r"dst=.*: expected a WeightLayout"):
        permute_weight(weight, layout, wrong)


def test_vck_needs_the_kernel_size():
    with pytest.raises(ValueError, match="from VCK to RSCK needs kernel_size"):
        permute_weight(torch.zeros(27, 4, 8), WeightLayout.VCK, WeightLayout.RSCK)
    with pytest.raises(ValueError, match=r"kernel_size=\(3, 3\) disagrees"):
        permute_weight(
            torch.zeros(27, 4, 8), WeightLayout.VCK, WeightLayout.RSCK, kernel_size=(3, 3)
        )


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 2), WeightLayout.RSCK), ((2,) * 7, WeightLayout.KRSC), ((2,) * 4, WeightLayout.VCK)],
)
def test_impossible_ranks(shape, layout):
    with pytest.raises(ValueError, match="cannot be"):
        permute_weight(torch.zeros(shape), layout, WeightLayout.KCRS)


def make_class(qualified, base=nn.Module):
    module, _, name = qualified.rpartition(".")
    return type(name, (base,), {"__module__": module, "__qualname__": name})


@pytest.mark.parametrize(
    ("qualified", "layout"),
    [
        ("spconv.pytorch.conv.SparseConvolution", WeightLayout.KRSC),
        ("spconv.conv.SparseConvolution", WeightLayout.RSCK),
        ("mmdet3d.ops.spconv.conv.SparseConvolution", WeightLayout.RSCK),
        ("mmcv.ops.sparse_conv.SparseConvolution", WeightLayout.RSCK),
        ("torchsparse.nn.modules.conv.Conv3d", WeightLayout.VCK),
        ("MinkowskiEngine.MinkowskiConvolution.MinkowskiConvolutionBase", WeightLayout.VCK),
    ],
)
def test_trap_06_layout_comes_from_the_class(qualified, layout):
    """A 3×3×3×3×3 weight fits every layout: only the class can tell."""
    base = make_class(qualified)
    for cls in (base, type("SubMConv3d", (base,), {})):
        module = cls()
        module.weight = nn.Parameter(torch.randn(3, 3, 3, 3, 3))
        module.kernel_size = (3, 3, 3) if layout is not WeightLayout.VCK else 3
        assert is_sparse_conv(module)
        assert layout_of(module) is layout


def test_trap_06_unknown_classes_are_refused_until_said():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 3, 3, 3))

    module = type("Child", (Fork,), {})()
    assert not is_sparse_conv(module)
    with pytest.raises(TypeError, match=r"Child is unknown.*register_layout"):
        layout_of(module)
    register_layout(Fork, WeightLayout.RSCK)
    assert is_sparse_conv(module)
    assert layout_of(module) is WeightLayout.RSCK
    register_layout(f"{Fork.__module__}.{Fork.__qualname__}", WeightLayout.KRSC)
    assert layout_of(module) is WeightLayout.RSCK  # the class itself goes before its name
    module.weight_layout = WeightLayout.KCRS
    assert layout_of(module) is WeightLayout.KCRS


def test_register_by_name():
    register_layout("my_fork.conv.Conv", WeightLayout.VCK)
    assert layout_of(make_class("my_fork.conv.Conv")()) is WeightLayout.VCK
    with pytest.raises(TypeError, match="register_layout"):
        register_layout(nn.ReLU(), WeightLayout.VCK)
    with pytest.raises(TypeError, match="register_layout"):
        register_layout("a.b", "KRSC")


def test_dense_modules():
    for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        module = type("Own", (cls,), {})(2, 3, 3)
        assert layout_of(module) is WeightLayout.KCRS
        assert not is_sparse_conv(module)
    with pytest.raises(TypeError, match="none of the layouts"):
        layout_of(nn.ConvTranspose2d(2, 3, 3))


@pytest.mark.parametrize("layout", list(WeightLayout))
def test_get_and_set_weight_are_inverse(layout, spconv):
    for module in (
        spconv.SubMConv3d(4, 6, 3, bias=False),
        spconv.SparseConv2d(4, 6, (3, 2), bias=False),
        spconv.SubMConv3d(4, 6, 1, bias=False),
        nn.Conv2d(4, 6, 3),
    ):
        module.weight.requires_grad_(False)
        before = module.weight.detach().clone()
        weight = get_weight(module, layout)
        set_weight(module, torch.zeros_like(weight), layout)
        assert module.weight.abs().sum() == 0
        set_weight(module, weight.double(), layout)
        assert torch.equal(module.weight, before)
        assert isinstance(module.weight, nn.Parameter)
        assert not module.weight.requires_grad
        with pytest.raises(ValueError, match="expected a weight of shape"):
            set_weight(module, torch.cat((weight, weight)), layout)


def test_get_weight_reaches_the_parameter(spconv):
    module = spconv.SubMConv3d(4, 6, 3, bias=False)
    get_weight(module, WeightLayout.RSCK)[0, 1, 2, 3, 5].backward()
    assert module.weight.grad[5, 0, 1, 2, 3] == 1
    assert module.weight.grad.sum() == 1


@pytest.mark.parametrize("channels", [(4, 6), (5, 5)])
def test_trap_04_pointwise_weights_are_read_as_spconv_reads_them(channels, spconv):
    module = spconv.SubMConv3d(*channels, 1, bias=False)
    matrix = get_weight(module, WeightLayout.VCK)[0]
    assert torch.equal(matrix, module.weight.view(*channels))
    assert not torch.equal(matrix, module.weight.view(channels[1], channels[0]).T)
    # A stride keeps the natural reading: spconv then runs its general kernel.
    strided = spconv.SparseConv3d(*channels, 1, 2, bias=False)
    matrix = get_weight(strided, WeightLayout.VCK)[0]
    assert torch.equal(matrix, strided.weight.view(channels[1], channels[0]).T)


def test_kernel_attribute_of_other_libraries():
    cls = make_class("torchsparse.nn.modules.conv.Conv3d")
    for size, shape in ((3, (27, 2, 4)), (1, (2, 4))):
        module = cls()
        module.kernel_size = size
        module.kernel = nn.Parameter(torch.randn(shape))
        weight = get_weight(module, WeightLayout.KRSC)
        assert tuple(weight.shape) == (4, size, size, size, 2)
        set_weight(module, weight * 2, WeightLayout.KRSC)
        assert tuple(module.kernel.shape) == shape
        assert torch.equal(get_weight(module, WeightLayout.KRSC), weight * 2)


@pytest.mark.parametrize("package", ["bevfusion.ops", "plugin.models.ops", "mmdet3d.ops"])
def test_spconv_1_inside_of_another_package(package) -> None:
    made = type("SparseConvolution", (nn.Module,), {"__module__": f"{package}.spconv.conv"})
    derived = type("SubMConv3d", (made,), {"__module__": f"{package}.spconv.conv"})
    assert layout_of(derived()) is WeightLayout.RSCK
    other = type("SparseConvolution", (nn.Module,), {"__module__": f"{package}.layers.conv"})
    with pytest.raises(TypeError, match="unknown"):
        layout_of(other())


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        ("spconv.pytorch.conv", WeightLayout.KRSC),
        ("plugin.ops.spconv.pytorch.conv", WeightLayout.KRSC),
        ("spconv.conv", WeightLayout.RSCK),
        ("plugin.ops.spconv.conv", WeightLayout.RSCK),
        ("mmcv.ops.sparse_conv", WeightLayout.RSCK),
        ("plugin.spconv.other.conv", None),
        ("spconvolution.conv", None),
    ],
)
def test_spconv_is_known_wherever_it_was_copied_to(module, layout):
    conv = type("SparseConvolution", (nn.Module,), {"__module__": module})
    assert is_sparse_conv(conv()) is (layout is not None)
    if layout is not None:
        assert layout_of(conv()) is layout
        assert library_name(conv).startswith("spconv.")

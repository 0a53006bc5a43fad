"""QuantSparseConvolution against dense convolutions of fake-quantized operands in float64."""

from __future__ import annotations

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import QuantDescriptor
from bevquant_sparse import WeightLayout, register_layout

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SHAPES = {1: (40,), 2: (12, 11), 3: (9, 8, 7), 4: (5, 4, 6, 5)}


def _quantized(values, amax, reference):
    return torch.from_numpy(reference(values.detach().numpy(), amax))


def _krsc_weight(module, reference):
    weight = module.weight.detach()
    amax = weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True).numpy()
    return _quantized(weight, amax, reference).movedim(-1, 1)  # [out, in, *kernel]


def _dense(indices, features, shape, batch):
    grid = torch.zeros(batch, *shape, features.shape[1], dtype=features.dtype)
    grid[tuple(indices.long().T)] = features
    return grid.movedim(-1, 1)


def _gather(grid, indices):
    return grid.movedim(1, -1)[tuple(indices.long().T)]


def _expected_input(x, reference):
    features = _quantized(x.features, x.features.abs().max().item(), reference)
    return _dense(x.indices, features, x.spatial_shape, x.batch_size)


def _close(got, expected):
    torch.testing.assert_close(got.detach().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_submanifold(rank, dilation, spconv, cloud, reference):
    conv = getattr(spconv, f"SubMConv{rank}d")(4, 6, 3, padding=dilation, dilation=dilation)
    nn.init.normal_(conv.bias)
    x = cloud(4, SHAPES[rank], share=0.3)
    expected = CONV[rank](
        _expected_input(x, reference),
        _krsc_weight(conv, reference),
        conv.bias.detach().double(),
        padding=dilation,
        dilation=dilation,
    )
    out = qnn.QuantSparseConvolution(conv)(x)
    assert torch.equal(out.indices, x.indices)
    _close(out.features, _gather(expected, x.indices))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_strided(rank, spconv, cloud, reference):
    conv = getattr(spconv, f"SparseConv{rank}d")(3, 5, 3, stride=2, padding=1, bias=False)
    x = cloud(3, SHAPES[rank], share=0.2)
    expected = CONV[rank](
        _expected_input(x, reference), _krsc_weight(conv, reference), stride=2, padding=1
    )
    out = qnn.QuantSparseConvolution(conv)(x)
    assert list(out.spatial_shape) == list(expected.shape[2:])
    _close(_dense(out.indices, out.features.double(), out.spatial_shape, 2), expected)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed(rank, spconv, cloud, reference):
    conv = getattr(spconv, f"SparseConvTranspose{rank}d")(3, 5, 3, stride=2, padding=1, bias=False)
    x = cloud(3, SHAPES[rank], share=0.2)
    expected = TRANSPOSED[rank](
        _expected_input(x, reference),
        _krsc_weight(conv, reference).transpose(0, 1),
        stride=2,
        padding=1,
    )
    out = qnn.QuantSparseConvolution(conv)(x)
    assert list(out.spatial_shape) == list(expected.shape[2:])
    _close(_dense(out.indices, out.features.double(), out.spatial_shape, 2), expected)


def test_inverse_returns_to_the_coordinates_before_the_stride(spconv, cloud, reference):
    down = spconv.SparseConv3d(3, 4, 3, stride=2, padding=1, bias=False, indice_key="down")
    up = spconv.SparseInverseConv3d(4, 2, 3, indice_key="down", bias=False)
    x = cloud(3)
    middle = qnn.QuantSparseConvolution(down)(x)
    expected = TRANSPOSED[3](
        _expected_input(middle, reference),
        _krsc_weight(up, reference).transpose(0, 1),
        stride=2,
        padding=1,
        output_padding=[(s - 1) % 2 for s in x.spatial_shape],
    )
    out = qnn.QuantSparseConvolution(up)(middle)
    rows = {tuple(row): i for i, row in enumerate(out.indices.tolist())}
    order = [rows[tuple(row)] for row in x.indices.tolist()]
    assert len(rows) == len(x.indices)
    _close(out.features[order], _gather(expected, x.indices))


@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d"])
def test_one_by_one_reads_memory_as_spconv_does(kind, spconv, cloud, reference):
    conv = getattr(spconv, kind)(4, 6, 1, bias=False)
    nn.init.normal_(conv.weight)
    x = cloud(4)
    matrix = conv.weight.detach().view(4, 6)
    matrix = _quantized(matrix, matrix.abs().amax(0, keepdim=True).numpy(), reference)
    features = _quantized(x.features, x.features.abs().max().item(), reference)
    out = qnn.QuantSparseConvolution(conv)(x)
    rows = {tuple(row): i for i, row in enumerate(out.indices.tolist())}
    order = [rows[tuple(row)] for row in x.indices.tolist()]
    _close(out.features[order], features @ matrix)


def test_rank_four(spconv, cloud, reference):
    conv = spconv.SubMConv4d(2, 3, 3, bias=False)
    x = cloud(2, SHAPES[4], batch=1, share=0.3)
    out = qnn.QuantSparseConvolution(conv)(x)
    features = _quantized(x.features, x.features.abs().max().item(), reference)
    weight = _krsc_weight(conv, reference)
    rows = {tuple(row): i for i, row in enumerate(x.indices.tolist())}
    expected = torch.zeros(len(rows), 3, dtype=torch.float64)
    for coordinate, row in rows.items():
        for offset in np.ndindex(3, 3, 3, 3):
            near = (
                coordinate[0],
                *(c + o - 1 for c, o in zip(coordinate[1:], offset, strict=True)),
            )
            if near in rows:
                expected[row] += weight[(slice(None), slice(None), *offset)] @ features[rows[near]]
    _close(out.features, expected)


class _OldSparseModule(nn.Module):
    """Named as in spconv 1: SparseSequential recognises its members by this base."""


class _OldConv(_OldSparseModule):
    """A submanifold convolution in the manner of spconv 1: RSCK weight, no replace_feature."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.ndim, self.in_channels, self.out_channels = 3, inputs, outputs
        self.kernel_size, self.stride, self.dilation = [3] * 3, [1] * 3, [1] * 3
        self.padding, self.output_padding = [1] * 3, [0] * 3
        self.conv1x1, self.transposed, self.inverse, self.subm = False, False, False, True
        self.indice_key, self.fused_bn = "subm", False  # one group, without saying so
        self.weight = nn.Parameter(torch.randn(3, 3, 3, inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))


_OldSparseModule.__name__ = "SparseModule"


class _OldTensor:
    def __init__(self, features, indices, spatial_shape, batch_size, grid=None):
        self.features, self.indices, self.spatial_shape = features, indices, spatial_shape
        self.batch_size, self.grid, self.indice_dict = batch_size, grid, {}

    def find_indice_pair(self, key):
        return self.indice_dict.get(key)


@pytest.fixture
def old_conv():
    register_layout(_OldConv, WeightLayout.RSCK)
    return _OldConv(4, 6)


def test_registered_spconv1_module_keeps_rsck_and_axis_4(old_conv, cloud, reference):
    made = cloud(4)
    x = _OldTensor(made.features, made.indices, made.spatial_shape, made.batch_size)
    module = qnn.QuantSparseConvolution(old_conv)
    assert module.weight_quantizer.axis == 4
    assert "axis=4 amax=dynamic" in repr(module)
    assert isinstance(module, _OldSparseModule)
    weight = old_conv.weight.detach()
    amax = weight.abs().amax((0, 1, 2, 3), keepdim=True).numpy()
    weight = _quantized(weight, amax, reference).permute(4, 3, 0, 1, 2)
    dense = _expected_input(x, reference)
    expected = F.conv3d(dense, weight, old_conv.bias.detach().double(), padding=1)
    out = module(x)
    assert isinstance(out, _OldTensor)
    _close(out.features, _gather(expected, x.indices))


def test_takes_over_everything_but_the_forward(spconv):
    conv = spconv.SparseConv3d(3, 4, 3, stride=2, padding=1, indice_key="down").eval()
    module = qnn.QuantSparseConvolution.from_float(conv)
    assert module.weight is conv.weight
    assert module.bias is conv.bias
    assert not module.training
    names = "ndim in_channels kernel_size stride padding dilation output_padding subm transposed "
    for name in (names + "inverse indice_key").split():
        assert getattr(module, name) == getattr(conv, name)
    assert not [name for name in conv._modules if "quantizer" in name]


def test_prints_its_quantizers_only(spconv):
    module = qnn.QuantSparseConvolution(
        spconv.SubMConv3d(3, 4, 3), quant_desc_input=QuantDescriptor(calib_method="histogram")
    )
    assert repr(module).splitlines() == [
        "QuantSparseConvolution(",
        "  (_input_quantizer): TensorQuantizer(8bit fake per-tensor amax=dynamic "
        "calibrator=HistogramCalibrator scale=1.0 quant)",
        "  (_weight_quantizer): TensorQuantizer(8bit fake axis=0 amax=dynamic "
        "calibrator=MaxCalibrator scale=1.0 quant)",
        ")",
    ]


def test_sparse_sequential_hands_it_sparse_tensors(spconv, cloud):
    chain = spconv.SparseSequential(
        qnn.QuantSparseConvolution(spconv.SubMConv3d(4, 4, 3)), nn.ReLU()
    )
    out = chain(cloud(4))
    assert isinstance(out, spconv.SparseConvTensor)
    assert out.features.min().item() == 0


def test_deepcopy_and_state_dict(spconv, cloud):
    module = qnn.QuantSparseConvolution(spconv.SubMConv3d(4, 4, 3, bias=False))
    x = cloud(4)
    module.input_quantizer.amax = 2.0
    twin = copy.deepcopy(module)
    assert twin.weight is not module.weight
    assert type(twin) is type(module)
    assert torch.equal(twin(x).features, module(x).features)
    other = qnn.QuantSparseConvolution(spconv.SubMConv3d(4, 4, 3, bias=False))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x).features, module(x).features)


def test_pickles_and_types_are_equal(spconv, cloud):
    a, b = (qnn.QuantSparseConvolution(spconv.SubMConv3d(4, 4, 3)) for _ in range(2))
    assert type(a) is type(b)
    x = cloud(4)
    assert torch.equal(pickle.loads(pickle.dumps(a))(x).features, a(x).features)


def test_convolutions_that_cannot_be_taken_over_are_reported(spconv):
    class Scaled(spconv.SubMConv3d):
        def forward(self, x):
            return super().forward(x.replace_feature(x.features * 2))

    class KernelConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(27, 2, 2))

    register_layout(KernelConv, WeightLayout.VCK)
    layers = (Scaled(2, 2, 3), KernelConv(), spconv.SparseMaxPool3d(2), spconv.AddTable())
    result = qnn.quantize_model(nn.Sequential(*layers))
    reasons = {item.path: item.reason for item in result.skipped}
    assert result.quantized == ()
    assert "pooling stays float" in reasons["2"]
    assert "its inputs are unknown without example inputs" in reasons["3"]
    about = [item.reason for item in result.skipped if item.path == "0"]
    assert any("Scaled has a forward of its own" in reason for reason in about)
    assert "KernelConv is no spconv-style module" in reasons["1"]


def test_vck_weights_have_one_range_on_the_last_axis(cloud, reference):
    class FlatConv(_OldConv):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs)
            self.weight = nn.Parameter(self.weight.detach().reshape(27, inputs, outputs))

    register_layout(FlatConv, WeightLayout.VCK)
    conv, x = FlatConv(4, 6), cloud(4)
    module = qnn.QuantSparseConvolution(conv)
    assert module.weight_quantizer.axis == 2
    weight = conv.weight.detach()
    weight = _quantized(weight, weight.abs().amax((0, 1), keepdim=True).numpy(), reference)
    weight = weight.reshape(3, 3, 3, 4, 6).permute(4, 3, 0, 1, 2)
    dense = _expected_input(x, reference)
    expected = F.conv3d(dense, weight, conv.bias.detach().double(), padding=1)
    _close(module(x).features, _gather(expected, x.indices))


def test_other_modules_are_refused_with_advice(spconv):
    with pytest.raises(TypeError, match=r"expects a sparse conv.*got Conv3d.*register_layout"):
        qnn.QuantSparseConvolution(nn.Conv3d(1, 1, 3))


def test_importing_the_package_does_not_import_spconv():
    import subprocess

    code = (
        "import atexit, gc, sys; gc.disable(); atexit.register(gc.freeze); "  # a quarter of it all
        "import bevquant_qnn; assert 'spconv' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_trap_15_gradients_reach_the_optimizers_own_parameter(spconv, cloud):
    conv = spconv.SubMConv3d(4, 4, 3, bias=True)
    optimizer = torch.optim.Adam(conv.parameters(), 0.05)
    module = qnn.QuantSparseConvolution(conv)
    before, x = conv.weight.detach().clone(), cloud(4)
    goal = torch.randn(len(x.features), 4)
    losses = []
    for _ in range(8):
        loss = (module(x).features - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert module.weight is conv.weight
    assert not torch.equal(conv.weight, before)
    assert losses[-1] < 0.9 * losses[0]
    # The float weight is not overwritten by its quantized form.
    assert not torch.equal(module.quantized_weight(), conv.weight)


def test_trap_16_input_is_never_changed(spconv, cloud):
    x = cloud(4)
    features, copied, keys = x.features, x.features.clone(), dict(x.indice_dict)
    module = qnn.QuantSparseConvolution(spconv.SubMConv3d(4, 4, 3, indice_key="k"))
    out = module(x)
    assert x.features is features
    assert torch.equal(x.features, copied)
    assert x.indice_dict == keys
    assert out.indice_dict is not x.indice_dict


@pytest.mark.parametrize("name", ["ReLU", "LeakyReLU", "Sigmoid"])
def test_trap_17_fused_activation_is_executed(name, spconv, cloud):
    conv = spconv.SubMConv3d(4, 4, 3)
    plain = qnn.QuantSparseConvolution(copy.deepcopy(conv))
    conv.act_type, conv.act_alpha = getattr(type(conv.act_type), name), 0.1
    x = cloud(4)
    before = plain(x).features
    expected = {"ReLU": F.relu, "LeakyReLU": lambda v: F.leaky_relu(v, 0.1), "Sigmoid": F.sigmoid}
    assert (before < 0).any()
    assert torch.equal(qnn.QuantSparseConvolution(conv)(x).features, expected[name](before))


def test_trap_20_forward_and_backward_are_our_own_and_repeatable(spconv, cloud):
    module = qnn.QuantSparseConvolution(spconv.SparseConv3d(4, 4, 3, 2, padding=1))
    x = cloud(4)
    runs = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        module.zero_grad()
        out = module(x).features
        out.square().sum().backward()
        runs.append((out.detach(), module.weight.grad.clone()))
    for out, gradient in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(gradient, runs[0][1])

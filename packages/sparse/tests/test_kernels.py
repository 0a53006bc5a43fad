"""Whole spconv models on this package's kernels, against spconv on one thread."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from bevquant_sparse import (
    Rulebook,
    WeightLayout,
    conv_forward,
    get_weight,
    is_sparse_conv,
    use_bevquant_kernels,
)

SHAPE = [16, 15, 14]


@pytest.fixture
def block_class(spconv):
    class Block(spconv.SparseModule):
        """A residual block as in mmdet3d's SparseBasicBlock."""

        def __init__(self, channels, key):
            super().__init__()
            self.conv1 = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key=key)
            self.bn1 = nn.BatchNorm1d(channels)
            self.conv2 = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key=key)
            self.relu = nn.ReLU()

        def forward(self, x):
            out = self.conv1(x)
            out = out.replace_feature(self.relu(self.bn1(out.features)))
            out = self.conv2(out)
            return out.replace_feature(self.relu(out.features + x.features))

    return Block


@pytest.fixture
def model(spconv, block_class):
    torch.manual_seed(0)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3, bias=False, indice_key="s1"),
        nn.ReLU(),
        block_class(8, "s1"),
        spconv.SubMConv3d(8, 6, 1, bias=False),
        spconv.SparseConv3d(6, 6, 1, bias=False),
        spconv.SparseConv3d(6, 12, 3, 2, (1, 1, 0), bias=False, indice_key="d1"),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        spconv.SparseMaxPool3d(2, 2, indice_key="d2"),
        block_class(12, "s2"),
        spconv.SparseInverseConv3d(12, 12, 2, indice_key="d2", bias=False),
        spconv.SparseInverseConv3d(12, 8, 3, indice_key="d1", bias=False),
        spconv.SparseConv3d(8, 8, (1, 1, 3), (1, 1, 2), dilation=(1, 1, 2), bias=False),
        spconv.SparseConvTranspose3d(8, 5, 3, 2, 1, bias=False),
    )
    return net.eval()


@pytest.fixture
def x(spconv, random_voxels):
    indices = random_voxels(1, 2, SHAPE, 400)
    return spconv.SparseConvTensor(torch.randn(400, 4), indices, SHAPE, 2)


def by_coordinate(x):
    """Coordinates and features in lexicographic order: spconv's order of outputs varies."""
    rows = x.indices.tolist()
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return x.indices[order], x.features[order]


def test_parity_with_spconv(model, x, spconv_numbers):
    with torch.no_grad():
        expected = model(x)
        changed = use_bevquant_kernels(model)
        found = model(x)
    assert changed == [
        *("0", "2.conv1", "2.conv2", "3", "4", "5", "8"),
        *("9.conv1", "9.conv2", "10", "11", "12", "13"),
    ]
    places, features = by_coordinate(found)
    expected_places, expected_features = by_coordinate(expected)
    assert torch.equal(places, expected_places)
    assert found.spatial_shape == expected.spatial_shape
    scale = expected_features.abs().max()
    assert (features - expected_features).abs().max() < 1e-5 * scale
    assert all(isinstance(book, Rulebook) for book in found.indice_dict.values())


def test_only_the_forward_changes(model, spconv):
    before = (repr(model), list(model.state_dict()), [type(m).__name__ for m in model.modules()])
    use_bevquant_kernels(model)
    assert use_bevquant_kernels(model) == []
    now = (repr(model), list(model.state_dict()), [type(m).__name__ for m in model.modules()])
    assert now == before
    assert isinstance(model[0], spconv.SubMConv3d)
    assert is_sparse_conv(model[0])
    assert "forward" not in vars(model[0])


def test_copies_and_pickles_keep_the_kernels(model, x):
    use_bevquant_kernels(model)
    with torch.no_grad():
        expected = model(x).features
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x).features, expected)
        assert use_bevquant_kernels(copied) == []
        conv = pickle.loads(pickle.dumps(model[0]))
        assert torch.equal(conv(x).features, model[0](x).features)
        assert conv.weight is not model[0].weight
        pool = pickle.loads(pickle.dumps(model[8]))
        assert type(pool) is type(model[8])


def test_a_parametrized_convolution_goes_back_to_these_kernels(model, x):
    weight_norm(model[0])
    use_bevquant_kernels(model)
    with torch.no_grad():
        expected = model(x).features
        assert torch.equal(copy.deepcopy(model)(x).features, expected)
        parametrize.remove_parametrizations(model[0], "weight")
        assert use_bevquant_kernels(model) == []
        torch.testing.assert_close(model(x).features, expected)


@pytest.mark.bits
def test_trap_20_forward_is_deterministic_and_backward_exists(model, x):
    use_bevquant_kernels(model)
    # torch's own batch norm sums its gradients by thread: it stays out of the comparison.
    for number, module in list(model.named_children()):
        if isinstance(module, nn.BatchNorm1d):
            setattr(model, number, nn.Identity())
        elif hasattr(module, "bn1"):
            module.bn1 = nn.Identity()
    runs = []
    for count in (2, 2, 2, 4, 1):
        torch.set_num_threads(count)
        model.zero_grad()
        out = model(x).features
        out.square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        runs.append({"out": out.detach()} | gradients)
    for name, first in runs[0].items():
        assert first.abs().sum() > 0
        assert all(torch.equal(run[name], first) for run in runs[1:]), name


def test_gradients_by_finite_differences(spconv, random_voxels):
    torch.manual_seed(0)
    model = spconv.SparseSequential(
        spconv.SubMConv2d(2, 3, 3, indice_key="a"),
        spconv.SparseConv2d(3, 2, 3, 2, 1, indice_key="b"),
        spconv.SparseInverseConv2d(2, 2, 3, indice_key="b"),
    ).double()
    use_bevquant_kernels(model)
    indices = random_voxels(2, 1, (3, 4), 6)
    parameters = list(model.parameters())

    def run(features, *_):
        return model(spconv.SparseConvTensor(features, indices, [3, 4], 1)).features

    features = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (features, *parameters))


def test_trap_20_multithreaded_result_is_right(model, x):
    """Unlike spconv's on two threads: the same as float64 within rounding."""
    use_bevquant_kernels(model)
    with torch.no_grad():
        single = model(x).features
        model.double()
        exact = model(x.replace_feature(x.features.double())).features
    assert (single - exact).abs().max() < 1e-5 * exact.abs().max()


def test_spconv_activation_and_bias(spconv, x):
    torch.manual_seed(1)
    conv = spconv.SubMConv3d(4, 6, 3)
    plain = conv_forward(conv, x).features
    conv.act_type, conv.act_alpha = type(conv.act_type).LeakyReLU, 0.25
    use_bevquant_kernels(conv)
    assert torch.equal(conv(x).features, torch.nn.functional.leaky_relu(plain, 0.25))
    added = conv(x, add_input=x.replace_feature(plain)).features
    assert torch.equal(added, torch.nn.functional.leaky_relu(plain + plain, 0.25))


def test_quantization_aware_subclasses_keep_their_forward(spconv, x):
    """spconv's own QAT modules hand a changed weight to ``_conv_forward``."""

    class Halved(spconv.SubMConv3d):
        def forward(self, input):
            return self._conv_forward(self.training, input, self.weight / 2, None)

    conv = Halved(4, 6, 3, bias=False)
    use_bevquant_kernels(conv)
    expected = conv_forward(conv, x, weight=conv.weight / 2)
    assert torch.equal(conv(x).features, expected.features)


def test_record_voxel_count(spconv, x):
    conv = spconv.SparseConv3d(4, 6, 3, 2, record_voxel_count=True)
    use_bevquant_kernels(conv)
    out = conv(x)
    assert int(conv.get_max_num_voxels()) == out.features.shape[0]


def test_trap_36_column_major_indices(spconv, x):
    conv = spconv.SubMConv3d(4, 6, 3, bias=False)
    use_bevquant_kernels(conv)
    view = x.indices.t().contiguous().t()
    assert not view.is_contiguous()
    found = conv(spconv.SparseConvTensor(x.features, view, SHAPE, 2))
    assert torch.equal(found.features, conv(x).features)


def test_quantized_features_are_refused(spconv, x):
    conv = spconv.SubMConv3d(4, 6, 3)
    with pytest.raises(TypeError, match="SubMConv3d: expected floating-point features"):
        conv_forward(conv, x, features=x.features.to(torch.int8))


@pytest.mark.parametrize("transposed", [False, True])
def test_dilated_and_padded_against_spconv(spconv_numbers, x, transposed):
    torch.manual_seed(2)
    spconv = spconv_numbers
    cls = spconv.SparseConvTranspose3d if transposed else spconv.SparseConv3d
    conv = cls(4, 6, (3, 2, 1), (2, 1, 3), (1, 0, 0), dilation=(2, 1, 1), bias=False)
    with torch.no_grad():
        expected = by_coordinate(conv(x))
        found = by_coordinate(conv_forward(conv, x))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)
    assert get_weight(conv, WeightLayout.RSCK).shape == (3, 2, 1, 4, 6)


def test_global_pooling_of_each_frame(spconv) -> None:
    pool = torch.nn.Sequential(spconv.SparseGlobalMaxPool(), spconv.SparseGlobalAvgPool())
    assert use_bevquant_kernels(pool) == ["0", "1"]
    indices = torch.tensor([[2, 0, 0, 1], [0, 1, 2, 3], [2, 3, 3, 3]], dtype=torch.int32)
    features = torch.tensor([[-1.0, -5.0], [4.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    x = spconv.SparseConvTensor(features, indices, [4, 4, 4], 3)
    assert pool[1](x).tolist() == [[4.0, -2.0], [0.0, 0.0], [-2.0, -4.5]]
    made = pool[0](x)
    assert made.tolist() == [[4.0, -2.0], [0.0, 0.0], [-1.0, -4.0]]
    made.sum().backward()
    assert features.grad is not None
    assert features.grad.tolist() == [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]

"""The stand-in for spconv, beside spconv itself and in a process without it."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from enum import Enum

import pytest
import torch
from torch import nn

from bevquant_sparse import (
    WeightLayout,
    get_weight,
    is_sparse_conv,
    layout_of,
    library_name,
    set_weight,
    use_bevquant_kernels,
    use_standin,
)
from bevquant_sparse._standin import _constants, _functional, _refused, _sequential, _voxels
from bevquant_sparse._standin import _pytorch as standin

SHAPE = [9, 8, 7]
LAYERS = {
    "subm": lambda s: s.SubMConv3d(4, 6, 3, bias=False, indice_key="a"),
    "subm 1x1": lambda s: s.SubMConv3d(4, 6, 1, padding=1, bias=False),
    "dilated": lambda s: s.SubMConv3d(4, 6, (3, 1, 5), dilation=(2, 1, 1), bias=False),
    "strided": lambda s: s.SparseConv3d(4, 6, (3, 2, 1), (2, 1, 3), (1, 0, 0), 1, bias=False),
    "strided 1x1": lambda s: s.SparseConv3d(4, 6, 1, 2, bias=False),
    "transposed": lambda s: s.SparseConvTranspose3d(4, 6, 3, 2, 1, bias=False),
    "pool": lambda s: s.SparseMaxPool3d(3, 2, 1),
    "inverse": lambda s: s.SparseSequential(
        s.SparseConv3d(4, 5, 3, 2, 1, bias=False, indice_key="d"),
        nn.ReLU(),
        s.SparseInverseConv3d(5, 6, 3, indice_key="d", bias=False),
    ),
    "sum": lambda s: s.SparseSequential(
        s.ConcatTable().add(s.SubMConv3d(4, 4, 3, bias=False)).add(s.Identity()), s.AddTable()
    ),
    "join": lambda s: s.SparseSequential(
        s.ConcatTable().add(s.SubMConv3d(4, 4, 3, bias=False)).add(s.SparseIdentity()),
        s.JoinTable(),
        s.SparseBatchNorm(8),
        s.SparseReLU(),
        s.RemoveGrid(),
    ),
}


def tensor(library, indices, channels=4):
    generator = torch.Generator().manual_seed(5)
    # Not negative: spconv's pooling starts at 0.
    features = torch.rand(len(indices), channels, generator=generator)
    return library.SparseConvTensor(features, indices, SHAPE, 2)


def by_coordinate(x):
    order = sorted(range(len(x.indices)), key=x.indices.tolist().__getitem__)
    return x.indices[order], x.features.detach()[order]


def parameters(cls):
    signature = inspect.signature(cls.__init__)
    return [(p.name, p.default) for p in signature.parameters.values()]


def classes(library):
    return {n: v for n, v in vars(library).items() if isinstance(v, type) and not n.startswith("_")}


def test_every_class_of_spconv_is_there_and_takes_the_same_arguments(spconv_numbers):
    theirs = {n: c for n, c in classes(spconv_numbers).items() if c.__module__[:6] == "spconv"}
    ours = classes(standin)
    assert theirs.keys() == ours.keys()
    for name, cls in theirs.items():
        assert library_name(ours[name]) == library_name(cls)
        if not issubclass(cls, Enum):
            assert parameters(ours[name]) == parameters(cls), name


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_made_and_compute_as_in_spconv(name, spconv_numbers, random_voxels):
    """Weights are drawn in the same order, so a seed gives the same model."""
    made = []
    for library in (spconv_numbers, standin):
        torch.manual_seed(3)
        made.append(LAYERS[name](library))
    theirs, ours = made
    assert repr(ours) == repr(theirs)
    state, expected_state = ours.state_dict(), theirs.state_dict()
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[key], expected_state[key]) for key in state)
    indices = random_voxels(1, 2, SHAPE, 120)
    with torch.no_grad():
        expected = theirs(tensor(spconv_numbers, indices))
        found = ours(tensor(standin, indices))
    assert found.spatial_shape == expected.spatial_shape
    places, features = by_coordinate(found)
    expected_places, expected_features = by_coordinate(expected)
    assert torch.equal(places, expected_places)
    torch.testing.assert_close(features, expected_features, rtol=1e-6, atol=1e-6)


def test_attributes_of_a_convolution(spconv_numbers):
    for make in (
        lambda s: s.SubMConv2d(4, 6, 1, indice_key="k", name="n"),
        lambda s: s.SparseConv4d(4, 6, 1, 1),
        lambda s: s.SparseConv1d(4, 6, 3, 2, 1, record_voxel_count=True),
        lambda s: s.SparseInverseConv3d(4, 6, 1, "k"),
        lambda s: s.SparseConvTranspose2d(4, 6, 1, stride=2),
    ):
        theirs, ours = make(spconv_numbers), make(standin)
        names = [n for n in vars(theirs) if n[0] != "_" and n not in ("scale", "zero_point")]
        for name in names:
            value, expected = getattr(ours, name), getattr(theirs, name)
            if name in ("algo", "act_type"):
                value, expected = value.name, expected.name
            assert value == expected, name
        assert {n: b.dtype for n, b in ours.named_buffers()} == {
            n: b.dtype for n, b in theirs.named_buffers()
        }
        assert ours.is_inverseable() == theirs.is_inverseable()


def test_one_answer_to_questions_about_classes():
    conv = standin.SparseInverseConv3d(4, 6, 3, "k")
    assert layout_of(conv) is WeightLayout.KRSC
    assert is_sparse_conv(conv)
    weight = torch.randn(3, 3, 3, 4, 6)
    set_weight(conv, weight, WeightLayout.RSCK)
    assert torch.equal(conv.weight, weight.movedim(-1, 0))
    assert not is_sparse_conv(standin.SparseMaxPool3d(2))
    pool = nn.Sequential(standin.SparseMaxPool2d(2), standin.SparseGlobalAvgPool())
    assert use_bevquant_kernels(pool) == ["0", "1"]


@pytest.mark.parametrize("kernel", [3, 1])
def test_weights_of_spconv_1_are_loaded(kernel, random_voxels):
    torch.manual_seed(0)
    net = standin.SparseSequential(a=standin.SubMConv3d(4, 6, kernel), b=nn.BatchNorm1d(6))
    old = {**net.state_dict(), "a.weight": get_weight(net[0], WeightLayout.RSCK)}
    assert old["a.weight"].shape == (kernel, kernel, kernel, 4, 6)
    other = standin.SparseSequential(a=standin.SubMConv3d(4, 6, kernel), b=nn.BatchNorm1d(6))
    other.load_state_dict(old)
    assert old["a.weight"].shape == (kernel, kernel, kernel, 4, 6)
    assert torch.equal(other[0].weight, net[0].weight)
    with pytest.raises(RuntimeError, match=r"size mismatch for a.weight"):
        net.load_state_dict(old | {"a.weight": torch.zeros(kernel, kernel, kernel, 6, 5)})


def test_a_shape_that_tells_no_layout_is_reported(monkeypatch, caplog):
    conv, weight = standin.SubMConv3d(3, 3, 3, bias=False), torch.randn(3, 3, 3, 3, 3)
    conv.load_state_dict({"weight": weight})
    assert torch.equal(conv.weight, weight)
    assert "fits spconv 2's layout (KRSC) and spconv 1's (RSCK)" in caplog.text
    for layout, axis in (("RSCK", -1), ("RSKC", -2), ("KRSC", 0)):
        monkeypatch.setattr(_constants, "SAVED_WEIGHT_LAYOUT", layout)
        conv.load_state_dict({"weight": weight})
        assert torch.equal(conv.weight, weight.movedim(axis, 0))
    assert caplog.text.count("\n") == 1


def test_a_conversion_in_the_place_of_ours(monkeypatch):
    """mmdet3d replaces `SparseModule._load_from_state_dict`: nothing may convert beside it."""
    seen = []

    def load(self, state_dict, prefix, *_):
        seen.append(tuple(state_dict[f"{prefix}weight"].shape))

    monkeypatch.setattr(_sequential.SparseModule, "_load_from_state_dict", load)
    standin.SubMConv3d(4, 6, 3).load_state_dict({"weight": torch.zeros(3, 3, 3, 4, 6)})
    assert seen == [(3, 3, 3, 4, 6)]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # spconv's sparse_add
def test_sparse_tensors(spconv_numbers, random_voxels):
    indices = random_voxels(1, 2, SHAPE, 50)
    theirs, ours = tensor(spconv_numbers, indices), tensor(standin, indices)
    grown = random_voxels(2, 2, SHAPE, 60)
    added = {spconv_numbers: spconv_numbers.functional.sparse_add, standin: _functional.sparse_add}
    for compute in (
        lambda _, x: x + x,
        lambda _, x: x.features + x,
        lambda _, x: x.minus(),
        lambda s, x: added[s](x, x, tensor(s, grown)),
    ):
        expected = compute(spconv_numbers, theirs)
        found = compute(standin, ours)
        torch.testing.assert_close(by_coordinate(found), by_coordinate(expected))
    assert ours.spatial_size == theirs.spatial_size
    assert repr(ours) == repr(theirs)
    grid = (torch.rand(2, 3, 4, 5) - 0.6).relu()
    made = [library.SparseConvTensor.from_dense(grid) for library in (spconv_numbers, standin)]
    torch.testing.assert_close(by_coordinate(made[1]), by_coordinate(made[0]))
    assert torch.equal(made[1].dense(channels_first=False), grid)


def test_what_a_sparse_tensor_refuses(random_voxels):
    indices = random_voxels(1, 2, SHAPE, 5)
    x = tensor(standin, indices)
    with pytest.raises(ValueError, match=r"use 'x = x.replace_feature"):
        x.features = x.features + 1
    with pytest.raises(ValueError, match="sparse_add adds over the union"):
        x + tensor(standin, indices[:3])
    with pytest.raises(TypeError, match="unsupported operand"):
        x + 1.0
    with pytest.raises(TypeError, match=r"expected int32 indices, got torch.int64; pass"):
        standin.SparseConvTensor(x.features, indices.long(), SHAPE, 2)
    with pytest.raises(ValueError, match=r"indices \[rows, 3\].*grid \[9, 8\].*\(5, 4\)"):
        standin.SparseConvTensor(x.features, indices, SHAPE[:2], 2)
    with pytest.raises(ValueError, match="one grid, batch size"):
        _functional.sparse_add(x, tensor(standin, indices, channels=3))
    kept = x.select_by_index(torch.tensor([4, 0]))
    assert torch.equal(kept.indices, indices[[4, 0]])
    empty = tensor(standin, indices[:0])
    assert standin.SparseSequential(nn.BatchNorm1d(4), nn.ReLU())(empty) is empty


def test_gradients(random_voxels):
    torch.manual_seed(0)
    net = standin.SparseSequential(
        standin.SubMConv2d(2, 3, 3), standin.SparseConv2d(3, 2, 3, 2, 1), standin.ToDense()
    ).double()
    indices = random_voxels(2, 1, (3, 4), 6)

    def run(features, *_):
        return net(standin.SparseConvTensor(features, indices, [3, 4], 1))

    features = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (features, *net.parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda(random_voxels):
    torch.manual_seed(0)
    net = standin.SparseSequential(
        standin.SubMConv3d(4, 6, 3), standin.SparseConv3d(6, 5, 3, 2, 1), standin.SparseMaxPool3d(2)
    )
    indices = random_voxels(1, 2, SHAPE, 120)
    expected = net(tensor(standin, indices))
    x = tensor(standin, indices)
    on_gpu = standin.SparseConvTensor(x.features.cuda(), indices.cuda(), SHAPE, 2)
    found = net.cuda()(on_gpu)
    assert torch.equal(found.indices.cpu(), expected.indices)
    torch.testing.assert_close(found.features.cpu(), expected.features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ndim", [2, 3])
def test_points_to_voxels(ndim):
    """Against a loop over the points, capacities of voxels and points included."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(300, ndim + 1, generator=generator) * 5 - 1
    size, low, high = [0.5, 1.0, 0.75][:ndim], [0.0] * ndim, [3.0] * ndim
    make = _voxels.PointToVoxel(size, [*low, *high], ndim + 1, 20, 3)
    numbers, groups, expected_ids = {}, [], []
    for point in points:
        at = tuple(math.floor(v / s) for v, s in zip(point[:ndim].tolist(), size, strict=True))
        inside = all(0 <= a < round(3 / s) for a, s in zip(at, size, strict=True))
        if inside and at not in numbers and len(numbers) < 20:
            numbers[at] = len(numbers)
            groups.append([])
        expected_ids.append(numbers.get(at, -1) if inside else -1)
        if expected_ids[-1] >= 0 and len(groups[expected_ids[-1]]) < 3:
            groups[expected_ids[-1]].append(point)
    voxels, coordinates, counts, ids = make.generate_voxel_with_id(points)
    assert ids.tolist() == expected_ids
    assert coordinates.tolist() == [list(at[::-1]) for at in numbers]
    assert counts.tolist() == [len(group) for group in groups]
    for voxel, group in zip(voxels, groups, strict=True):
        assert torch.equal(voxel[: len(group)], torch.stack(group))
        assert not voxel[len(group) :].any()
    filled = make(points, empty_mean=True)[0]
    torch.testing.assert_close(filled[0].mean(0), torch.stack(groups[0]).mean(0))
    assert [len(part) for part in make(points[:0])] == [0, 0, 0]
    features = torch.arange(20.0)[:, None]
    gathered = _voxels.gather_features_by_pc_voxel_id(features, ids, -1)
    assert gathered.flatten().tolist() == expected_ids
    with pytest.raises(ValueError, match=r"expected points \[points,"):
        make(points[:, :1])


def test_points_to_voxels_as_in_spconv(spconv_numbers):
    from spconv.pytorch.utils import PointToVoxel

    points = torch.rand(500, 4, generator=torch.Generator().manual_seed(1)) * 4 - 0.5
    arguments = ([0.5, 0.5, 1.0], [0, 0, 0, 3, 3, 2], 4, 40, 3)
    theirs, ours = PointToVoxel(*arguments), _voxels.PointToVoxel(*arguments)
    assert (ours.grid_size, ours.vsize) == (theirs.grid_size, theirs.vsize)
    for found, expected in zip(
        ours.generate_voxel_with_id(points), theirs.generate_voxel_with_id(points), strict=True
    ):
        assert torch.equal(found, expected)


def test_sizes(spconv_numbers):
    ours = {module.__name__: module for module in _refused.made_modules(standin.Identity)}
    ops = ours["spconv.pytorch.ops"]
    arguments = ([10, 11, 9], [3, 2, 5], [2, 3, 1], [1, 0, 2], [1, 2, 1])
    theirs = spconv_numbers.ops
    assert ops.get_conv_output_size(*arguments) == theirs.get_conv_output_size(*arguments)
    more = (*arguments, [1, 0, 0])
    assert ops.get_deconv_output_size(*more) == theirs.get_deconv_output_size(*more)


def test_names_that_cannot_be_computed_exist_in_spconv_and_raise(spconv_numbers):
    import importlib

    for home, calls in _refused._CALLS.items():
        module = importlib.import_module(home)
        assert [name for name in calls if not hasattr(module, name)] == []
        for name, call in _refused.refused(home).items():
            with pytest.raises(NotImplementedError, match=rf"{home}.{name}: .*; \w"):
                call(1, key=2)


def test_an_installed_spconv_is_never_shadowed(spconv_numbers):
    installed = sys.modules["spconv"]
    with pytest.raises(RuntimeError, match=r"spconv.* is at hand .*Remove the call, or uninstall"):
        use_standin()
    assert sys.modules["spconv"] is installed


ABSENT = """
import sys
from importlib.machinery import PathFinder

class WithoutSpconv(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "spconv" else super().find_spec(name, path, target)

sys.meta_path = [WithoutSpconv if f is PathFinder else f for f in sys.meta_path]
try:
    import spconv
except ModuleNotFoundError:
    pass
from bevquant_sparse import use_standin
use_standin()
use_standin()
import spconv, spconv.pytorch, spconv.utils
from spconv.core import ConvAlgo
from spconv.pytorch import SparseConvTensor, SubMConv3d, functional as Fsp, ops
from spconv.pytorch.conv import SparseConvolution
from spconv.pytorch.modules import SparseModule, is_spconv_module
from spconv.pytorch.utils import PointToVoxel
from spconv.utils import Point2VoxelCPU3d
if float(spconv.__version__[2:]) >= 2.2:  # as OpenPCDet asks
    spconv.constants.SPCONV_USE_DIRECT_TABLE = False
conv = spconv.pytorch.SubMConv3d(4, 6, 3, algo=ConvAlgo.Native)
assert isinstance(conv, spconv.pytorch.conv.SparseConvolution) and is_spconv_module(conv)
import io, pickle, torch
from torch.utils import _pytree as pytree
assert type(pickle.loads(pickle.dumps(conv))) is SubMConv3d
x = SparseConvTensor(torch.rand(1, 4), torch.zeros(1, 4, dtype=torch.int32), [2, 2, 2], 1)
assert [tuple(leaf.shape) for leaf in pytree.tree_leaves(conv(x))] == [(1, 6), (1, 4)]
try:
    from spconv.utils import VoxelGeneratorV2  # spconv 1: models try it first
except ImportError:
    print("as spconv 2")
"""


def test_where_spconv_is_absent():
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("as spconv 2\n", "")

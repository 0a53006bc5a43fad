"""The operators: what they promise to torch's tracers, and models that go through these."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree

from bevquant_sparse import (
    WeightLayout,
    build_rulebook,
    conv_forward,
    open_shapes,
    register_sparse_tensor,
    to_dense,
    use_bevquant_kernels,
)

# spconv's own dense(), which the model runs by itself, indexes by a list.
pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
ops = torch.ops.bevquant_sparse
SHAPE = (8, 6, 7)


def cloud(voxels=40, seed=0, channels=4):
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm(2 * 8 * 6 * 7, generator=generator)[:voxels]
    indices = torch.stack(torch.unravel_index(cells, (2, *SHAPE)), 1).int()
    return torch.randn(voxels, channels, generator=generator), indices


def calls():
    features, indices = cloud()
    where, ones, twos = (list(SHAPE), 2), [1, 1, 1], [2, 2, 2]
    down = build_rulebook(indices, SHAPE, 3, 2, 1, subm=False, batch_size=2)
    subm = build_rulebook(indices, SHAPE, 3, subm=True, batch_size=2)
    krsc, rsck = torch.randn(5, 3, 3, 3, 4), torch.randn(3, 3, 3, 4, 5)
    bias, grad = torch.randn(5), torch.randn(down.num_out, 5)
    how = ([3, 3, 3], "KRSC", False)
    leaf = features.clone().requires_grad_()
    return {
        "subm_rulebook": (indices, *where, [3, 3, 3], ones),
        "rulebook": (indices, *where, [3, 3, 3], twos, ones, ones, [0, 0, 0], False),
        "inverse_rulebook": (down.neighbours, indices),
        "identity_rulebook": (indices, *where),
        "conv": (leaf, krsc.requires_grad_(), bias.requires_grad_(), down.neighbours, *how),
        "conv ": (leaf, rsck, None, subm.neighbours, [3, 3, 3], "RSCK", True, "torch"),
        "conv_grad_features": (grad, features, krsc.detach(), down.neighbours, *how),
        "conv_grad_weight": (grad, features, krsc.detach(), down.neighbours, *how),
        "conv_grad_bias": (grad,),
        "max_pool": (leaf, down.neighbours),
        "avg_pool": (leaf, down.neighbours),
        "max_pool_grad": (grad[:, :4].contiguous(), features, down.neighbours),
        "avg_pool_grad": (grad[:, :4].contiguous(), features, down.neighbours),
        "to_dense": (leaf, indices, *where),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", calls())
def test_opcheck(name):
    torch.library.opcheck(getattr(ops, name.strip()).default, calls()[name])


def test_trap_41_dense_is_contiguous_channels_first():
    features, indices = cloud()
    dense = ops.to_dense(features, indices, list(SHAPE), 2)
    assert dense.shape == (2, 4, *SHAPE)
    assert dense.is_contiguous()


def test_shared_pairs_die_with_their_table():
    indices = cloud()[1]
    rulebook = build_rulebook(indices, SHAPE, 3, subm=True, batch_size=2)
    first = rulebook.pairs
    assert rulebook.pairs is first
    kept = weakref.ref(first[0])
    del first
    assert kept() is not None
    del rulebook
    assert kept() is None


# --- models of spconv's modules ---


def unet(spconv):
    class UNet(nn.Module):
        """SubM with and without a key, strided, 1×1×1, pooling, inverse, transposed, dense."""

        def __init__(self):
            super().__init__()
            self.stem = spconv.SparseSequential(
                spconv.SubMConv3d(4, 8, 3, bias=True, indice_key="s"), nn.BatchNorm1d(8), nn.ReLU()
            )
            self.block = spconv.SubMConv3d(8, 8, 3, bias=False)
            self.down = spconv.SparseSequential(
                spconv.SparseConv3d(8, 12, 3, 2, 1, indice_key="d"), nn.ReLU()
            )
            self.mid = spconv.SparseSequential(spconv.SubMConv3d(12, 12, 1))
            self.pool = spconv.SparseMaxPool3d(2, 2, indice_key="p")
            self.unpool = spconv.SparseInverseConv3d(12, 12, 2, indice_key="p")
            self.up = spconv.SparseInverseConv3d(12, 8, 3, indice_key="d")
            self.wide = spconv.SparseConvTranspose3d(8, 4, 2, 2)

        def forward(self, x):
            a = self.block(self.stem(x))
            b = self.mid(self.down(a))
            b = b.replace_feature(b.features + self.unpool(self.pool(b)).features)
            if "replace_feature" in b.__dir__():
                a = a.replace_feature(a.features + self.up(b).features)
            dense = a.dense()
            n, c, d, h, w = dense.shape
            return {"wide": self.wide(a), "bev": dense.view(n, c * d, h, w)}

    torch.manual_seed(0)
    model = UNet().eval()
    use_bevquant_kernels(model)
    return model


def sparse(spconv, voxels, seed=0):
    return spconv.SparseConvTensor(*cloud(voxels, seed), list(SHAPE), 2)


def leaves(value):
    return pytree.tree_leaves(value)


def same_bits(first, second):
    return all(torch.equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))


def exported(model, x):
    shapes = ShapesCollection()
    for leaf in leaves(x):
        shapes[leaf] = {0: Dim.AUTO}
    return torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False)


def count(program, name):
    return sum(node.target is getattr(ops, name).default for node in program.graph.nodes)


@pytest.mark.bits
def test_export_as_it_stands_with_a_voxel_count_that_varies(spconv):
    model = unet(spconv)
    program = exported(model, sparse(spconv, 40))
    for voxels in (40, 90, 7):
        x = sparse(spconv, voxels, seed=voxels)
        got = program.module()(x)
        assert type(got["wide"]) is spconv.SparseConvTensor
        assert same_bits(got, model(x))
    # One rulebook for the two SubM layers on the input's voxels, with a key and without.
    assert count(program, "subm_rulebook") == 1
    found = {n: count(program, n) for n in ("rulebook", "inverse_rulebook", "conv", "to_dense")}
    assert found == {"rulebook": 3, "inverse_rulebook": 2, "conv": 7, "to_dense": 1}


def test_a_graph_checks_its_coordinates(spconv):
    program = exported(unet(spconv), sparse(spconv, 40))
    outside = sparse(spconv, 40)
    outside.indices[3, 1] = 99
    with pytest.raises(ValueError, match=r"indices\[3\].*over range"):
        program.module()(outside)


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch.compile follows no methods of an enum's members"
)
def test_compile_without_a_graph_break(spconv):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = unet(spconv), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for voxels in (40, 90):
            x = sparse(spconv, voxels, seed=voxels)
            assert same_bits(compiled(x), model(x))
    assert counter.frame_count == 1


def test_layers_without_a_key_share_a_rulebook_until_the_coordinates_change(spconv):
    first, second = spconv.SubMConv3d(4, 4, 3), spconv.SubMConv3d(4, 4, 3)
    x = conv_forward(first, sparse(spconv, 40))
    (kept,) = x.indice_dict.values()
    assert list(conv_forward(second, x).indice_dict.values()) == [kept]
    x.indices[:, 1] = 7 - x.indices[:, 1]
    again = conv_forward(second, x)
    x.indice_dict.clear()
    assert torch.equal(again.features, conv_forward(second, x).features)
    assert list(again.indice_dict.values()) != [kept]


def test_sparse_tensors_are_pytree_nodes(spconv):
    register_sparse_tensor(spconv.SparseConvTensor)
    register_sparse_tensor(spconv.SparseConvTensor)
    x = sparse(spconv, 5)
    found, spec = pytree.tree_flatten({"x": x})
    assert found[0] is x.features
    assert found[1] is x.indices
    back = pytree.tree_unflatten(found, pytree.treespec_loads(pytree.treespec_dumps(spec)))["x"]
    assert back.spatial_shape == x.spatial_shape
    assert back.batch_size == 2
    with pytest.raises(TypeError, match="expected a class"):
        register_sparse_tensor(x)


def test_old_tensors_keep_their_class():
    class Tensor:
        def __init__(self, features, indices, spatial_shape, batch_size):
            self.features, self.indices = features, indices
            self.spatial_shape, self.batch_size = spatial_shape, batch_size
            self.indice_dict = {}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 3, 4, 5))
            self.bias, self.in_channels, self.kernel_size = None, 4, (3, 3, 3)
            self.indice_key, self.weight_layout = None, WeightLayout.RSCK

        def forward(self, features, indices):
            x = Tensor(features, indices, SHAPE, 2)
            out = conv_forward(self, x)
            out.features = out.features.relu()
            return out

    net = Net()
    n = Dim("n")
    program = torch.export.export(net, cloud(), dynamic_shapes=({0: n}, {0: n}), strict=False)
    got = program.module()(*cloud(30, 1))
    assert type(got) is Tensor
    assert same_bits(got, net(*cloud(30, 1)))


def test_a_traced_size_has_the_limits_of_a_given_one():
    """A grid whose size is in a tensor: one cell is enough, none is refused by the graph."""

    class Grid(nn.Module):
        def forward(self, features, indices, size):
            return to_dense(features, indices, (size.item(), 3), 1)

    features, indices = torch.ones(1, 2), torch.tensor([[0, 0, 1]])
    program = torch.export.export(Grid(), (features, indices, torch.tensor(4)), strict=False)
    module = program.module()
    assert module(features, indices, torch.tensor(1)).shape == (1, 2, 1, 3)
    with pytest.raises(RuntimeError, match="assert"):
        module(features, indices, torch.tensor(0))


def test_a_batch_size_may_be_a_tensor_where_a_model_is_exported(spconv):
    class Net(nn.Module):
        def forward(self, features, indices):
            frames = indices[:, 0].max() + 1
            torch._check(frames.item() > 0)
            x = spconv.SparseConvTensor(features, indices, list(SHAPE), frames)
            return x.features * x.batch_size

    features, indices = cloud()
    with open_shapes():
        program = torch.export.export(Net(), (features, indices), strict=False)
    made = program.module()
    assert torch.equal(made(features, indices), features * 2)
    assert torch.equal(made(features, indices * torch.tensor([0, 1, 1, 1])), features)

"""to_dense against a loop."""

import pytest
import torch

from bevquant_sparse import to_dense


@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 4), (2, 2, 3, 2)])
def test_to_dense(shape, random_voxels):
    indices = random_voxels(0, 2, shape, 7)
    features = torch.randn(len(indices), 3, dtype=torch.float64, requires_grad=True)
    dense = to_dense(features, indices.t().contiguous().t(), shape, 2)
    expected = torch.zeros(2, 3, *shape, dtype=torch.float64)
    for row, (batch, *place) in enumerate(indices.tolist()):
        expected[(batch, slice(None), *place)] = features[row].detach()
    assert torch.equal(dense, expected)
    assert torch.autograd.gradcheck(lambda f: to_dense(f, indices, shape, 2), features)


# spconv's own dense() indexes with a list.
@pytest.mark.filterwarnings("ignore:.*non-tuple sequence.*:UserWarning")
def test_same_as_spconv(spconv_numbers, random_voxels):
    spconv = spconv_numbers
    indices = random_voxels(1, 2, (4, 5, 6), 30)
    x = spconv.SparseConvTensor(torch.randn(30, 4), indices, [4, 5, 6], 2)
    assert torch.equal(to_dense(x.features, indices, x.spatial_shape, 2), x.dense())


def test_empty_and_refused():
    empty = torch.zeros(0, 3, dtype=torch.int32)
    assert to_dense(torch.zeros(0, 2), empty, (3, 4), 2).shape == (2, 2, 3, 4)
    with pytest.raises(ValueError, match=r"indices\[0\] = \[0, 3\].* over range"):
        to_dense(torch.zeros(1, 2), torch.tensor([[0, 3]]), (3,), 1)
    with pytest.raises(ValueError, match="one row per row of indices"):
        to_dense(torch.zeros(2, 2), torch.tensor([[0, 1]]), (3,), 1)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"features": [[1.0]]}, TypeError, "features: expected a torch.Tensor"),
        ({"spatial_shape": 3}, TypeError, "spatial_shape=3: expected a sequence"),
        ({"batch_size": None}, TypeError, "batch_size"),
        ({"spatial_shape": (2**31 - 1,) * 2}, ValueError, "cannot be held"),
    ],
)
def test_arguments_that_make_no_grid_are_named(change, error, words):
    arguments = {
        "features": torch.ones(1, 2), "indices": torch.tensor([[0, 1, 2]]),
        "spatial_shape": (3, 4), "batch_size": 1,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        to_dense(**arguments | change)

"""int8_to_dense against a loop over voxels."""

import numpy as np
import pytest
import torch

from bevquant_int8sim import int8_to_dense


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("shape", [(6, 5, 4), (7, 3), (9,), (3, 4, 2, 5)])
def test_equals_a_loop(shape, dtype, random_voxels):
    generator = np.random.default_rng(0)
    indices = random_voxels(generator, 2, shape, 12)
    features = torch.from_numpy(generator.integers(-128, 128, (12, 5))).to(dtype)
    for places in (indices, indices.long()):
        got = int8_to_dense(features, places, shape, 2)
        expected = torch.zeros(2, 5, *shape, dtype=dtype)
        for row, place in zip(features, indices.tolist(), strict=True):
            expected[(place[0], slice(None), *place[1:])] = row
        assert torch.equal(got, expected)


def test_folding_the_height_into_channels_is_a_view(random_voxels):
    indices = random_voxels(np.random.default_rng(1), 1, (6, 5, 4), 20)
    dense = int8_to_dense(torch.ones(20, 8, dtype=torch.int8), indices, (6, 5, 4), 1)
    flat = dense.permute(0, 1, 4, 2, 3).flatten(1, 2)
    assert flat.data_ptr() == dense.data_ptr()
    assert flat.is_contiguous(memory_format=torch.channels_last)


def test_used_memory_is_cleared():
    place = torch.tensor([[0, 1, 1, 1]], dtype=torch.int32)
    for value in (5, -3):
        q = torch.full((1, 64), value, dtype=torch.int8)
        dense = int8_to_dense(q, place, (8, 8, 16), 1)
        assert int(dense.long().sum()) == 64 * value
        place = place + torch.tensor([0, 1, 1, 1], dtype=torch.int32)
        del dense


def test_refusals():
    q, place = torch.ones(1, 2, dtype=torch.int8), torch.tensor([[0, 1, 2]])
    with pytest.raises(ValueError, match=r"row 0 lies at \[0, 1, 2\], outside"):
        int8_to_dense(q, place, (3, 2), 1)
    with pytest.raises(ValueError, match="do not fit a grid of 3 axes"):
        int8_to_dense(q, place, (3, 3, 3), 1)
    with pytest.raises(TypeError, match="features must be a tensor of int8"):
        int8_to_dense(q.float(), place, (3, 3), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": None}, "indices must be a tensor"),
        ({"indices": torch.ones(3, dtype=torch.int32)}, "do not fit a grid"),
        ({"spatial_shape": 3}, "spatial_shape=3: expected integers"),
        ({"spatial_shape": ()}, "do not fit a grid of 0 axes"),
        ({"spatial_shape": (3, "x")}, "spatial_shape"),
        ({"spatial_shape": (2**31 - 1, 2**31 - 1)}, "of which there may be"),
        ({"batch_size": None}, "batch_size=None"),
        ({"batch_size": 10**12}, "batch_size"),
    ],
)
def test_arguments_that_make_no_grid_are_named(change, words):
    arguments = {
        "features": torch.ones(1, 2, dtype=torch.int8), "indices": torch.tensor([[0, 1, 2]]),
        "spatial_shape": (3, 4), "batch_size": 1,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=words):
        int8_to_dense(**arguments | change)

"""Grids whose volume overflows int64, and grids too large for a bitmap."""

import random

import pytest
import torch

from bevquant_sparse import build_rulebook

LARGEST = 2**31 - 1


def clusters(ndim, size, seed=0):
    """Distinct voxels near the corners and the middle of a cube of this size, shuffled."""
    generator = random.Random(seed)
    centres = [(0,) * ndim, (size - 1,) * ndim, (size // 2,) * ndim]
    reach = (20, 5, 3, 2)[ndim - 1]  # near enough to be neighbours, room for sixty
    places = set()
    while len(places) < 60:
        centre = generator.choice(centres)
        place = [min(max(c + generator.randint(-reach, reach), 0), size - 1) for c in centre]
        places.add((generator.randint(0, 1), *place))
    rows = sorted(places)
    generator.shuffle(rows)
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [2**13, 2**20, LARGEST - 2])
def test_subm(ndim, size, backend, brute_force, pair_set):
    indices, shape, ones = clusters(ndim, size), (size,) * ndim, (1,) * ndim
    book = build_rulebook(indices, shape, 3, subm=True, batch_size=2, backend=backend)
    expected = brute_force(indices, shape, (3,) * ndim, ones, ones, ones, subm=True)
    assert pair_set(book) == expected


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [2**13, 2**20, LARGEST])
def test_strided(ndim, size, backend, brute_force, pair_set):
    indices, shape, ones = clusters(ndim, size), (size,) * ndim, (1,) * ndim
    book = build_rulebook(indices, shape, 3, 2, 1, subm=False, batch_size=2, backend=backend)
    expected = brute_force(
        indices, book.out_shape, (3,) * ndim, (2,) * ndim, ones, ones, subm=False
    )
    assert pair_set(book) == expected
    outputs = book.out_indices.tolist()
    assert outputs == sorted(outputs)


@pytest.mark.parametrize("subm", [True, False])
def test_the_very_largest_grid(subm, backend, brute_force, pair_set):
    """Kernel rank 4 on (2³¹ − 1)⁴ voxels: a linear key would need 125 bits."""
    shape = (LARGEST,) * 4
    indices = clusters(4, LARGEST)
    book = build_rulebook(indices, shape, (3, 1, 3, 1), subm=subm, batch_size=2, backend=backend)
    expected = brute_force(
        indices,
        book.out_shape,
        (3, 1, 3, 1),
        (1,) * 4,
        book.padding,
        (1,) * 4,
        subm=subm,
    )
    assert pair_set(book) == expected


@pytest.mark.parametrize("subm", [True, False])
def test_duplicates_are_found_on_large_grids(subm, backend):
    indices = torch.cat((clusters(3, LARGEST), clusters(3, LARGEST)[7:8]))
    with pytest.raises(ValueError, match=r"indices\[60\] .* repeats indices\[7\]"):
        build_rulebook(indices, (LARGEST,) * 3, 3, padding=1, subm=subm, backend=backend)


def test_transposed_to_a_large_grid(backend, brute_force, pair_set):
    size = 2**20
    indices = clusters(3, size)
    book = build_rulebook(
        indices, (size,) * 3, 3, 2, 1, subm=False, transposed=True, batch_size=2, backend=backend
    )
    ones = (1,) * 3
    expected = brute_force(
        indices, book.out_shape, (3,) * 3, (2,) * 3, ones, ones, subm=False, transposed=True
    )
    assert pair_set(book) == expected

"""Rulebooks against spconv's own pairs, on one thread where it is right."""

import numpy as np
import pytest

from bevquant_sparse import build_rulebook

# (kind, ndim, kernel, stride, padding, dilation, output padding)
CASES = [
    ("subm", 1, 3, 1, 1, 1, 0),
    ("subm", 2, 5, 1, 2, 1, 0),
    ("subm", 3, 3, 1, 1, 1, 0),
    ("subm", 3, (1, 3, 5), 1, (0, 1, 2), 1, 0),
    ("subm", 3, 3, 1, 2, 2, 0),
    ("subm", 4, 3, 1, 1, 1, 0),
    ("strided", 1, 3, 2, 1, 1, 0),
    ("strided", 2, 2, 2, 0, 1, 0),
    ("strided", 3, 3, 2, 1, 1, 0),
    ("strided", 3, 3, 2, (1, 1, 0), 1, 0),
    ("strided", 3, (1, 1, 3), (1, 1, 2), 0, 1, 0),
    ("strided", 3, 3, 1, 1, 2, 0),
    ("strided", 3, (2, 3, 4), (3, 2, 1), (0, 2, 1), (1, 1, 2), 0),
    ("strided", 4, 3, 2, 1, 1, 0),
    ("transposed", 2, 3, 2, 1, 1, 0),
    ("transposed", 3, 3, 2, 1, 1, 1),
    ("transposed", 3, 2, 2, 0, 1, 0),
    ("transposed", 3, (3, 2, 1), (1, 2, 3), (1, 0, 0), (2, 1, 1), (0, 1, 2)),
]


def spread(ndim, value):
    return [value] * ndim if isinstance(value, int) else list(value)


def spconv_pairs(spconv, indices, batch_size, shape, kind, *parameters):
    """``{(input row, output coordinate, offset)}`` and the output coordinates of spconv."""
    from spconv.core import ConvAlgo

    subm = kind == "subm"
    outputs, table, counts = spconv.ops.get_indice_pairs(
        indices,
        batch_size,
        list(shape),
        ConvAlgo.Native,
        *parameters,
        subm=subm,
        transpose=kind == "transposed",
    )
    listed = [tuple(row) for row in outputs.tolist()]
    pairs = set()
    for offset, count in enumerate(counts.tolist()):
        rows, outs = table[:, offset, :count].tolist()
        pairs |= {(i, listed[o], offset) for i, o in zip(rows, outs, strict=True)}
    if subm:
        # Only the first half is listed: the second mirrors it and the centre is the identity.
        volume = len(counts)
        listed_in = [tuple(row) for row in indices.tolist()]
        number = {place: row for row, place in enumerate(listed_in)}
        pairs |= {(number[o], listed_in[i], volume - 1 - k) for i, o, k in pairs}
        pairs |= {(i, place, volume // 2) for i, place in enumerate(listed_in)}
    return pairs, set(listed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pair_sets_are_equal(case, backend, spconv_numbers, random_voxels, pair_set):
    kind, ndim, *rest = case
    kernel, stride, padding, dilation, out_padding = (spread(ndim, value) for value in rest)
    shape = {1: (200,), 2: (20, 21), 3: (11, 12, 13), 4: (6, 7, 6, 5)}[ndim]
    indices = random_voxels(ndim, 2, shape, 120)
    rulebook = build_rulebook(
        indices,
        shape,
        kernel,
        stride,
        padding,
        dilation,
        subm=kind == "subm",
        transposed=kind == "transposed",
        output_padding=out_padding,
        batch_size=2,
        backend=backend,
    )
    expected, outputs = spconv_pairs(
        spconv_numbers, indices, 2, shape, kind, kernel, stride, padding, dilation, out_padding
    )
    assert pair_set(rulebook) == expected
    assert {tuple(row) for row in rulebook.out_indices.tolist()} == outputs


def test_real_frame(spconv_numbers, backend, real_voxels):
    """The two largest rulebooks of a BEVFusion encoder, 79,745 voxels on 1440×1440×41."""
    from spconv.core import ConvAlgo

    shape, ones = [1440, 1440, 41], [1] * 3
    for subm, stride in ((True, 1), (False, 2)):
        rulebook = build_rulebook(
            real_voxels, shape, 3, stride, 1, subm=subm, batch_size=1, backend=backend
        )
        outputs, table, counts = spconv_numbers.ops.get_indice_pairs(
            real_voxels, 1, shape, ConvAlgo.Native, [3] * 3, [stride] * 3, ones, ones, [0] * 3, subm
        )
        # spconv numbers its outputs otherwise: give each the row of its coordinate here.
        order = np.lexsort(outputs.numpy().T[::-1])
        row = np.empty_like(order)
        row[order] = np.arange(len(order))
        if subm:
            row = np.arange(len(order))
        else:
            assert np.array_equal(outputs.numpy()[order], rulebook.out_indices.numpy())
        expected = np.full(tuple(rulebook.neighbours.shape), -1, np.int32)
        for offset, count in enumerate(counts.tolist()):
            rows, outs = table[:, offset, :count].numpy()
            expected[row[outs], offset] = rows
            if subm:
                expected[rows, 26 - offset] = outs
        if subm:
            expected[:, 13] = np.arange(len(expected))
        assert np.array_equal(rulebook.neighbours.numpy(), expected)


def test_trap_35_operation_counts_come_from_all_pairs(spconv_numbers, real_voxels):
    """The encoder's forward is 25.46 GMAC; spconv's pair numbers give about half of it."""
    from spconv.core import ConvAlgo

    indices, shape = real_voxels, (1440, 1440, 41)
    # Kernel, stride, padding and output channels of the strided convolutions, and how many
    # SubM convolutions of which channels run before each.
    stages = [
        ([(5, 16), *[(16, 16)] * 4], (3, 2, 1), (16, 32)),
        ([(32, 32)] * 4, (3, 2, 1), (32, 64)),
        ([(64, 64)] * 4, (3, 2, (1, 1, 0)), (64, 128)),
        ([(128, 128)] * 4, ((1, 1, 3), (1, 1, 2), 0), (128, 128)),
    ]
    operations = listed = 0
    for subm, (kernel, stride, padding), channels in stages:
        same = build_rulebook(indices, shape, 3, subm=True, batch_size=1)
        down = build_rulebook(indices, shape, kernel, stride, padding, subm=False, batch_size=1)
        operations += sum(a * b for a, b in subm) * same.num_pairs
        operations += channels[0] * channels[1] * down.num_pairs
        ones, zeros = [1] * 3, [0] * 3
        pairs = spconv_numbers.ops.get_indice_pairs(
            indices, 1, list(shape), ConvAlgo.Native, [3] * 3, ones, ones, ones, zeros, True
        )
        listed += sum(a * b for a, b in subm) * int(pairs[2].sum())
        listed += channels[0] * channels[1] * down.num_pairs
        indices, shape = down.out_indices, down.out_shape
    assert shape == (180, 180, 2)
    assert round(operations / 1e9, 2) == 25.46
    assert listed < 0.7 * operations

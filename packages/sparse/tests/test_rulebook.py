"""Rulebooks against a dict of voxels, over all kinds, ranks and backends."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bevquant_sparse import _rulebook_torch, build_rulebook

KINDS = ("subm", "strided", "transposed")


@st.composite
def geometries(draw):
    """``(kind, shape, batch_size, voxel count, seed, keyword arguments of build_rulebook)``."""
    kind = draw(st.sampled_from(KINDS))
    ndim = draw(st.integers(1, 4))

    def axes(*values):
        return tuple(draw(st.sampled_from(values)) for _ in range(ndim))

    arguments = {"kernel_size": axes(1, 2, 3, 4), "dilation": axes(1, 2, 3)}
    if kind == "subm":
        arguments["kernel_size"] = axes(1, 3, 5)
    else:
        arguments |= {"stride": axes(1, 2, 3, 4), "padding": axes(0, 1, 2)}
    if kind == "transposed":
        arguments["output_padding"] = axes(0, 1)
    shape = axes(*range(1, 9))
    # Enough voxels for neighbours, few enough for loops over 625 offsets.
    count = draw(st.integers(0, 30))
    return kind, shape, draw(st.integers(1, 3)), count, draw(st.integers(0, 999)), arguments


def build(indices, shape, batch_size, kind, arguments, backend):
    flags = {"subm": kind == "subm", "transposed": kind == "transposed"}
    return build_rulebook(
        indices, shape, **arguments, **flags, batch_size=batch_size, backend=backend
    )


def build_or_reject(*arguments):
    """``build``; examples whose output grid is empty are not counted."""
    try:
        return build(*arguments)
    except ValueError as error:
        if "is empty" not in str(error):
            raise
    return assume(False)


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(case=geometries())
def test_pairs_equal_brute_force(case, backend, random_voxels, brute_force, pair_set):
    kind, shape, batch_size, count, seed, arguments = case
    indices = random_voxels(seed, batch_size, shape, count)
    rulebook = build_or_reject(indices, shape, batch_size, kind, arguments, backend)
    assert rulebook.neighbours.dtype == rulebook.out_indices.dtype == torch.int32
    found = pair_set(rulebook)
    geometry = (rulebook.kernel_size, rulebook.stride, rulebook.padding, rulebook.dilation)
    assert found == brute_force(
        indices, rulebook.out_shape, *geometry, subm=rulebook.subm, transposed=rulebook.transposed
    )
    assert rulebook.num_pairs == len(found)
    outputs = rulebook.out_indices.tolist()
    if kind == "subm":
        assert torch.equal(rulebook.out_indices, indices)
    else:
        assert outputs == sorted(outputs)
        assert {tuple(row) for row in outputs} == {out for _, out, _ in found}


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(case=geometries())
def test_every_path_of_the_torch_backend_agrees(case, random_voxels):
    """Dense table, sorted int32 and int64 keys, and ranks give the same tensors."""
    kind, shape, batch_size, count, seed, arguments = case
    indices = random_voxels(seed, batch_size, shape, count)
    expected = build_or_reject(indices, shape, batch_size, kind, arguments, "torch")
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (_rulebook_torch, "_DENSE_LIMIT"),
            (_rulebook_torch, "_INT32_LIMIT"),
            (_rulebook_torch, "_INT64_LIMIT"),
            (_rulebook_torch, "_KEY_LIMIT"),
        ):
            patch.setattr(module, name, 0)
            other = build(indices, shape, batch_size, kind, arguments, "torch")
            assert torch.equal(other.neighbours, expected.neighbours)
            assert torch.equal(other.out_indices, expected.out_indices)


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree_bit_for_bit(kind, random_voxels):
    pytest.importorskip("numba", reason="the numba extra is not installed")
    indices = random_voxels(1, 2, (70, 80, 64), 20_000)
    arguments = {"kernel_size": 3} if kind == "subm" else {"kernel_size": 3, "stride": 2}
    books = [build(indices, (70, 80, 64), 2, kind, arguments, b) for b in ("torch", "numba")]
    assert torch.equal(books[0].neighbours, books[1].neighbours)
    assert torch.equal(books[0].out_indices, books[1].out_indices)


@pytest.mark.parametrize("width", [1, 3, 5])
def test_lines_across_word_borders(width, backend, brute_force, pair_set):
    """A full grid whose lines start at every bit of a 64-bit word."""
    shape = (9, 41)
    indices = torch.nonzero(torch.ones(2, *shape)).int()
    rulebook = build_rulebook(indices, shape, (3, width), subm=True, backend=backend)
    expected = brute_force(indices, shape, (3, width), (1, 1), (1, width // 2), (1, 1), subm=True)
    assert pair_set(rulebook) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_swaps_the_pairs(kind, backend, random_voxels):
    indices = random_voxels(3, 2, (9, 8, 7), 150)
    arguments = {"kernel_size": (3, 3, 1)}
    if kind != "subm":
        arguments |= {"stride": 2, "padding": 1}
    rulebook = build(indices, (9, 8, 7), 2, kind, arguments, backend)
    inverse = rulebook.inverse()
    assert torch.equal(inverse.out_indices, rulebook.in_indices)
    assert torch.equal(inverse.in_indices, rulebook.out_indices)
    assert (inverse.in_shape, inverse.out_shape) == (rulebook.out_shape, rulebook.in_shape)
    expected = torch.full_like(inverse.neighbours, -1)
    for out, line in enumerate(rulebook.neighbours.tolist()):
        for offset, row in enumerate(line):
            if row >= 0:
                expected[row, offset] = out
    assert torch.equal(inverse.neighbours, expected)
    assert torch.equal(inverse.inverse().neighbours, rulebook.neighbours)


def test_pairs_are_grouped_by_offset_and_ascend(backend, random_voxels):
    indices = random_voxels(4, 1, (12, 12), 60)
    rulebook = build_rulebook(indices, (12, 12), 3, 2, 1, subm=False, backend=backend)
    in_rows, out_rows, bounds = rulebook.pairs
    assert in_rows.dtype == out_rows.dtype == torch.int64
    assert bounds[0] == 0
    assert bounds[-1] == rulebook.num_pairs == in_rows.shape[0]
    for offset in range(9):
        span = slice(bounds[offset], bounds[offset + 1])
        assert torch.equal(rulebook.neighbours[out_rows[span], offset].long(), in_rows[span])
        assert bool((out_rows[span].diff() > 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_zero_voxels_give_an_empty_rulebook(kind, backend):
    arguments = {"kernel_size": (3, 1, 3)}
    rulebook = build(torch.empty(0, 4).int(), (5, 5, 5), 2, kind, arguments, backend)
    assert rulebook.num_in == rulebook.num_out == rulebook.num_pairs == 0
    assert rulebook.neighbours.shape == rulebook.inverse_neighbours.shape == (0, 9)
    assert rulebook.pairs[2] == [0] * 10
    assert build_rulebook(torch.empty(0, 2).int(), (4,), 3, subm=True).batch_size == 1


def test_voxels_that_reach_no_output(backend):
    indices = torch.tensor([[0, 1], [0, 3]], dtype=torch.int32)
    rulebook = build_rulebook(indices, (5,), 1, 2, subm=False, backend=backend)
    assert rulebook.out_shape == (3,)
    assert rulebook.num_out == 0
    assert rulebook.neighbours.shape == (0, 1)
    assert rulebook.inverse().neighbours.tolist() == [[-1], [-1]]


def test_batch_size_defaults_to_the_largest_index_plus_one():
    indices = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    assert build_rulebook(indices, (5,), 3, subm=True).batch_size == 3


def test_int64_coordinates_are_taken(backend):
    indices = torch.tensor([[0, 1], [0, 2]])
    rulebook = build_rulebook(indices, (5,), 3, subm=True, backend=backend)
    assert rulebook.in_indices.dtype == torch.int32
    assert rulebook.neighbours.tolist() == [[-1, 0, 1], [0, 1, -1]]


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_same_at_any_thread_count_and_for_concurrent_callers(kind, backend, random_voxels):
    shape = (40, 50, 60)
    indices = random_voxels(5, 2, shape, 15_000)
    arguments = {"kernel_size": 3} if kind == "subm" else {"kernel_size": 3, "stride": 2}
    books = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        books.append(build(indices, shape, 2, kind, arguments, backend))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(build, indices, shape, 2, kind, arguments, backend) for _ in range(8)]
        books += [call.result() for call in calls]
    for book in books[1:]:
        assert torch.equal(book.neighbours, books[0].neighbours)
        assert torch.equal(book.out_indices, books[0].out_indices)


def test_reused_bitmaps_start_clean(random_voxels, brute_force, pair_set):
    """Small and large grids, refused and accepted input, alternate on one workspace."""
    pytest.importorskip("numba", reason="the numba extra is not installed")
    for seed in range(6):
        shape = (6, 7, 5 + 40 * (seed % 2))
        indices = random_voxels(seed, 1, shape, 90)
        twice = torch.cat((indices, indices[-1:]))
        with pytest.raises(ValueError, match="repeats"):
            build_rulebook(twice, shape, 3, subm=True, backend="numba")
        for subm in (True, False):
            book = build_rulebook(indices, shape, 3, padding=1, subm=subm, backend="numba")
            expected = brute_force(
                indices, book.out_shape, (3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, subm=subm
            )
            assert pair_set(book) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_cpu(kind, random_voxels):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    indices = random_voxels(6, 2, (70, 80, 64), 20_000)
    arguments = {"kernel_size": 3} if kind == "subm" else {"kernel_size": 3, "stride": 2}
    expected = build(indices, (70, 80, 64), 2, kind, arguments, "torch")
    found = build(indices.cuda(), (70, 80, 64), 2, kind, arguments, "auto")
    assert found.neighbours.device.type == "cuda"
    assert torch.equal(found.neighbours.cpu(), expected.neighbours)
    assert torch.equal(found.out_indices.cpu(), expected.out_indices)


def test_dense_convolution_shapes():
    """Output grids follow torch, and spconv's rule for transposed convolutions."""
    for size, kernel, stride, padding, dilation in [(9, 3, 2, 1, 1), (20, 4, 3, 0, 2)]:
        dense = torch.nn.Conv1d(1, 1, kernel, stride, padding, dilation)(torch.zeros(1, 1, size))
        book = build_rulebook(
            torch.tensor([[0, 4]]), (size,), kernel, stride, padding, dilation, subm=False
        )
        assert book.out_shape == tuple(dense.shape[2:])
    dense = torch.nn.ConvTranspose1d(1, 1, 3, 2, 1, output_padding=1)(torch.zeros(1, 1, 9))
    book = build_rulebook(
        torch.tensor([[0, 4]]), (9,), 3, 2, 1, subm=False, transposed=True, output_padding=1
    )
    assert book.out_shape == tuple(dense.shape[2:])
    assert math.prod(book.kernel_size) == book.kernel_volume


def test_a_traced_identity_rulebook_has_the_shape_of_the_real_one():
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32)
    real = torch.ops.bevquant_sparse.identity_rulebook(rows, [4, 4], 1)
    with FakeTensorMode() as mode:
        fake = torch.ops.bevquant_sparse.identity_rulebook(mode.from_tensor(rows), [4, 4], 1)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)

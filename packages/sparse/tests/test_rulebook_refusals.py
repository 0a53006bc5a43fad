"""What build_rulebook refuses, and how it says so."""

import pytest
import torch

from bevquant_sparse import build_rulebook

GOOD = torch.tensor([[0, 1, 2], [0, 3, 3], [1, 0, 0]], dtype=torch.int32)
SHAPE = (4, 5)


@pytest.fixture(params=["subm", "strided", "transposed"])
def build(request, backend):
    kind = request.param

    def call(indices, shape=SHAPE, kernel=3, **options):
        options.setdefault("batch_size", 2)
        return build_rulebook(
            indices,
            shape,
            kernel,
            subm=kind == "subm",
            transposed=kind == "transposed",
            backend=backend,
            **options,
        )

    return call


def with_row(row, position=1, dtype=torch.int32):
    rows = GOOD.tolist()
    rows.insert(position, row)
    return torch.tensor(rows, dtype=dtype)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0, -1, 2], ["indices[1] = [0, -1, 2]", "axis 0", "negative", "0…3"]),
        ([0, 1, -7], ["indices[1] = [0, 1, -7]", "axis 1", "negative"]),
        ([0, 4, 2], ["indices[1] = [0, 4, 2]", "axis 0", "over range", "0…3"]),
        ([0, 0, 5], ["indices[1] = [0, 0, 5]", "axis 1", "over range", "0…4"]),
        ([2, 0, 0], ["indices[1] = [2, 0, 0]", "batch index 2", "batch_size=2"]),
        ([-1, 0, 0], ["indices[1] = [-1, 0, 0]", "batch index -1"]),
    ],
)
def test_out_of_range_rows_are_named(build, row, words):
    with pytest.raises(ValueError, match="indices") as caught:
        build(with_row(row))
    for word in words:
        assert word in str(caught.value)


def test_the_first_offending_row_is_named(build):
    indices = torch.cat((GOOD, torch.tensor([[0, 9, 0], [5, 0, 0], [0, 0, -1]]).int()))
    with pytest.raises(ValueError, match=r"indices\[3\] = \[0, 9, 0\]"):
        build(indices)


@pytest.mark.parametrize("ordered", [True, False])
def test_duplicates_are_named(build, ordered):
    indices = torch.tensor([[0, 3, 3], [0, 1, 2], [1, 0, 0], [0, 1, 2], [0, 3, 3]])
    if ordered:
        indices = torch.tensor([[0, 1, 2], [0, 3, 3], [0, 3, 3], [1, 0, 0]])
    second, first = (2, 1) if ordered else (3, 1)
    with pytest.raises(ValueError, match=rf"indices\[{second}\].* repeats indices\[{first}\]"):
        build(indices.int())


def test_duplicates_that_reach_no_output_are_refused(backend):
    indices = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indices\[1\] = \[0, 1\] repeats indices\[0\]"):
        build_rulebook(indices, (5,), 1, 2, subm=False, backend=backend)


def test_int64_coordinates_do_not_wrap(build):
    with pytest.raises(ValueError, match="over range"):
        build(with_row([0, 2**32 + 1, 2], dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_wrong_dtype(build, dtype):
    with pytest.raises(ValueError, match=r"dtype torch.* expected torch.int32"):
        build(GOOD.to(dtype))


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 4), (3, 3, 1)])
def test_wrong_rank(build, shape):
    with pytest.raises(ValueError, match=r"expected \[rows, 3\]"):
        build(torch.zeros(shape, dtype=torch.int32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel_size": 0}, "kernel_size"),
        ({"kernel_size": (3, -1)}, "kernel_size"),
        ({"kernel_size": (3, 3, 3)}, "3 entries for 2 spatial axes"),
        ({"stride": 0}, "stride"),
        ({"stride": (1, -2)}, "stride"),
        ({"padding": -1}, "padding"),
        ({"dilation": 0}, "dilation"),
        ({"spatial_shape": (4, 0)}, "spatial_shape"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"output_padding": 1}, "output_padding"),
        ({"kernel_size": 9, "padding": 0}, r"output shape \(-4, -3\) is empty"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"stride": 2, "subm": True}, "stride must be 1"),
        ({"kernel_size": 2, "subm": True}, "must be odd"),
        ({"transposed": True, "subm": True}, "cannot be transposed"),
        (
            {"spatial_shape": (2**31 - 1, 9), "stride": 2, "transposed": True},
            "does not fit int32",
        ),
    ],
)
def test_parameters(options, words):
    arguments = {"spatial_shape": SHAPE, "kernel_size": 3, "subm": False} | options
    with pytest.raises(ValueError, match=words):
        build_rulebook(GOOD, arguments.pop("spatial_shape"), **arguments)


def test_five_axes():
    with pytest.raises(ValueError, match="5 axes"):
        build_rulebook(torch.zeros(1, 6, dtype=torch.int32), (2,) * 5, 1, subm=True)


def test_fractional_parameters():
    # The tests' own type checks may speak before the function does: both raise TypeError.
    with pytest.raises(TypeError, match="kernel_size"):
        build_rulebook(GOOD, SHAPE, (3, 3.0), subm=True)


@pytest.mark.parametrize("kind", ["subm", "strided"])
def test_trap_36_column_major_indices_give_the_right_rulebook(kind, backend, pair_set):
    mask = torch.rand(2, 9, 8, generator=torch.Generator().manual_seed(0)) < 0.3
    indices = mask.nonzero().int()
    column_major = indices.t().contiguous().t()
    assert not column_major.is_contiguous()
    wide = torch.zeros(len(indices), 6, dtype=torch.int32)
    wide[:, ::2] = indices
    options = {"subm": kind == "subm", "batch_size": 2, "backend": backend}
    expected = build_rulebook(indices.contiguous(), (9, 8), 3, **options)
    for view in (column_major, wide[:, ::2]):
        found = build_rulebook(view, (9, 8), 3, **options)
        assert torch.equal(found.neighbours, expected.neighbours)
        assert torch.equal(found.out_indices, expected.out_indices)
        assert found.in_indices.is_contiguous()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"spatial_shape": 4}, TypeError, "spatial_shape=4: expected a sequence"),
        ({"spatial_shape": None}, TypeError, "spatial_shape=None: expected a sequence"),
        ({"batch_size": "x"}, TypeError, "batch_size"),
        ({"batch_size": 1.5}, TypeError, "batch_size"),
        ({"kernel_size": 10**9}, ValueError, "more than 16777216 offsets"),
    ],
)
def test_arguments_of_another_type_are_named(change, error, words):
    arguments = {"spatial_shape": SHAPE, "kernel_size": 3, "stride": 2, "padding": 1} | change
    with pytest.raises(error, match=words):
        build_rulebook(GOOD, **arguments, subm=False)


@pytest.mark.parametrize("stride", [1000, 1025, 2**31 - 1])
def test_a_stride_beyond_the_grid_takes_no_longer(stride):
    """One output at most, by table or without one; a loop over remainders never ended."""
    indices = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 3, 4]], dtype=torch.int32)
    made = build_rulebook(indices, (4, 5), 3, stride, 1, subm=False, backend="torch")
    assert made.out_indices.tolist() == [[0, 0, 0]]
    assert made.neighbours.tolist() == [[-1, -1, -1, -1, 0, -1, -1, -1, 1]]


@pytest.mark.parametrize(("stride", "dilation"), [(1026, 4), (1030, 15), (1031, 6), (2048, 64)])
def test_many_remainders_are_solved_as_few_are(stride, dilation, monkeypatch):
    g = torch.Generator().manual_seed(stride)
    indices = torch.randint(0, 9000, (400, 2), generator=g).unique(dim=0)
    indices[:, 0] = 0
    indices = indices.unique(dim=0)
    made = []
    for few in (1024, 4096):
        monkeypatch.setattr("bevquant_sparse._rulebook_torch._FEW_REMAINDERS", few)
        made.append(
            build_rulebook(
                indices, (9000,), 40, stride, 7, dilation, subm=False, batch_size=1, backend="torch"
            )
        )
    assert torch.equal(made[0].neighbours, made[1].neighbours)
    outputs, offsets = (made[0].neighbours >= 0).nonzero().unbind(1)
    rows = made[0].neighbours[outputs, offsets].long()
    assert len(rows) > 5
    places = made[0].out_indices[outputs, 1] * stride - 7 + offsets * dilation
    assert torch.equal(indices[rows, 1], places)

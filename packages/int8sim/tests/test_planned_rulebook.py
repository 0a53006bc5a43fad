"""Rulebooks planned from pillars against bevquant_sparse's, and their tiles against both."""

import inspect

import numpy as np
import pytest
import torch

from bevquant_sparse import Rulebook, WeightLayout, build_rulebook

pytest.importorskip("numba", reason="the numba extra is not installed")

from bevquant_int8sim import int8_sparse_conv, plan_rulebook

GEOMETRIES = {
    "subm": dict(kernel_size=3, padding=1, subm=True),
    "subm, 5×3×1": dict(kernel_size=(5, 3, 1), subm=True),
    "subm, 1×1×7": dict(kernel_size=(1, 1, 7), subm=True),
    "subm, dilated": dict(kernel_size=3, dilation=(2, 3, 1), subm=True),
    "strided": dict(kernel_size=3, stride=2, padding=1, subm=False),
    "strided, no padding": dict(kernel_size=3, stride=2, padding=(1, 1, 0), subm=False),
    "flat": dict(kernel_size=(1, 1, 3), stride=(1, 1, 2), subm=False),
    "stride 1": dict(kernel_size=(3, 2, 3), padding=1, subm=False),
    "gaps between windows": dict(kernel_size=(1, 2, 1), stride=(2, 3, 4), subm=False),
    "wide padding": dict(kernel_size=(2, 2, 2), stride=2, padding=(3, 2, 4), subm=False),
    "2×4×4": dict(kernel_size=(2, 4, 4), stride=(1, 2, 3), padding=(0, 1, 2), subm=False),
}


def table_of(rulebook, channels=64):
    """The table of neighbours by which a rulebook's tiles convolve.

    The features are the inputs' numbers, in two digits; channel k of an output reads element k of
    the kernel alone. How many channels there are decides how many rows a tile has.
    """
    numbers = torch.arange(1, rulebook.num_in + 1)
    digits = torch.stack([numbers // 127, numbers % 127], 1)
    weight = torch.zeros(rulebook.kernel_volume, 2, channels, dtype=torch.int8)
    for element in range(rulebook.kernel_volume):
        weight[element, :, element] = torch.tensor([127, 1])
    few = rulebook.num_in < 127 * 127
    made = int8_sparse_conv(
        digits.to(torch.int8 if few else torch.int16), weight, None, rulebook,
        layout=WeightLayout.VCK, backend="portable",
    )  # fmt: skip
    return made[:, : rulebook.kernel_volume] - 1


@pytest.mark.parametrize("order", ["sorted", "random"])
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize(("batch", "shape", "count"), [(2, (9, 11, 13), 500), (1, (3, 4, 64), 90)])
def test_equals_build_rulebook(name, order, batch, shape, count, random_voxels):
    geometry = GEOMETRIES[name]
    indices = random_voxels(np.random.default_rng(count), batch, shape, count)
    if order == "sorted":
        indices = indices[np.lexsort(indices.numpy().T[::-1])].contiguous()
    ours = plan_rulebook(indices, shape, batch_size=batch, **geometry)
    theirs = build_rulebook(indices, shape, batch_size=batch, **geometry)
    assert type(ours) is not Rulebook
    names = "batch_size in_shape out_shape kernel_size stride padding dilation subm num_in num_out"
    for field in (*names.split(), "kernel_volume", "num_pairs", "output_padding", "transposed"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert torch.equal(ours.in_indices, theirs.in_indices)
    assert torch.equal(ours.out_indices, theirs.out_indices)
    for channels in (48, 64):
        assert torch.equal(table_of(ours, channels), theirs.neighbours)
    assert torch.equal(ours.neighbours, theirs.neighbours)
    assert torch.equal(ours.inverse().neighbours, theirs.inverse().neighbours)


def test_a_chain_of_layers(random_voxels):
    shape = (30, 31, 33)
    ours = theirs = random_voxels(np.random.default_rng(0), 1, shape, 3000)
    for name in ("subm", "strided", "subm", "strided", "subm", "strided, no padding", "flat"):
        a, b = (
            build(indices, shape, batch_size=1, **GEOMETRIES[name])
            for build, indices in ((plan_rulebook, ours), (build_rulebook, theirs))
        )
        assert torch.equal(a.out_indices, b.out_indices)
        assert torch.equal(table_of(a), b.neighbours)
        ours, theirs, shape = a.out_indices, b.out_indices, b.out_shape


def test_the_real_frame(real_frame):
    _, indices = real_frame
    shape = (1440, 1440, 41)
    for geometry in (GEOMETRIES["subm"], GEOMETRIES["strided"]):
        ours = plan_rulebook(indices, shape, batch_size=1, **geometry)
        theirs = build_rulebook(indices, shape, batch_size=1, **geometry)
        assert torch.equal(ours.out_indices, theirs.out_indices)
        assert torch.equal(table_of(ours), theirs.neighbours)


@pytest.mark.bits
@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same(threads, random_voxels):
    shape = (200, 150, 20)
    made = []
    for count in (1, threads):
        torch.set_num_threads(count)
        indices = random_voxels(np.random.default_rng(1), 1, shape, 20_000)
        rulebook = plan_rulebook(indices, shape, batch_size=1, **GEOMETRIES["strided"])
        made.append((rulebook.out_indices, table_of(rulebook)))
    assert all(map(torch.equal, *made))


def test_what_pillars_cannot_hold_goes_to_build_rulebook(random_voxels):
    generator = np.random.default_rng(2)
    tall = random_voxels(generator, 1, (4, 4, 80), 50)
    flat = random_voxels(generator, 1, (9, 9), 30)
    small = random_voxels(generator, 1, (6, 6, 6), 30)
    others = [
        (tall, (4, 4, 80), GEOMETRIES["subm"]),
        (flat, (9, 9), dict(kernel_size=3, subm=True)),
        (small, (6, 6, 6), dict(kernel_size=5, subm=True)),
        (small, (6, 6, 6), dict(kernel_size=3, dilation=2, subm=True)),
        (small, (6, 6, 6), dict(kernel_size=2, stride=2, subm=False, transposed=True)),
        (small.long(), (6, 6, 6), GEOMETRIES["subm"]),
        (small[:0], (6, 6, 6), GEOMETRIES["subm"]),
    ]
    for indices, shape, geometry in others:
        ours = plan_rulebook(indices, shape, batch_size=1, **geometry)
        theirs = build_rulebook(indices, shape, batch_size=1, **geometry)
        assert type(ours) is Rulebook
        assert torch.equal(ours.neighbours, theirs.neighbours)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1, 1, 1], [0, 1, 1, 1]], "uplicate"),
        ([[0, 1, 1, 8]], "8"),
        ([[1, 1, 1, 1]], "batch"),
        ([[0, -1, 1, 1]], "-1"),
    ],
)
def test_bad_coordinates_are_named(rows, message):
    indices = torch.tensor(rows, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        plan_rulebook(indices, (8, 8, 8), batch_size=1, **GEOMETRIES["subm"])


def test_coordinates_changed_in_place_are_seen():
    indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    assert plan_rulebook(indices, (8, 8, 8), batch_size=1, **GEOMETRIES["subm"]).num_pairs == 4
    indices[1, 3] = 5
    assert plan_rulebook(indices, (8, 8, 8), batch_size=1, **GEOMETRIES["subm"]).num_pairs == 2


def test_inference_mode(random_voxels):
    with torch.inference_mode():
        indices = random_voxels(np.random.default_rng(3), 1, (8, 8, 8), 60).clone()
        ours = plan_rulebook(indices, (8, 8, 8), batch_size=1, **GEOMETRIES["strided"])
        after = plan_rulebook(ours.out_indices, ours.out_shape, batch_size=1, **GEOMETRIES["subm"])
        theirs = build_rulebook(
            ours.out_indices, ours.out_shape, batch_size=1, **GEOMETRIES["subm"]
        )
        assert torch.equal(table_of(after), theirs.neighbours)


@pytest.mark.parametrize(
    "change",
    [
        {"spatial_shape": 8}, {"spatial_shape": (8, 8, None)}, {"kernel_size": 1.5},
        {"kernel_size": None}, {"stride": "xyz"}, {"padding": (1, 2**63, 1)},
    ],
)  # fmt: skip
def test_bad_arguments_are_named_as_by_the_other(change):
    indices = torch.tensor([[0, 0, 0, 0], [0, 5, 5, 5]], dtype=torch.int32)
    given = {"spatial_shape": (8, 8, 8), "kernel_size": 3, "stride": 2, "padding": 1} | change
    said = []
    for build in (build_rulebook, plan_rulebook):
        with pytest.raises((TypeError, ValueError), match=next(iter(change))) as error:
            build(indices, **given, subm=False, batch_size=1)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_the_arguments_are_those_of_the_other():
    theirs = dict(inspect.signature(build_rulebook).parameters)
    del theirs["tiles"]
    assert dict(inspect.signature(plan_rulebook).parameters) == theirs

"""Rulebooks planned from pillars against bevquant_sparse's, and their tiles against both."""

import numpy as np
import pytest
import torch

from bevquant_sparse import build_rulebook

pytest.importorskip("numba", reason="the numba extra is not installed")

from bevquant_int8sim import plan_rulebook
from bevquant_int8sim._compiled.planned_rulebook import PlannedRulebook
from bevquant_int8sim._compiled.sparse_plan import plan_for

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


def table_of(plan, rulebook):
    """The table of neighbours that a plan's tiles say, and how often each output occurs."""
    table = np.full((rulebook.num_out + 1, rulebook.kernel_volume), -1, np.int32)
    tile = np.repeat(np.arange(plan.num_tiles), np.diff(plan.bounds))
    outputs = plan.out_rows.reshape(-1, plan.tile_rows)
    table[outputs[tile], plan.offsets[:, None]] = plan.rows
    assert (table[-1] == -1).all()  # rows that fill the last tile see nothing
    return table[:-1], np.bincount(outputs[outputs >= 0], minlength=rulebook.num_out)


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
    assert type(ours) is PlannedRulebook
    names = "batch_size in_shape out_shape kernel_size stride padding dilation subm num_in num_out"
    for field in (*names.split(), "kernel_volume", "num_pairs", "output_padding", "transposed"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert torch.equal(ours.in_indices, theirs.in_indices)
    assert torch.equal(ours.out_indices, theirs.out_indices)
    for tile_rows in (6, 8):
        table, counts = table_of(plan_for(ours, tile_rows), ours)
        assert (counts == 1).all()
        assert (table == theirs.neighbours.numpy()).all()
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
        assert (table_of(plan_for(a, 8), a)[0] == b.neighbours.numpy()).all()
        ours, theirs, shape = a.out_indices, b.out_indices, b.out_shape


def test_the_real_frame(real_frame):
    _, indices = real_frame
    shape = (1440, 1440, 41)
    for geometry in (GEOMETRIES["subm"], GEOMETRIES["strided"]):
        ours = plan_rulebook(indices, shape, batch_size=1, **geometry)
        theirs = build_rulebook(indices, shape, batch_size=1, **geometry)
        assert torch.equal(ours.out_indices, theirs.out_indices)
        assert (table_of(plan_for(ours, 8), ours)[0] == theirs.neighbours.numpy()).all()


@pytest.mark.bits
@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same(threads, random_voxels):
    shape = (200, 150, 20)
    usual = torch.get_num_threads()
    plans = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            indices = random_voxels(np.random.default_rng(1), 1, shape, 20_000)
            rulebook = plan_rulebook(indices, shape, batch_size=1, **GEOMETRIES["strided"])
            plans.append(plan_for(rulebook, 8))
    finally:
        torch.set_num_threads(usual)
    for field in ("bounds", "offsets", "rows", "out_rows"):
        assert (getattr(plans[0], field) == getattr(plans[1], field)).all()


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
        assert type(ours) is not PlannedRulebook
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
        assert (table_of(plan_for(after, 8), after)[0] == theirs.neighbours.numpy()).all()


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

"""Two real processes under torchrun find what one does; calibrators merge exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevquant_quantizers import calib, calibrate, calibrator_state, load_calibrator_state, merge
from bevquant_quantizers._distributed import Shares

sys.path.insert(0, str(Path(__file__).parent))
from calibration_cases import Block, make_batches, outcome

SCENES = ["mse", "iterated", "behind 0", "behind 1"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes reports."""
    folder = tmp_path_factory.mktemp("torchrun")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = str(Path(__file__).parent / "distributed_worker.py")
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", worker, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.bits
@pytest.mark.parametrize("scene", SCENES)
def test_two_processes_equal_one_bit_for_bit(found, scene):
    model = Block()
    method = "percentile" if scene == "iterated" else "mse"
    wanted = outcome(model, calibrate(model, make_batches(), method=method))
    assert found[0][scene] == wanted
    assert found[1][scene] == wanted


def test_a_failure_ends_every_process_with_its_message(found):
    assert found[1]["failing"] == "ValueError: a bad frame"
    assert found[0]["failing"].startswith("PeerError: ")
    assert "process 1: ValueError: a bad frame" in found[0]["failing"]


def test_unequal_batches_are_refused(found):
    for process in found:
        assert "give each the same" in process["unequal"]


def test_all_merge(found):
    assert found[0]["merged"] == found[1]["merged"] == [2.0, 3.0]


def collected(parts, kind=calib.HistogramCalibrator, axis=None):
    calibrator = kind(8, axis, False)
    if kind is calib.HistogramCalibrator:
        calibrator = kind(8, axis, False, num_bins=64)
    for part in parts:
        calibrator.collect(part)
    return calibrator


def state(calibrator):
    meta, arrays = calibrator_state(calibrator)
    return meta, {key: value.tolist() for key, value in arrays.items()}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1.0, 30.0, 1e6]),
    axis=st.sampled_from([None, 1]),
    split=st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_merged_calibrators_equal_one(seed, scale, axis, split):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(30, 2, generator=generator)
    parts = [torch.randn(30, 2, generator=generator) * scale for _ in split]
    for kind in (calib.HistogramCalibrator, calib.MaxCalibrator):
        # All begin with the same tensor, which sets the width; here it is counted three times.
        some = [
            collected(
                [first, *(p for p, k in zip(parts, split, strict=True) if k == i)], kind, axis
            )
            for i in range(3)
        ]
        whole = collected([first, first, first, *parts], kind, axis)
        before = [state(c) for c in some]
        for order in (some, some[::-1]):
            assert state(merge(order)) == state(whole)
        assert [state(c) for c in some] == before


def test_merging_takes_zeros_and_nothing():
    zeros, nothing = collected([torch.zeros(5)]), collected([])
    some = collected([torch.tensor([1.0, 2.0])])
    for order in ([zeros, nothing, some], [some, zeros, nothing]):
        counts = merge(order)._calib_hist
        assert (int(counts[0]), int(counts.sum())) == (5, 7)
    assert merge([nothing, nothing]).compute_amax("mse") is None


def test_what_cannot_be_merged_is_refused():
    a, b = collected([torch.tensor([1.0])]), collected([torch.tensor([2.0])])
    with pytest.raises(ValueError, match="different widths"):
        merge([a, b])
    with pytest.raises(ValueError, match="cannot be merged"):
        merge([a, calib.MaxCalibrator(8, None, False)])
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    with pytest.raises(ValueError, match="shape"):
        merge([collected([torch.ones(2, n)], axis=1) for n in (3, 4)])
    with pytest.raises(ValueError, match="cannot be merged"):
        merge([collected([torch.ones(2, n)], calib.MaxCalibrator, 1) for n in (3, 4)])


@pytest.mark.parametrize("kind", [calib.HistogramCalibrator, calib.MaxCalibrator])
def test_states_come_back_and_damaged_ones_do_not(kind):
    whole = collected([torch.randn(50, 3), torch.randn(50, 3) * 4], kind, 1)
    copy = collected([], kind, 1)
    load_calibrator_state(copy, *calibrator_state(whole))
    assert repr(copy) == repr(whole)
    meta, arrays = calibrator_state(whole)
    with pytest.raises(ValueError, match="the state is of"):
        load_calibrator_state(collected([], kind, 0), meta, arrays)
    if kind is calib.HistogramCalibrator:
        with pytest.raises(ValueError, match="damaged"):
            load_calibrator_state(copy, meta, {"counts": arrays["counts"][:-1]})
        with pytest.raises(ValueError, match="damaged"):
            load_calibrator_state(copy, meta, {})
    assert repr(copy) == repr(whole)


@given(n=st.integers(0, 12), world=st.integers(1, 4), start=st.integers(0, 3))
def test_every_batch_goes_to_one_process(n, world, start):
    for kind in (list, iter):
        rounds = -(-n // world)
        if start > rounds:
            with pytest.raises(ValueError, match="rounds of batches"):
                list(Shares(kind(range(n)), 0, world).rounds(start))
            continue
        given = []
        for rank in range(world):
            shares = Shares(kind(list(range(n))), rank, world)
            dealt = list(shares.rounds(start))
            assert [r for r, _ in dealt] == list(range(start, rounds))
            assert shares.count == n
            given += [b for r, b in dealt if isinstance(b, int)]
        assert sorted(given) == list(range(min(start * world, n), n))

"""A few of the models of `nox -s random`: no raw error, and no wrong result without a word."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("spconv.pytorch", reason="spconv is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import torch
from random_models import flow
from random_models.flow import KINDS, Found, run, smallest, targets_of
from random_models.session import chosen, table
from torch import nn

# The fewest of the first ones that have all kinds of steps between them.
SEEDS = {"dense": (0, 2, 3, 5), "sparse": (0, 1, 4), "hybrid": (1, 3, 4, 5, 6, 7)}


@pytest.mark.parametrize("kind", KINDS)
def test_random_models_end_well(kind: str) -> None:
    found = [f for seed in SEEDS[kind] for f in run(kind, seed, chosen(kind, seed, 1))]
    assert [f for f in found if f.outcome in ("RAW", "SILENT")] == []
    # Models that are refused at the first stage would test nothing.
    late = [f for f in found if f.stage in targets_of(kind) or f.stage in ("integers", "save")]
    assert sum(f.outcome == "ok" for f in late) > len(SEEDS[kind])


# Models that ended on a raw error or a wrong check before, with the target that showed it.
FOUND_BEFORE = [("sparse", 4, "portable"), ("sparse", 160, "libspconv"), ("dense", 143, "portable")]


@pytest.mark.parametrize(("kind", "seed", "target"), FOUND_BEFORE)
def test_what_was_found_stays_mended(kind: str, seed: int, target: str) -> None:
    found = run(kind, seed, [target])
    assert [f for f in found if f.outcome in ("RAW", "SILENT")] == []
    assert not any("expected [voxels" in f.text for f in found)


def test_a_wrong_result_and_a_raw_error_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flow.simulate

    def wrong(model: nn.Module, *args: object) -> object:
        made = right(model, *args)
        if not any(step.name == "linear" for step in model.steps):
            return made
        return lambda *inputs: made(*inputs) * 1.1

    monkeypatch.setattr(flow, "simulate", wrong)
    outcomes = {f.stage: f.outcome for f in run("dense", 3, [])}
    assert outcomes["integers"] == "SILENT"
    assert outcomes["save"] == "RAW"  # a function has nothing to save
    skipped, steps = smallest("dense", 3, [], Found("save", "RAW", "AttributeError"))
    assert skipped
    assert "linear" in steps


def test_the_same_seed_makes_the_same_model() -> None:
    one, other = (flow.Stages("dense", 7) for _ in range(2))
    assert [s.name for s in one.net.steps] == [s.name for s in other.net.steps]
    assert torch.equal(one.net(*one.batches[0]), other.net(*other.batches[0]))
    assert "RAW" in table(Counter({("dense", "fuse", "ok"): 1}))

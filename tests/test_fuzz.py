"""A few of the mutants of `nox -s fuzz`, in this process: every reader ends on a clean error."""

from __future__ import annotations

import json

import pytest
from fuzz.mutate import changed_json
from fuzz.session import OUTCOMES, Mutants, counts, table

# What is slow to make or to read is left to the session.
QUICK = (
    "ranges", "saved collection", "quant config", "partition plan", "CPU suggestion",
    "compiled .hbm", ".pth zip", ".pth legacy", ".safetensors", "training checkpoint",
    "prepared frame", "points .npz", "points .bin", "points .tensor", "record of a rank",
    "settings of a run", "KITTI frame", "run for report", "engine's layers",
    "nuScenes tables", "message of a rank", "list of prepared frames", "record of a frame",
    "descriptor's YAML",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_damaged_files_end_on_a_clean_error(name: str) -> None:
    mutants = Mutants(name, seed=1)
    found = [mutants.run(number) for number in range(150)]
    mutants.close()
    assert [said for outcome, said in found if outcome not in ("ok", "clean")] == []
    assert sum(outcome == "clean" for outcome, _ in found) > 20  # the mutants do harm


def test_the_whole_run_covers_every_target_a_hundred_thousand_times() -> None:
    whole = counts(1.0)
    assert min(whole.values()) >= 500
    assert sum(whole.values()) >= 100_000


def test_a_mutant_is_made_again_by_its_number() -> None:
    import random

    good = json.dumps({"a": [1, {"b": 2.5}], "c": "x"}).encode()
    one, two = (changed_json(random.Random("0/ranges/7"), good) for _ in range(2))
    assert one == two


def test_a_wrong_exception_is_told_from_a_clean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: object) -> None:
        raise KeyError("names")

    mutants = Mutants("quant config", seed=0)
    assert mutants.target is not None
    mutants.target = mutants.target._replace(read=broken)
    assert mutants.run(0)[0] == "wrong"
    mutants.close()
    from collections import Counter

    assert table({"x": Counter(wrong=2)}).splitlines()[-1].split()[-len(OUTCOMES) - 1 :] == [
        "2", "0", "0", "2", "0", "0", "0"
    ]  # fmt: skip

"""A few of the mutants of `nox -s fuzz`, in this process: every reader ends on a clean error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz import session
from fuzz.mutate import changed_json
from fuzz.session import OUTCOMES, Mutants, clean, counts, table

# What is slow to make or to read is left to the session.
QUICK = (
    "ranges", "saved collection", "quant config", "partition plan", "CPU suggestion",
    "compiled .hbm", ".pth zip", ".pth legacy", ".safetensors", "training checkpoint",
    "prepared frame", "points .npz", "points .bin", "points .tensor", "points .pcd",
    "points .npy", "record of a rank",
    "settings of a run", "KITTI frame", "run for report", "engine's layers",
    "nuScenes tables", "mmdetection3d's infos", "message of a rank", "list of prepared frames",
    "record of a frame", "descriptor's YAML",
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


def test_only_what_the_project_raises_is_clean(tmp_path: Path) -> None:
    from bevquant_quantizers.documents import DocumentError, read_json

    def caught(call: Callable[[], object]) -> Exception:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        return error.value

    assert clean(caught(lambda: read_json(tmp_path / "none.json")), types=False)
    assert not clean(caught(lambda: int("x")), types=False)
    assert not clean(caught(lambda: np.zeros(3).reshape(2)), types=True)
    assert not clean(DocumentError("never raised"), types=False)


def test_a_target_that_refuses_what_is_good_is_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: object) -> None:
        raise ValueError("no file is good enough")

    number, make = session.READERS["quant config"]
    broken = (number, lambda: make()._replace(read=refuse))
    monkeypatch.setitem(session.READERS, "quant config", broken)
    with pytest.raises(ValueError, match="good enough"):
        Mutants("quant config", seed=0)

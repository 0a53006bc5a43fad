"""What the app keeps of frames that several ranks share, and which commands share them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bevfusion.model.head import Detections
from bevfusion.quantization import KeptScores
from bevfusion_quant import InputError
from bevfusion_quant.commands import check_processes
from bevfusion_quant.commands.ptq import Ptq
from bevfusion_quant.commands.saved import Evaluate
from bevfusion_quant.commands.tree import Tree
from bevquant_quantizers.ranks import (
    Ranks,
    Shards,
)


def test_commands_for_one_process_say_so() -> None:
    with pytest.raises(InputError, match="tree runs in one process, and 2 were started"):
        check_processes(Tree(), 2)
    with pytest.raises(InputError, match="--target bpu"):
        check_processes(Ptq(target="bpu"), 2)
    check_processes(Tree(), 1)
    check_processes(Evaluate(run=Path("x")), 4)


def test_scores_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boxes = np.arange(14, dtype=np.float32).reshape(2, 7)

    def one(count: int) -> Detections:
        return Detections(
            boxes[:count], boxes[:count, 0] / 7, np.arange(count), boxes[:count, :2]
        )  # fmt: skip

    monkeypatch.setattr(Ranks, "agree", lambda *told: None)
    scores = KeptScores(Shards(tmp_path, "run", {}, Ranks(0, 2)))
    scores.save("boxes", 0, [one(2), one(0), one(1)])
    scores.save("numbers", 0, [(0.1, 2.0), (1e300, 0.0)])
    assert scores.load("boxes", 1) is None
    assert scores.load("numbers", 0) == [(0.1, 2.0), (1e300, 0.0)]
    for found, count in zip(scores.load("boxes", 0) or (), (2, 0, 1), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(found, one(count), strict=True))

"""Constants of steps as JSON and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from bevquant_int8sim.model._saved_calls import from_json, to_json


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (np.float64("inf"), float("inf")),
        (np.bool_(True), True),
        ((np.int64(2), [1.5]), (2, [1.5])),
        (torch.float16, torch.float16),
        (torch.device("cpu"), torch.device("cpu")),
        (slice(1, None), slice(1, None)),
    ],
)
def test_round_trip(value: Any, read: Any) -> None:
    found = from_json(json.loads(json.dumps(to_json(value))))
    assert found == read
    assert type(found) is type(read)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="a constant of type complex cannot be saved"):
        to_json(1j)

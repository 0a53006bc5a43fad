"""Trial of half types before a file is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from bevquant_export.dense._half import Typed, half_typed
from bevquant_export.dense._half_digits import Size
from bevquant_export.dense._half_single import Known, Measure


def tried(
    proto: Any,
    known: Known,
    measure: Callable[[frozenset[str]], Mapping[str, Size]],
    apart: Callable[[Typed], Collection[str]],
) -> Typed:
    """Types without differences: first with float16 layers in front, then with float32 ones."""
    asked: Measure = lambda names: measure(frozenset(names))  # noqa: E731
    typed, keep = half_typed(copy.deepcopy(proto), known, asked), set[str]()
    for whole in (False, True):
        found = apart(typed) if typed.halves else ()
        if not found:
            break
        keep |= set(found)
        typed = half_typed(copy.deepcopy(proto), known, asked, keep, whole=whole)
    return typed


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}

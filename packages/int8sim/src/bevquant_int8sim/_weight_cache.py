"""Values derived from a weight alone, computed once while the weight is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = Lock()


def remembered(weight: Tensor, what: Hashable, make: Callable[[], Any]) -> Any:
    """``make()``, or its earlier result for this tensor if the tensor was not written to since.

    The result must not refer to the tensor, nor be a view of it: it would keep it alive.
    """
    if weight.is_inference():
        return make()  # its writes are not counted
    version = weight._version
    with _lock:
        kept: Any = _known.get(weight)
        if kept is None or kept[0] != version:
            kept = _known[weight] = (version, {})
        if what in kept[1]:
            return kept[1][what]
    made = make()
    with _lock:
        kept[1][what] = made
    return made

"""A graph that somebody still holds is not captured again.

Lowering, each exporter and each comparison follow the model that they are handed. A script hands
all of them the same one, and following it is most of what they do. `recalled` answers the graph of
an earlier capture that is still in use, where model and inputs are what they were: everything that
the model's modules hold is written down but for tensors, which are told by identity and count of
writes (a graph reads them from the model); inputs are told by how they are nested and the tensors'
sizes. What cannot be written down is captured anew. The caller replays the graph: none is answered
that does not give the model's bits.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import types
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ._graph import Graph
from ._signature import Arguments, flatten

__all__ = ["recalled", "remember"]

_LAST: WeakKeyDictionary[nn.Module, tuple[bytes, ref[Graph]]] = WeakKeyDictionary()
_NAMED = (type, types.BuiltinFunctionType, types.ModuleType)


def recalled(model: nn.Module, given: Arguments) -> Graph | None:
    """The graph that was remembered of this model as it is and of such inputs, if it is in use."""
    if model not in _LAST:
        return None
    state, graph = _LAST[model]
    found = graph()
    return found if found is not None and state == _state(model, given) else None


def remember(model: nn.Module, given: Arguments, graph: Graph) -> None:
    """Let `recalled` answer `graph` while somebody holds it."""
    state = _state(model, given)
    if state is None:
        _LAST.pop(model, None)
    else:
        _LAST[model] = state, ref(graph)


def _state(model: nn.Module, given: Arguments) -> bytes | None:
    """What a capture goes by; None where it cannot be told."""
    leaves, tree = flatten(given)
    sizes = [(leaf.shape, leaf.stride(), str(leaf.dtype), str(leaf.device)) for leaf in leaves]
    written = io.BytesIO()
    try:
        forwards = [id(type(module).forward) for module in model.modules()]
        _Writer(written, protocol=5).dump((model, forwards, tree, sizes))
    except Exception:  # a lock, a generator: whatever has no written form
        return None
    return hashlib.sha256(written.getbuffer()).digest()


class _Writer(pickle.Pickler):
    """Writes what objects hold; tensors, classes and functions by identity."""

    def persistent_id(self, obj: Any) -> Any:
        """What stands for an object; None: what it holds."""
        if isinstance(obj, Tensor):
            return "tensor", id(obj), obj._version, tuple(obj.shape), str(obj.dtype)
        if isinstance(obj, types.FunctionType):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return "function", id(obj), cells, obj.__defaults__, obj.__kwdefaults__
        return ("named", id(obj)) if isinstance(obj, _NAMED) else None

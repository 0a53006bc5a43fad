"""Find products that a forward computes by calling a function instead of a layer.

Such a call (`F.conv2d`, `a @ b`, attention) has no module that could be replaced. It stays float,
which only a real pass through the model shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bevquant_qnn._kinds import is_library_module

__all__ = ["FunctionalProducts"]

_NAMES = {
    "convolution": "a convolution",
    "mm": "a matrix product",
    "addmm": "a matrix product",
    "bmm": "a matrix product",
    "baddbmm": "a matrix product",
}
_ATTENTION = "_scaled_dot_product"


class FunctionalProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, notes products computed directly in the forward of an author's module.

    Attributes:
        found: (path of the module, what it computes), each once.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str]] = []
        self._model = model
        self._running: list[tuple[str, bool]] = []

    def hooks(self) -> Iterator[Any]:
        """Register the hooks that tell which module is running, and yield them for removal."""
        for path, module in self._model.named_modules():
            # A layer with a forward of its own is reported as a layer already.
            layer = isinstance(module, nn.modules.conv._ConvNd | nn.Linear)
            entry = (path, layer or is_library_module(module))
            yield module.register_forward_pre_hook(self._enter(entry))
            yield module.register_forward_hook(lambda *_: self._running.pop() and None)

    def _enter(self, entry: tuple[str, bool]) -> Callable[..., None]:
        return lambda *_: self._running.append(entry)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        product = "attention" if name.startswith(_ATTENTION) else _NAMES.get(name)
        if product is not None and self._running:
            path, library = self._running[-1]
            if not library and (path, product) not in self.found:
                self.found.append((path, product))
        return func(*args, **(kwargs or {}))

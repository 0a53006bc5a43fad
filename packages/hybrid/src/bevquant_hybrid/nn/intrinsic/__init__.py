"""A convolution or linear layer fused with its downstream operators."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "ANCHORS", "Fused", "anchor_of", "fused_class", "fused_name"]

ANCHORS: dict[type[nn.Module], tuple[str, str]] = {
    nn.Conv2d: ("Conv", "2d"),
    nn.Conv3d: ("Conv", "3d"),
    nn.ConvTranspose2d: ("ConvTranspose", "2d"),
    nn.Linear: ("Linear", ""),
}
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "ReLU", nn.ReLU6: "ReLU6"}


class Fused(nn.Module):
    """Anchor layer, then optionally batch norm, addition and activation, in this order.

    Without an addition the members are named "0", "1", …; with one, "conv", "bn" and "relu".

    Args:
        anchor: Convolution or linear layer.
        bn: Batch norm that continues to be trained.
        activation: ``nn.ReLU`` or ``nn.ReLU6``.

    Example:
        >>> fused_class(nn.Conv2d, adds=True, activation=nn.ReLU)(nn.Conv2d(1, 1, 1), None, nn.ReLU())
        ConvAddReLU2d(
          (conv): Conv2d(1, 1, kernel_size=(1, 1), stride=(1, 1))
          (relu): ReLU()
        )
    """  # noqa: E501

    adds: ClassVar[bool] = False

    def __init__(
        self, anchor: nn.Module, bn: nn.Module | None = None, activation: nn.Module | None = None
    ) -> None:
        super().__init__()
        self._roles: dict[str, str] = {}
        for role, module in (("conv", anchor), ("bn", bn), ("relu", activation)):
            if module is not None:
                self._roles[role] = role if self.adds else str(len(self._roles))
                self.add_module(self._roles[role], module)
        self.training = anchor.training

    def part(self, role: str) -> nn.Module | None:
        """Return the module of "conv", "bn" or "relu", or None."""
        return self._modules[self._roles[role]] if role in self._roles else None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Compute; `other` is the addend."""
        for role in ("conv", "bn", "add", "relu"):
            module = self.part(role)
            if module is not None:
                x = module(x)
            elif role == "add" and other is not None:
                x = x + other
        return x

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute with an addition: the call that it replaces was ``.add(x, other)``."""
        result: Tensor = self(x, other)
        return result

    def add_relu(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute with an addition, then clamp at 0."""
        return F.relu(self.add(x, other))


def anchor_of(module: Any) -> Any:
    """The layer of a fused module; any other module itself."""
    return module.part("conv") if isinstance(module, Fused) else module


def fused_name(anchor: type[nn.Module], bn: bool, adds: bool, activation: type | None) -> str:
    """Return the class name of a combination.

    Example:
        >>> fused_name(nn.ConvTranspose2d, bn=False, adds=True, activation=nn.ReLU6)
        'ConvTransposeAddReLU62d'
    """
    stem, suffix = ANCHORS[anchor]
    behind = ACTIVATIONS[activation] if activation else ""
    return f"{stem}{'BN' if bn else ''}{'Add' if adds else ''}{behind}{suffix}"


def fused_class(
    anchor: type[nn.Module],
    bn: bool = False,
    adds: bool = False,
    activation: type[nn.Module] | None = None,
) -> type[Fused]:
    """Return the class of a combination, the same one at every call."""
    return _class(fused_name(anchor, bn, adds, activation), adds)


@functools.cache
def _class(name: str, adds: bool) -> type[Fused]:
    return type(name, (Fused,), {"adds": adds, "__doc__": f"Float form of {name}."})

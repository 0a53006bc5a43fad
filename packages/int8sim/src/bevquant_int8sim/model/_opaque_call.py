"""A module that could not be followed, as a step of a program."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bevquant_graph import flatten, rebuild


class OpaqueCall(nn.Module):
    """Calls a module with its arguments put together of tensors; gives its tensors in order.

    Args:
        module: The module.
        inputs: How its arguments are put together.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs

    def forward(self, *leaves: Any) -> list[Tensor]:
        """Every tensor of what the module returns."""
        args, kwargs = rebuild(self.inputs, leaves)
        return flatten(self.module(*args, **kwargs))[0]

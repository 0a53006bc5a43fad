"""A module that could not be followed, as a step of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bevquant_graph import flatten, rebuild, refuse_other_sizes


class OpaqueCall(nn.Module):
    """Calls a module with its arguments put together of tensors; gives its tensors in order.

    Args:
        module: The module.
        inputs: How its arguments are put together.
        path: Of the module.
        fixed: For each tensor the sizes that the program holds, by axis.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, path: str, fixed: Sequence[Mapping[int, int]]
    ) -> None:
        super().__init__()
        self.path, self.fixed = path, fixed
        self.module = module
        self.inputs = inputs

    def forward(self, *leaves: Any) -> list[Tensor]:
        """Every tensor of the module's result.

        Raises:
            ValueError: A tensor of another size than the program holds.
        """
        args, kwargs = rebuild(self.inputs, leaves)
        made, _ = flatten(self.module(*args, **kwargs))
        refuse_other_sizes(self.path, self.fixed, made)
        return made

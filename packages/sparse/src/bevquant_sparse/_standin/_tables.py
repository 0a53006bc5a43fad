"""`spconv.pytorch.tables`: modules of several sparse tensors; `Identity` is spconv's `identity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bevquant_sparse._standin._functional import sparse_add
from bevquant_sparse._standin._sequential import SparseModule

__name__ = "spconv.pytorch.tables"


class _Table(SparseModule):
    def input_spatial_size(self, out_size: Any) -> Any:
        """The grid of the input for a grid of the output: the same."""
        return out_size


class JoinTable(_Table):
    """Channels of tensors with the same voxels, one behind the other."""

    def forward(self, input: Sequence[Any]) -> Any:
        """``cat([x.features, …], dim=1)``."""
        return input[0].replace_feature(torch.cat([x.features for x in input], 1))


class AddTable(_Table):
    """Sum of tensors with the same voxels."""

    def forward(self, input: Sequence[Any]) -> Any:
        """``x.features + …``."""
        total = input[0].features
        for x in input[1:]:
            total = total + x.features
        return input[0].replace_feature(total)


class AddTableMisaligned(SparseModule):
    """Sum over the union of the voxels of tensors."""

    def forward(self, input: Sequence[Any]) -> Any:
        """``sparse_add(*input)``."""
        return sparse_add(*input)


class ConcatTable(_Table):
    """Each of its modules on the same input."""

    def add(self, module: nn.Module) -> ConcatTable:
        """Append a module and return the table."""
        self.add_module(str(len(self._modules)), module)
        return self

    def forward(self, x: Any) -> list[Any]:
        """One output for each module."""
        return [module(x) for module in self.children()]


class Identity(nn.Module):
    """Returns its input."""

    __module__ = "spconv.pytorch.identity"

    def forward(self, input: Any) -> Any:
        """Return ``input``."""
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        """The grid of the input for a grid of the output: the same."""
        return out_size

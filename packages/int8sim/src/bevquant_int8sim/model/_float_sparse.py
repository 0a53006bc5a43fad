"""Modules that stay float in an integer model: opaque ones and sparse convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bevquant_graph import flatten, rebuild, refuse_other_sizes
from bevquant_int8sim.model._coords import Coords, Geometry
from bevquant_sparse import WeightLayout, sparse_conv

# A module that could not be followed, as a step of a program.


class OpaqueCall(nn.Module):
    """Calls a module with its arguments put together of tensors; gives its tensors in order.

    `fixed` has for each tensor the sizes that the program holds, by axis.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, path: str, fixed: Sequence[Mapping[int, int]]
    ) -> None:
        super().__init__()
        self.path, self.fixed = path, fixed
        self.module = module
        self.inputs = inputs

    def forward(self, *leaves: Any) -> list[Tensor]:
        """Every tensor of the module's result."""
        args, kwargs = rebuild(self.inputs, leaves)
        made, _ = flatten(self.module(*args, **kwargs))
        refuse_other_sizes(self.path, self.fixed, made)
        return made


class FloatSparseConv(nn.Module):
    """act(conv(x, w) + b) on features and coordinates instead of a library's sparse tensor.

    Args:
        weight: float ``[volume, in_channels, out_channels]``.
        bias: float ``[out_channels]`` or ``None``.
        geometry: Kernel size, stride and the like.
        key: Name under which an inverse convolution finds this one.
        activation: ``"None"``, ``"ReLU"``, ``"Sigmoid"`` or ``"LeakyReLU"``.
        alpha: Slope of the last.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        key: str | None,
        activation: str = "None",
        alpha: float = 0.0,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.geometry, self.key = geometry, key
        self.activation, self.alpha = activation, alpha

    def forward(self, features: Tensor, coords: Coords) -> tuple[Tensor, Coords]:
        """Features and coordinates of the output."""
        rulebook, out_coords = coords.convolved(self.geometry, self.key, "a float convolution")
        out = sparse_conv(features, self.weight, self.bias, rulebook, layout=WeightLayout.VCK)
        if self.activation == "ReLU":
            out = functional.relu(out)
        elif self.activation == "LeakyReLU":
            out = functional.leaky_relu(out, self.alpha)
        elif self.activation == "Sigmoid":
            out = torch.sigmoid(out)
        return out, out_coords

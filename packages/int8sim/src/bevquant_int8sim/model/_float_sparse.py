"""A sparse convolution that stays float in an integer model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bevquant_int8sim.model._coords import Coords, Geometry
from bevquant_quantizers import TensorQuantizer
from bevquant_sparse import WeightLayout, sparse_conv


class FloatSparseConv(nn.Module):
    """act(conv(x, w) + b) on features and coordinates instead of a library's sparse tensor.

    Args:
        weight: float ``[volume, in_channels, out_channels]``.
        bias: float ``[out_channels]`` or ``None``.
        geometry: Kernel size, stride and the like.
        key: Name under which an inverse convolution finds this one.
        activation: ``"None"``, ``"ReLU"``, ``"Sigmoid"`` or ``"LeakyReLU"``.
        alpha: Slope of the last.
        quantizer: Fake quantizer of the input, if it has one.
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
        quantizer: TensorQuantizer | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.geometry, self.key = geometry, key
        self.activation, self.alpha = activation, alpha
        self.quantizer = quantizer

    def forward(self, features: Tensor, coords: Coords) -> tuple[Tensor, Coords]:
        """Features and coordinates of the output."""
        rulebook, out_coords = coords.convolved(self.geometry, self.key, "a float convolution")
        if self.quantizer is not None:
            features = self.quantizer(features)
        out = sparse_conv(features, self.weight, self.bias, rulebook, layout=WeightLayout.VCK)
        if self.activation == "ReLU":
            out = functional.relu(out)
        elif self.activation == "LeakyReLU":
            out = functional.leaky_relu(out, self.alpha)
        elif self.activation == "Sigmoid":
            out = torch.sigmoid(out)
        return out, out_coords

"""Descriptors and functions, under the names of ``pytorch_quantization.tensor_quant``."""

from __future__ import annotations

import torch
from torch import Tensor

from ._descriptor import QuantDescriptor, ScaledQuantDescriptor
from ._fake_quant import fake_quantize
from ._integer_quant import fake_affine_tensor_quant, tensor_quant

__all__ = [
    "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
    "QUANT_DESC_8BIT_PER_TENSOR",
    "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR",
    "QuantDescriptor",
    "ScaledQuantDescriptor",
    "fake_affine_tensor_quant",
    "fake_tensor_quant",
    "legacy_fake_tensor_quant",
    "tensor_quant",
]

QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8)
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8, unsigned=True)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(num_bits=8, axis=0)
# Axis 0 is what upstream says here; the output channels of a transposed convolution are axis 1.
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)


def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Fake-quantize under upstream's name: `tensor_quant` divided by its scale, in one step.

    bfloat16 is computed in float32: its own eight bits would move values by more than a step.

    Args:
        inputs: Values, any shape, float.
        amax: Range, a tensor that broadcasts to `inputs`.
        num_bits: Bits of the integer, sign included.
        unsigned: Use 0…2^num_bits − 1; a negative input is then an error.
        narrow_range: Leave out the most negative integer.

    Returns:
        A tensor shaped and typed as `inputs`; see `bevquant_quantizers.fake_quantize`.

    Examples:
        >>> import torch
        >>> fake_tensor_quant(torch.tensor([0.3, 9.0]), torch.tensor(1.27))
        tensor([0.3000, 1.2700])
    """
    if inputs.dtype == torch.bfloat16:
        wide = fake_quantize(inputs.float(), amax.float(), num_bits, unsigned, narrow_range)
        return wide.to(torch.bfloat16)
    return fake_quantize(inputs, amax, num_bits, unsigned, narrow_range)


legacy_fake_tensor_quant = fake_tensor_quant

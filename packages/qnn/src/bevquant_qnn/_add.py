"""Quantized addition and concatenation of tensors that share one range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import is_sparse_tensor
from bevquant_qnn._descriptors import InputDefault
from bevquant_qnn._sparse_tensor import features_of, with_features
from bevquant_quantizers import QuantDescriptor, TensorQuantizer

# Quantized concatenation of tensors that share one range.


class QuantConcat(InputDefault, nn.Module):
    """Concatenate tensors after fake-quantizing each with one quantizer.

    y = cat(fq(x₀), fq(x₁), …). One range lets an integer kernel copy the integers side by side.
    Sparse tensors over the same voxels are concatenated by features. Where the channels of the
    result have ranges of their own (`TensorQuantizer.channel_factors`) y = cat(x₀, x₁, …), and its
    readers quantize.

    Args:
        dim: Axis of the concatenation; 1 is the channel axis of [N, C, …] and of sparse features.
        quant_desc_input: Descriptor of the quantizer; 8 bit per tensor by default.

    Example:
        >>> import torch
        >>> concat = QuantConcat()
        >>> concat.input_quantizer.amax = 127.0
        >>> concat(torch.tensor([[1.4]]), torch.tensor([[2.6]]))
        tensor([[1., 3.]])
    """

    hands_floats_on = True
    """For `bevquant_quantizers.calibrate`: its readers alone may quantize."""

    def __init__(self, dim: int = 1, *, quant_desc_input: QuantDescriptor | None = None) -> None:
        super().__init__()
        self.dim = dim
        self._input_quantizer = TensorQuantizer(self._input_descriptor(quant_desc_input))

    def forward(self, *inputs: Any) -> Any:
        """Concatenate tensors given one by one or as one list.

        Raises:
            ValueError: If nothing is given, or sparse operands hold different numbers of voxels.
        """
        items = (
            list(inputs[0])
            if len(inputs) == 1 and isinstance(inputs[0], list | tuple)
            else list(inputs)
        )
        if not items:
            msg = "QuantConcat: nothing to concatenate; give at least one tensor."
            raise ValueError(msg)
        tensors: list[Tensor] = [features_of(item) for item in items]
        sparse = next((item for item in items if is_sparse_tensor(item)), None)
        if sparse is not None and len({len(tensor) for tensor in tensors}) > 1:
            msg = (
                f"QuantConcat: features of {[tuple(t.shape) for t in tensors]} do not lie on the "
                "same voxels. Bring all operands to the same coordinates first."
            )
            raise ValueError(msg)
        if self._input_quantizer.channel_factors is None:
            tensors = [self._input_quantizer(tensor) for tensor in tensors]
        joined = torch.cat(tensors, self.dim)
        return joined if sparse is None else with_features(sparse, joined)


class QuantAdd(InputDefault, nn.Module):
    """Add two tensors after fake-quantizing both with one quantizer.

    y = fq(a) + fq(b). One range for both operands lets an integer kernel add the integers as they
    are, without rescaling either (the rule of NVIDIA's libspconv). Operands are dense tensors, or
    sparse tensors over the same voxels, whose features are added; neither is changed.

    Args:
        quant_desc_input: Descriptor of the quantizer; 8 bit per tensor by default.

    Example:
        >>> import torch
        >>> add = QuantAdd()
        >>> add.input_quantizer.amax = 127.0
        >>> add(torch.tensor([1.4, 3.0]), torch.tensor([2.0, 0.6]))
        tensor([3., 4.])
    """

    def __init__(self, *, quant_desc_input: QuantDescriptor | None = None) -> None:
        super().__init__()
        self._input_quantizer = TensorQuantizer(self._input_descriptor(quant_desc_input))

    def forward(self, a: Any, b: Any) -> Any:
        """Add two dense tensors, or two sparse tensors over the same voxels.

        Raises:
            ValueError: If sparse operands hold different numbers of voxels.
        """
        left, right = features_of(a), features_of(b)
        sparse = a if is_sparse_tensor(a) else b
        if is_sparse_tensor(sparse) and left.shape != right.shape:
            msg = (
                f"QuantAdd: features of shape {tuple(left.shape)} and {tuple(right.shape)} do not "
                "lie on the same voxels. Add tensors of submanifold convolutions with one "
                "indice_key, or bring both to the same coordinates first."
            )
            raise ValueError(msg)
        total = self._input_quantizer(left) + self._input_quantizer(right)
        return with_features(sparse, total) if is_sparse_tensor(sparse) else total

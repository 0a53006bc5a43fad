"""Quantized addition of two tensors that share one range."""

from __future__ import annotations

from typing import Any

from torch import nn

from bevquant_graph import is_sparse_tensor
from bevquant_qnn._descriptors import InputDefault
from bevquant_qnn._sparse_tensor import features_of, with_features
from bevquant_quantizers import QuantDescriptor, TensorQuantizer


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

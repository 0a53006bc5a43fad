"""Arithmetic on tensors as a module, so that its result can have a scale."""

from __future__ import annotations

from torch.ao.nn import quantized as torch_quantized

from bevquant_hybrid.nn._arithmetic import Arithmetic

__all__ = ["FloatFunctional"]


class FloatFunctional(Arithmetic, torch_quantized.FloatFunctional):
    """`torch.nn.quantized.FloatFunctional` with sub, mean, sum, maximum, minimum and matmul.

    One object stands for one place in a model: its QAT form keeps the scale of that result.

    Example:
        >>> import torch
        >>> FloatFunctional().sub(torch.tensor(3.0), torch.tensor(1.0))
        tensor(2.)
    """

    __module__ = "bevquant_hybrid.nn.quantized.functional_modules"  # its documented home

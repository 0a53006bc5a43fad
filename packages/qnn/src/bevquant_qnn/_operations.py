"""How many multiplications each layer does, from one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from bevquant_graph import is_sparse_tensor
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_qnn._sparse_tensor import features_of
from bevquant_quantizers import TensorQuantizer
from bevquant_sparse import Rulebook, build_rulebook

__all__ = ["count_operations"]


def count_operations(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[nn.Module, int]:
    """Return multiply-accumulates by layer; elements read by what multiplies nothing.

    A convolution does outputs · in/groups · kernel, a linear layer outputs · in, a sparse
    convolution in · out for every pair of its rulebook. Pools, additions, concatenations and
    residual inputs count one for every element that they read.

    Args:
        model: From `quantize_model`.
        run: Runs it once.
    """
    counts: dict[nn.Module, int] = {}

    def add(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        counts[module] = counts.get(module, 0) + _operations(module, inputs, output)

    with ExitStack() as stack:
        for module in model.modules():
            own = [c for c in module._modules.values() if isinstance(c, TensorQuantizer)]
            if own or isinstance(module, TensorQuantizer):
                stack.callback(module.register_forward_hook(add).remove)
        run(model)
    return counts


def _operations(module: Any, inputs: tuple[Any, ...], output: Any) -> int:
    if isinstance(module, QuantSparseConvolution):
        return _channel_pairs(module) * _pairs(module, inputs[0], output)
    if isinstance(module, nn.Linear):
        return int(output.numel() * module.in_features)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        # Every input meets every weight of its group.
        return int(inputs[0].numel() * math.prod(module.weight.shape[1:]))
    if isinstance(module, nn.modules.conv._ConvNd):
        return int(output.numel() * math.prod(module.weight.shape[1:]))
    return sum(features_of(value).numel() for value in _flat(inputs))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _flat(item)]
    return [value] if isinstance(value, Tensor) or is_sparse_tensor(value) else []


def _channel_pairs(module: Any) -> int:
    return int(module.in_channels * module.out_channels)


def _pairs(module: Any, x: Any, output: Any) -> int:
    """Pairs of (input, output) voxels that meet."""
    kept = output.indice_dict.get(getattr(module, "indice_key", None))
    if isinstance(kept, Rulebook):
        return kept.num_pairs
    sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
    if all(size == 1 for size in module.kernel_size):
        return len(output.features)
    subm, transposed = bool(module.subm), bool(getattr(module, "transposed", False))
    shape = [int(size) for size in x.spatial_shape]
    return build_rulebook(
        x.indices, shape, *sizes, subm=subm, transposed=transposed, batch_size=int(x.batch_size)
    ).num_pairs

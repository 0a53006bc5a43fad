"""How many operations a call takes: two for every multiplication with its addition.

Convolutions, correlations, linear layers, matrix products, attention and recurrent cells count.
Everything else counts as 0, as in the vendor's own reports: its time is that of its bytes.
"""

from __future__ import annotations

from math import prod

from bevquant_hybrid.operators import OperatorCall

__all__ = ["count_operations"]


def count_operations(call: OperatorCall) -> int:
    """Operations of one call.

    Conv: 2·|output|·(C_in/groups)·∏kernel. ConvTranspose: 2·|input|·(C_out/groups)·∏kernel.
    Correlation: 2·|output|·C·K². Linear: 2·|output|·C_in. Matrix product: 2·|output|·K. A fused
    addition or activation is free.

    Example:
        >>> conv = OperatorCall(
        ...     "conv", "torch.nn.Conv2d",
        ...     {"in_channels": 3, "out_channels": 32, "kernel_size": 3, "groups": 1},
        ...     input_shapes=((256, 3, 32, 32),), input_dtypes=("qint8",),
        ...     output_shape=(256, 32, 16, 16),
        ... )
        >>> count_operations(conv)
        113246208
    """
    name = call.operator.rpartition(".")[2]
    if name in ("Conv2d", "Conv3d"):
        return 2 * prod(call.output_shape) * _met_weights(call, "in_channels")
    if name == "ConvTranspose2d":
        return 2 * prod(call.input_shapes[0]) * _met_weights(call, "out_channels")
    if name == "Linear":
        return 2 * prod(call.output_shape) * _int(call, "in_features")
    if name == "Correlation":
        patch = call.input_shapes[0][1] * _int(call, "kernel_size") ** 2
        return 2 * prod(call.output_shape) * patch
    if name == "matmul":
        return 2 * prod(call.output_shape) * call.input_shapes[0][-1]
    if name == "LSTMCell":
        return 2 * call.weight_count * prod(call.input_shapes[0][:-1])
    if name == "MultiheadAttention":
        return _attention(call)
    return 0


def _attention(call: OperatorCall) -> int:
    """Four projections of L·N tokens, then Q·Kᵀ and the weighted sum over S keys."""
    tokens = prod(call.input_shapes[0][:-1])
    width = call.input_shapes[0][-1]
    keys = call.input_shapes[min(1, len(call.input_shapes) - 1)][0]
    return 2 * tokens * (call.weight_count + 2 * keys * width)


def _int(call: OperatorCall, name: str) -> int:
    value = call.attributes[name]
    if not isinstance(value, int):
        raise ValueError(f"{call.path}: {name}={value!r}; expected an integer")
    return value


def _met_weights(call: OperatorCall, side: str) -> int:
    """Weights that one element of the other side meets: channels per group · ∏kernel."""
    kernel = call.attributes["kernel_size"]
    sizes = kernel if isinstance(kernel, tuple) else (kernel,) * (len(call.output_shape) - 2)
    area = prod(int(size) for size in sizes if size is not None)
    return _int(call, side) // _int(call, "groups") * area

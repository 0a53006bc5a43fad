"""The arithmetic of folding batch normalisation into the layer before it.

Batch normalisation in evaluation mode is y = (x − μ)·γ/√(σ² + ε) + β per channel (Ioffe and
Szegedy 2015, section 3.1), y = s·x + t. With x = W·u + b that is y = W'·u + b' where W' = s·W and
b' = s·(b − μ) + β. Before a layer, W·y + b is W'·x + b' where W' = W·s per input channel and
b' = b + W·t. All of it is computed in float64.
"""

from __future__ import annotations

import sys
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bevquant_sparse import WeightLayout

if TYPE_CHECKING:
    from jaxtyping import Float
else:
    try:
        from jaxtyping import Float
    except ImportError:  # plain tensors then

        class Float:
            def __class_getitem__(cls, item):
                return item[0]


def check_tensors(weight: Any, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> None:
    """Refuse operands that are no tensors; a bias, γ and β may be None."""
    needed = {"the layer's weight": weight, "running mean": mean, "running variance": var}
    optional = {"the layer's bias": bias, "batch norm weight": gamma, "batch norm bias": beta}
    given = {n: t for n, t in optional.items() if t is not None}
    for name, value in {**needed, **given}.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"{name}: expected floating-point numbers, got {value.dtype}")


def scale_and_bias(
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    gamma: Tensor | None,
    beta: Tensor | None,
    channels: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """γ/√(σ² + ε) and b' of each output channel, in float64 on ``device``."""
    if not isinstance(eps, Real) or not 0 <= eps <= sys.float_info.max:
        raise ValueError(f"batch norm eps={eps!r}: expected a number that is not negative")
    for name, tensor in (("mean", mean), ("var", var), ("weight", gamma), ("bias", beta)):
        if tensor is not None and tuple(tensor.shape) != (channels,):
            raise ValueError(
                f"batch norm {name} has shape {tuple(tensor.shape)}, but the layer before it makes "
                f"{channels} channels; fold a batch norm into the layer whose output it normalises"
            )
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(
            f"the layer's bias has shape {tuple(bias.shape)}, but its weight makes {channels} "
            "channels"
        )

    if not var.is_meta and not (_exact(var, device) + eps > 0).all():
        raise ValueError(
            f"batch norm var has a value {var[~(_exact(var, var.device) + eps > 0)][0]:.4g}, and "
            f"var + eps must be positive (eps={eps}); load a checkpoint with running statistics"
        )
    scale = scale_of(mean.to(device), var, eps, gamma, beta)
    mean = _exact(mean, device)
    shifted = (-mean if bias is None else _exact(bias, device) - mean) * scale
    return scale, shifted if beta is None else shifted + _exact(beta, device)


def scale_of(
    mean: Tensor, var: Tensor, eps: float, gamma: Tensor | None, beta: Tensor | None
) -> Tensor:
    """γ/√(σ² + ε) of each channel, in float64 on the device of ``mean``."""
    scale = (_exact(var, mean.device) + eps).rsqrt()
    return scale if gamma is None else scale * _exact(gamma, mean.device)


def _exact(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device=device, dtype=torch.float64)


def fuse_conv_bn_weights(
    conv_w: Float[Tensor, "first second *kernel"],
    conv_b: Float[Tensor, " bias_channels"] | None,
    bn_rm: Float[Tensor, " out_channels"],
    bn_rv: Float[Tensor, " out_channels"],
    bn_eps: float,
    bn_w: Float[Tensor, " out_channels"] | None,
    bn_b: Float[Tensor, " out_channels"] | None,
    transpose: bool = False,
    groups: int = 1,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Fold batch norm into the weight and bias of a dense convolution.

    ``W' = W·γ/√(σ² + ε)``, ``b' = (b − μ)·γ/√(σ² + ε) + β`` per output channel, computed in
    float64 and rounded once to the weight's dtype. The signature is that of
    ``torch.nn.utils.fusion.fuse_conv_bn_weights`` with ``groups`` added: torch's function is
    wrong for grouped transposed convolutions.

    Args:
        conv_w: ``[out, in/groups, *kernel]``; with ``transpose``: ``[in, out/groups, *kernel]``.
        conv_b: ``[out]``, or None for zero.
        bn_rm: Running mean μ, ``[out]``.
        bn_rv: Running variance σ², ``[out]``.
        bn_eps: ε.
        bn_w: γ, or None for one (``affine=False``).
        bn_b: β, or None for zero.
        transpose: Whether ``conv_w`` is of a transposed convolution.
        groups: Groups of the convolution; matters for transposed ones only.

    Returns:
        Weight and bias with the dtypes of ``conv_w`` and ``conv_b`` (``conv_w`` where there is
        no bias); each requires a gradient where its origin did, the bias without an origin where
        the weight did.

    Raises:
        TypeError: An operand is no tensor.
        ValueError: The number of channels differs, or does not divide by ``groups``.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> w, b = fuse_conv_bn_weights(
        ...     torch.full((1, 1, 1), 3.0), None, one, one * 4, 0.0, one * 2, one * 5
        ... )
        >>> w.item(), b.item()
        (3.0, 4.0)
    """
    check_tensors(conv_w, conv_b, bn_rm, bn_rv, bn_w, bn_b)
    if transpose and (not isinstance(groups, int) or groups < 1 or conv_w.shape[0] % groups):
        raise ValueError(
            f"a transposed convolution weight of shape {tuple(conv_w.shape)} cannot have "
            f"{groups} groups; pass the groups of the convolution"
        )
    channels = int(conv_w.shape[1]) * groups if transpose else int(conv_w.shape[0])
    scale, bias = scale_and_bias(conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b, channels, conv_w.device)
    weight = conv_w.detach().double()
    if not transpose:
        return _parameters(conv_w, conv_b, _along(weight, scale, 0), bias)
    # Input channels lie group after group, and a group's output channels are its own.
    grouped = weight.reshape(groups, -1, *conv_w.shape[1:])
    shape = (groups, 1, -1, *(1,) * (conv_w.ndim - 2))
    scaled = grouped * scale.reshape(shape)
    return _parameters(conv_w, conv_b, scaled.reshape(conv_w.shape), bias)


def fuse_linear_bn_weights(
    linear_w: Float[Tensor, "out_features in_features"],
    linear_b: Float[Tensor, " bias_features"] | None,
    bn_rm: Float[Tensor, " out_features"],
    bn_rv: Float[Tensor, " out_features"],
    bn_eps: float,
    bn_w: Float[Tensor, " out_features"] | None,
    bn_b: Float[Tensor, " out_features"] | None,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Fold batch norm into the weight and bias of a linear layer.

    As ``fuse_conv_bn_weights``, with a weight ``[out_features, in_features]``; the signature is
    that of ``torch.nn.utils.fusion.fuse_linear_bn_weights``.

    Raises:
        TypeError: An operand is no tensor.
        ValueError: The number of features differs.

    Example:
        >>> import torch
        >>> zero, one = torch.zeros(2), torch.ones(2)
        >>> w, b = fuse_linear_bn_weights(torch.eye(2), None, zero, one, 0.0, one * 2, one)
        >>> w.tolist(), b.tolist()
        ([[2.0, 0.0], [0.0, 2.0]], [1.0, 1.0])
    """
    check_tensors(linear_w, linear_b, bn_rm, bn_rv, bn_w, bn_b)
    return fuse_conv_bn_weights(linear_w, linear_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b)


def fuse_sparse_conv_bn_weights(
    weight: Float[Tensor, ...],
    bias: Float[Tensor, " bias_channels"] | None,
    bn_mean: Float[Tensor, " out_channels"],
    bn_var: Float[Tensor, " out_channels"],
    bn_eps: float,
    bn_weight: Float[Tensor, " out_channels"] | None,
    bn_bias: Float[Tensor, " out_channels"] | None,
    *,
    layout: WeightLayout,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Fold batch norm into the weight and bias of a sparse convolution, in any layout.

    The formula of ``fuse_conv_bn_weights``; ``layout`` says which axis holds the output
    channels. It is never guessed: a ``[16, 3, 3, 3, 16]`` weight fits two layouts.

    Args:
        weight: Weight in ``layout``, kernel rank 1 to 4. What spconv 2 keeps for a 1×1×1 kernel
            is not in the layout its shape suggests: read it with ``bevquant_sparse.get_weight``.
        bias: ``[out]``, or None for zero.
        bn_mean: Running mean μ, ``[out]``.
        bn_var: Running variance σ², ``[out]``.
        bn_eps: ε.
        bn_weight: γ, or None for one.
        bn_bias: β, or None for zero.
        layout: Layout of ``weight``, and of the result.

    Raises:
        ValueError: The number of channels differs, or the weight's rank does not fit ``layout``.
        TypeError: ``layout`` is not a ``WeightLayout``.

    Example:
        >>> import torch
        >>> zero, one = torch.zeros(2), torch.ones(2)
        >>> w, b = fuse_sparse_conv_bn_weights(
        ...     torch.ones(27, 3, 2), None, zero, one, 0.0, torch.tensor([2.0, 0.0]), one,
        ...     layout=WeightLayout.VCK,
        ... )
        >>> w[0, 0].tolist(), b.tolist()
        ([2.0, 0.0], [1.0, 1.0])
    """
    if not isinstance(layout, WeightLayout):
        raise TypeError(f"layout: expected a WeightLayout, got {layout!r}")
    check_tensors(weight, bias, bn_mean, bn_var, bn_weight, bn_bias)
    ranks = (3, 3) if layout is WeightLayout.VCK else (3, 6)
    if not ranks[0] <= weight.ndim <= ranks[1]:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} cannot be in layout {layout.name}, which has "
            f"{'3' if ranks[0] == ranks[1] else '3 to 6'} axes; say which layout it has"
        )
    channels = layout.channels(weight)[1]
    scale, new_bias = scale_and_bias(
        bias, bn_mean, bn_var, bn_eps, bn_weight, bn_bias, channels, weight.device
    )
    return _parameters(
        weight, bias, _along(weight.detach().double(), scale, layout.out_axis), new_bias
    )


def absorb_norm(
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor, float, Tensor | None, Tensor | None],
    groups: int,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight ``[out, in/groups, *kernel]`` and bias of a layer that takes the norm before it.

    Exact where every weight meets a normalised value: no zeros are padded in between.
    """
    channels = int(weight.shape[1]) * groups
    scale, shift = scale_and_bias(None, *norm, channels, weight.device)
    split = weight.detach().double().reshape(groups, -1, *weight.shape[1:])
    inputs = (groups, 1, -1, *(1,) * (weight.ndim - 2))
    added = (split * shift.reshape(inputs)).flatten(2).sum(2).flatten()
    added = added if bias is None else added + bias.detach().double()
    return _parameters(weight, bias, (split * scale.reshape(inputs)).reshape(weight.shape), added)


def _along(weight: Tensor, scale: Tensor, axis: int) -> Tensor:
    shape = [1] * weight.ndim
    shape[axis] = -1
    return weight * scale.reshape(shape)


def _parameters(
    weight: Tensor, bias: Tensor | None, new_weight: Tensor, new_bias: Tensor
) -> tuple[nn.Parameter, nn.Parameter]:
    # Without a bias, the new one has the weight's type.
    origin = weight if bias is None else bias
    return (
        nn.Parameter(new_weight.detach().to(weight.dtype), weight.requires_grad),
        nn.Parameter(
            new_bias.detach().to(device=weight.device, dtype=origin.dtype), origin.requires_grad
        ),
    )

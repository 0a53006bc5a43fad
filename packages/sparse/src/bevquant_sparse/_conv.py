"""The differentiable sparse convolution: checks, choice of a backend, gradients."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bevquant_sparse import _conv_torch
from bevquant_sparse._conv_matmul import column_sum
from bevquant_sparse._layout import WeightLayout, permute_weight
from bevquant_sparse._operator import operator
from bevquant_sparse._rulebook import Rulebook
from bevquant_sparse._table import Table

_BACKENDS = ("auto", "numba", "torch")
_HALF = (torch.float16, torch.bfloat16)


def sparse_conv(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rulebook: Rulebook,
    *,
    layout: WeightLayout,
    backend: str = "auto",
) -> Tensor:
    """Convolve the rows of a sparse tensor along the pairs of a rulebook.

    With ``n(o, k)`` the input row that output row ``o`` sees under kernel offset ``k`` (absent
    neighbours contribute nothing)::

        out[o, c] = bias[c] + Σ_k Σ_i features[n(o, k), i] · weight[k, i, c]

    A correlation, as ``torch.nn.functional.conv3d`` and spconv compute it. One function serves
    submanifold, strided, transposed and inverse convolutions: the rulebook makes the difference.

    Deterministic: each output is summed in one fixed order, so results and gradients are
    bit-identical between runs and, on a CPU, at any number of threads. With ``"numba"`` a row's
    result does not even depend on which other rows are present. NaN and Inf propagate as the sum
    says. float16 and bfloat16 are computed in float32 and rounded once, to nearest even, at the
    end. Differentiable once in features, weight and bias.

    Args:
        features: ``[num_in, in_channels]``, floating point, one row per ``rulebook.in_indices``.
        weight: Kernel in ``layout``, of the same dtype and device.
        bias: ``[out_channels]`` or ``None``; an output row without neighbours equals it.
        rulebook: The pairs, on the same device.
        layout: Axis order of ``weight``; never guessed from its shape.
        backend: ``"torch"`` (CPU and CUDA, torch alone), ``"numba"`` (float32 and half types on a
            CPU; the ``numba`` extra) or ``"auto"``: numba where it applies and is installed.

    Returns:
        ``[num_out, out_channels]`` in the dtype of ``features``.

    Raises:
        TypeError: ``layout`` is not a ``WeightLayout``, an operand is not floating point, or
            dtypes differ.
        ValueError: A shape or device does not fit the rulebook, or the backend is unknown or
            cannot run these operands.
        ImportError: ``backend="numba"`` without numba.

    Example:
        >>> import torch
        >>> from bevquant_sparse import WeightLayout, build_rulebook, sparse_conv
        >>> indices = torch.tensor([[0, 1], [0, 2], [0, 5]], dtype=torch.int32)
        >>> rulebook = build_rulebook(indices, [8], 3, subm=True, batch_size=1)
        >>> features = torch.tensor([[1.0], [10.0], [100.0]])
        >>> weight = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> sparse_conv(features, weight, None, rulebook, layout=WeightLayout.RSCK).flatten()
        tensor([ 32.,  21., 200.])
    """
    _check(features, weight, bias, rulebook, layout)
    _check_backend(backend, features)
    chosen = () if backend == "auto" else (backend,)
    out: Tensor = _conv(
        features,
        weight,
        bias,
        rulebook.neighbours,
        list(rulebook.kernel_size),
        layout.name,
        rulebook.subm,
        *chosen,
    )
    return out


@operator(
    "conv(Tensor features, Tensor weight, Tensor? bias, Tensor neighbours, int[] kernel_size,"
    " str layout, bool subm, str backend='auto') -> Tensor"
)
def _conv(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbours: Tensor,
    kernel_size: Sequence[int],
    layout: str,
    subm: bool,
    backend: str = "auto",
) -> Tensor:
    """``sparse_conv`` of operands that fit each other."""
    table = Table(neighbours, features.shape[0], subm)
    vck = permute_weight(weight, WeightLayout[layout], WeightLayout.VCK, kernel_size=kernel_size)
    run = _choose(backend, features).forward
    # Autocast would lower the products; the sum's dtype is the operands'.
    with torch.autocast(features.device.type, enabled=False):
        out: Tensor = run(wide(features), wide(vck), None if bias is None else wide(bias), table)
    return out.to(features.dtype)


@_conv.register_fake
def _(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbours: Tensor,
    kernel_size: Sequence[int],
    layout: str,
    subm: bool,
    backend: str = "auto",
) -> Tensor:
    return features.new_empty(neighbours.shape[0], WeightLayout[layout].channels(weight)[1])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, weight, _, neighbours, *ctx.how = inputs
    ctx.save_for_backward(features, weight, neighbours)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    features, weight, neighbours = ctx.saved_tensors
    grads: list[Tensor | None] = [None, None, None]
    if ctx.needs_input_grad[0]:
        grads[0] = _grad_features(grad_out, features, weight, neighbours, *ctx.how)
    if ctx.needs_input_grad[1]:
        grads[1] = _grad_weight(grad_out, features, weight, neighbours, *ctx.how)
    if ctx.needs_input_grad[2]:
        grads[2] = _grad_bias(grad_out)
    return *grads, None, None, None, None, None


_conv.register_autograd(_backward, setup_context=_keep_for_backward)


@operator(
    "conv_grad_features(Tensor grad_out, Tensor features, Tensor weight, Tensor neighbours,"
    " int[] kernel_size, str layout, bool subm, str backend='auto') -> Tensor"
)
def _grad_features(
    grad_out: Tensor,
    features: Tensor,
    weight: Tensor,
    neighbours: Tensor,
    kernel_size: Sequence[int],
    layout: str,
    subm: bool,
    backend: str = "auto",
) -> Tensor:
    """Gradient of ``conv`` in its features."""
    table = Table(neighbours, features.shape[0], subm)
    vck = permute_weight(weight, WeightLayout[layout], WeightLayout.VCK, kernel_size=kernel_size)
    run = _choose(backend, features).grad_features
    with torch.autocast(features.device.type, enabled=False):
        grad: Tensor = run(wide(grad_out), wide(vck), table)
    return grad.to(features.dtype)


@operator(
    "conv_grad_weight(Tensor grad_out, Tensor features, Tensor weight, Tensor neighbours,"
    " int[] kernel_size, str layout, bool subm, str backend='auto') -> Tensor"
)
def _grad_weight(
    grad_out: Tensor,
    features: Tensor,
    weight: Tensor,
    neighbours: Tensor,
    kernel_size: Sequence[int],
    layout: str,
    subm: bool,
    backend: str = "auto",
) -> Tensor:
    """Gradient of ``conv`` in its weight, in the weight's layout."""
    table = Table(neighbours, features.shape[0], subm)
    run = _choose(backend, features).grad_weight
    with torch.autocast(features.device.type, enabled=False):
        grad: Tensor = run(wide(features), wide(grad_out), table)
    grad = permute_weight(grad, WeightLayout.VCK, WeightLayout[layout], kernel_size=kernel_size)
    return grad.to(weight.dtype)


@operator("conv_grad_bias(Tensor grad_out) -> Tensor")
def _grad_bias(grad_out: Tensor) -> Tensor:
    """Gradient of ``conv`` in its bias."""
    with torch.autocast(grad_out.device.type, enabled=False):
        return column_sum(wide(grad_out)).to(grad_out.dtype)


@_grad_features.register_fake
def _(grad_out: Tensor, features: Tensor, *how: Any) -> Tensor:
    return features.new_empty(features.shape)


@_grad_weight.register_fake
def _(grad_out: Tensor, features: Tensor, weight: Tensor, *how: Any) -> Tensor:
    return weight.new_empty(weight.shape)


@_grad_bias.register_fake
def _(grad_out: Tensor) -> Tensor:
    return grad_out.new_empty(grad_out.shape[1])


def wide(values: Tensor) -> Tensor:
    """Half types in float32, the others as they are."""
    return values.float() if values.dtype in _HALF else values


def _check_backend(backend: str, features: Tensor) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(_BACKENDS)}")
    if backend == "numba" and not _fits_numba(features):
        raise ValueError(
            f"backend='numba' runs float32, float16 and bfloat16 on a CPU, got {features.dtype} "
            f"on {features.device}; use backend='auto' or 'torch'"
        )


def _fits_numba(features: Tensor) -> bool:
    return features.device.type == "cpu" and features.dtype in (torch.float32, *_HALF)


def _choose(backend: str, features: Tensor) -> ModuleType:
    """The module that runs ``backend``; only operators ask, as tracers break numba's import."""
    _check_backend(backend, features)
    if backend == "torch" or not _fits_numba(features):
        return _conv_torch
    try:
        return importlib.import_module("bevquant_sparse._conv_numba")
    except ImportError as error:
        if backend == "auto":
            return _conv_torch
        raise ImportError(
            "backend='numba' needs numba: pip install numba, or use backend='torch'"
        ) from error


def _check(
    features: Tensor, weight: Tensor, bias: Tensor | None, rulebook: Rulebook, layout: WeightLayout
) -> None:
    if not isinstance(layout, WeightLayout):
        raise TypeError(
            f"sparse_conv: layout must be a WeightLayout, got {layout!r}; layout_of(module) "
            "returns a module's"
        )
    check_features("sparse_conv", features, rulebook)
    _check_like("weight", weight, features)
    shape, rank = tuple(weight.shape), len(rulebook.kernel_size)
    expected_rank = 3 if layout is WeightLayout.VCK else rank + 2
    kernel = layout.kernel_size(weight) if len(shape) == expected_rank else None
    volume = rulebook.kernel_volume
    wanted = (volume,) if layout is WeightLayout.VCK else tuple(rulebook.kernel_size)
    if kernel != wanted or layout.channels(weight)[0] != features.shape[1]:
        raise ValueError(
            f"sparse_conv: expected a {layout.name} weight of shape "
            f"{_weight_shape(layout, wanted, features.shape[1])} for kernel size "
            f"{tuple(rulebook.kernel_size)} and features with {features.shape[1]} channels, got "
            f"{shape}; check the layout and the module the rulebook was built for"
        )
    if bias is not None:
        _check_like("bias", bias, features)
        out_channels = layout.channels(weight)[1]
        if tuple(bias.shape) != (out_channels,):
            raise ValueError(
                f"sparse_conv: expected bias of shape ({out_channels},), one value per output "
                f"channel, got {tuple(bias.shape)}"
            )


def _weight_shape(layout: WeightLayout, kernel: tuple[int, ...], in_channels: int) -> str:
    extents = [str(k) for k in kernel]
    axes = {
        WeightLayout.RSCK: [*extents, str(in_channels), "out"],
        WeightLayout.KRSC: ["out", *extents, str(in_channels)],
        WeightLayout.KCRS: ["out", str(in_channels), *extents],
        WeightLayout.VCK: [*extents, str(in_channels), "out"],
    }[layout]
    return f"[{', '.join(axes)}]"


def check_features(caller: str, features: Tensor, rulebook: Rulebook) -> None:
    """Refuse features that are not one floating-point row per input voxel, on the pairs' device."""
    for what, value, wanted in (("features", features, Tensor), ("rulebook", rulebook, Rulebook)):
        if not isinstance(value, wanted):
            raise TypeError(
                f"{caller}: {what} must be a {wanted.__name__}, got {type(value).__name__}"
            )
    if not features.is_floating_point():
        raise TypeError(f"{caller}: expected floating-point features, got {features.dtype}")
    if features.ndim != 2 or features.shape[0] != rulebook.num_in:
        raise ValueError(
            f"{caller}: expected features of shape [{rulebook.num_in}, channels], one row per "
            f"input voxel of the rulebook, got {tuple(features.shape)}"
        )
    if features.device != rulebook.neighbours.device:
        raise ValueError(
            f"{caller}: features are on {features.device}, the rulebook is on "
            f"{rulebook.neighbours.device}; build it from indices on the features' device"
        )


def _check_like(name: str, value: Tensor, features: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"sparse_conv: {name} must be a Tensor, got {type(value).__name__}")
    if value.dtype != features.dtype:
        raise TypeError(
            f"sparse_conv: {name} is {value.dtype}, features are {features.dtype}; convert one of "
            "them"
        )
    if value.device != features.device:
        raise ValueError(
            f"sparse_conv: {name} is on {value.device}, features are on {features.device}; move "
            "one of them"
        )

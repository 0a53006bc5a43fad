"""Run an spconv-style module on an spconv-style tensor through this package's kernels."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bevquant_sparse._conv import sparse_conv
from bevquant_sparse._layout import WeightLayout, permute_weight
from bevquant_sparse._modules import as_multiplied, weight_name
from bevquant_sparse._rulebook import Rulebook
from bevquant_sparse._rulebook_cache import borrows, describe, rulebook_for
from bevquant_sparse._sparse_tensor import traced

_HALF = (torch.float16, torch.bfloat16)


def conv_forward(
    module: Any,
    x: Any,
    *,
    features: Tensor | None = None,
    weight: Tensor | None = None,
    layout: WeightLayout | None = None,
    bias: Tensor | EllipsisType | None = ...,
    add_input: Any = None,
    backend: str = "auto",
) -> Any:
    """Run a SubM, strided, transposed or inverse sparse convolution module on ``x``.

    ``out = act(conv(features, weight) + bias [+ add_input])``, differentiable, the same at any
    thread count. Nothing is mutated: the result is a new tensor with a copied ``indice_dict``
    that holds the rulebook under the module's ``indice_key``.

    Args:
        module: Has ``ndim, in_channels, out_channels, kernel_size, stride, padding, dilation,
            output_padding, subm, transposed, inverse, indice_key, weight, bias`` as spconv's
            ``SparseConvolution``; ``act_type`` and ``act_alpha`` are executed where present.
        x: Has ``features, indices, spatial_shape, batch_size, indice_dict`` as spconv's
            ``SparseConvTensor`` (spconv 1 tensors too).
        features: ``[rows, in_channels]`` to use instead of ``x.features``.
        weight: Used instead of ``module.weight``.
        layout: Layout of ``weight``. ``None``: ``weight`` is shaped and ordered as
            ``module.weight``, spconv 2's own reading of 1×…×1 kernels included.
        bias: Used instead of ``module.bias``; ``None`` for no bias.
        add_input: A tensor like ``x`` added to the result before the activation.
        backend: Passed to ``build_rulebook`` and ``sparse_conv``.

    Returns:
        A tensor like ``x``. float16 and bfloat16 features are computed in float32 and returned
        in their own dtype.

    Raises:
        ValueError: Channels, rulebook or coordinates do not fit; the message names the module.
        TypeError: The features are not floating point, or the module's layout is unknown.

    Example:
        >>> out = conv_forward(module, x)                             # doctest: +SKIP
        >>> out = conv_forward(module, x, weight=quantized_weight)    # doctest: +SKIP
    """
    if not hasattr(x, "features"):
        raise TypeError(f"conv_forward: x: expected a sparse tensor, got {type(x).__name__}")
    return run_conv(
        module,
        x,
        x.features if features is None else features,
        getattr(module, weight_name(module)) if weight is None else weight,
        None if weight is None else layout,
        module.bias if isinstance(bias, EllipsisType) else bias,
        add_input=add_input,
        act_type=getattr(module, "act_type", None),
        act_alpha=getattr(module, "act_alpha", 0.0),
        backend=backend,
    )


def run_conv(
    module: Any,
    x: Any,
    features: Tensor,
    weight: Tensor,
    layout: WeightLayout | None,
    bias: Tensor | None,
    *,
    add_input: Any,
    act_type: Any,
    act_alpha: float | int,
    backend: str,
) -> Any:
    """``conv_forward`` with every operand said; ``module`` gives the geometry alone."""
    _check_module(module, features)
    _suppose_voxels(x.indices)
    rulebook, indice_dict = rulebook_for(module, x, backend)
    if layout is None:
        weight, layout = as_multiplied(module, weight)
    if borrows(module, rulebook):
        weight = permute_weight(weight, layout, WeightLayout.VCK)[: rulebook.kernel_volume]
        layout = WeightLayout.VCK
    returned, computed = _dtypes(features, weight)
    try:
        out = sparse_conv(
            _cast(features, computed),
            _cast(weight, computed),
            None if bias is None else _cast(bias, computed),
            rulebook,
            layout=layout,
            backend=backend,
        )
    except ValueError as error:
        raise ValueError(f"{describe(module)}: {error}") from error
    if add_input is not None:
        out = out + _cast(add_input.features, computed)
    record_voxel_count(module, rulebook)
    out = _activate(module, out, act_type, act_alpha)
    return with_rulebook(x, _cast(out, returned), rulebook, indice_dict)


def _check_module(module: Any, features: Tensor) -> None:
    if not features.is_floating_point():
        raise TypeError(
            f"{describe(module)}: expected floating-point features, got {features.dtype}; "
            "dequantize or convert them first"
        )
    if features.ndim != 2 or features.shape[1] != module.in_channels:
        raise ValueError(
            f"{describe(module)}: expected features [rows, {module.in_channels}], got "
            f"{tuple(features.shape)}; check the channels of the layer before"
        )
    if getattr(module, "groups", 1) != 1:
        raise ValueError(
            f"{describe(module)}: groups={module.groups}; grouped sparse convolutions do not exist "
            "in spconv and are not supported"
        )


def _suppose_voxels(indices: Tensor) -> None:
    """A graph goes the way of a frame with voxels, where it cannot tell how many there are."""
    # `SparseSequential` asks in front of every layer. Frames without any run all the same.
    rows: Any = indices.shape[0]
    if isinstance(rows, torch.SymInt) and not rows.node.has_hint():
        torch._check(rows >= 1)


def _dtypes(features: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype to return and the dtype to compute in."""
    computed = features.dtype
    if weight.dtype is not computed:  # promote_types would be a node of an exported graph
        computed = torch.promote_types(computed, weight.dtype)
    computed = torch.float32 if computed in _HALF else computed
    return (features.dtype if features.dtype in _HALF else computed), computed


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    # No call without need: an exported graph would show it.
    return values if values.dtype is dtype else values.to(dtype)


def _activate(module: Any, out: Tensor, act_type: Any, act_alpha: float | int) -> Tensor:
    """Execute a fused activation (spconv's ``tv.gemm.Activation``)."""
    name = "None_" if act_type is None else str(getattr(act_type, "name", act_type))
    if name in ("None_", "None"):
        return out
    if name == "ReLU":
        return functional.relu(out)
    if name == "Sigmoid":
        return torch.sigmoid(out)
    if name == "LeakyReLU":
        return functional.leaky_relu(out, float(act_alpha))
    raise ValueError(
        f"{describe(module)}: act_type={act_type!r} is unknown; expected None_, ReLU, Sigmoid or "
        "LeakyReLU"
    )


def record_voxel_count(module: Any, rulebook: Rulebook) -> None:
    """Keep the largest number of outputs seen in spconv's ``record_voxel_count`` buffer."""
    seen = getattr(module, "max_num_voxels_during_training", None)
    if seen is not None and getattr(module, "record_voxel_count", False):
        with torch.no_grad():
            seen.clamp_(min=rulebook.num_out)


def with_rulebook(x: Any, features: Tensor, rulebook: Rulebook, indice_dict: dict[Any, Any]) -> Any:
    """A new tensor like ``x`` holding ``features`` on the rulebook's outputs."""
    indices, shape = rulebook.out_indices, list(rulebook.out_shape)
    if torch.compiler.is_compiling():
        return traced(x, features, indices, shape, indice_dict)
    if hasattr(x, "replace_feature"):
        out = (x.shadow_copy() if hasattr(x, "shadow_copy") else x).replace_feature(features)
    else:
        # spconv 1: the constructor is the only way to another tensor.
        out = type(x)(features, indices, shape, x.batch_size)
        if hasattr(x, "grid"):
            out.grid = x.grid
    out.indices = indices
    out.spatial_shape = shape
    out.indice_dict = indice_dict
    return out

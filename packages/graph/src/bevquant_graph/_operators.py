"""The one table of what operators do to values, scales, order and shape.

A row names an operator however it is called: as ATen operator, as function or method, as module.
Whoever reads a graph asks `op_spec`; a new operator is a row here and what computes it where it is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ._layer_class import layer_class


@dataclass(frozen=True)
class OpSpec:
    """Properties of an operator.

    Attributes:
        name: The operator's ATen name.
        kind: Its class for readers of graphs:
            ``"identity"`` the same tensor, or a copy;
            ``"layout_op"`` unchanged values in another shape, order or selection;
            ``"concat"`` several tensors side by side;
            ``"relu"``, ``"add"``, ``"max_pool"``, ``"avg_pool"``, ``"resize"``;
            ``"sample"`` weighted sums of its first operand at real positions;
            ``"layer"`` products with a weight;
            ``"norm"`` a batch norm of fixed statistics;
            ``"quantize"`` fake quantization;
            ``"rulebook"``, ``"sparse_layer"``, ``"sparse_pool"``, ``"to_dense"``;
            ``"size"`` a query of a shape;
            ``"float"`` all others.
        values: Whether each output value is an input value (or a padding zero).
        order: Whether values also keep their position in memory order.
        shape: Whether the output has the input's shape.
        mixes: Whether an output value is computed from several input values.
        modules: Classes of torch.nn (by name) whose forward is this operator alone.
        places: Whether operands after the first only select where the first is read.
    """

    name: str
    kind: str = "float"
    values: bool = False
    order: bool = False
    shape: bool = False
    mixes: bool = True
    modules: tuple[str, ...] = ()
    places: bool = False


def _rows(names: str, kind: str, **about: Any) -> dict[str, OpSpec]:
    return {name: OpSpec(name, kind, **about) for name in names.split()}


_KEEPS: Any = dict(values=True, order=True, shape=True, mixes=False)
_DIMS = ("1d", "2d", "3d")

OPERATORS: dict[str, OpSpec] = {
    **_rows(
        "clone contiguous detach alias lift lift_fresh lift_fresh_copy detach_ dropout "
        "feature_dropout alpha_dropout native_dropout shadow_copy",
        "identity", **_KEEPS,
        modules=("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d"),
    ),
    **_rows(
        "view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as reshape_as "
        "_reshape_alias unsafe_split unbind",
        "layout_op", values=True, order=True, mixes=False, modules=("Flatten", "Unflatten"),
    ),
    **_rows(
        "permute transpose t movedim moveaxis swapaxes swapdims mT T roll flip pixel_shuffle "
        "pixel_unshuffle channel_shuffle slice select split split_with_sizes chunk tensor_split "
        "expand expand_as broadcast_to repeat repeat_interleave tile narrow index_select index "
        "gather take_along_dim masked_select unfold getitem",
        "layout_op", values=True, mixes=False,
        modules=("PixelShuffle", "PixelUnshuffle", "ChannelShuffle"),
    ),
    **_rows(
        "pad constant_pad_nd", "layout_op", values=True, mixes=False,
        modules=tuple(f"{p}Pad{d}" for p in ("Zero", "Constant") for d in _DIMS),
    ),
    **_rows("cat concat concatenate stack hstack vstack", "concat", values=True, mixes=False),
    **_rows("relu relu6 hardtanh", "relu", shape=True, mixes=False, modules=("ReLU", "ReLU6")),
    **_rows("add", "add", shape=True),
    **_rows(
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices",
        "max_pool", values=True, modules=tuple(f"MaxPool{d}" for d in _DIMS),
    ),
    **_rows(
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d", "avg_pool",
        modules=tuple(f"{a}AvgPool{d}" for a in ("", "Adaptive") for d in _DIMS),
    ),
    **_rows("upsample_nearest1d upsample_nearest2d upsample_nearest3d", "resize", values=True,
            modules=("Upsample", "UpsamplingNearest2d")),
    **_rows("upsample_bilinear2d", "resize", modules=("UpsamplingBilinear2d",)),
    **_rows(
        "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d "
        "linear", "layer",
        modules=("Linear", *(f"Conv{t}{d}" for t in ("", "Transpose") for d in _DIMS)),
    ),
    **_rows("batch_norm", "norm", shape=True, mixes=False,
            modules=("SyncBatchNorm", *(f"BatchNorm{d}" for d in _DIMS))),
    **_rows(
        "bevquant_quantizers::fake_quantize bevquant_quantizers::fake_quantize_affine",
        "quantize", shape=True, mixes=False,
    ),
    **_rows(
        "bevquant_sparse::rulebook bevquant_sparse::subm_rulebook "
        "bevquant_sparse::inverse_rulebook bevquant_sparse::identity_rulebook", "rulebook",
    ),
    **_rows("bevquant_sparse::conv", "sparse_layer"),
    **_rows("bevquant_sparse::max_pool", "sparse_pool", values=True),
    **_rows("bevquant_sparse::avg_pool", "sparse_pool"),
    **_rows("bevquant_sparse::to_dense", "to_dense", values=True, mixes=False),
    **_rows("sym_size sym_numel sym_stride sym_storage_offset size numel dim", "size"),
    **_rows("matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention", "float"),
    **_rows(
        "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d "
        "bevquant_graph::deformable_attention", "sample", places=True,
    ),
}  # fmt: skip


def _by_module() -> dict[str, OpSpec]:
    """Of a row's operators that of the class's own name, else the first."""
    found: dict[str, OpSpec] = {}
    for name, spec in OPERATORS.items():
        for module in spec.modules:
            if module not in found or name.replace("_", "") == module.lower():
                found[module] = spec
    return found


_BY_MODULE = _by_module()


def op_spec(target: object) -> OpSpec:
    """Properties of an operator, under any of its names.

    Args:
        target: An ATen or custom operator, a function, the name of a method, a module (by
            `layer_class`) or a class of torch.nn. In-place forms are the operator itself.

    Example:
        >>> import torch
        >>> op_spec(torch.ops.aten.permute.default).kind, op_spec("permute").values
        ('layout_op', True)
        >>> op_spec(torch.nn.MaxPool2d).kind, op_spec(torch.relu_).kind, op_spec(torch.erf).kind
        ('max_pool', 'relu', 'float')
    """
    if isinstance(target, nn.Module):
        target = layer_class(target) or type(target)
    if isinstance(target, type):
        # By its name only where it is torch's own class: others may carry the same.
        known = target.__module__.startswith("torch.nn.modules.")
        return (_BY_MODULE.get(target.__name__) if known else None) or OpSpec(target.__name__)
    return _named(target if isinstance(target, str) else _name(target))


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    if schema is not None:
        namespace, _, name = schema.name.partition("::")
        return str(name if namespace == "aten" else schema.name)
    return str(getattr(target, "__name__", target))


@cache
def _named(name: str) -> OpSpec:
    plain = name if name.startswith("__") or not name.endswith("_") else name[:-1]
    found = OPERATORS.get(plain)
    return OpSpec(plain) if found is None else found

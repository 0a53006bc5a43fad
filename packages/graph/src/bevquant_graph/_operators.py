"""The one table of operators: their effect on values, scales, order and shape.

A row names an operator in all its forms: ATen operator, function, method, module. Readers of a
graph call `op_spec`. A new operator needs a row here, and its kernel in the package that computes
it.
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
            ``"matmul"`` products of tensors that a forward names;
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
        layout: Effect of a layout operator: ``"reshape"``, ``"permute"`` axes, ``"reorder"`` values
            along an axis, ``"shuffle"`` values between axes, take a ``"part"``, ``"repeat"``,
            ``"pad"``.
        casts: Whether it converts the type of values.
        like: Whether the second operand only gives the shape.
        product: Sum of products that it computes, in words.
        neutral: Second operand that leaves the first unchanged.
        creates: Whether it makes a tensor of numbers.
        chooses: Its choice by value: ``"ranks"`` values and their indices, ``"indices"``,
            ``"places"`` of true values, ``"rows"`` by a mask.
        writes: Whether it writes into its first operand, whose type and shape the result has.
        alias: Whether the result shares its memory with the operand, if strides allow it.
        positive: Whether no result is negative, whatever the operands are.
        compares: Whether it compares values, which gives true or false.
        draws: Whether it draws random numbers in evaluation too (dropout does not).
    """

    name: str
    kind: str = "float"
    values: bool = False
    order: bool = False
    shape: bool = False
    mixes: bool = True
    modules: tuple[str, ...] = ()
    places: bool = False
    layout: str = ""
    casts: bool = False
    like: bool = False
    product: str = ""
    neutral: float | None = None
    creates: bool = False
    chooses: str = ""
    compares: bool = False
    draws: bool = False
    writes: bool = False
    alias: bool = False
    positive: bool = False

    @property
    def unary(self) -> bool:
        """Whether each output value is a function of the one input value at its place."""
        return self.shape and not self.mixes and self.kind in ("float", "relu")


def _rows(names: str, kind: str, **about: Any) -> dict[str, OpSpec]:
    return {name: OpSpec(name, kind, **about) for name in names.split()}


_KEEPS: Any = dict(values=True, order=True, shape=True, mixes=False)
_MOVES: Any = dict(values=True, mixes=False)
_ALIASES = {
    "abs": "absolute", "acos": "arccos", "acosh": "arccosh", "add": "iadd", "asin": "arcsin",
    "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2", "atanh": "arctanh",
    "bitwise_and": "__and__ __iand__", "bitwise_or": "__or__ __ior__",
    "bitwise_xor": "__xor__ __ixor__", "cat": "concat concatenate", "clamp": "clip",
    "div": "divide true_divide", "eq": "__eq__", "erf": "special_erf", "erfc": "special_erfc",
    "exp2": "special_exp2", "expand": "broadcast_to", "expm1": "special_expm1",
    "ge": "greater_equal __ge__", "gt": "greater __gt__", "le": "less_equal __le__",
    "linalg_inv": "inverse", "log1p": "special_log1p", "logit": "special_logit",
    "logsumexp": "special_logsumexp", "lt": "less __lt__", "matmul": "linalg_matmul",
    "movedim": "moveaxis", "mul": "multiply imul", "ne": "not_equal __ne__", "neg": "negative",
    "outer": "ger", "reshape": "view _unsafe_view _reshape_alias", "round": "special_round",
    "sigmoid": "special_expit", "softmax": "special_softmax", "split": "split_with_sizes",
    "sub": "subtract isub", "transpose": "swapaxes swapdims", "trunc": "fix",
    "vstack": "row_stack",
}  # fmt: skip
ALIASES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
"""Other names of operators; the arguments are those of the operator, in the same order."""
_DIMS = ("1d", "2d", "3d")

OPERATORS: dict[str, OpSpec] = {
    **_rows("detach alias data lift lift_fresh detach_", "identity", **_KEEPS, alias=True),
    **_rows(
        "clone contiguous lift_fresh_copy dropout feature_dropout alpha_dropout native_dropout "
        "shadow_copy", "identity", **_KEEPS,
        modules=("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d"),
    ),
    **_rows(
        "reshape flatten unflatten squeeze unsqueeze", "layout_op",
        **_MOVES, order=True, layout="reshape", alias=True, modules=("Flatten", "Unflatten"),
    ),
    **_rows("view_as reshape_as", "layout_op", **_MOVES, order=True, layout="reshape", like=True,
            alias=True),
    **_rows("unsafe_split unbind", "layout_op", **_MOVES, order=True, layout="part", alias=True),
    **_rows("permute transpose t movedim mT T numpy_T", "layout_op", **_MOVES, layout="permute",
            alias=True),
    **_rows("roll flip", "layout_op", **_MOVES, layout="reorder"),
    **_rows("pixel_shuffle pixel_unshuffle channel_shuffle", "layout_op", **_MOVES,
            layout="shuffle", modules=("PixelShuffle", "PixelUnshuffle", "ChannelShuffle")),
    **_rows(
        "slice select split chunk tensor_split narrow unfold diagonal", "layout_op",
        **_MOVES, layout="part", alias=True,
    ),
    **_rows("index_select gather take_along_dim", "layout_op", **_MOVES, layout="part"),
    **_rows("index masked_select", "layout_op", **_MOVES, layout="part", chooses="rows"),
    **_rows("getitem", "layout_op", **_MOVES, layout="part", chooses="rows", alias=True),
    **_rows("expand", "layout_op", **_MOVES, layout="repeat", alias=True),
    **_rows("repeat repeat_interleave tile", "layout_op", **_MOVES, layout="repeat"),
    **_rows("expand_as", "layout_op", **_MOVES, layout="repeat", like=True, alias=True),
    **_rows(
        "pad constant_pad_nd", "layout_op", **_MOVES, layout="pad",
        modules=tuple(f"{p}Pad{d}" for p in ("Zero", "Constant") for d in _DIMS),
    ),
    **_rows("cat stack hstack vstack dstack column_stack", "concat", values=True, mixes=False),
    # F.relu6 is hardtanh(0, 6) in a graph.
    **_rows("relu relu6", "relu", shape=True, mixes=False, positive=True,
            modules=("ReLU", "ReLU6")),
    **_rows("hardtanh", "relu", shape=True, mixes=False, modules=("ReLU6",)),
    **_rows("add", "add", shape=True, neutral=0),
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
        "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
        "layer", product="a convolution",
        modules=tuple(f"Conv{t}{d}" for t in ("", "Transpose") for d in _DIMS),
    ),
    **_rows("linear", "layer", product="a matrix product", modules=("Linear",)),
    **_rows("batch_norm", "norm", shape=True, mixes=False,
            modules=("SyncBatchNorm", *(f"BatchNorm{d}" for d in _DIMS))),
    **_rows(
        "bevquant_quantizers::fake_quantize bevquant_quantizers::fake_quantize_affine "
        "bevquant_quantizers::fake_quantize_blocks",
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
    **_rows("sym_size sym_numel sym_stride sym_storage_offset size numel nelement dim ndimension "
            "stride", "size"),
    **_rows(
        "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d "
        "bevquant_graph::deformable_attention", "sample", places=True,
    ),
    **_rows("matmul mm bmm einsum", "matmul", product="a matrix product"),
    **_rows("addmm baddbmm", "float", product="a matrix product"),
    **_rows("scaled_dot_product_attention", "float", product="attention"),
    **_rows("to _to_copy type_as float half double int long bool", "float", casts=True),
    **_rows(
        "acos acosh asin asinh atan atanh ceil celu clamp clamp_max clamp_min cos cosh elu erf "
        "erfc expm1 floor gelu hardshrink hardswish leaky_relu log log10 log1p log2 log_sigmoid "
        "mish neg reciprocal round rsqrt selu sign silu sin sinh tan tanh threshold trunc",
        "float", shape=True, mixes=False,
    ),
    **_rows(
        "addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor lerp maximum minimum pow "
        "remainder", "float", shape=True,
    ),
    **_rows(
        "copy fill zero masked_fill masked_scatter index_put index_add index_copy index_fill "
        "index_reduce scatter scatter_add scatter_reduce", "float", writes=True,
    ),
    **_rows("abs exp hardsigmoid sigmoid softplus sqrt square", "float",
            shape=True, mixes=False, positive=True),
    **_rows("softmax", "float", positive=True),
    **_rows("topk sort max min kthvalue median mode", "float", chooses="ranks"),
    **_rows("argsort argmax argmin", "float", chooses="indices"),
    **_rows("nonzero nonzero_numpy where torchvision::nms", "float", chooses="places"),
    **_rows("eq ne lt le gt ge isclose", "float", compares=True),
    **_rows("sub", "float", shape=True, neutral=0),
    **_rows("mul div", "float", shape=True, neutral=1),
    **_rows("arange eye full linspace ones scalar_tensor zeros", "float", creates=True),
    **_rows(
        "bernoulli cauchy exponential geometric log_normal multinomial normal poisson rand "
        "rand_like randint randint_like randn randn_like randperm uniform", "float", draws=True,
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
        if schema.overload_name == "dtype" and name == "view":
            return "view.dtype"  # other numbers of the same bits
        return str(name if namespace == "aten" else schema.name)
    return str(getattr(target, "__name__", target))


@cache
def _named(name: str) -> OpSpec:
    # In-place operators end in "_"; names as __add__ are aliases.
    plain = name if name.startswith("__") or not name.endswith("_") else name[:-1]
    plain = ALIASES.get(plain, plain)
    found = OPERATORS.get(plain)
    return OpSpec(plain) if found is None else found

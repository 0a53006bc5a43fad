"""The operators of programs.

The operators of bevquant_hybrid are the functions that fixed-point modules call. Torch's operators
move, order and compare integers, or compute in float64 between two roundings (softmax, layer norm,
adaptive pooling, addition and multiplication of numbers). Detections and pillars are operators of
this package on floats, for the CPU. No others are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bevquant_graph import op_spec

_NAMESPACE = "bevquant_hybrid::"


def _aten(names: str, *of: str) -> frozenset[str]:
    """The names in ATen, each with the overloads that are given."""
    return frozenset(f"aten::{name}{end}" for name in names.split() for end in of or ("",))


_MOVES = _aten(
    "cat channel_shuffle constant_pad_nd contiguous expand flip gather index.Tensor "
    "index_select native_channel_shuffle permute pixel_shuffle pixel_unshuffle repeat "
    "replication_pad1d replication_pad2d replication_pad3d reshape roll select.int "
    "slice.Tensor split.Tensor split_with_sizes squeeze squeeze.dim squeeze.dims t to.dtype "
    "transpose.int unbind.int unsqueeze"
)
_ORDER = _aten(
    "amax amin argmax argmin max max.dim min min.dim nonzero sort sort.stable topk"
) | _aten("eq ne gt ge lt le", ".Scalar", ".Tensor")
# On integers and in float64 only: in float32 they would be work for a CPU.
ARITHMETIC = _aten(
    "_adaptive_avg_pool2d abs clamp clamp_max clamp_min exp floor maximum mean.dim minimum "
    "pow.Tensor_Scalar rsqrt sum.dim_IntList"
) | _aten("add sub mul div", ".Scalar", ".Tensor")
_OF_TORCH = _MOVES | _ORDER | ARITHMETIC
# What a traced graph calls beside them.
_OF_GRAPHS = _aten("Int ScalarImplicit contiguous detach flatten size to unflatten view zeros_like")
# Constants: these read a shape alone.
OF_SHAPE = _aten("zeros_like ones_like full_like new_zeros new_ones new_full")
# A traced graph holds numbers as tensors, but torch hands them over as numbers.
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": lambda number: number,
    "aten::equal": lambda one, other: type(one) is type(other) and one == other,
}
# What may read a tensor whose size the data decide: these name no size of it.
LOOSE = _aten("contiguous index.Tensor select.int slice.Tensor t to.dtype transpose.int unbind.int")
# Results whose size the data decide: always, or for one value of a setting.
_SIZED_BY_DATA: dict[str, tuple[str, object] | None] = {
    "aten::nonzero": None,
    f"{_NAMESPACE}detect": None,
    f"{_NAMESPACE}detect_v1": ("nms_padding_mode", None),
    f"{_NAMESPACE}point_pillars_preprocess": ("use_max", False),
}


def sized_by_data(name: str, given: Mapping[str, object]) -> bool:
    """Whether the data decide the size of what an operator returns."""
    if name not in _SIZED_BY_DATA:
        return False
    setting = _SIZED_BY_DATA[name]
    return setting is None or given[setting[0]] == setting[1]


def is_integer(name: str) -> bool:
    """Whether an operator is one of this package's."""
    registered = set(torch.ops.bevquant_hybrid)
    return name.startswith(_NAMESPACE) and name.removeprefix(_NAMESPACE) in registered


def is_known(name: str) -> bool:
    """Whether a program may call an operator."""
    return name in _OF_TORCH or is_integer(name)


def is_neutral(name: str) -> bool:
    """Whether a traced graph may call an operator, with any overload, for a program."""
    known = name in {of.partition(".")[0] for of in _OF_TORCH} or is_integer(name)
    return known or name in _OF_GRAPHS


def find_operator(name: str) -> Any:
    """Return torch's operator of a name that is known."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def only_moves(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call only copies values in the same order."""
    source: Any = given.get("self")
    spec = op_spec(name.removeprefix("aten::"))
    if spec.kind == "identity" and spec.alias:
        return True
    if name == "aten::_to_copy":
        return given.get("dtype") in (None, source.dtype)
    if name == "aten::clone":
        # A change of order stays in the program: sums of floats depend on it.
        return source.is_contiguous() or given.get("memory_format") != torch.contiguous_format
    if name == "aten::as_strided_":
        # Of axes of length one, as pooling to one pixel does: that says nothing.
        wide = [i for i, size in enumerate(source.shape) if size > 1]
        sizes, strides = given["size"], given["stride"]
        same = list(sizes) == list(source.shape) and given.get("storage_offset") is None
        return same and all(strides[i] == source.stride(i) for i in wide)
    return False


def canonical(name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the operator that a program calls instead of this one, with its arguments."""
    if op_spec(name.removeprefix("aten::")).name == "reshape":  # under any name, as view
        shape = given.get("size", given.get("shape"))
        return "aten::reshape", {"self": given["self"], "shape": shape}
    if name == "aten::_to_copy":
        return "aten::to.dtype", {"self": given["self"], "dtype": given["dtype"]}
    if name == "aten::clone":
        return "aten::contiguous", {"self": given["self"]}
    return name, given

"""The operators that a program may call, and nothing else.

Those of bevquant_hybrid are the very functions that fixed-point modules call. Those of torch move
integers, order and compare them, or belong to the few modules that compute exactly in float64
between two roundings (softmax, layer norm, adaptive pooling, numbers added and multiplied).
Detections and pillars are whole operators of this package, on floats and for the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["ARITHMETIC", "LOOSE", "find_operator", "is_integer", "is_known", "sized_by_data"]

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


def is_known(name: str, *, any_overload: bool = False) -> bool:
    """Whether a program may call an operator; or another of the same name before the dot."""
    known = {of.partition(".")[0] for of in _OF_TORCH} if any_overload else _OF_TORCH
    return name in known or is_integer(name)


def find_operator(name: str) -> Any:
    """Return torch's operator of a name that is known."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")

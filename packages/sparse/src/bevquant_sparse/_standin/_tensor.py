"""`spconv.pytorch.core`: the sparse tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from bevquant_sparse._dense import to_dense
from bevquant_sparse._geometry import whole_numbers

__name__ = "spconv.pytorch.core"


def expand_nd(ndim: int, val: Any) -> list[int]:
    """One number for each of ``ndim`` axes: ``val`` repeated, or its own ``ndim`` numbers."""
    values = [int(val)] * ndim if isinstance(val, int) else [int(v) for v in val]
    if len(values) != ndim:
        raise ValueError(f"expected one number or {ndim} of them, one an axis, got {val!r}")
    return values


class _NotedByFx(type):
    """A call of the class with a proxy of torch.fx is a node of the traced graph."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        proxies = [x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)]
        if proxies:
            return proxies[0].tracer.create_proxy("call_function", cls, args, kwargs)
        return super().__call__(*args, **kwargs)


class SparseConvTensor(metaclass=_NotedByFx):
    """Features of the active voxels of a grid.

    Args:
        features: ``[rows, channels]``.
        indices: int32 ``[rows, 1 + ndim]``: batch, then the spatial axes.
        spatial_shape: Grid in voxels.
        batch_size: Number of samples.
        grid: Kept as an attribute; read by nothing here, like the four that follow.
        voxel_num: Kept.
        indice_dict: Rulebooks by ``indice_key``; shared with the tensors made from this one.
        benchmark: Kept.
        permanent_thrust_allocator: Ignored.
        enable_timer: Ignored.
        force_algo: Kept.

    Raises:
        ValueError: The shapes do not fit each other.
        TypeError: The indices are not int32.
    """

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int] | Tensor,
        batch_size: int,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[Any, Any] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: Any = None,
    ) -> None:
        shape = list(whole_numbers(spatial_shape))
        if features.ndim != 2 or indices.ndim != 2 or indices.shape[1] != len(shape) + 1:
            raise ValueError(
                "SparseConvTensor: expected features [rows, channels] and indices [rows, "
                f"{1 + len(shape)}] (batch, then one column for each axis of the grid {shape}), "
                f"got {tuple(features.shape)} and {tuple(indices.shape)}"
            )
        if indices.dtype is not torch.int32:
            raise TypeError(
                f"SparseConvTensor: expected int32 indices, got {indices.dtype}; pass indices.int()"
            )
        if isinstance(batch_size, int) and batch_size < 1:
            raise ValueError(f"SparseConvTensor: expected batch_size >= 1, got {batch_size}")
        self._features = features
        self.indices = indices
        self.spatial_shape: Any = shape
        self.batch_size = batch_size
        self.indice_dict: dict[Any, Any] = {} if indice_dict is None else indice_dict
        self.grid = torch.Tensor() if grid is None else grid
        self.voxel_num = voxel_num
        self.benchmark = benchmark
        self.benchmark_record: dict[str, Any] = {}
        self.thrust_allocator = None
        self._timer = None
        self.force_algo = force_algo
        self.int8_scale = None

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"

    @property
    def features(self) -> Tensor:
        """``[rows, channels]``; ``replace_feature`` gives a tensor with others."""
        return self._features

    @features.setter
    def features(self, value: Tensor) -> None:
        raise ValueError(
            "you can't set feature directly, use 'x = x.replace_feature(your_new_feature)' to "
            "generate new SparseConvTensor instead."
        )

    @property
    def is_quantized(self) -> bool:
        """Whether the features are torch's qint8."""
        return self.features.dtype is torch.qint8

    @property
    def spatial_size(self) -> int:
        """Number of voxels of the grid, active or not."""
        return math.prod(self.spatial_shape)

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """The same voxels with other features; rulebooks are shared."""
        new = SparseConvTensor(
            feature, self.indices, self.spatial_shape, self.batch_size, self.grid, self.voxel_num,
            self.indice_dict, self.benchmark, force_algo=self.force_algo,
        )  # fmt: skip
        new.benchmark_record = self.benchmark_record
        new.int8_scale = self.int8_scale
        return new

    def shadow_copy(self) -> SparseConvTensor:
        """Another tensor object of the same parts."""
        return self.replace_feature(self.features)

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """The rows of a mask or of row numbers; no rulebook fits them, so none goes along."""
        new = self.replace_feature(self.features[valid_indices])
        new.indices = self.indices[valid_indices]
        new.indice_dict = {}
        return new

    def minus(self) -> SparseConvTensor:
        """The negative features."""
        return self.replace_feature(-self.features)

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """Voxels of a dense grid ``[batch, *grid, channels]`` in which any channel is not 0."""
        indices = (x.detach() != 0).any(-1).nonzero()
        features = x[tuple(indices.unbind(1))]
        return cls(features, indices.int(), list(x.shape[1:-1]), x.shape[0])

    def dense(self, channels_first: bool = True) -> Tensor:
        """``[batch, channels, *grid]``, or channels last; zero where no voxel is active."""
        out = to_dense(self.features, self.indices, self.spatial_shape, self.batch_size)
        return out if channels_first else out.movedim(1, -1).contiguous()

    def find_indice_pair(self, key: object) -> Any:
        """The ``Rulebook`` under an ``indice_key``; None where there is none."""
        return None if key is None else self.indice_dict.get(key)

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        if not isinstance(other, SparseConvTensor | Tensor):
            return NotImplemented
        features = other.features if isinstance(other, SparseConvTensor) else other
        if features.shape != self.features.shape:
            raise ValueError(
                f"SparseConvTensor +: expected the same voxels and channels, got features "
                f"{tuple(self.features.shape)} and {tuple(features.shape)}; "
                "functional.sparse_add adds over the union of the voxels"
            )
        return self.replace_feature(self.features + features)

    __radd__ = __add__
    __iadd__ = __add__  # another tensor object: features are replaced, not written to

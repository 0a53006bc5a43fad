"""`spconv.pytorch.modules`: sparse modules and sequences of sparse and dense ones."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from bevquant_sparse._modules import is_sparse_conv
from bevquant_sparse._standin import _constants
from bevquant_sparse._standin._tensor import SparseConvTensor

__name__ = "spconv.pytorch.modules"

logger = logging.getLogger("bevquant_sparse")


class SparseModule(nn.Module):
    """Base of the modules that take a sparse tensor; others get its features.

    Loading a state dict puts a sparse convolution's weight into spconv 2's layout. mmdet3d replaces
    `_load_from_state_dict` of this class by a conversion of its own.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        key = f"{prefix}weight"
        if is_sparse_conv(self) and isinstance(state_dict.get(key), Tensor):
            state_dict = {**state_dict, key: _as_own(self, state_dict[key], key)}
        super()._load_from_state_dict(state_dict, prefix, *more)


def _as_own(module: Any, weight: Tensor, key: str) -> Tensor:
    """A saved weight in spconv 2's layout, KRSC."""
    # A shape tells the layout unless the kernel's sizes all equal both numbers of channels.
    own, layout = tuple(module.weight.shape), _constants.SAVED_WEIGHT_LAYOUT
    shapes = {
        "KRSC": own,
        "RSCK": (*module.kernel_size, module.in_channels, module.out_channels),
        "RSKC": (*module.kernel_size, module.out_channels, module.in_channels),
    }
    if not layout and tuple(weight.shape) == own == shapes["RSCK"] and max(own) > 1:
        logger.warning(
            "%s: its shape %s fits spconv 2's layout (KRSC) and spconv 1's (RSCK); read "
            "as KRSC. Set spconv.constants.SAVED_WEIGHT_LAYOUT to the layout of the file",
            key, own,
        )  # fmt: skip
    if not layout:
        layout = "RSCK" if own != tuple(weight.shape) == shapes["RSCK"] else "KRSC"
    # A weight that fits no layout is left to torch's error.
    if layout == "KRSC" or tuple(weight.shape) != shapes[layout]:
        return weight
    if layout == "RSKC":
        return weight.movedim(-2, 0).contiguous()
    # A 1×…×1 kernel is multiplied as view(in, out): its memory is in that order already.
    return weight.reshape(own) if module.conv1x1 else weight.movedim(-1, 0).contiguous()


class SparseReLU(nn.ReLU):
    """ReLU of a sparse tensor's features, or of a tensor."""

    def forward(self, input: Any) -> Any:
        """Apply it."""
        return _on_features(super().forward, input)


class SparseBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d of a sparse tensor's features, or of a tensor."""

    def forward(self, input: Any) -> Any:
        """Apply it."""
        return _on_features(super().forward, input)


class SparseSyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm of a sparse tensor's features, or of a tensor."""

    def forward(self, input: Any) -> Any:
        """Apply it."""
        return _on_features(super().forward, input)


class SparseIdentity(nn.Identity):
    """Returns its input."""

    def forward(self, input: Any) -> Any:
        """Apply it."""
        return _on_features(super().forward, input)


def _on_features(function: Any, x: Any) -> Any:
    if isinstance(x, SparseConvTensor):
        return x.replace_feature(function(x.features))
    return function(x)


def is_spconv_module(module: object) -> bool:
    """Whether a sequence gives a module the sparse tensor, not its features."""
    sparse = (SparseModule, SparseReLU, SparseBatchNorm, SparseSyncBatchNorm, SparseIdentity)
    return isinstance(module, sparse)


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Give each sparse module its path in ``module``, which errors then name."""
    for path, child in module.named_modules():
        if hasattr(child, "_sparse_unique_name"):
            child._sparse_unique_name = path


class SparseSequential(SparseModule):
    """Modules in a row. Dense ones run on the features, and not at all on no voxels.

    Args:
        *args: Modules, or one `OrderedDict` of them.
        **kwargs: Modules by name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        named = args[0] if len(args) == 1 and isinstance(args[0], OrderedDict) else None
        modules = named or {str(number): module for number, module in enumerate(args)}
        for name, module in modules.items():
            self.add_module(name, module)
        for name, module in kwargs.items():
            if name in self._modules:
                raise ValueError(f"SparseSequential: two modules are named {name!r}")
            self.add_module(name, module)

    def __getitem__(self, idx: int) -> Any:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"index {idx} is out of range")
        return list(self._modules.values())[idx]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module; its name is its number where none is given."""
        self.add_module(str(len(self)) if name is None else name, module)

    def forward(self, input: Any) -> Any:
        """Run the modules in order."""
        for module in self._modules.values():
            if is_spconv_module(module) or not isinstance(input, SparseConvTensor):
                input = module(input)  # type: ignore[misc]
            elif input.indices.shape[0] != 0:
                input = input.replace_feature(module(input.features))  # type: ignore[misc]
        return input


class ToDense(SparseModule):
    """The dense grid of a sparse tensor, channels first."""

    __module__ = "spconv.pytorch"

    def forward(self, x: Any) -> Tensor:
        """``x.dense()``."""
        out: Tensor = x.dense()
        return out


class RemoveGrid(SparseModule):
    """Drops the ``grid`` of a sparse tensor, in place."""

    __module__ = "spconv.pytorch"

    def forward(self, x: Any) -> Any:
        """Return ``x``."""
        x.grid = None
        return x

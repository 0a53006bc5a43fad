"""What functions, methods and modules do to tensors, by name."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from bevquant_graph import layer_class

__all__ = [
    "ADDITIONS",
    "JOINS",
    "KEEPS_INPUT",
    "METADATA",
    "MOVES",
    "RELUS",
    "SITES_METADATA",
    "is_identity",
    "is_inplace",
    "is_move",
    "is_relu",
]

# Questions about a tensor, whose answers are the same for its integers.
METADATA = frozenset("shape size ndim dim device numel nelement".split())
SITES_METADATA = frozenset("indices spatial_shape batch_size".split())
# The very same tensor, or a copy of it.
KEEPS_INPUT = frozenset("contiguous detach float shadow_copy dropout".split())
# Values keep their meaning, in another shape or place: done on integers as on floats.
MOVES = frozenset(
    "view reshape permute transpose flatten unflatten squeeze unsqueeze movedim swapaxes t getitem "
    "split chunk unbind expand expand_as repeat index_select narrow roll flip clone "
    "pixel_shuffle select take_along_dim".split()
)
JOINS = frozenset({"cat", "concat", "concatenate", "stack"})
RELUS: dict[str, float | None] = {"relu": None, "relu_": None, "relu6": 6.0}
ADDITIONS = frozenset({"add", "add_", "iadd"})


def is_identity(module: nn.Module) -> bool:
    """Whether the module hands on its input in evaluation mode."""
    return layer_class(module, nn.Identity, _DropoutNd) is not None or type(module).__name__ in (
        "DropPath",
        "SparseIdentity",
    )


def is_relu(module: nn.Module) -> bool:
    """Whether the module is a ReLU or ReLU6."""
    return (
        layer_class(module, nn.ReLU, nn.ReLU6) is not None or type(module).__name__ == "SparseReLU"
    )


def is_move(module: nn.Module) -> bool:
    """Whether the module only moves values."""
    return layer_class(module, nn.Flatten, nn.Unflatten, nn.PixelShuffle) is not None


def is_inplace(name: str, kwargs: Any) -> bool:
    """Whether a function or method of this name writes to its first argument."""
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in ("iadd", "isub", "imul", "itruediv") or kwargs.get("inplace") is True

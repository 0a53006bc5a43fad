"""A batch norm with its layer, and the checks of both before folding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._foldable import conv_problem, out_channels
from ._ranges import other_readers


@dataclass(frozen=True)
class NormPaths:
    """Paths of a batch norm's parameters in the model, and its ε."""

    mean: str
    var: str
    weight: str | None
    bias: str | None
    eps: float


class Refused(Exception):
    """A batch norm stays, for the reason that is the message."""


@dataclass(frozen=True)
class Part:
    """One layer's share of a batch norm y = s·x + t."""

    layer: str
    # For each of the layer's own channels, the channel of the batch norm that scales it; −1 for
    # none. Output channels, or input channels of a layer downstream.
    channels: tuple[int, ...]
    # Whether it adds t; of several layers in a sum one does.
    shifted: bool = True


@dataclass(frozen=True)
class Fold:
    """A batch norm that is folded: into layers upstream or downstream, or into one of its own."""

    # Path of the layer that takes it; of several the first.
    conv: str
    # Path of the batch norm, or of the module with the parameters of a functional one.
    bn: str
    norm: NormPaths
    # Path of the module whose forward calls it.
    caller: str
    # Names of its own children that run after the normalisation, in order; None if other code does,
    # so the normalisation must stay as an identity.
    rest: tuple[str, ...] | None = ()
    # Whether other code indexes members of its chain.
    indexed: bool = False
    # Share of each layer; empty if ``conv`` takes all of it, channel by channel.
    parts: tuple[Part, ...] = ()
    # Whether these layers are downstream of the batch norm.
    ahead: bool = False
    # Spatial axes of its depthwise convolution; 0 if layers take it.
    axes: int = 0


def layer_problem(
    model: nn.Module,
    owners: Mapping[str, list[str]],
    conv: str,
    channels: int,
    *,
    own_forward: bool = False,
) -> str | None:
    """Why no batch norm of ``channels`` channels can be folded into the layer at ``conv``."""
    module = model.get_submodule(conv)
    problem = conv_problem(module, own_forward=own_forward)
    if problem is not None:
        return f"{conv}: {problem}"
    made = out_channels(module)
    if made != channels:
        return (
            f"{conv}: {type(module).__name__} makes {made} channels but its batch norm "
            f"normalises {channels}"
        )
    own = {f"{conv}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)}
    # A tied tensor would change for its other owner too.
    tied = tied_to(owners, own)
    if tied is not None:
        return f"{tied[0]} is tied to {tied[1]}"
    # A range that layers share cannot follow one layer's weight.
    others = other_readers(model, module)
    if others:
        return f"{conv} shares the quantizer of its weight with {', '.join(others)}"
    return None


def tensor_owners(model: nn.Module) -> dict[str, list[str]]:
    """Each parameter's and buffer's path, and all paths of the same tensor."""
    owners: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), []).append(f"{prefix}.{name}".lstrip("."))
    return {path: paths for paths in owners.values() for path in paths}


def tied_to(owners: Mapping[str, list[str]], paths: set[str]) -> tuple[str, str] | None:
    """One of ``paths`` and another path of the same tensor; None where each is its own."""
    for path in sorted(paths):
        others = [name for name in owners.get(path, ()) if name not in paths]
        if others:
            return path, ", ".join(others)
    return None


def norm_paths(bn: str, module: _BatchNorm) -> NormPaths:
    """Where a batch norm module keeps its numbers."""
    prefix = f"{bn}." if bn else ""
    weight, bias = (
        f"{prefix}{name}" if getattr(module, name, None) is not None else None
        for name in ("weight", "bias")
    )
    return NormPaths(f"{prefix}running_mean", f"{prefix}running_var", weight, bias, module.eps)

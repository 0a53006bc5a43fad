"""Every place in which a model holds a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_OWN = frozenset(("_modules", "_parameters", "_buffers"))


def replace_modules(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules wherever the model holds them.

    Children are replaced, and so are modules in other attributes: forwards iterate over lists,
    tuples and dicts of layers that were also registered by `torch.nn.Module.add_module`. Such a
    container is not changed; the attribute gets a new one. A container may contain itself.

    Args:
        model: It is changed.
        replaced: Module of the model to its replacement.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.layers = [nn.ReLU()]
        ...         self.add_module("first", self.layers[0])
        >>> net = Net()
        >>> replace_modules(net, {net.first: nn.Sigmoid()})
        >>> net.first, net.layers
        (Sigmoid(), [Sigmoid()])
    """
    made: dict[int, tuple[Any, Any]] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in replaced:
                module._modules[name] = replaced[child]
        for name, value in list(vars(module).items()):
            if name not in _OWN:
                vars(module)[name] = _with(value, replaced, made)


def _with(
    value: Any, replaced: Mapping[nn.Module, nn.Module], made: dict[int, tuple[Any, Any]]
) -> Any:
    """The value with the modules in it replaced; the value itself if it has none."""
    if isinstance(value, nn.Module):
        return replaced.get(value, value)
    if id(value) in made:
        return made[id(value)][1]
    if not _holds(value, replaced):
        return value
    if type(value) is tuple:
        return tuple(_with(item, replaced, made) for item in value)
    # Containers that attributes share, or that hold themselves, stay so; `made` keeps them alive,
    # as an identity is unique among living objects only.
    other = value.copy()
    made[id(value)] = value, other
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        other[key] = _with(item, replaced, made)
    return other


def _holds(value: Any, replaced: Mapping[nn.Module, nn.Module]) -> bool:
    """Whether one of the modules lies in a value, at any depth of its containers."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, nn.Module):
            if item in replaced:
                return True
        elif (type(item) in (list, tuple) or isinstance(item, dict)) and id(item) not in seen:
            seen.add(id(item))
            pending += item.values() if isinstance(item, dict) else item
    return False

"""Every place in which a model holds a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["replace_modules"]

_OWN = frozenset(("_modules", "_parameters", "_buffers"))


def replace_modules(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others, wherever the model holds them.

    That is as a child, and in attributes that are no children: forwards go over lists, tuples and
    dicts of layers that were also registered by `torch.nn.Module.add_module`. Such a container is
    not written to, the attribute becomes another one.

    Args:
        model: It is changed.
        replaced: A module of the model to what takes its place.

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
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in replaced:
                module._modules[name] = replaced[child]
        for name, value in list(vars(module).items()):
            if name not in _OWN:
                made = _with(value, replaced)
                if made is not value:
                    vars(module)[name] = made


def _with(value: Any, replaced: Mapping[nn.Module, nn.Module]) -> Any:
    """The value with the modules in it replaced; itself where there are none."""
    if isinstance(value, nn.Module):
        return replaced.get(value, value)
    kind = type(value)
    if kind in (list, tuple):
        items = [_with(item, replaced) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else kind(items)
    if isinstance(value, dict):
        pairs = [(key, item, _with(item, replaced)) for key, item in value.items()]
        changed = {key: made for key, item, made in pairs if made is not item}
        if changed:
            value = value.copy()
            value.update(changed)
    return value

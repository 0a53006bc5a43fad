"""What a loader's batch is to a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._signature import Arguments, is_sparse_tensor

_LINE = "forward=lambda m, b: m(b[0])"


def batch_arguments(model: nn.Module, batch: Any) -> Arguments:
    """Positional and keyword arguments of a batch, by the signature of the model's forward.

    | batch | forward | call |
    |---|---|---|
    | ``(a, b)`` or ``[a, b]`` | takes as many positional arguments | ``m(a, b)`` |
    | ``(image, label)`` | takes one | ``m(image)`` |
    | ``(image, label)`` | the second is optional | refused |
    | dict | has parameters of all its keys, or ``**kwargs`` | ``m(**batch)`` |
    | dict | has a parameter of some keys, among them every required one | ``m`` of those |
    | dict | has a parameter of none, and takes one argument | ``m(batch)`` |
    | anything else | | ``m(batch)`` |

    A dict is any mapping, or an object with ``keys`` and members such as a `UserDict`. A label is
    what cannot be an image: integers, strings, lists, dictionaries, tensors of up to one axis.

    Args:
        model: Its forward is asked, not run.
        batch: What a loader gives.

    Raises:
        TypeError: It fits in several ways or none; ``forward=`` and the line to write are named.

    Example:
        >>> net, image, label = nn.Flatten(), torch.ones(1, 2, 2), torch.tensor([3])
        >>> [len(batch_arguments(net, batch)[0]) for batch in (image, (image,), (image, label))]
        [1, 1, 1]
        >>> batch_arguments(net, {"image": image, "label": label})[0][0].keys()
        dict_keys(['image', 'label'])
    """
    mapping = _is_mapping(batch)
    if not mapping and not isinstance(batch, tuple | list):
        return (batch,), {}
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # compiled code has no signature
        return ((), dict(batch.items())) if mapping else (tuple(batch), {})
    if mapping:
        return _of_mapping(model, batch, parameters)
    return _of_members(model, tuple(batch), parameters), {}


def _is_mapping(value: Any) -> bool:
    if isinstance(value, Tensor | nn.Module) or is_sparse_tensor(value):
        return False
    duck = all(hasattr(type(value), name) for name in ("keys", "items", "__getitem__"))
    return isinstance(value, Mapping) or duck


def _of_members(
    model: nn.Module, members: tuple[Any, ...], parameters: list[inspect.Parameter]
) -> tuple[Any, ...]:
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return members
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in taken if p.default is p.empty]
    labelled = len(members) == 2 and _is_label(members[1])
    if labelled and len(taken) == 1:
        return members[:1]
    if len(members) > len(taken) or (labelled and len(required) == 1):
        fits = "takes" if len(members) > len(taken) else "may take its second member in"
        raise TypeError(
            f"{type(model).__name__}.forward({', '.join(p.name for p in taken)}) {fits} "
            f"{len(taken)} positional arguments, the batch has {len(members)} members; say which "
            f"of them it takes, as in {_LINE}"
        )
    return members


def _is_label(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() <= 1 or not (value.is_floating_point() or value.dtype == torch.bool)
    return isinstance(value, int | str | list | Mapping)


def _of_mapping(model: nn.Module, batch: Any, parameters: list[inspect.Parameter]) -> Arguments:
    items = dict(batch.items())
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    taken = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = {p.name for p in taken if p.default is p.empty}
    known = items.keys() & named.keys()
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if required <= items.keys() and (open_ended or len(known) == len(items)):
        return (), items
    if known and required <= known:
        return (), {name: items[name] for name in items if name in known}
    if not known and len(required) <= 1 and parameters:
        return (batch,), {}
    names = ", ".join(p.name for p in parameters)
    raise TypeError(
        f"{type(model).__name__}.forward({names}) has no parameters "
        f"{', '.join(sorted(map(str, required - items.keys()))) or 'for them'} among the batch's "
        f"keys {', '.join(map(str, items))}; say what it takes, as in "
        "forward=lambda m, b: m(b['image'])"
    )

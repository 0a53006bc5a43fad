"""A deep copy of a model that runs with its own modules only."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ._faults import described
from ._kinds import check_kind


def copied(
    model: nn.Module,
    who: str,
    shared: Mapping[int, Any] = types.MappingProxyType({}),
    *,
    remedy: str = "",
) -> nn.Module:
    """Return a deep copy of a model: parameters, buffers, attributes and hooks.

    ``copy.deepcopy`` does not copy functions. Here a hook or an attribute that is a closure over
    modules or tensors of the model becomes a closure over those of the copy. Results of autograd
    among buffers, attributes and their members, which it does not copy either, are detached. Python
    modules among them (``self.np = numpy``) are the model's own.

    Args:
        model: It is not changed.
        who: The calling function, for the message.
        shared: Values by ``id`` that the copy has from the model, as in a memo of ``deepcopy``.
        remedy: A further remedy, for the message.

    Raises:
        ValueError: A member cannot be copied (a lock, an open file). The message names module,
            attribute and remedy.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> copied(net, "quantize_model")[0].weight is net[0].weight
        False
    """
    check_kind(model, nn.Module, "a torch module")
    memo = {**_memo(model), **shared}
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"{who}: {_uncopyable(model)} cannot be copied ({type(error).__name__}: {error}). "
            f"Remove it for this call{remedy}"
        ) from error
    held = [*model.modules(), *model.parameters(), *model.buffers()]
    twins = {id(item): memo[id(item)] for item in held if id(item) in memo}
    for module in made.modules():
        _rebind(vars(module), twins)
    return made


def _memo(model: nn.Module) -> dict[int, Any]:
    """Memo of `copy.deepcopy` for members that it refuses: autograd's results, Python modules."""
    memo: dict[int, Any] = {}
    pending = [value for module in model.modules() for _, value in _own(module)]
    seen = set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
        elif isinstance(value, types.ModuleType):
            memo[id(value)] = value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
    return memo


def _rebind(attributes: dict[str, Any], twins: dict[int, Any]) -> None:
    """Replace closures over originals by closures over their copies, in attributes and hooks."""
    for container in (attributes, *attributes.values()):
        if not isinstance(container, dict | list):
            continue
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if isinstance(value, types.FunctionType):
                container[key] = _function(value, twins)


def _function(function: Any, twins: dict[int, Any]) -> Callable[..., Any]:
    """The function over the copies; itself where it refers to none of the originals."""

    def twin(value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return _function(value, twins)
        return twins.get(id(value), value)

    twins[id(function)] = function  # a closure may hold itself
    cells = function.__closure__ or ()
    values = [(cell, twin(cell.cell_contents)) for cell in cells if _filled(cell)]
    new = {id(c): types.CellType(value) for c, value in values if value is not c.cell_contents}
    defaults = tuple(map(twin, function.__defaults__ or ()))
    same = all(a is b for a, b in zip(defaults, function.__defaults__ or (), strict=True))
    if not new and same:
        return function  # type: ignore[no-any-return]
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        defaults or None,
        tuple(new.get(id(cell), cell) for cell in cells),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    twins[id(function)] = made
    return made


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that is assigned later
        return False
    return True


def _uncopyable(model: nn.Module) -> str:
    """The parts of a model that cannot be copied, in words."""
    for path, module in model.named_modules():
        for name, value in _own(module):
            memo = {id(other): other for other in model.modules()}
            try:
                copy.deepcopy(value, memo)
            except Exception:
                return f"attribute {name!r} ({type(value).__name__}) of {described(path, module)}"
    return f"{type(model).__name__}"


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers and attributes of a module, without its children."""
    yield from module._parameters.items()
    yield from module._buffers.items()
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield name, value

"""The arguments of a call: which become values of the program, which are constants of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from bevquant_int8sim.model._program import Ref

__all__ = [
    "Number",
    "arguments",
    "bind",
    "copied",
    "is_sparse_tensor",
    "leaf_names",
    "leaves",
    "with_symbols",
]

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Number:
    """Stands for a number among the example inputs while a forward is followed.

    Data flow takes what has `features` for a value that may be another one in the next call.
    """

    features = None


def arguments(example_inputs: Any) -> Arguments:
    """Positional and keyword arguments: of a tuple, a dict of named inputs, or a single input."""
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def copied(value: Any) -> Any:
    """Nested inputs with tensors of their own, for a run that may write to what it is given."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if is_sparse_tensor(value) and hasattr(value, "replace_feature"):
        return value.replace_feature(value.features.detach().clone())
    if isinstance(value, dict):
        return type(value)({key: copied(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def is_sparse_tensor(value: object) -> bool:
    """Whether `value` is an spconv-style sparse tensor."""
    return not isinstance(value, Tensor) and all(
        hasattr(value, name) for name in ("features", "indices", "spatial_shape", "batch_size")
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_value(value: object) -> bool:
    return isinstance(value, Tensor | Number | Ref) or is_sparse_tensor(value) or _is_number(value)


def _children(value: Any) -> Any:
    """Members of a container, as the tracer of data flow takes it apart."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else None


def leaves(value: Any, *, numbers: bool) -> Iterator[Any]:
    """Values among the arguments, in the order in which a traced graph lists its inputs."""
    children = _children(value)
    if children is not None:
        for _, child in children:
            yield from leaves(child, numbers=numbers)
    elif _is_value(value) and (numbers or not _is_number(value)):
        yield value


def leaf_names(module: nn.Module, example: Arguments, *, numbers: bool) -> Iterator[str]:
    """What to call each of the `leaves` of ``[args, kwargs]``: by the parameter it goes to."""
    args, kwargs = example
    parameters = list(inspect.signature(module.forward).parameters.values())
    plain = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    named = [(plain[i] if i < len(plain) else f"inputs[{i}]", v) for i, v in enumerate(args)]
    for name, value in (*named, *kwargs.items()):
        found = list(leaves(value, numbers=numbers))
        single = _children(value) is None
        yield from (name if single else f"{name}[{i}]" for i in range(len(found)))


def with_symbols(value: Any) -> Any:
    """`value` with numbers replaced by `Number`s."""
    return _mapped(value, lambda leaf: Number() if _is_number(leaf) else leaf)


def named(value: Any, names: Iterator[str], *, numbers: bool) -> Any:
    """`value` with its values replaced by `Ref`s of these names."""
    return _mapped(
        value,
        lambda leaf: (
            Ref(next(names)) if _is_value(leaf) and (numbers or not _is_number(leaf)) else leaf
        ),
    )


def _mapped(value: Any, change: Any) -> Any:
    children = _children(value)
    if children is None:
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(child, change) for key, child in children}
    return type(value)([_mapped(child, change) for _, child in children])


def bind(signature: Arguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name to value for a call with `args` and `kwargs`.

    Raises:
        TypeError: The call has other arguments than the example inputs had.
        ValueError: A constant of the traced forward has another value.
    """
    found: dict[str, Any] = {}
    wanted, named_wanted = signature
    if len(args) != len(wanted) or kwargs.keys() != named_wanted.keys():
        raise TypeError(
            f"expected {_counted(wanted, named_wanted)} like the example inputs, got "
            f"{_counted(args, kwargs)}"
        )
    _bind(list(wanted), list(args), "inputs", found)
    _bind(dict(named_wanted), {name: kwargs[name] for name in named_wanted}, "named inputs", found)
    return found


def _counted(args: Any, kwargs: Mapping[str, Any]) -> str:
    names = f" and the named ones {', '.join(kwargs)}" if kwargs else ""
    return f"{len(args)} positional inputs{names}"


def _bind(wanted: Any, got: Any, where: str, found: dict[str, Any]) -> None:
    if isinstance(wanted, Ref):
        if not _is_value(got):
            raise TypeError(f"{where}: expected a tensor or a number, got {type(got).__name__}")
        found[wanted.name] = got
        return
    children = _children(wanted)
    if children is None:
        same = wanted is got or (type(wanted) is type(got) and bool(wanted == got))
        if not same:
            raise ValueError(
                f"{where}: the model was simulated with {wanted!r} here and got {got!r}; simulate "
                "it again with example inputs like these"
            )
        return
    others = _children(got)
    if others is None or [k for k, _ in children] != [k for k, _ in others]:
        have = "nothing that has members" if others is None else [k for k, _ in others]
        raise TypeError(f"{where}: expected members {[k for k, _ in children]}, got {have}")
    for (key, child), (_, other) in zip(children, others, strict=True):
        _bind(child, other, f"{where}[{key!r}]", found)

"""Inputs and outputs of a model as flat lists of tensors.

Forwards take and return sparse tensors, `batch_dict`s, numpy arrays, numbers, named tuples and
libraries' output classes. A `Tree` holds the structure of such a value: the graph has only tensors
as inputs and outputs, and a call keeps its form.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._arrays import TracedArray, is_traced
from ._attributes import frames_remedy, same_constant

Place = tuple[Any, ...]
"""The keys and indices that lead to a value, from ``(args, kwargs)`` or from a result."""
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Leaf:
    """A tensor, or a number that may be another one in the next call, by its place in the list."""

    index: int
    # ``"array"`` for a numpy array, ``"float"`` for a float: tensors in the list.
    kind: str = ""


@dataclass(frozen=True, eq=False)
class Constant:
    """A value that is part of the graph: a string, a numpy array, an object, `None`."""

    value: Any


@dataclass(frozen=True, eq=False)
class Nested:
    """A container: its class, its keys where it has keys, and its members."""

    kind: type
    keys: tuple[Any, ...] | None
    members: tuple[Tree, ...]


@dataclass(frozen=True, eq=False)
class Sparse:
    """An spconv-style sparse tensor: features and indices are leaves, the sizes as they come."""

    kind: type
    features: Tree
    indices: Tree
    spatial_shape: Tree
    batch_size: Tree


Tree = Leaf | Constant | Nested | Sparse


def arguments(example_inputs: Any) -> Arguments:
    """Positional and keyword arguments, from a tuple, a dict of named inputs, or one input.

    A dict whose keys are the model's parameters names its inputs. Put a dict that *is* the single
    input (a `batch_dict`) into a tuple.
    """
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def is_sparse_tensor(value: object) -> bool:
    """Whether `value` is an spconv-style sparse tensor, by its attributes.

    Mappings are not: some have every attribute (mmcv's configs, Pointcept's `Point`).
    """
    return not isinstance(value, Tensor | nn.Module | Mapping) and all(
        hasattr(value, name) for name in ("features", "indices", "spatial_shape", "batch_size")
    )


def flatten(
    value: Any, *, numbers: bool = False, arrays: Callable[[Any, Place], bool] | None = None
) -> tuple[list[Any], Tree]:
    """Tensors of `value` in order, and its structure.

    Args:
        value: Nested dicts, lists, tuples, dataclasses, sparse tensors, other objects.
        numbers: Whether integers are leaves too; booleans never are.
        arrays: Which numpy arrays and floats are leaves too, by value and place: none by default.
    """
    leaves: list[Any] = []

    def leaf(item: Any, kind: str = "") -> Leaf:
        leaves.append(item)
        return Leaf(len(leaves) - 1, kind)

    def visit(item: Any, place: Place) -> Tree:
        # First, as `isinstance` takes a traced array for a numpy array.
        if is_traced(item):
            return leaf(item.tensor, "array")
        if isinstance(item, Tensor | torch.SymInt | torch.SymFloat):
            return leaf(item)
        if isinstance(item, int) and not isinstance(item, bool) and numbers:
            return leaf(int(item))
        if arrays is not None and arrays(item, place):
            return leaf(input_tensor(item), "float" if isinstance(item, float) else "array")
        if is_sparse_tensor(item):
            sizes = [s if isinstance(s, torch.SymInt) else int(s) for s in item.spatial_shape]
            return Sparse(
                type(item),
                visit(item.features, place),
                visit(item.indices, place),
                Nested(list, None, tuple(map(Constant, sizes))),
                visit(item.batch_size, place),
            )
        members = _members(item)
        if members is None:
            return Constant(item)
        keys, values = members
        named = zip(range(len(values)) if keys is None else keys, values, strict=True)
        return Nested(type(item), keys, tuple(visit(v, (*place, k)) for k, v in named))

    return leaves, visit(value, ())


def input_tensor(value: Any) -> Any:
    """A numpy array or a float as a tensor of its own; other values are returned unchanged.

    Example:
        >>> input_tensor(0.5), input_tensor(3)
        (tensor(0.5000, dtype=torch.float64), 3)
    """
    if isinstance(value, float | np.generic | np.ndarray):
        array = np.asarray(value)
        # torch has no longdouble and takes no negative strides, so the array is copied in order.
        if array.dtype.kind in "fiub" and array.dtype.itemsize <= 8:
            return torch.from_numpy(np.array(array, order="C"))
    return value


def numpy_value(value: Any, kind: str) -> Any:
    """The numpy array or the float that a leaf of a kind stands for; others are unchanged."""
    if not kind or not isinstance(value, Tensor):
        return value
    # [()] makes a numpy scalar of an array without axes.
    return float(value) if kind == "float" else value.detach().cpu().numpy()[()]


def traced_value(value: Any, leaf: Leaf) -> Any:
    """In a trace: a leaf as the forward gets it."""
    return TracedArray(value, frozenset((leaf.index,))) if leaf.kind else value


def entries(tree: Tree, place: Place = ()) -> Iterator[tuple[Place, Leaf | Constant]]:
    """Leaves and constants of a structure with their places, in order.

    Example:
        >>> [place for place, _ in entries(flatten({"a": [torch.ones(1), None]})[1])]
        [('a', 0), ('a', 1)]
    """
    if isinstance(tree, Leaf | Constant):
        yield place, tree
    elif isinstance(tree, Sparse):
        for part in (tree.features, tree.indices, tree.spatial_shape, tree.batch_size):
            yield from entries(part, place)
    else:
        for key, member in _by_key(tree).items():
            yield from entries(member, (*place, key))


def members_of(value: Any) -> dict[Any, Any] | None:
    """Members of a container by key; of lists and tuples by position.

    Returns:
        None for values other than mappings, lists, tuples and dataclasses.

    Example:
        >>> members_of({"image": 1}), members_of([2, 3]), members_of(4)
        ({'image': 1}, {0: 2, 1: 3}, None)
    """
    found = _members(value)
    if found is None:
        return None
    keys, members = found
    return dict(zip(range(len(members)) if keys is None else keys, members, strict=True))


def _members(value: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]] | None:
    """Keys (or None) and members of a container; None for other values."""
    if isinstance(value, Mapping):
        return tuple(value.keys()), tuple(value.values())
    if isinstance(value, list | tuple):
        return None, tuple(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in fields(value))
        return names, tuple(getattr(value, n) for n in names)
    return None


def matched(wanted: Tree, given: Tree, leaves: list[Any], where: str) -> Iterator[Any]:
    """The leaves of `given` in the order of `wanted`; members are found by their keys.

    Args:
        wanted: How the example inputs are put together.
        given: How those of a call are.
        leaves: Of `given`.
        where: Name of both, for messages.
    """
    if isinstance(wanted, Leaf):
        yield _matched_leaf(wanted, given, leaves, where)
    elif isinstance(wanted, Constant):
        if not isinstance(given, Constant) or not same_constant(wanted.value, given.value):
            raise ValueError(
                f"{where}: the model was captured with {wanted.value!r} here, got "
                f"{_described(given)}; capture again with example inputs like these"
                f"{frames_remedy(wanted.value)}"
            )
    elif isinstance(wanted, Sparse):
        if not isinstance(given, Sparse):
            raise TypeError(f"{where}: expected a sparse tensor, got {_described(given)}")
        for name in ("features", "indices", "spatial_shape", "batch_size"):
            own = getattr(wanted, name), getattr(given, name)
            yield from matched(*own, leaves, f"{where}.{name}")
    else:
        found = _by_key(given) if isinstance(given, Nested) else {}
        members = _by_key(wanted)
        refuse_other_members(members, found, where)
        for key, member in members.items():
            yield from matched(member, found[key], leaves, f"{where}[{key!r}]")


def _matched_leaf(wanted: Leaf, given: Tree, leaves: list[Any], where: str) -> Any:
    if isinstance(given, Leaf):
        return leaves[given.index]
    value = given.value if isinstance(given, Constant) else None
    # A frame may hold 1 where the example has 1.0.
    if wanted.kind == "float" and type(value) is int:
        value = float(value)
    made = input_tensor(value) if wanted.kind else None
    if not isinstance(made, Tensor):
        kind = f"a numpy {wanted.kind}" if wanted.kind else "a tensor"
        raise TypeError(f"{where}: expected {kind}, got {_described(given)}")
    return made


def refuse_other_members(wanted: Collection[Any], given: Collection[Any], where: str) -> None:
    """Refuse a container whose keys, of those that the forward asks for, differ from the example's.

    Raises:
        TypeError: Keys are missing, or there are others; the message names them.
    """
    missing = [key for key in wanted if key not in given]
    others = [key for key in given if key not in wanted]
    if missing or others:
        raise TypeError(
            f"{where}: expected members {[*wanted]}, got {[*given]}: "
            + (f"{missing} missing" if missing else "")
            + (" and " if missing and others else "")
            + (f"{others} not in the example; the forward asks for them" if others else "")
        )


def _by_key(tree: Nested) -> dict[Any, Tree]:
    keys = range(len(tree.members)) if tree.keys is None else tree.keys
    return dict(zip(keys, tree.members, strict=True))


def _described(tree: Tree) -> str:
    if isinstance(tree, Constant):
        return repr(tree.value)
    return "a tensor or number" if isinstance(tree, Leaf) else f"a {tree.kind.__name__}"


def rebuild(
    tree: Tree,
    leaves: Any,
    *,
    sparse: Callable[..., Any] | None = None,
    array: Callable[[Any, Leaf], Any] | None = None,
) -> Any:
    """The value that `tree` describes, with these leaves; containers are new in every call.

    Args:
        tree: From `flatten`.
        leaves: Value of each `Leaf`.
        sparse: Makes a sparse tensor of ``(features, indices, spatial_shape, batch_size)``; by
            default an object of the original class.
        array: Makes the value of a leaf of a kind; by default the numpy array or the float.
    """
    if isinstance(tree, Leaf):
        value = leaves[tree.index]
        return array(value, tree) if array else numpy_value(value, tree.kind)
    if isinstance(tree, Constant):
        return tree.value
    if isinstance(tree, Sparse):
        parts = (tree.features, tree.indices, tree.spatial_shape, tree.batch_size)
        made = [rebuild(part, leaves, sparse=sparse, array=array) for part in parts]
        return (sparse or tree.kind)(*made)
    members = [rebuild(m, leaves, sparse=sparse, array=array) for m in tree.members]
    return _container(tree, members)


def _container(tree: Nested, members: list[Any]) -> Any:
    kind = tree.kind
    if tree.keys is None:
        return refilled(kind, members)
    items = dict(zip(tree.keys, members, strict=True))
    if kind is dict or issubclass(kind, defaultdict):
        return items
    if issubclass(kind, OrderedDict) and kind is not OrderedDict:
        return kind(**items)  # transformers' ModelOutput and its like
    made: Any = kind
    return made(items) if issubclass(kind, Mapping) else made(**items)


def refilled(kind: type[Any], members: Iterable[Any]) -> Any:
    """A list or tuple of a class, with these members; named tuples take them one by one.

    Example:
        >>> from collections import namedtuple
        >>> refilled(namedtuple("Found", "boxes scores"), [1, 2]), refilled(tuple, [1, 2])
        (Found(boxes=1, scores=2), (1, 2))
    """
    return kind(*members) if hasattr(kind, "_fields") else kind(members)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """The value with other `leaves`, in lists, tuples and dictionaries of the same classes.

    Example:
        >>> map_leaves(str, [1, {"a": (2, 3)}])
        ['1', {'a': ('2', '3')}]
    """
    if isinstance(value, Mapping):
        return {key: map_leaves(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return refilled(type(value), [map_leaves(change, item) for item in value])
    return change(value)


def place_name(module: nn.Module, place: Place) -> str:
    """A name for a place in ``(args, kwargs)``: parameter and keys.

    Example:
        >>> place_name(nn.Flatten(), (0, 0, "boxes", 2))
        "input['boxes'][2]"
    """
    side, first, *keys = place
    name = str(first)
    if side == 0:
        parameters = inspect.signature(module.forward).parameters.values()
        plain = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        name = plain[first] if first < len(plain) else f"inputs[{first}]"
    return name + "".join(f"[{key!r}]" for key in keys)


def leaf_names(module: nn.Module, inputs: Tree) -> list[str]:
    """A name for each leaf of ``(args, kwargs)``: its parameter and key.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> tree = flatten(((torch.ones(1), [torch.ones(1)]), {}))[1]
        >>> class Net(nn.Module):
        ...     def forward(self, image, maps):
        ...         return image + maps[0]
        >>> leaf_names(Net(), tree)
        ['image', 'maps[0]']
    """
    assert isinstance(inputs, Nested)
    names: dict[int, str] = {}
    for side, members in enumerate(inputs.members):
        assert isinstance(members, Nested)
        for key, member in _by_key(members).items():
            names |= dict(_named(member, place_name(module, (side, key))))
    return [names[i] for i in range(len(names))]


def _named(tree: Tree, name: str) -> Iterator[tuple[int, str]]:
    if isinstance(tree, Leaf):
        yield tree.index, name
    elif isinstance(tree, Sparse):
        yield from _named(tree.features, f"{name}.features")
        yield from _named(tree.indices, f"{name}.indices")
        yield from _named(tree.batch_size, f"{name}.batch_size")
    elif isinstance(tree, Nested):
        for key, member in _by_key(tree).items():
            yield from _named(member, f"{name}[{key!r}]")

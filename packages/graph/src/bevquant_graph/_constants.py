"""Numbers that a forward takes out of constant tensors: they are the same in every frame.

Constant are the model's parameters, buffers and tensors that are attributes (``if self.enabled``,
``int(self.grid[0])``), of the module or its class, in lists and dictionaries too, those that are
global in the file of the class, and tensors that the forward makes of Python's numbers
(``torch.tensor([[4, 6], [2, 3]])``). torch's exporter treats them as values of a frame: it stops at
a branch on them, and adds a requirement for every number taken out. Here each constant tensor has
its real value beside it. Operations on constant tensors alone are computed on the real values too,
and a question gets the number.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ._arrays import stack_promoted, torch_call
from ._asserted import passing
from ._equal_values import equal_constants, node_of
from ._operators import OPERATORS, op_spec

_aten = torch.ops.aten
_LARGEST = 1 << 12  # elements of a tensor that is computed beside, members of a container
_DEPTH = 3  # of containers in an attribute
Place = tuple[str, str]  # a module's path, and the name of one of its `own_tensors`
# As they are outside of a trace, in which ``int`` may have another meaning.
_CONVERSIONS: dict[str, Any] = {
    name: getattr(Tensor, name)
    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
}
_COMPARISONS = frozenset("__eq__ __ne__ __lt__ __le__ __gt__ __ge__".split())
_COMPUTED = frozenset(
    "__getitem__ select unbind __iter__ squeeze unsqueeze view reshape flatten to long int float "
    "double bool type clone detach neg __neg__ abs round floor ceil clamp clip sqrt exp log "
    "add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__ div __truediv__ __rtruediv__ "
    "floor_divide __floordiv__ remainder __mod__ pow __pow__ eq __eq__ ne __ne__ lt __lt__ le "
    "__le__ gt __gt__ ge __ge__ logical_and __and__ logical_or __or__ logical_not __invert__ "
    "any all sum prod max min amax amin mean cumsum cat stack".split()
)
_SIZED = frozenset(name for name, spec in OPERATORS.items() if spec.creates) | {"empty"}
# Behind the first argument these take numbers, for which tensors of one element may stand.
_CUT = frozenset(
    "__getitem__ view reshape unflatten expand repeat tile new_zeros new_ones new_full new_empty "
    "split tensor_split narrow interpolate pad roll topk".split()
)
_INDEXED = frozenset(("__getitem__", "__setitem__"))
INTEGERS = frozenset((torch.int32, torch.int64))  # types of counts
_MADE = frozenset(
    "tensor as_tensor from_numpy zeros ones full arange linspace new_tensor new_zeros new_ones "
    "new_full".split()
)
_OF_NUMBERS = frozenset("tensor as_tensor new_tensor".split())
_NAMED = _COMPUTED | _SIZED | _CUT | _MADE | frozenset(_CONVERSIONS)
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))
_WRITES = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])


@cache
def _reshapes(name: str) -> bool:
    """Whether a function changes the shape of its tensor in place."""
    moves = op_spec(name).kind == "layout_op" or name.startswith("resize")
    return name.endswith("_") and (moves or name.startswith("as_strided"))


class OpenRange(Sequence[int]):
    """``range(n)`` of an open number: a tensor as an index or as data, else the example's range."""

    def __init__(self, *ends: Any) -> None:
        self._ends = ends

    def rows(self) -> Tensor:
        """Its numbers."""
        return torch.arange(*self._ends)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where torch reads an index as a sequence: the modes of a trace see it first."""
        return NotImplemented

    @property
    def _fixed(self) -> range:
        return range(*self._ends)

    def __len__(self) -> int:
        return len(self._fixed)

    def __getitem__(self, place: Any) -> Any:
        return self._fixed[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._fixed)


class ReshapesInput(Exception):
    """The forward changes the shape of an input in place (``image.squeeze_()``)."""


@dataclass
class Truncations:
    """Modules in which ``int`` leaves open numbers open."""

    scopes: list[dict[str, Any]] = field(default_factory=list)
    # Whether it leaves numbers of frames open, as ``int(x.shape[0])``, and whether one was met.
    frames: bool = True
    met_frames: bool = False


class Constants(TorchFunctionMode):
    """Function mode within a traced forward; small constant tensors give their values.

    Args:
        model: As it is outside of the trace.

    Attributes:
        taken: The tensors from which the forward took a number, by place, with their values.
            The graph holds for these values.
        written: Whether the forward writes to one of them, so that the next frame finds it changed.
        of_sizes: Whether the forward makes a tensor from open sizes, such as the sizes of levels.
        asks_sizes: Whether it asks for a number of such a tensor, as ``assert sizes.sum() == n``.
        fix_sizes: Whether these sizes are fixed to the example's, which makes the tensor constant.
        squeezes_row: Whether a squeeze of chosen rows decides by their number: the example has one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._real = {name: value.detach() for name, value in _tensors(model)}
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # also holds what the id is of
        self._open: dict[int, tuple[Tensor, Any]] = {}  # the same of comparisons with a size
        self._origin: dict[int, frozenset[Place]] = {}  # the tensors they read
        self.taken: dict[Place, Tensor] = {}
        self._sized: dict[int, Tensor] = {}  # tensors that are computed from open sizes alone
        self.written = self.of_sizes = self.asks_sizes = self.fix_sizes = False
        self.squeezes_row = False
        self._inputs: set[int] = set()
        self._reshapes = False

    def inputs(self, leaves: Iterable[Any]) -> list[Any]:
        """The inputs for the forward: aliases if it reshapes one in place, which torch forbids."""
        given = list(leaves)
        self._inputs = set(map(id, given))
        return [_aten.alias(v) if self._reshapes and isinstance(v, Tensor) else v for v in given]

    def has(self, value: Any) -> bool:
        """Whether a value of the forward is a constant tensor."""
        return id(value) in self._known

    def withdraw(self) -> None:
        """Answer no question about the model's tensors from now on."""
        self._real.clear()
        self.taken.clear()
        self.written = False

    def begin(self, model: nn.Module) -> Constants:
        """The tensors that stand for the model's in the trace."""
        found = {name: value for name, value in _tensors(model) if name in self._real}
        self._known = {id(value): (value, self._real[name]) for name, value in found.items()}
        self._origin = {id(value): frozenset((name,)) for name, value in found.items()}
        self._sized = {}
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func, args, kwargs = torch_call(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) is Tensor.data:
            func = Tensor.detach  # torch loses track of what ``x.data`` gives
        if func is Tensor.__deepcopy__:  # it copies memory, which a trace does not have
            func, args = Tensor.clone, args[:1]
        name = getattr(func, "__name__", "")
        if _reshapes(name) and id(args[0]) in self._inputs:
            self._reshapes = True
            raise ReshapesInput
        if name == "_assert" and isinstance(args[0], Tensor):
            return None
        if kwargs.get("generator") is not None:  # a trace would hold the one of its own run
            raise RuntimeError("it draws random numbers from a generator")
        if name == "equal" and len(args) == 2:  # attention asks whether query and key are one
            one, two = args
            if one is two or one.shape != two.shape:
                return one is two
            if self._are_equal(one, two):
                return True
        if name == "squeeze":
            _fix_squeezed(*args, **kwargs)
            if self.squeezes_row:
                return _squeezed(*args, **kwargs)
        if name in _INDEXED:
            args = (args[0], self._open_bounds(args[1]), *args[2:])
        if name == "pad" and self._is_count(kwargs.get("value")):
            func = _padded
        # add_ writes, __add__ does not.
        writes = name in _WRITES or name[-1:] == "_" != name[-2:-1] or "out" in kwargs
        if not writes and name not in _NAMED:
            return func(*args, **kwargs)
        if name in _SIZED or name in _CUT:
            kept = args[: name in _CUT]
            plain = self._taken_index if name == "__getitem__" else self._taken_number
            rest = map_aggregate((args[len(kept) :], kwargs), plain)
            args, kwargs = (*kept, *rest[0]), rest[1]
        if name in _OF_NUMBERS and any(map(_holds_tensors, args)):
            args, kwargs = _as_of_tensor(name, args, kwargs)
            with self:  # torch reads each tensor's number
                made = _stacked(args[0])
                return made.to(kwargs.get("device"), kwargs.get("dtype") or made.dtype)
        if name in _OF_NUMBERS and any(map(_is_open, _leaves((args, kwargs)))):
            self.of_sizes = True
            if self.fix_sizes:
                args, kwargs = map_aggregate((args, kwargs), _fixed)
            elif name != "tensor":  # torch.tensor leaves them open, the others do not
                args, kwargs = _as_of_tensor(name, args, kwargs)
                func = torch.tensor
        leaves = _leaves((args, kwargs))
        given = [value for value in leaves if isinstance(value, Tensor)]
        known = [id(value) in self._known for value in given]
        origin = self._origins(given)
        if name == "__bool__" and id(args[0]) in self._open:
            self._take(origin)
            # The answer about the size itself becomes a guard.
            return bool(self._open[id(args[0])][1])
        if known and all(known) and name in _CONVERSIONS:
            self._take(origin)
            return self._beside(_CONVERSIONS[name], args, kwargs)
        sized = any(id(value) in self._sized for value in given)
        sized = sized and all(id(v) in self._sized or id(v) in self._known for v in given)
        self.asks_sizes |= sized and name in _CONVERSIONS
        if name in ("__bool__", "item") and not sized:
            passes = passing(sys._getframe(1), prints=True)
            if passes is not None:
                return passes
        made = func(*args, **kwargs)
        if writes:
            self._forget([made] if isinstance(made, Tensor) else given)
        elif known and all(known) and name in _COMPUTED:
            self._note_computed(made, func, (args, kwargs), leaves, origin)
        elif (sized and name in _COMPUTED) or (name in _OF_NUMBERS and any(map(_is_open, leaves))):
            self._sized |= {id(v): v for v in _leaves(made) if isinstance(v, Tensor)}
        elif name in _MADE and _is_small(made) and not any(map(_is_open, leaves)):
            self._note_made(made, func, args, kwargs)
        return made

    def _are_equal(self, one: Tensor, two: Tensor) -> bool:
        """Whether two tensors have the same values in every frame."""
        node, other = node_of(one), node_of(two)
        if node is None or other is None:
            return False
        known = {node_of(value): (value, real) for value, real in self._known.values()}
        with _disable_current_modes():
            found = equal_constants(node, other, lambda n: known.get(n, (None, None))[1])
        if found is not None:
            self._take(self._origins(known[n][0] for n in found))
        return found is not None

    def _origins(self, tensors: Iterable[Tensor]) -> frozenset[Place]:
        return frozenset().union(*(self._origin.get(id(value), ()) for value in tensors))

    def _take(self, names: Iterable[Place]) -> None:
        with _disable_current_modes():
            self.taken |= {name: self._real[name].clone() for name in names if name in self._real}

    def _note_computed(
        self, made: Any, func: Any, given: Any, leaves: list[Any], origin: frozenset[Place]
    ) -> None:
        """Note the result of an operation on constants, or of comparing one with an open size."""
        if not any(map(_is_open, leaves)):
            self._note(made, self._beside(func, *given), origin)
        elif func.__name__ in _COMPARISONS and all(
            value.numel() == 1 for value in leaves if isinstance(value, Tensor)
        ):
            args: Any = map_aggregate(given[0], self._number)
            self._open[id(made)] = made, getattr(operator, func.__name__.strip("_"))(*args)
            self._origin[id(made)] = origin

    def _note_made(self, made: Tensor, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note a tensor of Python's numbers, which ``x.new_tensor`` makes of the type of `x`."""
        if func.__name__.startswith("new_"):
            func = getattr(torch, func.__name__.removeprefix("new_"))
            args, kwargs = args[1:], {"dtype": made.dtype, **kwargs}
        # The real values are on the CPU, whatever device the trace is for.
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        if not any(isinstance(leaf, Tensor) for leaf in _leaves((args, kwargs))):
            self._note(made, self._beside(func, args, kwargs), frozenset())

    def _forget(self, written: list[Tensor]) -> None:
        """Constants in memory that was written are constant no more; of the model, none is."""
        memory = {value.untyped_storage()._cdata for value in written}
        known = self._known.items()
        met = [key for key, (value, _) in known if value.untyped_storage()._cdata in memory]
        if any(self._origin[key] for key in met):
            self.written = True
            met = list(self._known)
        for key in met:
            del self._known[key]

    def _note(self, made: Any, real: Any, origin: frozenset[Place]) -> None:
        if isinstance(made, Tensor):
            self._known[id(made)], self._origin[id(made)] = (made, real), origin
        elif isinstance(made, list | tuple):
            for one, other in zip(made, real, strict=True):
                self._note(one, other, origin)

    def _beside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Result of a function for the tensors' values."""
        held: Any = map_aggregate((args, kwargs), self._held)
        with _disable_current_modes():
            return func(*held[0], **held[1])

    def _held(self, value: Any) -> Any:
        return self._known[id(value)][1] if id(value) in self._known else value

    def _taken_number(self, value: Any) -> Any:
        """The number that a constant of one element holds; other values as they are."""
        if id(value) not in self._known or value.numel() != 1:
            return value
        self._take(self._origins([value]))
        return self._number(value)

    def _taken_index(self, value: Any) -> Any:
        """The same in an index, where a tensor of one axis is no number."""
        return value if isinstance(value, Tensor) and value.dim() else self._taken_number(value)

    def _open_bounds(self, value: Any) -> Any:
        """An index whose slices end at counts in tensors, with open numbers; torch fixes these."""
        if isinstance(value, tuple):
            return tuple(map(self._open_bounds, value))
        if not isinstance(value, slice):
            return value.rows() if isinstance(value, OpenRange) else value
        ends = value.start, value.stop, value.step
        return slice(*(end.item() if self._is_count(end) else end for end in ends))

    def _is_count(self, end: Any) -> bool:
        return (
            isinstance(end, Tensor)
            and end.numel() == 1
            and end.dtype in INTEGERS
            and id(end) not in self._known
        )

    def _number(self, value: Any) -> Any:
        if id(value) not in self._known:
            return value
        with _disable_current_modes():
            return self._held(value).item()


def _padded(x: Tensor, pad: Any, mode: str = "constant", *, value: Tensor) -> Tensor:
    """``pad`` with an open number; torch itself requires a float."""
    inside = torch.nn.functional.pad(torch.ones_like(x, dtype=torch.bool), pad, mode)
    return torch.where(inside, torch.nn.functional.pad(x, pad, mode), value.to(x.dtype))


def _tensors(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    shared: dict[type, dict[str, Tensor]] = {}  # classes of many modules are searched once
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in own_tensors(module, shared).items():
            yield (path, name), value


def own_tensors(
    module: nn.Module, shared: dict[type, dict[str, Tensor]] | None = None
) -> dict[str, Tensor]:
    """Small tensors of one module, its class and the class's file that a forward may read, by name.

    Args:
        module: The modules in it are not searched.
        shared: Those of the classes that are known.
    """
    kind = type(module)
    shared = {} if shared is None else shared
    if kind not in shared:
        shared[kind] = _of_class(kind)
    # As BEVDet's grid, a plain attribute.
    plain = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
    return {**shared[kind], **_small({**plain, **module._parameters, **module._buffers})}


def _of_class(kind: type) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in ("builtins", "torch"):
            continue
        members = vars(base).values()
        functions = [inspect.unwrap(v) for v in members if isinstance(v, FunctionType)]
        for names in {id(f.__globals__): f.__globals__ for f in functions}.values():
            plain = {name: value for name, value in names.items() if name[:2] != "__"}
            found |= {f"global {name}": value for name, value in _small(plain).items()}
        found |= _small(vars(base))
    return found


def _small(named: Mapping[str, Any], depth: int = _DEPTH) -> dict[str, Tensor]:
    """Small tensors among values and in their containers, by name."""
    found: dict[str, Tensor] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            if not is_lazy(value) and value.numel() <= _LARGEST:
                found[name] = value
            continue
        fields = is_dataclass(value) or isinstance(value, SimpleNamespace)
        members: Any = ()
        # dict's own method: transformers' lazy dictionaries import a model for each value.
        if isinstance(value, dict):
            members = dict.items(value)
        elif isinstance(value, list | tuple):
            members = list(enumerate(value))
        elif fields and not isinstance(value, type):
            members = vars(value).items() if hasattr(value, "__dict__") else ()
        if depth and len(members) <= _LARGEST:
            form = "{}.{}" if fields else "{}[{!r}]"
            inner = {form.format(name, key): member for key, member in list(members)}
            found |= _small(inner, depth - 1)
    return found


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(value, found.append)
    return found


def _is_small(made: Any) -> bool:
    """Whether it is a tensor of fixed sizes with few elements."""
    if not isinstance(made, Tensor) or any(map(_is_open, made.shape)):
        return False
    return made.numel() <= _LARGEST


def _fixed(value: Any) -> Any:
    return int(value) if isinstance(value, torch.SymInt) else value


def _holds_tensors(data: Any) -> bool:
    """Whether some data are a list with tensors in it, or numbers that are one."""
    if isinstance(data, OpenRange):
        return True
    return isinstance(data, list | tuple) and any(isinstance(v, Tensor) for v in _leaves(data))


def _stacked(value: Any) -> Tensor:
    """The tensor that ``torch.tensor`` makes of lists of numbers and tensors of one element."""
    if isinstance(value, OpenRange):
        return value.rows()
    if isinstance(value, list | tuple):
        return stack_promoted([_stacked(item) for item in value])
    return value.reshape(()) if isinstance(value, Tensor) else torch.tensor(value)


def _as_of_tensor(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of ``torch.tensor`` for those of ``torch.as_tensor`` or ``x.new_tensor``."""
    if name == "new_tensor":
        return args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
    return args[:1], {**dict(zip(("dtype", "device"), args[1:], strict=False)), **kwargs}


def squeezed_axes(axes: int, dim: int | Iterable[int] | None) -> list[int]:
    """The axes that a squeeze of a tensor with so many axes may remove, in order."""
    named = range(axes) if dim is None else (dim,) if isinstance(dim, int) else dim
    return sorted(axis % axes for axis in named) if axes else []


def _fix_squeezed(x: Any, dim: int | tuple[int, ...] | None = None) -> None:
    """Fix the open axes of size 1 that a squeeze removes; torch would keep them."""
    for axis in squeezed_axes(x.dim(), dim):
        size = x.shape[axis]
        # Results of later operators, as of `torch.where`, would have another number of axes.
        # torch notes the answer as a guard, but keeps an earlier "unknown" of computed sizes.
        if isinstance(size, torch.SymInt) and size.node.hint == 1 and size == 1:
            type(size.node.shape_env)._maybe_evaluate_static.cache_clear()


def _squeezed(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """A squeeze that asks for numbers of chosen rows; torch would keep their axes."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # and sympy

    for axis in reversed(squeezed_axes(x.dim(), dim)):
        size = x.shape[axis]
        chosen = isinstance(size, torch.SymInt) and free_unbacked_symbols(size)
        x = x.select(axis, 0) if chosen and size == 1 else x.squeeze(axis)
    return x


def _is_open(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)

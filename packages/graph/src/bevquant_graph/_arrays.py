"""numpy arrays and floats of the arguments, as inputs of a graph.

Forwards compute with a frame's ``lidar2img`` and ``can_bus`` in numpy. In a trace each of these
arrays, and each float that is an input, is a `TracedArray`: a tensor with numpy's interface.
numpy's functions and operators on it are torch's (`torch._numpy`), torch's functions get the
tensor. Code that needs the numbers themselves (``float(a)``, ``if a > 0``, OpenCV) gets
`NeedsNumbers`, and the array is a constant of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ._operators import ALIASES
from ._quiet import by_thread

FLOATS = ("float16", "float32", "float64")
_OF_NUMBERS = frozenset("tensor as_tensor asarray new_tensor".split())
_MADE = ("array", "asarray", "asanyarray", "ascontiguousarray")
_MATH = "sin cos tan asin acos atan atan2 sqrt exp log radians degrees hypot fabs pow".split()
_NUMPY = {name: alias for alias, name in ALIASES.items() if alias.startswith("arc")}
_NUMPY["pow"] = "power"


def _tnp() -> Any:
    import torch._numpy  # only where there is an array

    return torch._numpy


class NeedsNumbers(AttributeError):
    """Code needs the numbers of an array that is an input.

    Attributes:
        origins: The inputs that the array is computed from, by index.
    """

    def __init__(self, origins: frozenset[int], reader: str) -> None:
        super().__init__(f"{reader} needs the numbers of a numpy array or a float of the inputs")
        self.origins = origins


class TracedArray:
    """A numpy array in a trace: its values, and the inputs that it is computed from, by index."""

    is_read_by_forwards = False  # it has no attributes of an author's
    __array_priority__ = 1000.0

    def __init__(self, tensor: Tensor, origins: frozenset[int]) -> None:
        self.tensor, self.origins = tensor, origins

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """As `isinstance` sees it: numpy's scalars are without axes."""
        return np.ndarray if self.tensor.dim() else np.dtype(self._numpy_name).type

    @property
    def _numpy_name(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def dtype(self) -> Any:
        """Type of the values, as numpy's."""
        return np.dtype(self._numpy_name)

    @property
    def T(self) -> TracedArray:
        """The array with its axes reversed."""
        return TracedArray(self.tensor.permute(*range(self.tensor.dim())[::-1]), self.origins)

    def __getattr__(self, name: str) -> Any:
        tnp = _tnp()
        found = None if name.startswith("__") else getattr(tnp.ndarray, name, None)
        if name in ("tolist", "item"):
            return lambda *place: _listed(self[place] if place else self)
        if callable(found):
            return lambda *args, **kwargs: _computed(found, (self, *args), kwargs)
        if found is None:
            raise NeedsNumbers(self.origins, f"array.{name}")
        return getattr(tnp.ndarray(self.tensor), name)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        home = _tnp().linalg if func.__module__ == "numpy.linalg" else _tnp()
        return _computed(getattr(home, func.__name__, None), args, kwargs, func.__name__)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        called = method == "__call__" and "out" not in kwargs
        found = getattr(_tnp(), ufunc.__name__, None) if called else None
        return _computed(found, args, kwargs, ufunc.__name__)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*as_tensors(args), **as_tensors(kwargs or {}))

    def __getitem__(self, index: Any) -> Any:
        return _computed(_operator("__getitem__"), (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        _computed(_operator("__setitem__"), (self, index, value), {})

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __copy__(self) -> TracedArray:
        return TracedArray(self.tensor.clone(), self.origins)

    def __deepcopy__(self, _: Any) -> TracedArray:
        return self.__copy__()

    def __hash__(self) -> int:
        return id(self)


def _operator(name: str) -> Any:
    return getattr(_tnp().ndarray, name)


def _method(name: str) -> Callable[..., Any]:
    def method(self: TracedArray, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return getattr(self.tensor, name)(*others)
        if name.startswith("__i") and name != "__invert__" and not self.tensor.dim():
            return NotImplemented  # numpy's scalars are not written to
        return _computed(_operator(name), (self, *others), {})

    return method


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor".split()
_COMPARED = "eq ne lt le gt ge neg pos abs invert".split()
for _name in (*_COMPARED, *(f"{side}{n}" for side in ("", "r", "i") for n in _ARITHMETIC)):
    setattr(TracedArray, f"__{_name}__", _method(f"__{_name}__"))


def _refused(name: str) -> Callable[..., Any]:
    def method(self: TracedArray, *_: Any, **__: Any) -> Any:
        raise NeedsNumbers(self.origins, name)

    return method


for _name in "bool int float complex index array".split():
    setattr(TracedArray, f"__{_name}__", _refused(_name))


def is_traced(value: Any) -> bool:
    """Whether a value is a `TracedArray`; `isinstance` is replaced during a trace."""
    return type(value) is TracedArray


def _computed(func: Any, args: Any, kwargs: Any, name: str = "") -> Any:
    """The result of one of torch._numpy's functions, in traced arrays."""
    tnp = _tnp()
    origins = frozenset[int]().union(*(a.origins for a in _traced((args, kwargs))))
    if func is None:
        raise NeedsNumbers(origins, f"numpy.{name}")

    def inside(value: Any) -> Any:
        if is_traced(value):
            return tnp.ndarray(value.tensor)
        if isinstance(value, np.generic | np.ndarray):
            return tnp.ndarray(torch.as_tensor(np.asarray(value)))
        if isinstance(value, np.dtype) or (
            isinstance(value, type) and issubclass(value, np.generic)
        ):
            return getattr(tnp, np.dtype(value).name)
        return value

    in_rows = getattr(func, "__module__", "").endswith("linalg")  # torch's lie in columns

    def outside(value: Any) -> Any:
        if not isinstance(value, tnp.ndarray):
            return value
        return TracedArray(value.tensor.contiguous() if in_rows else value.tensor, origins)

    try:
        return _mapped(outside, func(*_mapped(inside, args), **_mapped(inside, kwargs)))
    except Exception as error:  # whatever torch's form of a function does not take
        raise NeedsNumbers(origins, f"numpy.{func.__name__} ({error})") from error


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)([_mapped(change, item) for item in value])
    if type(value) is dict:
        return {key: _mapped(change, item) for key, item in value.items()}
    return change(value)


def _traced(value: Any) -> Iterator[TracedArray]:
    if is_traced(value):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _traced(item)


def _listed(array: TracedArray) -> Any:
    return [_listed(item) for item in array] if array.tensor.dim() else array


def as_tensors(value: Any) -> Any:
    """Arguments of a torch function with tensors for traced arrays."""
    return _mapped(lambda item: item.tensor if is_traced(item) else item, value)


def torch_call(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call of torch with traced arrays among its arguments, as one without.

    Returns:
        Function, positional and named arguments.
    """
    name = getattr(func, "__name__", "")
    if next(_traced((args, kwargs)), None) is None:
        return func, args, kwargs
    place = int(name == "new_tensor")
    if name not in _OF_NUMBERS or len(args) <= place:
        return func, as_tensors(args), as_tensors(kwargs)
    data = args[place]
    made = _stacked(data)
    dtype = made.dtype
    if name == "new_tensor":
        dtype = args[0].dtype
    elif (
        not is_traced(data)
        and dtype.is_floating_point
        and not any(array.tensor.dim() for array in _traced(data))
    ):  # numbers, by torch's default
        dtype = torch.get_default_dtype()
    dtype = kwargs.get("dtype") or (args[place + 1] if len(args) > place + 1 else dtype)
    # torch.tensor copies, torch.as_tensor need not.
    if name in ("tensor", "new_tensor") and dtype is made.dtype:
        return torch.clone, (made,), {}
    return Tensor.to, (made,), {"dtype": dtype}


def _stacked(value: Any) -> Tensor:
    """One tensor of nested lists of arrays and numbers, as numpy makes one array."""
    if is_traced(value):
        tensor: Tensor = value.tensor
        return tensor
    if isinstance(value, list | tuple) and next(_traced(value), None) is not None:
        return stack_promoted([_stacked(item) for item in value])
    return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))


def stack_promoted(parts: Sequence[Tensor]) -> Tensor:
    """A stack of tensors in their common dtype."""
    kind = reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.stack([part.to(kind) for part in parts])


@contextmanager
def numpy_traced() -> Iterator[None]:
    """For the length of the block ``np.array``, ``torch.from_numpy`` and `math` take them.

    ``np.arange`` takes open sizes.
    """
    tnp = _tnp()

    def array(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            met = list(_traced(value))
            if not met:
                return original(value, dtype, *args, **kwargs)
            tensor = _stacked(value)
            if dtype is not None:
                tensor = tensor.to(getattr(torch, np.dtype(dtype).name))
            # np.array copies, the others do not.
            if tensor is getattr(value, "tensor", None) and original is np_array:
                tensor = tensor.clone()
            return TracedArray(tensor, frozenset[int]().union(*(a.origins for a in met)))

        return made

    def number(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            if not any(map(is_traced, args)):
                return original(*args)
            return _computed(getattr(tnp, name), args, {})

        return made

    def arange(*ends: Any, **kwargs: Any) -> Any:
        if not any(isinstance(end, torch.SymInt) for end in ends):
            return np_arange(*ends, **kwargs)
        return _computed(tnp.arange, ends, kwargs)

    def from_numpy(array: Any) -> Tensor:
        return array.tensor if is_traced(array) else shared(array)

    np_array, np_arange, shared = np.array, np.arange, torch.from_numpy
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(np, "arange", by_thread(arange, np_arange)))
        stack.enter_context(mock.patch.object(torch, "from_numpy", by_thread(from_numpy, shared)))
        for name in _MADE:
            own = getattr(np, name)
            stack.enter_context(mock.patch.object(np, name, by_thread(array(own), own)))
        for name in _MATH:
            own, other = getattr(math, name), _NUMPY.get(name, name)
            stack.enter_context(mock.patch.object(math, name, by_thread(number(own, other), own)))
        yield


def needed(error: BaseException | None) -> frozenset[int]:
    """The inputs whose numbers an error, or one that it came from, asks for."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, NeedsNumbers):
            return error.origins
        error = error.__cause__ or error.__context__
    return frozenset()

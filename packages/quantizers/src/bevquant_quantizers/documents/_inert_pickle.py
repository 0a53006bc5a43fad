"""A pickle read as data: no callable that a file names is looked up, imported or called.

The opcodes come from `pickletools.genops`; this module keeps their stack. A name is a `Global`, an
object of a class without a row in `BUILDERS` is an `Opaque`: its class's name and, where the
pickle filled it as a dict, these items. Everything else of such an object is dropped. Tensors stay
unread: a `StoredTensor` says where its bytes are, `_checkpoint` reads those that it returns.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch

from bevquant_graph import file_path

from ._json import DocumentError, a, read_content

_PUSHED = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "BYTEARRAY8".split()
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Global:
    """The name of a class or function, such as `torch.FloatStorage`."""

    name: str


@dataclass(eq=False)
class Opaque:
    """An object of an unknown class."""

    name: str
    # Entries that the pickle set as in a dict, of a subclass of dict for example.
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Storage:
    """A run of numbers in the file, of `size` elements."""

    key: str
    dtype: torch.dtype
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """A view of a storage: shape and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class _Dtype:
    """`numpy.dtype`: its code, and the byte order that BUILD brings."""

    code: str
    order: str = "<"

    def numpy(self) -> np.dtype[Any]:
        dtype = np.dtype(self.code).newbyteorder(">" if self.order == ">" else "<")
        if dtype.kind not in "biufc":
            raise ValueError(f"arrays of type {self.code!r} are not read")
        return dtype


@dataclass(eq=False)
class StoredArray:
    """`numpy.ndarray`; `array` is None until BUILD brings the numbers, and for other objects."""

    array: np.ndarray[Any, Any] | None = None

    def take(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if isinstance(dtype, _Dtype) and isinstance(content, bytes | bytearray):
            self.array = _array(content, dtype, shape, "F" if fortran else "C")


def _array(content: bytes | bytearray, dtype: _Dtype, shape: Any, order: str) -> Any:
    kind = dtype.numpy()
    if math.prod(shape) * kind.itemsize != len(content):
        raise ValueError(f"an array of shape {shape} and type {kind} has {len(content)} bytes")
    return np.frombuffer(content, kind).reshape(shape, order="F" if order == "F" else "C")


def dtype_named(name: str) -> torch.dtype | None:
    """`torch.float32` and the storage classes, by name."""
    leaf = name.rpartition(".")[2]
    found = getattr(torch, _STORAGES.get(leaf, leaf), None)
    return found if name.startswith("torch.") and isinstance(found, torch.dtype) else None


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
    """`_rebuild_tensor`, `_v2` (requires_grad, hooks) and `_v3` (…, dtype)."""
    if isinstance(storage, Opaque):
        return storage
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without a storage")
    dtype, offset, limit = storage.dtype, int(offset), storage.size
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    if len(rest) > 2 and isinstance(rest[2], Global):
        dtype = dtype_named(rest[2].name) or dtype
        limit = storage.size * storage.dtype.itemsize // dtype.itemsize
    if len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
        raise ValueError("a tensor's shape and strides contradict each other")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and last >= limit:
        raise ValueError(f"a tensor of shape {list(shape)} reaches beyond its storage")
    return StoredTensor(storage, offset, shape, stride, dtype)


def _pairs(*args: Any) -> dict[Any, Any]:
    return dict(args[0]) if args and isinstance(args[0], list | tuple | dict) else {}


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes: a text in latin-1."""
    return str(text).encode("latin1" if str(encoding).startswith("latin") else "utf-8")


def _scalar(dtype: _Dtype, content: bytes) -> Any:
    return np.frombuffer(content, dtype.numpy(), 1)[0].item()


def _first(value: Any, *_: Any) -> Any:
    return value


def _listed(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda items=(), *_: kind(items if isinstance(items, list | tuple | set) else ())


BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _pairs,
    "collections.defaultdict": lambda *_: {},
    "collections.Counter": _pairs,
    "builtins.dict": _pairs,
    "builtins.list": _listed(list),
    "builtins.tuple": _listed(tuple),
    "builtins.set": _listed(set),
    "builtins.frozenset": _listed(frozenset),
    "torch.Size": _listed(tuple),
    "torch.device": lambda *args: ":".join(str(part) for part in args),
    "_codecs.encode": _encoded,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "numpy.dtype": lambda code, *_: _Dtype(str(code)),
    "numpy._reconstruct": lambda *_: StoredArray(),
    "numpy._frombuffer": lambda content, dtype, shape, order: StoredArray(
        _array(content, dtype, shape, order)
    ),
    "numpy.scalar": _scalar,
}
"""What a name means: functions of this module alone, none of which looks at the name's own."""

# Where Python 2, numpy 1 and numpy 2 keep the same thing.
_MOVED = {
    "__builtin__": "builtins",
    "numpy.core.multiarray": "numpy",
    "numpy._core.multiarray": "numpy",
    "numpy.core.numeric": "numpy",
    "numpy._core.numeric": "numpy",
}


def read_pickle(stream: IO[bytes], storage_of: Callable[[Any], Any] | None = None) -> Any:
    """The next pickle of a stream in memory, which is left behind its end."""
    machine = _Machine(storage_of)
    for opcode, arg, _ in pickletools.genops(stream):
        machine.step(opcode.name, arg)
    return machine.stack[-1]


class _Machine:
    """The stack, the marks and the memo of a pickle."""

    def __init__(self, storage_of: Callable[[Any], Any] | None) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storage_of = storage_of

    def step(self, name: str, arg: Any) -> None:
        stack = self.stack
        if name in _PUSHED:
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise ValueError("the stack is empty")
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[arg] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[arg])
        elif name == "MARK":
            self.marks.append(stack)
            self.stack = []
        elif name not in ("PROTO", "FRAME", "STOP"):
            getattr(self, f"_{name.lower()}")(arg)

    def _items(self) -> list[Any]:
        """The values since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _pop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._items()

    def _pop_mark(self, _: Any) -> None:
        self._items()

    def _dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def _list(self, _: Any) -> None:
        items = self._items()
        self.stack.append(items)

    def _tuple(self, _: Any) -> None:
        items = self._items()
        self.stack.append(tuple(items))

    def _frozenset(self, _: Any) -> None:
        items = self._items()
        self.stack.append(frozenset(items))

    def _dict(self, _: Any) -> None:
        items = self._items()
        self.stack.append(dict(zip(items[::2], items[1::2], strict=True)))

    def _append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._items())

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def _additems(self, _: Any) -> None:
        items = self._items()
        if isinstance(self.stack[-1], set):
            self.stack[-1].update(items)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self, _: Any) -> None:
        self._update(self._items())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target = target.items if isinstance(target, Opaque) else target
        if isinstance(target, dict):
            target.update(zip(items[::2], items[1::2], strict=True))

    def _global(self, arg: str) -> None:
        module, _, name = arg.partition(" ")
        self.stack.append(Global(f"{_MOVED.get(module, module)}.{name}"))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._global(f"{module} {name}")

    def _reduce(self, _: Any) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        self.stack.append(_made(called, args))

    _newobj = _reduce

    def _newobj_ex(self, _: Any) -> None:
        self.stack.pop()
        self._reduce(None)

    def _inst(self, arg: str) -> None:
        items = self._items()
        self._global(arg)
        self.stack.append(_made(self.stack.pop(), items))

    def _obj(self, _: Any) -> None:
        called, *items = self._items()
        self.stack.append(_made(called, items))

    def _build(self, _: Any) -> None:
        """The state of an object: kept of arrays and their types alone."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StoredArray):
            target.take(state)
        elif isinstance(target, _Dtype):
            target.order = str(state[1])

    def _binpersid(self, _: Any) -> None:
        if self.storage_of is None:
            raise ValueError("a persistent id, which such a file does not have")
        self.stack.append(self.storage_of(self.stack.pop()))


def _made(called: Any, args: Any) -> Any:
    if not isinstance(called, Global):
        return Opaque(type(called).__name__)
    if called.name == "torch._tensor._rebuild_from_type_v2":
        return _made(args[0], args[2])  # a subclass of Tensor: function, class, arguments, state
    if called.name == "copyreg._reconstructor" or called.name == "copy_reg._reconstructor":
        return Opaque(args[0].name)
    builder = BUILDERS.get(called.name)
    return Opaque(called.name) if builder is None else builder(*args)


def read_plain_pickle(path: str | os.PathLike[str], what: str = "pickle") -> Any:
    """Read a pickle of plain data; nothing in the file is executed.

    Args:
        path: The file.
        what: What it should be, for messages.

    Returns:
        Dicts, lists, tuples, texts and numbers as they are; arrays as lists.

    Raises:
        DocumentError: It is missing, damaged, cut short, of another kind, or holds an object of
            another class.

    Example:
        >>> import pickle, tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     pickle.dump({"a": np.arange(2), "b": np.float64(1.5)}, file)
        ...     file.flush()
        ...     read_plain_pickle(file.name)
        {'a': [0, 1], 'b': 1.5}
    """
    place = str(file_path(path, what))
    content = read_content(path, what)
    try:
        found = read_pickle(io.BytesIO(content))
        unknown = opaque_names(found)
        if not unknown:
            return _plain(found)
    except Exception as error:  # whatever the pickle's damage raises, it is no such file
        raise DocumentError(
            f"{place} is not {a(what)}: it is damaged, cut short or something else "
            f"({type(error).__name__})"
        ) from error
    where, name = next(iter(unknown.items()))
    raise DocumentError(
        f"{place} is not {a(what)}: it holds an object of the class {name}"
        f"{f' at {where!r}' if where else ''}, which is not created; write plain data in its place"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, StoredArray):
        if value.array is None:
            raise ValueError("an array of objects")
        return value.array.tolist()
    return value


def opaque_names(value: Any, path: str = "") -> Mapping[str, str]:
    """The class of each unknown object in plain containers, by its path; each object once."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    waiting = [(path, value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, Opaque | Global):
            found[where] = item.name
        if id(item) in seen or not isinstance(item, dict | list | tuple | Opaque):
            continue
        seen.add(id(item))
        if isinstance(item, Opaque):
            item = item.items
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        waiting += [(f"{where}.{key}" if where else str(key), part) for key, part in pairs]
    return dict(sorted(found.items()))

"""Recorder of a running model's operator calls and the calling modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bevquant_hybrid.runtime._operators import (
    ARITHMETIC,
    LOOSE,
    OF_NUMBERS,
    OF_SHAPE,
    canonical,
    is_integer,
    is_known,
    is_neutral,
    only_moves,
    sized_by_data,
)
from bevquant_hybrid.runtime._program import operator_step
from bevquant_int8sim.program import OperatorCall, Ref, TensorType, Value

_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class RefusedError(ValueError):
    """A call that programs do not support; names the operator, not yet the module."""

    def __init__(self, operator: str, reason: str) -> None:
        super().__init__(f"{operator} {reason}")
        self.operator = operator


@dataclass(frozen=True)
class _Known:
    """A tensor that depends on the inputs."""

    name: str
    loose: bool  # whether the data decide its size


class Recorder(TorchDispatchMode):
    """Record, while active, every operator call that depends on the inputs.

    Calls on constants alone are run and only their results enter the program: tables of functions,
    quantized biases, multipliers. Tensors that the calls read are copied to the CPU.
    """

    def __init__(
        self, module: nn.Module, scope: Callable[[], str], kept: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self._kept = kept  # gets inputs and results by name
        self.steps: list[OperatorCall] = []
        self.values: dict[str, Value] = {}
        self.constants: dict[str, Tensor] = {}
        self.refused: Exception | None = None  # why the model cannot be recorded
        self.refused_in = ""  # path of the module that was the reason
        self.calls = 0  # of this package's operators, on constants too
        self._scope = scope  # returns the path of the module that computes now
        self._modules = {path for path, _ in module.named_modules()}
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        self._names = {_place(tensor): path for path, tensor in tensors.items()}
        self._known: dict[_Place, _Known] = {}
        self._memories: set[int] = set()
        self._constant_of: dict[_Place, str] = {}
        self._seen: list[Any] = [_number_kept(tensor) for tensor in tensors.values()]
        self._count = 0

    def input(self, tensor: Tensor, name: str) -> Ref:
        """Declare an input."""
        self._note(tensor, _Known(name, False))
        return Ref(name)

    def operand(self, tensor: Tensor, hint: str) -> Ref:
        """Return a tensor's operand in the program; a new constant is named after `hint`."""
        known = self._find(tensor)
        return Ref(known.name) if known else self.constant(tensor, hint)

    def constant(self, tensor: Tensor, hint: str) -> Ref:
        """Add a tensor to the program as a constant and return its operand."""
        place = _place(tensor)
        if place not in self._constant_of:
            name = self._free(self._names.get(place) or hint)
            self.constants[name] = tensor.detach().cpu().clone().contiguous()
            self._constant_of[place] = name
            self._seen.append(_number_kept(tensor))
        return Ref(self._constant_of[place])

    def _free(self, base: str) -> str:
        name, count = base, 1
        while name in self.constants or name in self.values:
            count += 1
            name = f"{base}_{count}"
        return name

    def is_loose(self, tensor: Tensor) -> bool:
        """Whether the data decide the size of a tensor."""
        known = self._find(tensor)
        return known is not None and known.loose

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except Exception as error:
            # torch.jit passes the text of an error on, and neither its type nor its attributes.
            if self.refused is None:
                self.refused, self.refused_in = error, self._scope()
            raise

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func.name()
        self.calls += is_integer(name)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        reads = {leaf: known for leaf in leaves if (known := self._find(leaf)) is not None}
        if not reads:
            if name in OF_NUMBERS and len(leaves) < len(args):
                return OF_NUMBERS[name](*args)
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise RefusedError(name, "draws random numbers; a program has none")
            return func(*args, **kwargs)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if only_moves(name, given):
            result = func(*args, **kwargs)
            self._know(result, reads[given["self"]])
            return result
        if name in OF_SHAPE and not any(known.loose for known in reads.values()):
            return func(*args, **kwargs)
        operator, given = canonical(name, given)
        self._check(operator, reads)
        scope = self._path(given.get("name"))
        arguments = self._arguments(func, given, scope)
        result = func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else list(result)
        if all(_place(tensor) in self._known for tensor in results):
            return result  # a view of everything
        loose = any(known.loose for known in reads.values()) or sized_by_data(operator, given)
        made = tuple(self._value(tensor, loose) for tensor in results)
        self.steps.append(operator_step(operator, arguments, made, scope))
        return result

    def _path(self, name: str | None) -> str:
        """The path passed to the operator if it names a module, else the running module's."""
        return str(name if name in self._modules else self._scope() or name or "")

    def _know(self, tensor: Tensor, known: _Known) -> None:
        self._known[_place(tensor)] = known
        self._memories.add(_place(tensor)[0])
        self._seen.append(_number_kept(tensor))

    def _find(self, tensor: Tensor) -> _Known | None:
        place = _place(tensor)
        if place not in self._known and place[0] in self._memories:
            raise RefusedError("a view", "was taken of a tensor in a way that torch does not show")
        return self._known.get(place)

    def _check(self, operator: str, reads: Mapping[Tensor, _Known]) -> None:
        if operator == "aten::_local_scalar_dense":
            raise RefusedError(
                operator,
                "(item(), bool(), float()) makes a number of a tensor that depends on the input; "
                "a program takes no decisions",
            )
        if not is_known(operator):
            raise RefusedError(operator, "is no operator of an integer program")
        narrow = [t for t in reads if t.is_floating_point() and t.dtype != torch.float64]
        if operator in ARITHMETIC and narrow:
            kind = str(narrow[0].dtype).removeprefix("torch.")
            raise RefusedError(operator, f"computes in {kind}, not in integers")
        if operator not in LOOSE and any(known.loose for known in reads.values()):
            raise RefusedError(operator, "reads a tensor whose size depends on the data")

    def _value(self, tensor: Tensor, loose: bool) -> str:
        self._count += 1
        name = self._free(f"%{self._count}")
        self._note(tensor, _Known(name, loose))
        return name

    def _note(self, tensor: Tensor, known: _Known) -> None:
        self._know(tensor, known)
        shape = None if known.loose else tuple(tensor.shape)
        self.values[known.name] = Value(TensorType(tensor.dtype, shape), known.name)
        if self._kept is not None:
            self._kept[known.name] = tensor.detach().cpu().clone()

    def _arguments(self, func: Any, given: Mapping[str, Any], scope: str) -> Mapping[str, Any]:
        defaults = {
            a.name: a.default_value for a in func._schema.arguments if a.has_default_value()
        }
        prefix = f"{scope}." if scope else ""
        # What a schema fills in by itself is not written.
        return {
            name: self._argument(value, f"{prefix}{name}")
            for name, value in given.items()
            if isinstance(value, Tensor) or name not in defaults or value != defaults[name]
        }

    def _argument(self, value: Any, hint: str) -> Any:
        if isinstance(value, Tensor):
            return self.operand(value, hint)
        if isinstance(value, list | tuple):
            return tuple(self._argument(item, hint) for item in value)
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            return value
        raise RefusedError(hint, f"is a {type(value).__name__}, which no file holds")


def _place(tensor: Tensor) -> _Place:
    """The memory of a tensor's values, equal for all its aliases."""
    memory = tensor.untyped_storage()._cdata
    return (
        memory,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def _number_kept(tensor: Tensor) -> Any:
    """Hold the number of a tensor's memory, so that no other gets it, and not the memory itself."""
    return StorageWeakRef(tensor.untyped_storage())


@contextlib.contextmanager
def following(module: nn.Module) -> Iterator[Callable[[], str]]:
    """Follow the calls of modules inside `module`; the result gives the innermost one's path."""
    stack = [""]
    hooks: list[Any] = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: stack.append(path)

    def leave(*_: Any) -> None:
        stack.pop()

    if not isinstance(module, torch.jit.ScriptModule):
        for path, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(enter(path)))
            hooks.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield lambda: stack[-1]
    finally:
        for hook in hooks:
            hook.remove()


def in_graph(module: Any, operator: str, behind: int) -> tuple[str, str]:
    """Return a traced model's name of a refused operator, and the path of its module or ``""``."""
    calls = 0
    found: list[tuple[str, str]] = []
    for node in module.inlined_graph.nodes():
        kind = node.kind()
        calls += is_integer(kind)
        if calls == behind and kind.startswith("aten::"):
            innermost = str(node.scopeName()).rpartition("/")[2]
            path = innermost.removeprefix("__module.").removeprefix("__module")
            # torch decomposes some calls before they are recorded: the graph has `aten::prelu` for
            # `aten::_prelu_kernel`.
            if kind == operator.partition(".")[0]:
                return operator, path
            if not is_neutral(kind):
                found.append((kind, path))
    return found[0] if found else (operator, "")

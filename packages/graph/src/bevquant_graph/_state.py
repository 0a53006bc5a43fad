"""A model that runs and is as it was: its buffers, attributes and registrations."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._attributes import attributes_of
from ._kinds import check_kind, run_on
from ._own_inputs import own_inputs

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_LOCKS_LOCK = RLock()
_REGISTERED = ("_parameters", "_buffers", "_modules")
TORCHS = vars(nn.Module()).keys()  # attributes of every module


def called(model: nn.Module, args: Any = (), kwargs: Any = None) -> Any:
    """Result of a model's call that leaves the model and its arguments unchanged.

    The forward gets containers and tensors of its own (`own_inputs`), and buffers and attributes
    that it writes are restored (`state_kept`).

    Args:
        model: The model.
        args: Positional arguments.
        kwargs: Named arguments.

    Example:
        >>> class Counts(nn.Module):
        ...     frames = 0
        ...     def forward(self, frame):
        ...         self.frames += 1
        ...         frame["boxes"] = frame["image"] + self.frames
        ...         return frame["boxes"]
        >>> net, frame = Counts(), {"image": torch.ones(1)}
        >>> called(net, [frame]), called(net, [frame]), frame
        (tensor([2.]), tensor([2.]), {'image': tensor([1.])})
    """
    with state_kept(model):
        return run_on(model, own_inputs(list(args)), own_inputs(dict(kwargs or {})))


@contextmanager
def state_kept(*models: nn.Module) -> Iterator[list[bool]]:
    """Restore the state that models change while they run inside.

    State is buffers, attributes (counters, tensors, objects and contents of containers) and
    registrations. Other threads that enter it with one of the models wait.

    Args:
        models: They must not be changed otherwise inside.

    Yields:
        A list that afterwards holds, for each model, whether its state had changed.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2))
        >>> with state_kept(net):
        ...     _ = net(torch.ones(3, 2))
        >>> net[0].num_batches_tracked
        tensor(0)
    """
    noted: list[bool] = []
    with _locked(*models):
        states = [_State(model) for model in models]
        try:
            yield noted
        finally:
            noted += [state.put_back() for state in states]


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """As `state_kept`, of a model that another thread, which waits for this one, holds already."""
    state = _State(model)
    try:
        yield
    finally:
        state.put_back()


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Create ordinary tensors inside, under ``torch.inference_mode()`` too.

    Inference tensors can neither be written nor trained with later. Recording of gradients does not
    change.

    Example:
        >>> with torch.inference_mode(), ordinary_tensors():
        ...     torch.ones(1).is_inference()
        False
    """
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield


@contextmanager
def alone(*models: nn.Module) -> Iterator[None]:
    """Let other threads wait that enter it with one of the models, or with a part of one.

    Tensors created inside are ordinary ones (`ordinary_tensors`).

    Example:
        >>> with alone(nn.ReLU()):
        ...     pass
    """
    with _locked(*models), ordinary_tensors():
        yield


@contextmanager
def _locked(*models: nn.Module) -> Iterator[None]:
    """Hold the locks of all modules of the models.

    A thread that has to wait holds none of them meanwhile: the owner of a model may put new modules
    into it and lock these too. The modules are listed once the models themselves are held.
    """
    for model in models:
        check_kind(model, nn.Module, "a torch module")
    while True:
        with ExitStack() as stack:
            busy = next((lock for lock in _locks(models) if not _taken(lock, stack)), None)
            if busy is None:
                yield
                return
        with busy:  # until its owner is done
            pass


def _taken(lock: Any, stack: ExitStack) -> bool:
    if not lock.acquire(blocking=False):
        return False
    stack.callback(lock.release)
    return True


def _locks(models: tuple[nn.Module, ...]) -> Iterator[Any]:
    """The models' own locks first; their parts are listed when these were taken."""
    for module in chain(models, (part for model in models for part in model.modules())):
        with _LOCKS_LOCK:
            lock = _LOCKS.setdefault(module, RLock())
        yield lock


class _State:
    """State of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor, Tensor]] = []
        self._seen = {id(p) for p in model.parameters()}
        for module in model.modules():
            own = vars(module)  # which of a scripted module has no registrations
            for named in (own, *(own[name] for name in _REGISTERED if name in own)):
                self._dicts.append((named, dict(named)))
            held = (value for name, value in own.items() if name not in TORCHS)
            self._note([*module.buffers(recurse=False), *held])

    def _note(self, pending: list[Any]) -> None:
        while pending:
            value = pending.pop()
            if id(value) in self._seen:
                continue
            if isinstance(value, Tensor):
                self._seen.add(id(value))
                # Others have no strided memory to copy.
                if not (is_lazy(value) or value.is_meta or value.layout is not torch.strided):
                    memory = value.detach()
                    self._tensors.append((value, memory, memory.clone()))
            elif isinstance(value, dict | list | set | deque):
                self._seen.add(id(value))
                self._containers.append((value, _content(value)))
                # dict's own methods: subclasses override theirs.
                pending += dict.values(value) if isinstance(value, dict) else value
            elif isinstance(value, tuple):
                pending += value
            elif names := attributes_of(value):
                self._seen.add(id(value))
                held = {name: object.__getattribute__(value, name) for name in names}
                self._objects.append((value, held))
                pending += held.values()

    def put_back(self) -> bool:
        """Restore all state and return whether any had changed. Only changed state is written."""
        changed = [_update(named, before) for named, before in self._dicts]
        changed += [_set_attributes(value, held) for value, held in self._objects]
        changed += [_refill(container, content) for container, content in self._containers]
        changed += [_restore(*kept) for kept in self._tensors]
        return any(changed)


def _update(named: dict[str, Any], before: dict[str, Any]) -> bool:
    new = named.keys() - before.keys()
    other = [n for n, value in before.items() if n not in named or named[n] is not value]
    for name in new:
        del named[name]
    for name in other:
        named[name] = before[name]
    return bool(new or other)


def _set_attributes(value: Any, before: dict[str, Any]) -> bool:
    new = [name for name in attributes_of(value) if name not in before]
    other = [n for n, item in before.items() if getattr(value, n, None) is not item]
    for name in new:
        object.__delattr__(value, name)
    for name in other:
        object.__setattr__(value, name, before[name])
    return bool(new or other)


def _content(container: Any) -> list[Any]:
    return list(dict.items(container) if isinstance(container, dict) else container)


def _refill(container: Any, before: list[Any]) -> bool:
    """Give a container its members back, where they are others or in another order."""
    keyed = isinstance(container, dict)
    parts = [part for item in before for part in (item if keyed else (item,))]
    now = [part for item in _content(container) for part in (item if keyed else (item,))]
    if len(parts) == len(now) and all(map(operator.is_, parts, now)):
        return False
    container.clear()
    if isinstance(container, OrderedDict):
        OrderedDict.update(container, before)
    elif keyed:
        dict.update(container, before)
    elif isinstance(container, set):
        container.update(before)
    else:
        container.extend(before)
    return True


def _restore(tensor: Tensor, memory: Tensor, before: Tensor) -> bool:
    """Give a tensor its memory and its numbers back."""
    # Inference tensors can be written in inference mode alone.
    with torch.no_grad(), torch.inference_mode(memory.is_inference()):
        layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr()
        moved = layout != (memory.shape, memory.stride(), memory.dtype, memory.data_ptr())
        if moved:
            tensor.data = memory
        written = not torch.equal(memory, before)
        if written:
            memory.copy_(before)
    return moved or written

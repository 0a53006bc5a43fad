"""Models that remember frames, as functions: their memory is an input and an output.

Detectors keep a past BEV or propagated queries in attributes (``self.prev_bev``, StreamPETR's
``self.memory_embedding``). `with_memory` finds these attributes by running some frames, and puts
them into the arguments and the result. Captures, integer models and files then have the memory as
named inputs and outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ._attributes import same_constant
from ._copies import copied
from ._faults import refuse_unusable
from ._own_inputs import own_inputs
from ._quiet import evaluation
from ._signature import Arguments, Constant, arguments, entries, flatten
from ._state import TORCHS, state_kept


class WithMemory(nn.Module):
    """A model as a function of a frame and its memory: ``(result, memory) = model(frame, memory)``.

    Args:
        model: The model, whose attributes are those before the first frame.
        names: The attributes that it remembers frames by: paths in the model.

    Attributes:
        model: The model. A call leaves it as it is.
        names: See above.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)
        self.train(model.training)

    def forward(self, frame: Any, memory: Any = None) -> tuple[Any, dict[str, Any]]:
        """The model's result for a frame, and its memory after the frame.

        Args:
            frame: A tuple of positional inputs, a dict of named inputs, or one input.
            memory: Memory returned for the previous frame; None for a first frame.

        Raises:
            ValueError: The memory has other names.
        """
        if memory is not None and memory.keys() != {*self.names}:
            raise ValueError(
                f"WithMemory: expected the memory {[*self.names]}, got {[*memory]}; give what the "
                "call for the frame before returned, or None for a first frame"
            )
        return self._after(frame, memory or {})

    def _after(self, frame: Any, memory: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """As `forward`; missing entries of the memory are as before the first frame."""
        args, kwargs = arguments(frame)
        places = [(name, *_held(self.model, name)) for name in self.names]
        before = {name: held.get(last, _ABSENT) for name, held, last in places}
        try:
            for name, held, last in places:
                if (value := memory.get(name, before[name])) is not _ABSENT:
                    held[last] = own_inputs(value)
                if isinstance(before[name], deque):
                    held[last] = deque(held[last], before[name].maxlen)
            result = self.model(*args, **kwargs)
            after = {name: held[last] for name, held, last in places}
            # Inputs and results have no deques.
            return result, {n: [*v] if isinstance(v, deque) else v for n, v in after.items()}
        finally:
            for name, held, last in places:
                if before[name] is _ABSENT:
                    held.pop(last, None)
                else:
                    held[last] = before[name]


# None may be the value of an attribute.
_ABSENT: Any = object()


def _held(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds an attribute or a buffer, and its name there."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._buffers if last in module._buffers else vars(module)), last


def with_memory(model: nn.Module, frames: Iterable[Any]) -> WithMemory:
    """The model with its memory from frame to frame as an input and an output.

    Memory is every attribute and buffer that a frame changes and that changes the result, or other
    memory, of the next frame. The first form, ``made(frame)``, starts a sequence; the following
    form is ``made(frame, memory)``. Each is captured, simulated and exported on its own example.

    Args:
        model: The model in the state before a first frame. It is not changed: the result holds a
            copy of it.
        frames: Two or more frames of one sequence, in order; each a tuple of positional inputs, a
            dict of named inputs, or one input.

    Raises:
        TypeError: `model` is not a module.
        ValueError: Fewer than two frames, or a model without memory.

    Example:
        >>> class Follows(nn.Module):
        ...     past = None
        ...     def forward(self, x):
        ...         self.past = x if self.past is None else self.past * 0.5 + x
        ...         return self.past + 1
        >>> net = with_memory(Follows(), [torch.ones(1), torch.ones(1)])
        >>> result, memory = net(torch.ones(1))
        >>> memory
        {'past': tensor([1.])}
        >>> net(torch.ones(1), memory)
        (tensor([2.5000]), {'past': tensor([1.5000])})
    """
    refuse_unusable(model, "with_memory", finite=False)
    frames = list(frames)
    if len(frames) < 2:
        raise ValueError(
            f"with_memory: expected two or more frames of a sequence, got {len(frames)}"
        )
    made = WithMemory(copied(model, "with_memory"), ())
    with evaluation(made), torch.no_grad(), state_kept(made):
        calls = (arguments(frame) for frame in frames)
        # While it is measured which of them matter, all are memory.
        made.names = tuple(changed_attributes(made.model, calls))
        names = tuple(_that_matter(made, frames))
    made.names = names
    if not names:
        raise ValueError(
            f"with_memory: {type(model).__name__} gives the same results whatever came before; it "
            "remembers nothing. Use the model itself"
        )
    made.train(model.training)
    return made


def changed_attributes(model: nn.Module, calls: Iterable[Arguments]) -> Iterator[str]:
    """Paths of the attributes and buffers that one of the calls, in order, changes."""
    found: dict[str, None] = {}
    with state_kept(model):
        for given in calls:
            # A copy, as the forward may write into the same tensors.
            before = own_inputs(_attributes(model))
            args, kwargs = own_inputs(given)
            model(*args, **kwargs)
            now = _attributes(model).items()
            found |= {n: None for n, v in now if n not in before or not _same(before[n], v)}
    yield from found


def _attributes(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        held = {n: v for n, v in vars(module).items() if n not in TORCHS} | module._buffers
        start = f"{path}." if path else ""
        found |= {f"{start}{n}": v for n, v in held.items() if not isinstance(v, nn.Module)}
    return found


def _that_matter(model: WithMemory, frames: list[Any]) -> Iterator[str]:
    """Of the names those without which the frames give other results or other memory.

    An attribute that a frame writes before it reads it is none.
    """

    def run(left_out: str) -> list[Any]:
        made, memory = list[Any](), dict[str, Any]()
        for frame in frames:
            result, memory = model._after(own_inputs(frame), memory)
            memory.pop(left_out, None)
            made.append((result, memory))
        return made

    whole = run("")
    for name in model.names:
        known = [(result, {n: v for n, v in m.items() if n != name}) for result, m in whole]
        try:
            matters = not all(map(_same, known, run(name)))
        except Exception:  # a forward that finds one attribute of a first frame alone
            matters = True
        if matters:
            yield name


def _same(one: Any, other: Any) -> bool:
    (tensors, tree), (others, other_tree) = flatten(one), flatten(other)
    known, given = ([*entries(t)] for t in (tree, other_tree))
    return (
        [place for place, _ in known] == [place for place, _ in given]
        and all(_alike(e, f) for (_, e), (_, f) in zip(known, given, strict=True))
        and same_constant(tensors, others)
    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return same_constant(one.value, other.value)
    return type(one) is type(other)


Model = Callable[..., Any]


def in_sequence(
    model: Model,
    frames: Iterable[Any],
    *,
    first: Model | None = None,
    memory: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Run a model of `with_memory` over the frames of one sequence, in order.

    Use it to calibrate on sequences, each one a batch:
    ``calibrate(model, sequences, forward=lambda m, frames: list(in_sequence(m, frames)))``.

    Args:
        model: Takes ``frame`` and ``memory``: a `WithMemory`, quantized or not, or the integer
            model of its following form.
        frames: Of one sequence.
        first: For the first frame, takes ``frame``: the integer model of the first form. By default
            `model` itself.
        memory: Before the first frame, to continue a sequence.

    Yields:
        The result for each frame.

    Example:
        >>> class Follows(nn.Module):
        ...     past = None
        ...     def forward(self, x):
        ...         self.past = x if self.past is None else self.past * 0.5 + x
        ...         return self.past
        >>> frames = [torch.ones(1)] * 3
        >>> [float(result) for result in in_sequence(with_memory(Follows(), frames), frames)]
        [1.0, 1.5, 1.75]
    """
    yield from (result for result, _ in _in_order(model, first or model, frames, memory))


def _in_order(model: Model, first: Model, frames: Iterable[Any], memory: Any) -> Iterator[Any]:
    for frame in frames:
        named = {"frame": own_inputs(frame)}
        made = first(**named) if memory is None else model(**named, memory=memory)
        memory = made[1]
        yield made

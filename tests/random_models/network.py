"""A model that is a list of steps, of which some can be left out again."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]  # of the step's module, and of the values that it reads


@dataclass(frozen=True)
class Step:
    """A step: the name of its kind, its function, and the positions of what it reads."""

    name: str
    function: Function
    sources: tuple[int, ...]
    part: str  # name of its module; empty for none


class Network(nn.Module):
    """Runs its steps in order; value 0 is the input.

    Attributes:
        steps: The steps.
        parts: Their modules; several steps may call one.
        returned: Positions of the values that it returns.
    """

    def __init__(self, steps: Sequence[Step], parts: nn.ModuleDict, returned: Sequence[int]):
        super().__init__()
        self.steps, self.parts, self.returned = list(steps), parts, list(returned)

    def begin(self, x: Any) -> Any:
        return x

    def finish(self, value: Any) -> Any:
        return value

    def forward(self, x: Any) -> Any:
        return self.follow(self.begin(x))

    def follow(self, value: Any) -> Any:
        values = [value]
        for step in self.steps:
            part = (self.parts[step.part],) if step.part else ()
            values.append(step.function(*part, *(values[source] for source in step.sources)))
        made = tuple(self.finish(values[position]) for position in self.returned)
        return made[0] if len(made) == 1 else made


@dataclass(frozen=True)
class Candidate:
    """A kind of step.

    Attributes:
        name: In messages.
        make: Of the random choices and an example of each value that it reads: a module or None,
            and the step's function; None where such values cannot be read.
        reads: How many values.
    """

    name: str
    make: Callable[..., tuple[nn.Module | None, Function] | None]
    reads: int = 1


def leave_out(steps: Sequence[Step], skipped: Collection[int]) -> list[Step]:
    """The steps, where a skipped one hands on the first value that it reads."""
    return [
        Step("skipped", lambda x, *_: x, step.sources[:1], "") if i in skipped else step
        for i, step in enumerate(steps)
    ]


def grow(
    rng: random.Random,
    candidates: Sequence[Candidate],
    value: Any,
    length: int,
    ready: Callable[[nn.Module], Any] = nn.Module.eval,
) -> tuple[list[Step], nn.ModuleDict, list[int]]:
    """Random steps that run on an example, and the positions of one or two results."""
    values, steps, parts = [value], [], nn.ModuleDict()
    tries = 0
    while len(steps) < length and tries < 40 * length:
        tries += 1
        candidate = rng.choice(candidates)
        newest = [len(values) - 1, len(values) - 1, rng.randrange(len(values))]
        sources = tuple(rng.choice(newest) for _ in range(candidate.reads))
        read = [values[source] for source in sources]
        made = candidate.make(rng, *read)
        if made is None:
            continue
        module, function = made
        name = f"{candidate.name}{len(steps)}" if module is not None else ""
        shared = [s for s in steps if s.name == candidate.name and s.part]
        if module is not None and shared and rng.random() < 0.1:
            name, module, function = shared[0].part, parts[shared[0].part], shared[0].function
        try:
            with torch.no_grad():
                if module is not None:
                    ready(module.eval())
                result = function(*([] if module is None else [module]), *read)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            continue  # values of other shapes
        if module is not None:
            parts[name] = module
        steps.append(Step(candidate.name, function, sources, name))
        values.append(result)
    returned = [len(values) - 1]
    if rng.random() < 0.3:
        returned.append(rng.randrange(1, len(values)))
    return steps, parts, returned


def settle(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Give norms statistics and weights as after a training."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm):
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
            module.bias.data.normal_(0, 0.2, generator=generator)
    return model.eval()

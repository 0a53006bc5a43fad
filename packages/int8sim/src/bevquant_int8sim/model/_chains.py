"""Runs of convolutions in a program as chains, once their kernels are known.

A chain is recorded from a step-by-step run in which every convolution had run before: its checks
need not be repeated for inputs of the same shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bevquant_int8sim._prepared import Run, layouts, watched
from bevquant_int8sim.model._program import Program
from bevquant_int8sim.model._step import Ref, Step, names_in
from bevquant_int8sim.model._weighted_steps import Conv, ConvTranspose

if TYPE_CHECKING:
    from bevquant_int8sim._compiled.chain import Chain

_LAYOUTS = 8  # of inputs that chains are kept for

Values = MutableMapping[str, Any]
ByStep = Callable[[int], tuple[tuple[Any, ...], tuple[Any, ...]]]
"""Runs the step of that number; its arguments and outputs."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Steps of a program that are run by a chain, or else step by step."""

    steps: range
    chain: Chain | None = None
    given: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    def run(self, values: Values, by_step: ByStep) -> None:
        if self.chain is None:
            for number in self.steps:
                by_step(number)
        else:
            values.update(
                zip(self.made, self.chain([values[name] for name in self.given]), strict=True)
            )


class Convolutions:
    """Convolutions that follow each other in a program."""

    def __init__(self, program: Program, numbers: range) -> None:
        self.numbers = numbers
        self._steps = program.steps
        self._last = {name: at for at, step in enumerate(self._steps) for name in step.inputs}
        self._last |= dict.fromkeys(names_in(program.result), len(self._steps))
        own = [self._steps[number] for number in numbers]
        made = {step.outputs[0] for step in own}
        read = dict.fromkeys(name for step in own for name in step.inputs)
        self._inputs = [name for name in read if name not in made]
        self.spent = [name for name in (*read, *made) if self._last.get(name, -1) < numbers.stop]
        self._operands = [tensor for step in own for tensor in step.tensors.values()]
        self._known: dict[Hashable, tuple[list[int], list[_Part]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy learns its chains itself: they know where in memory their weights lie."""
        return self.__dict__ | {"_known": {}}

    def run(self, values: Values, backend: str, by_step: ByStep) -> None:
        """Run all steps; what is read behind them is written to `values`.

        `by_step` writes to `values` too, and deletes there what no step reads later.
        """
        if any(tensor.is_inference() for tensor in self._operands):
            return _Part(self.numbers).run(values, by_step)  # writes to them are not counted
        key = (backend, layouts(*(values[name] for name in self._inputs)))
        versions = [tensor._version for tensor in self._operands]
        known = self._known.get(key)
        if known is not None and known[0] == versions:
            for part in known[1]:
                part.run(values, by_step)
            for name in self.spent:
                values.pop(name, None)
            return None
        runs = [self._watch(number, by_step) for number in self.numbers]
        if all(runs):
            if len(self._known) >= _LAYOUTS:
                self._known.clear()
            self._known[key] = versions, list(self._parts(runs))
        return None

    def _watch(self, number: int, by_step: ByStep) -> Run | None:
        """What ran a step; ``None`` unless it was one call that had been made before."""
        with watched() as runs:
            given, made = by_step(number)
        if len(runs) != 1:
            return None
        _, inputs, output = runs[0]
        same = all(a is b for a, b in itertools.zip_longest(given, inputs))
        return runs[0] if same and output is made[0] else None

    def _parts(self, runs: Sequence[Any]) -> Iterator[_Part]:
        from bevquant_int8sim._compiled.chain import lie_well

        numbers: list[int] = []
        made: set[str] = set()
        for number, (convolution, _, _) in zip(self.numbers, runs, strict=True):
            step = self._steps[number]
            finished = convolution.output is None  # by the kernel
            inside = [name in made for name in names_in(step.args)]
            if not finished or not lie_well(convolution, inside):
                yield from self._part(numbers, runs)
                numbers, made = [], set()
            if finished:
                numbers.append(number)
                made.update(step.outputs)
            else:
                yield _Part(range(number, number + 1))
        yield from self._part(numbers, runs)

    def _part(self, numbers: list[int], runs: Sequence[Any]) -> Iterator[_Part]:
        from bevquant_int8sim._compiled.chain import Chain, Link

        if not numbers:
            return
        steps = range(numbers[0], numbers[-1] + 1)
        if len(numbers) == 1:
            yield _Part(steps)
            return
        outputs = [self._steps[number].outputs[0] for number in steps]
        reads = [tuple(names_in(self._steps[number].args)) for number in steps]
        given = [name for name in dict.fromkeys(itertools.chain(*reads)) if name not in outputs]
        place = {name: at for at, name in enumerate((*given, *outputs))}
        links = [
            Link(runs[number - self.numbers.start][0], tuple(place[name] for name in names))
            for number, names in zip(steps, reads, strict=True)
        ]
        kept = [name for name in outputs if self._last.get(name, -1) >= steps.stop]
        chain = Chain(links, len(given), [place[name] for name in kept])
        yield _Part(steps, chain, tuple(given), tuple(kept))


def convolutions(program: Program) -> dict[int, Convolutions]:
    """Where convolutions begin that follow each other, and these."""
    found, first = {}, 0
    for alike, steps in itertools.groupby(program.steps, _is_plain):
        stop = first + len(list(steps))
        if alike and stop - first > 1:
            found[first] = Convolutions(program, range(first, stop))
        first = stop
    return found


def _is_plain(step: Step) -> bool:
    """Whether it is a convolution of values alone."""
    known = isinstance(step, Conv | ConvTranspose)
    return known and not step.kwargs and all(type(a) is Ref for a in step.args)

"""A model in integers, and its execution."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from bevquant_graph import (
    Sizes,
    arguments,
    check_guards,
    is_sparse_tensor,
    without_autocast,
)
from bevquant_int8sim._backends import check_backend
from bevquant_int8sim.model._chains import convolutions
from bevquant_int8sim.model._coords import Coords, SparseOutput, coords_of
from bevquant_int8sim.model._fast_program import dequantize_late, fuse_residuals, sort_rows
from bevquant_int8sim.model._form import ACCUMULATORS, Form, Integers
from bevquant_int8sim.model._program import FloatFallback, Program
from bevquant_int8sim.model._signature import Arguments, bind
from bevquant_int8sim.model._step import (
    Constant,
    FloatCall,
    LayoutCall,
    NumberCall,
    OperatorCall,
    Ref,
    Step,
    names_in,
    replaced,
)
from bevquant_int8sim.model._traced_source import Source
from bevquant_quantizers.documents import text_table
from bevquant_sparse.runtime.eager import eager

Observer = Callable[[Step, tuple[Any, ...], tuple[Any, ...]], None]
Walk = Generator[tuple[Step, tuple[Any, ...], tuple[Any, ...]], None, Any]


@dataclass(frozen=True, eq=False)
class Recorded:
    """Result of one step.

    Attributes:
        path: Module that the step comes from.
        op: Its operation.
        value: The integers, accumulators or floats.
        scale: Value of one integer step; None for accumulators and floats.
    """

    path: str
    op: str
    value: Tensor
    scale: float | None

    def dequantized(self) -> Tensor:
        """The value as float32."""
        return self.value.float() if self.scale is None else (self.value * self.scale).float()


class IntegerModel:
    """A calibrated model in integers, from `simulate` or `IntegerModel.load`.

    It is called like the model it was made from and returns the same structure, as floats. It can
    be copied and pickled; an unpickled model runs like a loaded one and has no `source`.

    Args:
        program: Its steps.
        source: The captured model that it was made from; None for a loaded one.
        backend: Kernels to run on, see `int8_sparse_conv`.
        sum_ranges: Largest absolute value of each tensor that a sum reads in eight bits of its
            own, see ``simulate(integer_sums=…)``; empty for a loaded model, whose steps hold it.

    Attributes:
        calls_other_steps: Whether a call fuses steps or reorders voxels where no result shows it.
    """

    def __init__(
        self,
        program: Program,
        source: Source | None = None,
        *,
        backend: str = "auto",
        sum_ranges: Mapping[str, float] | None = None,
    ) -> None:
        self.program = program
        self.sum_ranges: Mapping[str, float] = sum_ranges or {}
        self.source = source
        self.backend = check_backend(backend, "IntegerModel")
        # A call runs these steps, which are faster and give the same bits; `walk` runs the
        # program's own.
        self._fast = dequantize_late(fuse_residuals(sort_rows(program)))
        self.calls_other_steps = self._fast.steps != program.steps
        # Whatever runs in float is torch's or the author's code, which may write to what it reads,
        # by the name of a function, by a module's `inplace`, or behind a view.
        self._overwrites = any(isinstance(step, FloatCall | NumberCall) for step in program.steps)
        self._spent = {p: _last_uses(p) for p in (program, self._fast)}
        self._plain = {p: [_plain_names(step) for step in p.steps] for p in (program, self._fast)}
        self._convolutions = convolutions(self._fast)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step in order of execution."""
        return self.program.steps

    @property
    def islands(self) -> tuple[FloatFallback, ...]:
        """The former name of `float_fallbacks`."""
        return self.float_fallbacks

    @property
    def float_fallbacks(self) -> tuple[FloatFallback, ...]:
        """Parts that are computed in float, with reason and share of the operations."""
        return self.program.float_fallbacks

    @property
    def operations(self) -> int:
        """Multiply-accumulates of the example, plus the values that other steps compute.

        0 until the model was compared with the model it was made from.
        """
        return sum(self.program.operations.values())

    @property
    def integer_share(self) -> float:
        """Share of `operations` that runs in integers, 0 to 1."""
        return 1 - sum(fallback.share or 0 for fallback in self.float_fallbacks)

    @eager
    @without_autocast()
    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on one set of inputs, structured like the example inputs.

        Of dictionaries and dataclasses only the members that the forward reads are required. The
        arguments stay as they are: what the forward writes into a container is in the container
        that is returned, beside the members that the caller gave and the forward does not read.
        """
        given = args, kwargs
        values, sizes = self._begin(self._fast, given)

        def by_step(number: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return self._execute(self._fast, number, values, sizes)

        number = 0
        while number < len(self._fast.steps):
            row = self._convolutions.get(number)
            if row is None:
                by_step(number)
                number += 1
            else:
                row.run(values, self.backend, by_step)
                number = row.numbers.stop
        return self._end(self._fast, values, sizes, given)

    def walk(self, inputs: Any) -> Walk:
        """Run step by step, each step when the caller asks for it.

        Results that no later step reads are not kept.

        Args:
            inputs: A tuple of positional inputs, a dict of named inputs, or one input.

        Yields:
            Each step, its arguments and its outputs, in order of execution.

        Returns:
            The result of a call, as the generator's value.

        Raises:
            TypeError: The inputs have another structure than the example inputs.
            ValueError: As for a call.
        """
        given = arguments(self.inputs_of(inputs))
        values, sizes = self._begin(self.program, given)
        for number, step in enumerate(self.program.steps):
            yield step, *self._execute(self.program, number, values, sizes, keep=True)
        return self._end(self.program, values, sizes, given)

    def inputs_of(self, batch: Any) -> Any:
        """A loader's batch as a tuple of positional inputs or a dict of named inputs.

        For a loaded model, which has no forward, the batch is returned unchanged.
        """
        return batch if self.source is None else self.source.graph.inputs_of(batch)

    @eager
    @without_autocast()
    def run(
        self, inputs: Any, *, record: bool = True, observe: Observer | None = None
    ) -> tuple[Any, dict[str, Recorded]]:
        """Run and return the intermediate results too.

        Args:
            inputs: A tuple of positional inputs, a dict of named inputs, or one input.
            record: Keep the result of every step.
            observe: Called after each step with the step, its arguments and its outputs.

        Returns:
            The result of a call, and for each module path the recorded result. Several results of
            one path are numbered, as in ``"block.relu#2"``; accumulators that are kept for several
            consumers have ``":int32"`` after their path.
        """
        found: dict[str, Recorded] = {}

        def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
            computes = not isinstance(step, NumberCall | Constant)
            if record and computes and isinstance(made[0], Tensor):
                form = self.program.values[step.outputs[0]].form
                scale = form.scale if isinstance(form, Integers) else None
                place = step.path or step.label
                place += f":{ACCUMULATORS}" if form == ACCUMULATORS else ""
                name, count = place, 1
                while name in found:
                    count += 1
                    name = f"{place}#{count}"
                found[name] = Recorded(step.path, step.op, made[0], scale)
            if observe is not None:
                observe(step, given, made)

        return exhausted(self.walk(inputs), see), found

    def _begin(self, program: Program, given: Arguments) -> tuple[dict[str, Any], Sizes]:
        """Constants and inputs by name, and the sizes of the inputs."""
        values: dict[str, Any] = dict(program.constants)
        sizes: dict[str, tuple[int, ...] | int] = {}
        for name, value in bind(program.signature, *program.members.required(given)).items():
            coords = program.sparse_inputs.get(name)
            if (coords is not None) != is_sparse_tensor(value):
                expected = "sparse tensor" if coords is not None else "tensor"
                raise TypeError(f"input {name}: expected a {expected}, got {type(value).__name__}")
            values[name] = value.float() if name in program.single else value
            if coords is not None:
                values[name], values[coords] = value.features, coords_of(value)
                sizes[f"{coords}.indices"] = tuple(value.indices.shape)
                sizes[f"{coords}.batch_size"] = int(value.batch_size)
                sizes[f"{coords}.spatial_shape"] = tuple(map(int, value.spatial_shape))
            if isinstance(values[name], Tensor):
                if values[name].is_meta:
                    raise TypeError(
                        f"input {name}: expected a tensor with values, got one on the meta device; "
                        "give a tensor of a real frame"
                    )
                if values[name].layout is not torch.strided:
                    raise TypeError(
                        f"input {name}: expected an ordinary tensor, got one of layout "
                        f"{values[name].layout}; call .to_dense() first"
                    )
                sizes[name] = tuple(values[name].shape)
            elif isinstance(value, int):
                sizes[name] = value
        # Sizes that must agree are checked behind the steps: layers name what they expect
        # themselves.
        check_guards((g for g in program.guards if not g.agrees), sizes, _REMEDY)
        return values, sizes

    def _execute(
        self,
        program: Program,
        number: int,
        values: dict[str, Any],
        sizes: Sizes,
        *,
        keep: bool = False,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Run a step on `values`, drop values without later readers; return inputs, outputs."""
        step, plain = program.steps[number], self._plain[program][number]
        if plain is None:
            given, named = _given(step.args, values), _given(step.kwargs, values)
        else:
            given, named = tuple([values[name] for name in plain]), {}
        try:
            with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
                made = step.execute(given, named, self.backend)
            values.update(zip(step.outputs, made, strict=True))
        except Exception as error:
            # Of shapes that do not fit; layers name the channels that they expect themselves.
            if isinstance(error, RuntimeError | LookupError) or not step.tensors:
                _check_agreement(program, sizes, error)
            # What a file may say is checked when it is read; how torch's own functions take
            # their constants only shows here.
            own = step.target is None
            may_be_input = own and not sizes.keys().isdisjoint(step.inputs)
            known = (ValueError, TypeError) if may_be_input else ValueError
            if not program.origin or isinstance(error, known):
                raise
            raise ValueError(
                f"{program.origin}: {step.path or 'the model'} ({step.operator or step.op}) "
                f"does not compute on these inputs: {error}; save the model again if it should"
            ) from error
        if keep:
            made = self._kept(made)
        for name in self._spent[program][number]:
            del values[name]
        return given, made

    def _end(
        self, program: Program, values: Mapping[str, Any], sizes: Sizes, given: Arguments
    ) -> Any:
        """What a call returns."""
        _check_agreement(program, sizes)  # a layer that cannot take them has said so by now
        return program.members.handed_on(_given(program.result, values), given)

    def _kept(self, made: tuple[Any, ...]) -> tuple[Any, ...]:
        """A step's outputs, copied before a later step can overwrite them."""
        if not self._overwrites:
            return made
        return tuple(
            value.clone() if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in made
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to a folder: tensors as safetensors, the rest as JSON, with checksums.

        The folder is written to a temporary name and renamed. A model saved there before is
        replaced.

        Raises:
            ValueError: The model calls modules or functions that cannot be saved (all are named),
                or `folder` holds something else.
        """
        from bevquant_int8sim.model._save import save_program

        save_program(self.program, folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        operators: Collection[str] = (),
    ) -> IntegerModel:
        """Read a model that `save` wrote. Nothing is unpickled.

        Args:
            folder: The saved model.
            backend: Kernels to run on, see `int8_sparse_conv`.
            device: Device of its tensors and inputs.
            operators: Namespaces of `torch.library` whose operators it may call beside torch's own,
                such as "mmcv". Import the package that registers them first.

        Raises:
            ValueError: A file is missing or changed, the schema version is another one, a tensor
                does not fit its step, or a step calls something that a file may not call.
        """
        from bevquant_int8sim.model._save import load_program

        program = load_program(folder, device, operators)
        try:
            return cls(program, backend=backend)
        except (LookupError, AttributeError, TypeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"{os.fspath(folder)}: its program cannot be made ready to run ({error!r}); save "
                "the model again"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> IntegerModel:
        """A model with tensors of its own; the graph, which is a record, stays one."""
        program = copy.deepcopy(self.program, memo)
        ranges = dict(self.sum_ranges)
        return type(self)(program, self.source, backend=self.backend, sum_ranges=ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the graph, which lives in its process: as a loaded model then."""
        return _unpickled, (type(self), self.program, self.backend, dict(self.sum_ranges))

    def __repr__(self) -> str:
        return program_table(self.program)


def _unpickled(
    kind: type[IntegerModel], program: Program, backend: str, ranges: dict[str, float]
) -> IntegerModel:
    return kind(program, backend=backend, sum_ranges=ranges)


_AS_IT_IS = nullcontext()


def exhausted(walk: Generator[Any, None, Any], see: Callable[..., None] | None = None) -> Any:
    """Return value of a walk after all its steps, each passed to `see`."""
    while True:
        try:
            step = next(walk)
        except StopIteration as ended:
            return ended.value
        if see is not None:
            see(*step)


def _given(values: Any, known: Mapping[str, Any]) -> Any:
    def read(ref: Any) -> Any:
        if isinstance(ref, Ref):
            return known[ref.name]
        coords: Coords = known[ref.coords]
        return SparseOutput(
            known[ref.features], coords.indices, coords.spatial_shape, coords.batch_size
        )

    return replaced(values, read)


def _plain_names(step: Step) -> tuple[str, ...] | None:
    """Names of the values that a step reads, where it reads nothing else."""
    plain = not step.kwargs and all(type(ref) is Ref for ref in step.args)
    return tuple(ref.name for ref in step.args) if plain else None


def _check_agreement(program: Program, sizes: Sizes, cause: Exception | None = None) -> None:
    """Refuse inputs of other sizes than the forward fixes, or that do not agree."""
    try:
        check_guards((g for g in program.guards if g.agrees), sizes, _REMEDY)
    except ValueError as error:
        raise error from cause


_REMEDY = (
    "simulate again with such inputs, or let the forward compute with the size itself, which stays "
    "open, where it takes int(…) of it"
)


def _last_uses(program: Program) -> list[tuple[str, ...]]:
    """For each step the values without later readers."""
    seen = set(names_in(program.result))
    spent: list[tuple[str, ...]] = []
    # Backwards, the first step that touches a value is the last one to read it.
    for step in reversed(program.steps):
        touched = dict.fromkeys((*step.inputs, *step.outputs))
        spent.append(tuple(name for name in touched if name not in seen))
        seen.update(touched)
    return spent[::-1]


def program_table(program: Program) -> str:
    """One line per step that computes: operation, module, result, why it is in float."""
    rows = [("op", "module", "result", "note")]
    rows += [
        _row(step, program) for step in program.steps if not isinstance(step, NumberCall | Constant)
    ]
    float_fallbacks = program.float_fallbacks
    title = f"IntegerModel: {len(rows) - 1} steps, {len(float_fallbacks)} float fallback"
    title += "s" * (len(float_fallbacks) != 1)
    if float_fallbacks and program.operations:
        share = sum(fallback.share or 0 for fallback in float_fallbacks)
        title += f" with {100 * share:.2g} % of the operations"
    return f"{title}\n{indent(text_table(rows), '  ')}"


def _row(step: Step, program: Program) -> tuple[str, str, str, str]:
    op = f"{step.op} {step.name}" if isinstance(step, FloatCall | LayoutCall) else step.op
    op = step.operator if isinstance(step, OperatorCall) else op
    if step.clamps[0]:
        op += " + ReLU"
    return op, step.path, _result(program.values[step.outputs[0]].form), step.reason


def _result(form: Form) -> str:
    if isinstance(form, Integers):
        return f"{form} × {form.scale:.4g}"
    return str(form)

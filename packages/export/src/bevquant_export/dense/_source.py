"""A calibrated model as integer steps, with all sizes.

The program is the simulator's, or that of the model's own package. An exporter writes the steps
that the simulator, or the model itself, runs, so the two cannot disagree on the integers and scales
of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bevquant_export._errors import QdqError
from bevquant_export._inputs import bound
from bevquant_graph import (
    as_example,
    flatten,
    is_sparse_tensor,
    leaves,
    refuse_unusable,
)
from bevquant_int8sim import IntegerModel, simulate
from bevquant_int8sim.program import (
    PROGRAM_READERS,
    Add,
    Program,
    Ref,
    Rounds,
    Step,
    in_single,
    names_in,
    replaced,
)

Observe = Callable[[Step, tuple[Any, ...], tuple[Any, ...]], None]
Sums = bool | Mapping[str, float]


class QdqProgram(Protocol):
    """Program that `export_qdq_onnx` writes and `compare_qdq_onnx` compares a file with.

    Models of `bevquant_qnn` are simulated. Other packages read their own models through
    `bevquant_int8sim.program.PROGRAM_READERS`. The steps are those of `bevquant_int8sim.program`,
    with these additions to an `IntegerModel`'s:

    * `Weighted.weight_scale` is the step size of each output channel, and `Weighted.bias` may be
      float;
    * a `FloatCall` may be a layout operator, and its result may be quantized;
    * `Step.on_cpu` says that hb_mapper must not quantize the step.

    Attributes:
        program: The steps in order.
        names: For each input of the program, the parameter of the model that it stands for.
    """

    @property
    def program(self) -> Program: ...

    @property
    def names(self) -> Mapping[str, str]: ...

    def run(self, inputs: Any, *, observe: Observe) -> Any:
        """Run, and return the model's result, in floats.

        `observe` gets each step, its inputs, and integers where the result has some.
        """


class _Simulated:
    """A `bevquant_qnn` model."""

    def __init__(
        self, model: nn.Module | IntegerModel, args: Any, sums: Sums, verify: bool
    ) -> None:
        self.model: IntegerModel = self._lowered(model, args, sums, verify)
        ports = ports_of(self.model).items()
        made = {name: node.meta.get("val") for name, (_, node) in ports}
        doubles = [n for n, v in made.items() if getattr(v, "dtype", None) == torch.float64]
        if doubles:
            held = self.model
            self.model = IntegerModel(
                in_single(held.program, doubles), held.source,
                backend=held.backend, sum_ranges=held.sum_ranges,
            )  # fmt: skip
            _refuse_lost_digits(held, self.model, args, doubles)

    def _lowered(
        self, model: nn.Module | IntegerModel, args: Any, sums: Sums, verify: bool
    ) -> IntegerModel:
        if isinstance(model, IntegerModel):
            rounds = (step for step in model.steps if isinstance(step, Rounds))
            other = next((step for step in rounds if not step.is_default), None)
            if other is not None:
                raise QdqError(
                    "the integer model rounds otherwise than files do "
                    f"({other.rounding}, in {other.arithmetic}): "
                    "half to even, in floats; give the calibrated model"
                )
            if model.source is None or (sums and not model.sum_ranges and _adds_sums(model)):
                met = "was loaded from a folder" if model.source is None else "adds accumulators"
                raise QdqError(
                    f"the integer model {met}; give the calibrated model, or what "
                    f"simulate(…, integer_sums={bool(sums)}) makes of it"
                )
            return model
        refuse_unusable(model, "export_qdq_onnx", finite=False)
        return simulate(model, args, integer_sums=sums, verify=verify)

    @property
    def program(self) -> Program:
        return self.model.program

    @property
    def sum_ranges(self) -> Mapping[str, float]:
        return self.model.sum_ranges

    @property
    def names(self) -> Mapping[str, str]:
        return {name: path for name, (path, _) in ports_of(self.model).items()}

    def run(self, inputs: Any, *, observe: Observe) -> Any:
        returned, _ = self.model.run(inputs, record=False, observe=observe)
        return returned


def _refuse_lost_digits(
    double: IntegerModel, single: IntegerModel, args: Any, names: Collection[str]
) -> None:
    """Refuse inputs whose float64 the model needs, as a time in seconds since 1970.

    Results are compared, and what is computed from float64 in other types: a wrong time since the
    last frame is little in a map, and all of a velocity.
    """

    def leaves_doubles(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> bool:
        into = made[0].dtype if isinstance(made[0], Tensor) else torch.float64
        return into != torch.float64 and any(
            getattr(value, "dtype", None) == torch.float64 for value in leaves(given)
        )

    def values_of(model: IntegerModel, at: Callable[..., bool]) -> dict[str, Tensor]:
        found: dict[str, Any] = {}

        def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
            if at(step, given, made):
                found[step.outputs[0]] = made[0]

        returned, _ = model.run(args, record=False, observe=see)
        results = [value for value in flatten(returned)[0] if isinstance(value, Tensor)]
        return found | {f"result {i}": v for i, v in enumerate(results) if v.is_floating_point()}

    wanted = values_of(double, leaves_doubles)
    got = values_of(single, lambda step, *_: step.outputs[0] in wanted)
    pairs = [(wanted[name].double(), got[name].double()) for name in wanted]
    if all(a.shape == b.shape and (a - b).norm() <= 0.1 * a.norm() for a, b in pairs):
        return
    given = {name: v for name, v in bound(double.program, args) if name in names and v.numel()}
    worst = max(given, key=lambda name: float(given[name].abs().max()))
    path, _ = ports_of(double)[worst]
    raise QdqError(
        f"input {path} is float64 with values up to {float(given[worst].abs().max()):g}; files "
        "hold float32, in which the model computes other values. Give values that float32 holds, "
        "such as times and places relative to the first frame"
    )


def _adds_sums(model: IntegerModel) -> bool:
    """Whether a sum reads accumulators."""
    values = model.program.values
    adds = (step for step in model.steps if isinstance(step, Add))
    return any(values[name].form == "int32" for step in adds for name in step.inputs)


def ports_of(model: IntegerModel) -> dict[str, tuple[str, Any]]:
    """Inputs of a program to the parameters that they are, and to the nodes of the graph.

    A sparse tensor is one input; the node of its features stands for it.
    """
    assert model.source is not None
    graph = model.source.graph
    owners = [p.removesuffix(".features") for p in graph.input_names if p.endswith(".features")]
    parts = {f"{owner}.{part}" for owner in owners for part in ("indices", "batch_size")}
    found = [
        (path.removesuffix(".features"), node)
        for path, node in zip(graph.input_names, graph.placeholders, strict=True)
        if path not in parts
    ]
    return dict(zip(names_in(model.program.signature), found, strict=True))


def tuple_of(name: str) -> str:
    """The tuple of a member such as ``chunk[0]``; else the value itself."""
    return name.partition("[")[0]


def location(program: QdqProgram, step: Step) -> str:
    """``file:line`` of the author's code that computes a step; "" where unknown."""
    source = program.model.source if isinstance(program, _Simulated) else None
    if source is None:
        return ""
    made = set(step.outputs)
    nodes = (node for node, held in source.held.items() if made & set(held.values()))
    return next((source.graph.location(node) for node in nodes), "")


def integer_model(program: QdqProgram) -> IntegerModel | None:
    """The `IntegerModel`, whose every sum is exact, where the program is that of one."""
    return program.model if isinstance(program, _Simulated) else None


def program_of(
    model: nn.Module | IntegerModel, args: Any, sums: Sums = False, *, verify: bool
) -> QdqProgram:
    """Read a model.

    Args:
        model: The model, or the integer model that was made of it.
        args: Example inputs.
        sums: How sums read layers, as ``simulate(integer_sums=…)``; packages that read their own
            models decide themselves.
        verify: Compare the integers with the model on `args`.
    """
    read = _reader_of(model)
    if read is not None:
        found: QdqProgram = read(model, args)
        return found
    return _Simulated(model, args, sums, verify)


def _reader_of(model: Any) -> Any:
    """The reader of another package's model; None for simulated models."""
    held = list(model.modules()) if isinstance(model, nn.Module) else []
    readers = PROGRAM_READERS.items()
    return next((r for kind, r in readers if any(isinstance(m, kind) for m in held)), None)


def inputs_of(program: Program, args: Any) -> Iterator[tuple[str, Any]]:
    """Inputs of the program and their values in a call, without gradients.

    A sparse tensor ``x`` gives its features, as ``x``, and its coordinates, as ``x.indices``.
    """
    for name, value in bound(program, args):
        if is_sparse_tensor(value):
            yield name, value.features.detach()
            yield f"{name}.indices", value.indices
        else:
            yield name, value.detach() if isinstance(value, Tensor) else value


def example_of(model: Any, args: Any) -> Any:
    """Example inputs, or a loader's batch, as arguments of the model (`as_example`).

    For another package's model a dict or a tensor is returned unchanged: that package reads it.
    """
    if not isinstance(args, tuple | list) and _reader_of(model) is not None:
        return args
    return model.inputs_of(args) if isinstance(model, IntegerModel) else as_example(model, args)


Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """A program and one or two runs of it."""

    program: Program
    # Tensor to its shape; of several tensors, a tuple of shapes, and ``name[i]`` to each.
    shapes: Mapping[str, Any]
    # Sizes, numbers and the like by name.
    hosts: Mapping[str, Any]
    # Type of each tensor as the program holds it.
    dtypes: Mapping[str, torch.dtype]
    # Shapes of a second run with twice the batch; with a name for a size that depends on the number
    # of voxels. Empty where all sizes are constants.
    wider: Mapping[str, Any]
    # Hosts of that run, without those that the file computes from its inputs' values and free
    # sizes.
    wider_hosts: Mapping[str, Any]
    # Tensors that a call takes, in order, to the parameters that they go to.
    inputs: Mapping[str, str]
    # Numbers among the arguments, which are constants of the file.
    fixed: Mapping[str, Any]
    # Accumulators that a sum reads to their largest absolute value in the run.
    ranges: Mapping[str, float]
    # Ranges that sums' operands have in the program itself (`IntegerModel`).
    sum_ranges: Mapping[str, float]
    # Source of the program, to run it again.
    integer: QdqProgram
    # Of sparse tensors among the inputs, by their coordinates' name: grid and frames. Their
    # coordinates are the input ``<features>.indices``.
    grids: Mapping[str, tuple[Shape, int]] = field(default_factory=dict)
    # Whether there are voxels among its tensors.
    sparse: bool = False

    def form(self, name: str) -> Any:
        """`Integers`, or ``"int32"`` or ``"float"``."""
        return self.program.values[name].form

    @property
    def free(self) -> bool:
        """Whether the batch may vary."""
        return bool(self.wider)

    def dtype(self, name: str) -> Any:
        """Torch type of the tensor in the file: float32 for quantized values."""
        values = self.program.values
        form = values.get(name) or values.get(tuple_of(name))
        if form is not None and form.form not in ("float", "number"):
            return torch.float32
        return self.dtypes.get(name, torch.float32)

    def named(self, name: str) -> tuple[int | str, ...]:
        """Shape, with names for the sizes that follow the batch."""
        return tuple(
            m if isinstance(m, str) else n if n == m else "batch" if axis == 0 else f"{name}_{axis}"
            for axis, (n, m) in enumerate(zip(*self._runs(name), strict=True))
        )

    def _runs(self, name: str) -> tuple[Any, Any]:
        """Shape in the first run and in the second one."""
        shape = self.shapes[name]
        return shape, self.wider.get(name, shape)

    def target(self, path: str, name: str, source: str | None = None) -> list[int]:
        """Shape argument of a Reshape to the shape of `name`: −1 for the free size.

        0, the size of the same axis of the input, for sizes of `source`, if several are free.
        """
        sizes = [-1 if isinstance(n, str) else n for n in self.named(name)]
        own = [] if source is None else list(zip(*self._runs(source), strict=True))
        for axis, pair in enumerate(zip(*self._runs(name), strict=True)):
            if sizes.count(-1) > 1 and sizes[axis] == -1 and own[axis : axis + 1] == [pair]:
                sizes[axis] = 0
        if sizes.count(-1) > 1:
            raise QdqError(
                f"{path or 'the model'}: {sizes.count(-1)} sizes of a reshaped "
                "tensor follow the batch or values of a frame; expected one. Give the others as "
                "numbers, and where they follow the batch export with dynamic_batch=False"
            )
        return sizes

    def varies(self, value: Any) -> bool:
        """Whether a size or number among arguments is computed from the file's inputs."""
        if not isinstance(value, Ref) or value.name not in self.hosts:
            return False
        return value.name not in self.wider_hosts

    def counts(self, step: Step) -> bool:
        """Whether a number among a step's arguments is computed from the file's inputs."""
        return any(self.varies(Ref(name)) for name in step.inputs)

    def constants(
        self, path: str, values: Any, *, sizes: bool = False, counted: bool = False
    ) -> Any:
        """Arguments with every host value of the run; `Ref`s of tensors stay.

        With `sizes`, the sizes of the result are read from the run, so host values may vary; with
        `counted`, numbers computed from the file's inputs stay `Ref`s.
        """
        if not sizes:
            hosts, wider = self.hosts, self.wider_hosts
            for name in (name for name in names_in(values) if name in hosts):
                if name not in wider:
                    if counted:
                        continue
                    raise QdqError(
                        f"{path or 'the model'}: an argument, {hosts[name]} on "
                        "the example, is computed from the values of a frame, and the file would "
                        "hold it as a constant; give the model a fixed one"
                    )
                if hosts[name] != wider[name]:
                    raise QdqError(
                        f"{path or 'the model'}: an argument follows the batch "
                        f"({hosts[name]}, then {wider[name]}), which the file holds as a "
                        "constant. Export with dynamic_batch=False"
                    )

        def read(ref: Ref) -> Any:
            known = ref.name in self.hosts and not (counted and self.varies(ref))
            return self.hosts[ref.name] if known else ref

        return replaced(values, read)

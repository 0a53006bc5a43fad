"""Steps of a program: one dataclass for each kind, with its computation, its check and its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor, nn

from bevquant_graph import leaves, refilled
from bevquant_int8sim.model._coords import Coords
from bevquant_int8sim.model._float_sparse import FloatSparseConv

Given = tuple[Any, ...]
"""Arguments of a step: tensors, coordinates and constants."""


class Method:
    """Calls the method of its first argument that has this name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.__name__)(*args, **kwargs)


def torch_operator(name: str) -> torch._ops.OpOverload | None:
    """The operator ``<library>.<operator>.<overload>`` that torch knows."""
    library, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    known = getattr(getattr(torch.ops, library, None), packet, None)
    found = getattr(known, overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) and str(found) == name else None


@dataclass(frozen=True)
class Ref:
    """A value in the arguments of a step, by its name."""

    name: str


@dataclass(frozen=True)
class SparseRef:
    """A sparse tensor: its features and its coordinates, by name."""

    features: str
    coords: str


@dataclass(frozen=True, eq=False)
class Step:
    """One operation: the base of all kinds.

    Attributes:
        path: Module that it comes from; of a function, the module whose forward calls it.
        args: Positional arguments; values are `Ref`s, everything else is a constant.
        outputs: Names of the computed values.
        kwargs: Keyword arguments, likewise.
        reason: Reason of a computation in float; empty for all other steps.
        on_cpu: Whether hb_mapper must not quantize the step, in programs for its files.
        op: Name of the kind, in tables and messages.
        reads: Fewest and most positional arguments; None if the called function decides.
        operands: Number of leading arguments that must be values.
        makes: Number of outputs.
        named: Whether settings are named arguments.
        foreign: Whether it calls code with messages of its own, which do not get the path in front.
        computes: Whether `cost` counts its values.
    """

    path: str
    args: tuple[Any, ...]
    outputs: Annotated[tuple[str, ...], Meta(min_length=1)]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    on_cpu: bool = False

    op: ClassVar[str]
    reads: ClassVar[tuple[int, int] | None] = None
    operands: ClassVar[int] = 1
    makes: ClassVar[int] = 1
    named: ClassVar[bool] = False
    foreign: ClassVar[bool] = False
    computes: ClassVar[bool] = True

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The outputs.

        Args:
            args: Positional arguments, with values in place of `Ref`s.
            kwargs: Named arguments, likewise.
            backend: Kernels to run on, see `int8_sparse_conv`.
        """
        raise NotImplementedError

    def execute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The outputs, see `run`.

        Raises:
            ValueError: An operand does not fit, an accumulator overflows, NaN is to be quantized;
                the message names the step's module.
        """
        try:
            return self.run(args, kwargs, backend)
        except (ValueError, TypeError) as error:
            # Errors of torch's or the author's code are theirs; others begin with the module.
            if self.foreign or str(error).startswith(self.where):
                raise
            raise type(error)(f"{self.where}: {error}") from error

    def check(self) -> None:
        """Check that a step of a file can run: its operands, tensors and settings.

        Raises:
            ValueError: The first thing that does not fit; the caller names the module.
        """
        if self.reads is not None:
            low, high = self.reads
            if not low <= len(self.args) <= high or (self.kwargs and not self.named):
                raise ValueError(
                    f"{self.op} takes {low} to {high} values, got {len(self.args)} and "
                    f"{len(self.kwargs)} by name"
                )
            if not all(isinstance(value, Ref) for value in self.args[: self.operands]):
                raise ValueError(f"{self.op} takes values, got constants")
            if len(self.outputs) != self.makes:
                raise ValueError(f"{self.op} makes {len(self.outputs)} values")
        for number in numbers_in((self.args, self.kwargs)):
            refuse_wide(number, self.operator or self.op)

    def cost(self, given: Given, made: Given, products: int) -> int:
        """Multiplications; of a step without matrix products, the number of computed values.

        Args:
            given: Its arguments.
            made: Its outputs.
            products: Multiplications of torch's own matrix products in it.
        """
        values = sum(v.numel() for v in made if isinstance(v, Tensor)) if self.computes else 0
        return products or values

    @property
    def where(self) -> str:
        """Its module, for messages."""
        return self.path or "the model"

    @property
    def called(self) -> str:
        """Name of the function, or class of the module, that a call calls; else empty."""
        return ""

    @property
    def target(self) -> Callable[..., Any] | None:
        """The function or module of a call; None for a kind with kernels of its own."""
        return None

    @property
    def label(self) -> str:
        """Its kind, or the name of the function that it calls."""
        return self.called or self.op

    @property
    def clamps(self) -> tuple[bool, float | None]:
        """Whether the stored result includes a ReLU, and its ceiling in units of the form."""
        return False, None

    @property
    def operator(self) -> str:
        """Torch's operator that it calls, as torch's registry names it; else empty."""
        return ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read, each once."""
        return tuple(dict.fromkeys(names_in((self.args, self.kwargs))))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights and the like, by the names of the fields."""
        found: dict[str, Tensor] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                found[name] = value
            elif name == "scales":
                found |= {f"scale{i}": scale for i, scale in enumerate(value)}
        return found

    def on_device(self, device: torch.device | str) -> Step:
        """The step with its tensors on a device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | nn.Module)
        }
        if "scales" in vars(self):
            moved["scales"] = tuple(scale.to(device) for scale in vars(self)["scales"])
        return replace(self, **moved)

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy; operators by name."""
        function = vars(self).get("function")
        by_name = isinstance(function, torch._ops.OpOverload)
        return {**vars(self), **({"function": str(function)} if by_name else {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of `__getstate__`."""
        vars(self).update(state)
        if isinstance(state.get("function"), str):
            vars(self)["function"] = torch_operator(state["function"])


@dataclass(frozen=True, eq=False, kw_only=True)
class Call(Step):
    """A call of a function or a module; the base of three kinds."""

    # Name of the function, or class of the module.
    name: str
    function: Callable[..., Any] | None = None
    # The module, if it calls one.
    module: nn.Module | None = None

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """Call it; several outputs are the members of a list or tuple."""
        function: Any = self.target
        if function is torch.ops.aten.as_strided.default:  # counts in memory, in torch's own order
            args = (args[0].contiguous(), *args[1:])
        result = function(*args, **kwargs)
        if len(self.outputs) == 1:
            return (result,)
        if not isinstance(result, list | tuple) or len(result) != len(self.outputs):
            count, came = len(self.outputs), type(result).__name__
            raise ValueError(f"{self.where}: expected {count} values, its call gives a {came}")
        return tuple(result)

    def check(self) -> None:
        """Check that it calls one thing."""
        if (self.function is None) == (self.module is None):
            raise ValueError(f"{self.op} calls neither one function nor one module")
        super().check()

    @property
    def called(self) -> str:
        """Name of the function, or class of the module."""
        return self.name

    @property
    def target(self) -> Callable[..., Any] | None:
        """The function or module."""
        return self.module if self.function is None else self.function

    @property
    def operator(self) -> str:
        """Torch's operator that it calls, as torch's registry names it; else empty."""
        return self.function.name() if isinstance(self.function, torch._ops.OpOverload) else ""


@dataclass(frozen=True, eq=False, kw_only=True)
class FloatCall(Call):
    """A computation in float."""

    op = "float"
    foreign = True

    def cost(self, given: Given, made: Given, products: int) -> int:
        """Of a sparse convolution pairs · in · out channels."""
        if not isinstance(self.module, FloatSparseConv):
            return super().cost(given, made, products)
        module = self.module
        rulebook, _ = given[1].convolved(module.geometry, module.key, self.path)
        return int(rulebook.num_pairs) * module.weight[0].numel()


@dataclass(frozen=True, eq=False, kw_only=True)
class FloatRelu(FloatCall):
    """A ReLU of floats, clamped at `ceiling` from above."""

    name: str = "relu"
    function: Callable[..., Any] | None = torch.relu
    ceiling: float | None = None

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """min(max(x, 0), ceiling)."""
        made = torch.relu(args[0])
        return (made if self.ceiling is None else made.clamp(max=self.ceiling),)

    @property
    def clamps(self) -> tuple[bool, float | None]:
        """A ReLU with its ceiling."""
        return True, self.ceiling


@dataclass(frozen=True, eq=False, kw_only=True)
class LayoutCall(Call):
    """A layout operator: values stay as they are, integers too."""

    op = "layout"
    computes = False


@dataclass(frozen=True, eq=False, kw_only=True)
class NumberCall(Call):
    """A size, a number or a condition, computed on the CPU."""

    op = "number"
    foreign = True
    computes = False


@dataclass(frozen=True, eq=False, kw_only=True)
class OperatorCall(Step):
    """A call of an operator of torch's registry."""

    function: torch._ops.OpOverload
    # Arguments that read no value, by the names of its schema; `kwargs` has the rest.
    constants: Mapping[str, Any] = field(default_factory=dict)

    op = "operator"
    foreign = True

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """By position where the schema allows it: torch's parser takes numbers as tensors there."""
        operator: Any = self.function
        positional: list[Any] = []
        named = {**kwargs, **self.constants}
        for argument in operator._schema.arguments:
            if argument.kwarg_only or argument.name not in named:
                break
            positional.append(named.pop(argument.name))
        result = operator(*positional, **named)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def check(self) -> None:
        """Check that it calls an operator with plain constants."""
        if not isinstance(self.function, torch._ops.OpOverload):
            raise ValueError("it calls no operator of torch")
        if names_in(self.constants):
            raise ValueError(f"a constant reads {names_in(self.constants)[0]!r}")
        for number in numbers_in(self.constants):
            refuse_wide(number, self.operator)
        super().check()

    @property
    def target(self) -> Callable[..., Any] | None:
        """The operator."""
        return self.function

    @property
    def operator(self) -> str:
        """The operator, as torch's registry names it."""
        return str(self.function.name())

    @property
    def given(self) -> dict[str, Any]:
        """All arguments by name."""
        return {**self.kwargs, **self.constants}


@dataclass(frozen=True, eq=False, kw_only=True)
class Constant(Step):
    """A constant tensor that steps read as a value."""

    value: Tensor

    op = "constant"
    reads = (0, 0)
    computes = False

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The tensor."""
        return (self.value,)


@dataclass(frozen=True, eq=False)
class Coordinates(Step):
    """Coordinates of voxels, of their indices, grid and number of frames."""

    op = "coordinates"
    reads = (3, 3)
    computes = False

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The `Coords`."""
        indices, spatial_shape, batch_size = args
        return (Coords(indices, spatial_shape, batch_size),)


def _leaves(value: Any) -> Iterator[Any]:
    """References and constants of nested arguments, in order."""
    for leaf in leaves(value):
        cut = isinstance(leaf, slice)
        yield from leaves((leaf.start, leaf.stop, leaf.step)) if cut else (leaf,)


def names_in(value: Any) -> list[str]:
    """Names of the values that nested arguments read, in order."""
    found: list[str] = []
    for leaf in _leaves(value):
        if isinstance(leaf, Ref):
            found.append(leaf.name)
        elif isinstance(leaf, SparseRef):
            found += leaf.features, leaf.coords
    return found


def replaced(value: Any, read: Any) -> Any:
    """`value` with every `Ref` and `SparseRef` replaced by the result of ``read``."""
    # Not by `map_leaves`: it asks for a mapping first, which takes longer, and each step runs this.
    if isinstance(value, Ref | SparseRef):
        return read(value)
    if isinstance(value, Mapping):
        return {key: replaced(item, read) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return refilled(type(value), [replaced(item, read) for item in value])
    if isinstance(value, slice):
        return slice(*replaced((value.start, value.stop, value.step), read))
    return value


def numbers_in(value: Any) -> Iterator[int | float]:
    """Numbers among nested constants."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, int | float))


def refuse_wide(number: int | float, operation: str) -> None:
    """Refuse an integer of more than 32 bits, except for the end of an open slice."""
    if isinstance(number, int) and not -(2**31) <= number < 2**31 and abs(number) != 2**63 - 1:
        raise ValueError(f"{number} among the arguments of {operation}")

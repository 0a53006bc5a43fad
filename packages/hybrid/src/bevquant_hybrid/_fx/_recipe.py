"""The calls that replace a function: new modules, their methods, functions of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from bevquant_hybrid.nn._functions import FloatFunctional


@dataclass(eq=False)
class Step:
    """One call: of a new module, of a method of one, of a function, or of a tensor's method."""

    operation: str  # part of the new module's name; "" where there is no module
    module: nn.Module | None  # the new module, or None
    target: Any  # of a module with methods, the method; else the function or the tensor's method
    args: tuple[Any, ...]  # nodes, numbers and earlier steps
    kwargs: dict[str, Any] = field(default_factory=dict)  # the same by name


class Recipe:
    """The steps that a function becomes.

    Args:
        numbers: Nodes that hold numbers.
        parameter: Looks up the parameter or buffer that a get_attr node reads.

    Attributes:
        hybrid: When a hybrid model has these steps: ``"always"``, ``"on the BPU"`` where its
            mapper runs them all there, or ``"never"``.
    """

    hybrid: str
    result: Any  # the last step; a node where the function is the identity

    def __init__(self, numbers: set[Node], parameter: Callable[[Node], Any]) -> None:
        self.numbers, self.parameter = numbers, parameter
        self.steps: list[Step] = []

    def add(self, step: Step) -> Step:
        """Append a step."""
        self.steps.append(step)
        return step

    def arithmetic(self, method: str, *args: Any, **kwargs: Any) -> Step:
        """Call a method of a new FloatFunctional."""
        return self.add(Step(method, FloatFunctional(), method, args, kwargs))

    def module(self, operation: str, module: nn.Module, *args: Any) -> Step:
        """Call a new module."""
        return self.add(Step(operation, module, None, args))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Step:
        """Call a function, or a method of a tensor."""
        return self.add(Step("", None, target, args, kwargs))

    def is_tensor(self, value: Any) -> bool:
        """Whether an argument is a tensor of the graph."""
        return isinstance(value, Step | Node) and value not in self.numbers

    def is_number(self, value: Any) -> bool:
        """Whether an argument is a number, known now or as traced."""
        return isinstance(value, int | float) or (isinstance(value, Node) and value in self.numbers)

    def scaled(self, x: Any, factor: Any) -> Any:
        """X times a number."""
        return x if factor in (1, 1.0) else self.arithmetic("mul_scalar", x, factor)

    def inverse(self, number: Any) -> Any:
        """1 / a number; None where that is 0."""
        if isinstance(number, Node):
            return self.call(operator.truediv, 1.0, number)
        return 1 / number if number else None

    def negated(self, number: Any) -> Any:
        """The negative of a number."""
        return self.call(operator.neg, number) if isinstance(number, Node) else -number

    def constant(self, value: Any, name: str) -> Tensor | None:
        """The parameter that an argument is; None where there is none."""
        if value is None:
            return None
        if isinstance(value, Node) and value.op == "get_attr":
            found = self.parameter(value)
            if isinstance(found, Tensor):
                return found
        raise LookupError(f"its {name} is computed, not a parameter of the model")

"""Guards: the conditions on sizes under which a captured graph is the model.

A forward that asks about a size (``if x.shape[2] % 2:``, ``len(points) > 100``, a number of
``float(x.numel())``) goes one way with the example, and torch notes the condition. `Guard` is that
condition in terms of inputs and axes, with the line that asks. It has a form in JSON, so programs
and files keep it.
`check_guards` evaluates conditions with a parser of its own: arithmetic, comparisons and a few
functions of numbers, nothing else, as a file may come from anywhere.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

Sizes = Mapping[str, Sequence[int] | int]
_LONGEST = 20_000  # characters of a condition
_HIGHEST = 64  # exponent


@dataclass(frozen=True)
class Guard:
    """A condition on the sizes of inputs; a graph, program or file is right where it holds.

    Attributes:
        condition: In Python's notation, as ``s0 % 2 == 0``; ``s0`` is the first of `sizes`.
        sizes: Input and axis of each size; the axis is None for an input that is a number.
        file: Source file of the forward that asks; "" where unknown.
        line: The line there.

    Example:
        >>> guard = Guard("s0 % 2 == 0", (("x", 2),), "net.py", 9)
        >>> str(guard), guard.holds({"x": (1, 3, 8, 8)}), guard.holds({"x": (1, 3, 7, 8)})
        ('x.shape[2] % 2 == 0 (net.py:9)', True, False)
        >>> Guard.from_json(guard.to_json()) == guard
        True
    """

    condition: str
    sizes: tuple[tuple[str, int | None], ...]
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return self.text + (f" ({self.place})" if self.place else "")

    @property
    def text(self) -> str:
        """The condition in terms of inputs and axes."""
        names = [n if axis is None else f"{n}.shape[{axis}]" for n, axis in self.sizes]
        return re.sub(r"\bs(\d+)\b", lambda found: names[int(found[1])], self.condition)

    @property
    def place(self) -> str:
        """``file:line`` of the forward; "" where unknown."""
        return f"{self.file}:{self.line}" if self.file else ""

    @cached_property
    def fixes(self) -> int | None:
        """The one value that the guard leaves to its one size; None of other conditions."""
        found = re.fullmatch(r"s0 == (\d+)", self.condition)
        return int(found[1]) if found and len(self.sizes) == 1 else None

    @property
    def agrees(self) -> bool:
        """Whether it fixes a size, or requires two equal ones: layers refuse others themselves."""
        return self.fixes is not None or self.condition == "s0 == s1"

    def holds(self, sizes: Sizes) -> bool:
        """Whether inputs of these sizes fulfil it; guards on other inputs hold.

        Args:
            sizes: Input to its shape, or to the number that it is.
        """
        values: list[Any] = []
        for name, axis in self.sizes:
            if name not in sizes:
                return True
            given: Any = sizes[name]
            if axis is not None and axis >= len(given):
                return False
            values.append(given if axis is None else given[axis])
        try:
            return bool(_Evaluation(values).visit(parsed(self.condition)))
        except (ArithmeticError, ValueError):  # such as a division by a size of 0
            return False

    def renamed(self, names: Mapping[str, str]) -> Guard:
        """The guard with other names of inputs."""
        return replace(self, sizes=tuple((names.get(n, n), axis) for n, axis in self.sizes))

    def where(self, known: Mapping[tuple[str, int | None], int]) -> Guard | None:
        """The guard on the remaining sizes where some are known; None where all are.

        Args:
            known: Input and axis to the size.

        Example:
            >>> guard = Guard("s0 * s1 <= 100", (("x", 0), ("x", 2)))
            >>> str(guard.where({("x", 2): 8}))
            'x.shape[0] * 8 <= 100'
        """
        others = [place for place in self.sizes if place not in known]
        if not others:
            return None
        texts = [
            str(known[place]) if place in known else f"s{others.index(place)}"
            for place in self.sizes
        ]
        text = re.sub(r"\bs(\d+)\b", lambda found: texts[int(found[1])], self.condition)
        return replace(self, condition=text, sizes=tuple(others))

    def to_json(self) -> dict[str, Any]:
        """The guard in terms of JSON."""
        sizes = [[name, axis] for name, axis in self.sizes]
        return {
            "condition": self.condition, "sizes": sizes, "file": self.file, "line": self.line,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Guard:
        """Inverse of `to_json`.

        Raises:
            ValueError: Not a guard, or its condition is more than arithmetic on its sizes.
        """
        match data:
            case {
                "condition": str(text),
                "sizes": list(sizes),
                "file": str(file),
                "line": int(line),
            }:
                pairs = tuple(_size(item) for item in sizes)
            case _:
                raise ValueError(f"expected a guard (condition, sizes, file, line), got {data!r}")
        guard = cls(text, pairs, file, line)
        # One evaluation visits every node; sizes of 1 may divide by 0.
        try:
            _Evaluation([1] * len(pairs)).visit(parsed(text))
        except ArithmeticError:
            pass
        return guard


def _size(item: Any) -> tuple[str, int | None]:
    match item:
        # True is an int, too.
        case [str(name), int() | None as axis] if axis is None or (0 <= axis and axis is not True):
            return name, axis
    raise ValueError(f"expected an input and an axis, got {item!r}")


def check_guards(guards: Iterable[Guard], sizes: Sizes, remedy: str) -> None:
    """Refuse inputs of sizes for which the forward takes another branch.

    Args:
        guards: Guards that must hold.
        sizes: Input to its shape, or to the number that it is.
        remedy: What to do, for the message.

    Raises:
        ValueError: A guard does not hold; the message names condition, input, file and line.

    Example:
        >>> check_guards([Guard("s0 > 9", (("x", 0),))], {"x": (8,)}, "give more")
        Traceback (most recent call last):
        ...
        ValueError: input x: expected x.shape[0] > 9, as the forward asks, got shape (8,); give more
    """
    for guard in guards:
        if guard.holds(sizes):
            continue
        names = list(dict.fromkeys(name for name, _ in guard.sizes))
        place = f" in {guard.place}" if guard.place else ""
        if guard.fixes is not None and guard.sizes[0][1] is not None:
            wanted = f"size {guard.fixes} in axis {guard.sizes[0][1]}, which the forward fixes"
        else:
            wanted = f"{guard.text}, as the forward asks"
        got = " and ".join(_got(sizes[name]) for name in names)
        raise ValueError(
            f"input{'s' * (len(names) > 1)} {' and '.join(names)}: expected {wanted}{place}, got "
            f"{got}; {remedy}"
        )


def _got(given: Sequence[int] | int) -> str:
    return f"{given}" if isinstance(given, int) else f"shape {tuple(given)}"


@lru_cache(maxsize=1 << 12)
def parsed(condition: str) -> ast.expr:
    """The condition as a tree."""
    if len(condition) > _LONGEST:
        raise ValueError(f"a condition of {len(condition)} characters; expected {_LONGEST} at most")
    try:
        # Deep nesting exhausts the parser's stack or memory.
        return ast.parse(condition, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"condition {condition[:80]!r}: {error}") from error


def _power(base: Any, exponent: Any) -> Any:
    # A file may hold 9**9**9, which takes forever.
    if abs(exponent) > _HIGHEST:
        raise ValueError(f"an exponent of {exponent}")
    return base**exponent


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Pow: _power,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (min, max, abs, int, float, round)},
    **{f"math.{function.__name__}": function for function in (
        math.sqrt, math.floor, math.ceil, math.trunc, math.log, math.log2, math.exp, math.sin,
        math.cos, math.tan, math.atan,
    )},
}  # fmt: skip


class _Evaluation(ast.NodeVisitor):
    """Evaluates arithmetic on sizes; every other node of a tree is refused."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        self._sizes = {f"s{place}": size for place, size in enumerate(sizes)}

    def generic_visit(self, node: ast.AST) -> Any:
        raise ValueError(f"a condition holds {type(node).__name__}; expected arithmetic on sizes")

    def visit_Constant(self, node: ast.Constant) -> Any:
        # No text: "x" * 10**9 fills the memory.
        if type(node.value) not in (int, float, bool):
            return self.generic_visit(node)
        return node.value

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in self._sizes:
            raise ValueError(f"a condition names {node.id!r}; expected {', '.join(self._sizes)}")
        return self._sizes[node.id]

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        return self._function(node.op)(self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        return self._function(node.op)(self.visit(node.operand))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        values = [bool(self.visit(value)) for value in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)

    def visit_Compare(self, node: ast.Compare) -> Any:
        # Everything is visited, also behind a false comparison: `from_json` relies on it.
        values = [self.visit(value) for value in (node.left, *node.comparators)]
        pairs = zip(node.ops, values[:-1], values[1:], strict=True)
        return all([self._function(op)(one, other) for op, one, other in pairs])

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        test, *values = map(self.visit, (node.test, node.body, node.orelse))
        return values[0] if test else values[1]

    def visit_Call(self, node: ast.Call) -> Any:
        function = _FUNCTIONS.get(ast.unparse(node.func))
        if function is None or node.keywords:
            return self.generic_visit(node)
        return function(*map(self.visit, node.args))

    def _function(self, node: ast.AST) -> Callable[..., Any]:
        found = _OPERATORS.get(type(node))
        return self.generic_visit(node) if found is None else found

"""The small language of the limits: comparisons between quantities, numbers and sets.

``1 <= kernel_size <= 7``, ``dilation in {1, 2, 4}``, ``padding <= kernel_size / stride``. A
quantity of several numbers, such as a kernel size, is compared number by number.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ._call import Value

__all__ = ["Expression"]

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda value, choices: value in choices,
}


@dataclass(frozen=True)
class Expression:
    """A parsed comparison.

    >>> within = Expression.parse("1 <= kernel_size <= 7")
    >>> within.names
    ('kernel_size',)
    >>> within.holds_for_all({"kernel_size": (3, 7)}), within.holds_for_all({"kernel_size": 8})
    (True, False)
    """

    text: str
    names: tuple[str, ...]
    _tree: ast.Compare

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Parse ``text``; a ``ValueError`` names what the language does not have."""
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"limit {text!r} is no expression: {error.msg}") from error
        if not isinstance(tree, ast.Compare):
            raise ValueError(f"limit {text!r} is no comparison, such as 'kernel_size <= 7'")
        names: dict[str, None] = {}
        for comparison in tree.ops:
            if type(comparison) not in _COMPARISONS:
                raise ValueError(f"limit {text!r}: {type(comparison).__name__} is not allowed")
        for term in (tree.left, *tree.comparators):
            _check(term, text, names)
        return cls(text, tuple(names), tree)

    def holds_for_all(self, quantities: Mapping[str, Value]) -> bool:
        """Whether the comparison is true of every number of every quantity."""
        return all(self._outcomes(quantities))

    def holds_for_any(self, quantities: Mapping[str, Value]) -> bool:
        """Whether it is true of at least one."""
        return any(self._outcomes(quantities))

    def _outcomes(self, quantities: Mapping[str, Value]) -> list[bool]:
        left = _evaluate(self._tree.left, quantities)
        outcomes: list[bool] = []
        for comparison, term in zip(self._tree.ops, self._tree.comparators, strict=True):
            right = _evaluate(term, quantities)
            outcomes += _pairwise(_COMPARISONS[type(comparison)], left, right, self.text)
            left = right
        return outcomes


def _check(term: ast.expr, text: str, names: dict[str, None]) -> None:
    if isinstance(term, ast.Name):
        names[term.id] = None
    elif isinstance(term, ast.BinOp) and type(term.op) in _ARITHMETIC:
        _check(term.left, text, names)
        _check(term.right, text, names)
    elif isinstance(term, ast.Set) and all(isinstance(e, ast.Constant) for e in term.elts):
        return
    elif not isinstance(term, ast.Constant):
        raise ValueError(f"limit {text!r}: {ast.unparse(term)!r} is not allowed")


def _evaluate(term: ast.expr, quantities: Mapping[str, Value]) -> Any:
    if isinstance(term, ast.Name):
        return quantities[term.id]
    if isinstance(term, ast.Constant):
        return term.value
    if isinstance(term, ast.Set):
        return frozenset(e.value for e in term.elts if isinstance(e, ast.Constant))
    if isinstance(term, ast.BinOp):
        left, right = (_evaluate(side, quantities) for side in (term.left, term.right))
        values = _pairwise(_ARITHMETIC[type(term.op)], left, right, ast.unparse(term))
        return tuple(values) if isinstance(left, tuple) or isinstance(right, tuple) else values[0]
    raise TypeError(f"cannot evaluate {ast.dump(term)}")  # parse() lets nothing else in


def _pairwise(function: Callable[[Any, Any], Any], left: Any, right: Any, text: str) -> list[Any]:
    """``function`` of each number of ``left`` with its partner of ``right``; one fits all."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        if len(left) != len(right):
            raise ValueError(f"{text!r}: {left} and {right} differ in length")
        pairs = list(zip(left, right, strict=True))
    elif isinstance(left, tuple):
        pairs = [(value, right) for value in left]
    elif isinstance(right, tuple):
        pairs = [(left, value) for value in right]
    else:
        pairs = [(left, right)]
    try:
        return [function(*pair) for pair in pairs]
    except TypeError as error:
        raise ValueError(f"{text!r}: cannot be computed of {left!r} and {right!r}") from error

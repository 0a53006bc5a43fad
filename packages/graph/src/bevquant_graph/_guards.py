"""Forwards that treat only empty inputs differently from their base class.

Examples are mmcv's and maskrcnn-benchmark's wrappers of torch's layers, whose old versions took no
empty batches: ``if x.numel() == 0: return empty``, then ``return super().forward(x)``. The source
is followed for an input with elements. On every path its result must be the next class's forward of
the same arguments.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

_COUNTS = ("numel", "nelement", "__len__")
_SHAPES = ("shape", "size")
# What a condition may read of the input: nothing here changes it.
_READ = frozenset(
    (*_COUNTS, *_SHAPES, "dim", "ndim", "dtype", "device", "is_cuda", "requires_grad")
)


@cache
def only_guards(cls: type) -> bool:
    """Whether the forward in a class's own body passes inputs with elements to the next class.

    Example:
        >>> from torch import nn
        >>> class Doubles(nn.ReLU):
        ...     def forward(self, x): return 2 * super().forward(x)
        >>> only_guards(Doubles)
        False
    """
    function = vars(cls).get("forward")
    if not inspect.isfunction(function):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return False
    (made,) = tree.body
    if not isinstance(made, ast.FunctionDef) or made.decorator_list:
        return False
    names = inspect.getfullargspec(function)
    if len(names.args) < 2 or names.varargs or names.varkw or names.kwonlyargs:
        return False
    return _Path(cls.__name__, names.args).ends_in_base(made.body)


class _Path:
    """The paths through a forward for an input with elements."""

    def __init__(self, cls: str, names: list[str]) -> None:
        self.cls, self.owner, self.value, self.names = cls, names[0], names[1], names[1:]

    def ends_in_base(self, body: list[ast.stmt]) -> bool:
        """Whether every path ends with the next class's forward of the same arguments."""
        for place, step in enumerate(body):
            rest = body[place + 1 :]
            if isinstance(step, ast.If):
                if not self.only_looks(step.test):
                    return False
                # Unknown: both branches must end in the base's forward.
                known = self.truth(step.test)
                taken = [step.body] if known else [step.orelse]
                taken = [step.body, step.orelse] if known is None else taken
                return all(self.ends_in_base([*branch, *rest]) for branch in taken)
            if isinstance(step, ast.Return):
                return self.is_base_call(step.value)
            if isinstance(step, ast.Assign) and self.is_base_call(step.value):
                made, end = step.targets[0], rest[0] if rest else None
                return (
                    isinstance(made, ast.Name)
                    and isinstance(end, ast.Return)
                    and isinstance(end.value, ast.Name)
                    and end.value.id == made.id
                )
            if not isinstance(step, ast.Pass) and not (
                isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant)
            ):
                return False
        return False

    def is_base_call(self, value: ast.expr | None) -> bool:
        """Whether it is ``super().forward`` of all arguments as they came."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return False
        base = value.func.value
        if value.func.attr != "forward" or not isinstance(base, ast.Call) or base.keywords:
            return False
        if not isinstance(base.func, ast.Name) or base.func.id != "super":
            return False
        of = [item.id for item in base.args if isinstance(item, ast.Name)]
        if base.args and of != [self.cls, self.owner]:
            return False
        given = [item.id if isinstance(item, ast.Name) else "" for item in value.args]
        named = {
            item.arg: item.value.id if isinstance(item.value, ast.Name) else ""
            for item in value.keywords
        }
        left = self.names[len(given) :]
        return given == self.names[: len(given)] and named == dict(zip(left, left, strict=True))

    def only_looks(self, test: ast.expr) -> bool:
        """Whether a condition reads size and type of the input alone, and binds nothing."""
        looked = {
            id(node.value)
            for node in ast.walk(test)
            if isinstance(node, ast.Attribute) and node.attr in _READ
        }
        lengths: list[Any] = [node for node in ast.walk(test) if self.is_length(node)]
        looked |= {id(node.args[0]) for node in lengths}
        return not any(
            isinstance(node, ast.NamedExpr | ast.Await | ast.Yield)
            or (isinstance(node, ast.Name) and node.id in self.names and id(node) not in looked)
            for node in ast.walk(test)
        )

    def is_length(self, node: Any) -> bool:
        """Whether it is ``len(input)``."""
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return (
            named and node.func.id == "len" and len(node.args) == 1 and self.is_input(node.args[0])
        )

    def is_input(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.value

    def truth(self, test: ast.expr) -> bool | None:
        """Value of a condition for an input with elements; None if unknown."""
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            found = [self.truth(value) for value in test.values]
            decides = isinstance(test.op, ast.Or)
            if decides in found:
                return decides
            return None if None in found else not decides
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self.compared(test.left, test.ops[0], test.comparators[0])
        return True if self.counts(test) else None

    def compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        """Value of a comparison of a count, which is at least 1, with 0 or 1."""
        if self.counts(right) and not self.counts(left):
            turned = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
            return self.compared(right, turned.get(type(op), type(op))(), left)
        if not self.counts(left) or not isinstance(right, ast.Constant):
            return None
        bound = right.value
        if type(bound) is not int:
            return None
        if bound < 1:
            known = {ast.Eq: False, ast.NotEq: True, ast.Gt: True, ast.LtE: False}
            known |= {ast.GtE: True, ast.Lt: False}
            return known.get(type(op))
        return {ast.GtE: True, ast.Lt: False}.get(type(op)) if bound == 1 else None

    def counts(self, node: ast.expr) -> bool:
        """Whether it is the number of the input's elements, or a size of one of its axes."""
        if self.is_length(node):
            return True
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Slice):
                return False
            node = node.value
            if isinstance(node, ast.Attribute) and node.attr == "shape":
                return self.is_input(node.value)
            return self.calls(node, ("size",), 0)
        return self.calls(node, _COUNTS, 0) or self.calls(node, ("size",), 1)

    def calls(self, node: ast.expr, names: tuple[str, ...], count: int) -> bool:
        """Whether it is a method of the input of one of these names, with so many arguments."""
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in names
            and self.is_input(node.func.value)
            and len(node.args) == count
            and not node.keywords
        )

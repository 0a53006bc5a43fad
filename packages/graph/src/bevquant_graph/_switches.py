"""Branches of a forward around a line, read from its source.

`if self.conf.depth_confidence > 0:` around a line means that it does not run for other settings.
Lines in a branch, and lines downstream of one that returns, do not run for every frame.
"""

from __future__ import annotations

import ast
import copy
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

_DEPTH = 4  # assignments followed: stop = self.early; stop = stop and …
_LONGEST = 40  # nodes of a term that is filled in


def switch_of(file: str, line: int) -> str:
    """Conditions on attributes of ``self`` under which a line runs; "" where there are none."""
    function = _function(file, line)
    if function is None:
        return ""
    found = dict.fromkeys(
        ast.unparse(term)
        for test in _tests(function, line)
        for term in _parts(_resolved(test, function, line))
        if _of_attributes(term)
    )
    return " and ".join(found)


@lru_cache(maxsize=1 << 14)
def branch_of(file: str, line: int, other: int, name: str = "") -> str:
    """The branch of the question in `line` that another line of the same file is in.

    "" for lines that run under each answer, as those that call a member `name` that both branches
    read, and for lines of other functions.
    """
    function = _function(file, line)
    if function is None or not _holds(function, other):
        return ""
    asks = [n for n in ast.walk(function) if isinstance(n, ast.If | ast.While | ast.IfExp)]
    own = [n for n in asks if _holds(n.test, line)]  # several in one line: of all
    for ask, part in product(own, ("body", "orelse")):
        inside = getattr(ask, part)
        if any(_holds(n, other) for n in (inside if isinstance(inside, list) else [inside])):
            # Of one line, a question about sizes makes no nodes itself.
            if not _holds(ask.test, other) or any(map(_is_size, ast.walk(ask.test))):
                return "" if _in_both(ask, name) else part
    within = (n for ask in own for n in ast.walk(ask))
    ends = any(isinstance(n, ast.Return | ast.Break | ast.Continue) for n in within)
    return "downstream" if ends and other > line else ""


@lru_cache(maxsize=4096)
def size_questions(file: str, line: int) -> tuple[int, ...]:
    """Lines of a line's function that ask about sizes: ``if x.shape[2] % 2``, ``if len(x) > 1``.

    Without those about empty tensors, as ``if x.numel() == 0``, which have no values to be wrong.
    """
    function = _function(file, line)
    tests = () if function is None else ast.walk(function)
    asks = [n for n in tests if isinstance(n, ast.If | ast.While | ast.IfExp)]
    return tuple(
        ask.lineno
        for ask in asks
        if any(map(_is_size, ast.walk(ask.test))) and not _is_emptiness(ask.test)
    )


def _is_emptiness(test: ast.expr) -> bool:
    """Whether a question is about empty tensors alone: ``x.numel() == 0 and …``, ``not len(x)``."""
    if isinstance(test, ast.BoolOp):
        none = isinstance(test.op, ast.And) and any(map(_is_none, test.values))
        return none or all(map(_is_emptiness, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_emptiness(test.operand)
    if isinstance(test, ast.Compare):
        whole = not isinstance(test.left, ast.BinOp)
        return whole and ast.unparse(test.comparators[0]) == "0"
    return isinstance(test, ast.Call | ast.Subscript | ast.Attribute)


def _is_none(test: ast.expr) -> bool:
    """Whether a condition holds for empty tensors alone."""
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.Eq) and _is_emptiness(test)
    bare = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return bare and _is_size_of(test.operand)  # type: ignore[attr-defined]


def _is_size_of(value: ast.expr) -> bool:
    return _is_emptiness(value) and any(map(_is_size, ast.walk(value)))


def _in_both(ask: ast.If | ast.While | ast.IfExp, name: str) -> bool:
    parts = [ask.body, ask.orelse]
    nodes = [part if isinstance(part, list) else [part] for part in parts]
    return all(
        any(isinstance(n, ast.Attribute) and n.attr == name for top in part for n in ast.walk(top))
        for part in nodes
    )


def _is_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("shape", "size", "numel", "nelement")
    return isinstance(node, ast.Name) and node.id == "len"


def _function(file: str, line: int) -> ast.FunctionDef | None:
    return next((f for f in reversed(_functions(file)) if _holds(f, line)), None)


@lru_cache(maxsize=64)
def _functions(file: str) -> tuple[ast.FunctionDef, ...]:
    """Functions of a file, each behind the one around it; none where it cannot be read."""
    try:
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return ()
    # ast.walk is breadth first.
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _holds(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _tests(function: ast.FunctionDef, line: int) -> Iterator[ast.expr]:
    """Tests of the branches that a line is in, and its own up to the question."""
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.While) and _holds(node, line):
            if any(_holds(inner, line) for inner in node.orelse):
                yield ast.UnaryOp(ast.Not(), node.test)
            else:
                yield node.test


def _parts(test: ast.expr) -> list[ast.expr]:
    joined = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
    return [p for value in test.values for p in _parts(value)] if joined else [test]  # type: ignore[attr-defined]


def _resolved(term: ast.expr, function: ast.FunctionDef, line: int) -> ast.expr:
    """The term with the values that local names were last given upstream of the line."""
    given: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and node.lineno < line and len(node.targets) == 1:
            if isinstance(node.targets[0], ast.Name) and len([*ast.walk(node.value)]) <= _LONGEST:
                given[node.targets[0].id] = node.value

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            # Each position needs nodes of its own.
            return copy.deepcopy(given.get(node.id, node))

    term = copy.deepcopy(term)
    for _ in range(_DEPTH):
        term = Fill().visit(term)
    return term


def _of_attributes(term: ast.expr) -> bool:
    """Whether a term reads attributes of self and no other name, and calls nothing."""
    names = {node.id for node in ast.walk(term) if isinstance(node, ast.Name)}
    computes = any(isinstance(node, ast.Call | ast.Subscript) for node in ast.walk(term))
    return names == {"self"} and not computes

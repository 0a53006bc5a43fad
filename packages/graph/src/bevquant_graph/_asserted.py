"""The author's own checks of values: ``assert (mask.sum(1) > 0).all()``, ``if bad.any(): raise``.

The result of a forward does not depend on them, so the graph does not hold them.
"""

from __future__ import annotations

import ast
import dis
import linecache
import re
from functools import lru_cache
from types import FrameType


def passing(frame: FrameType | None, *, prints: bool = False) -> bool | None:
    """The answer with which a check passes, where a frame asks for the truth of its condition.

    Checks are asserts, and an ``if`` without an else that always raises, outside of ``try`` blocks,
    whose result may depend on them. In ``a and b``, ``a or b`` and ``not a`` each part has an
    answer.

    Args:
        frame: It runs the instruction that asks, or is torch's way from there.
        prints: Include an ``if`` without an else that only prints, warns or logs.

    Returns:
        None where the instruction is no question of a check, or the source is unknown.

    Example:
        >>> import sys
        >>> class Asked:
        ...     def __bool__(self):
        ...         self.answer = passing(sys._getframe(1))
        ...         return False
        >>> asked = Asked()
        >>> if asked:
        ...     raise ValueError
        >>> asked.answer
        False
    """
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    if frame is None:
        return None
    code, last = frame.f_code, frame.f_lasti
    places = list(code.co_positions())
    check = _checks(code.co_filename, prints).get(places[last // 2])
    if check is None:
        return None
    # A jump may have the place of another part, or of the whole; the parts' order is kept.
    jumps = [
        jump.offset
        for jump in dis.get_instructions(code)
        if "JUMP" in jump.opname and "IF" in jump.opname and places[jump.offset // 2] in check
    ]
    parts = [answer for answer in check.values() if answer is not None]
    if len(set(parts)) == 1:
        return parts[0]
    passed = sum(offset < last for offset in jumps)
    return parts[passed] if len(jumps) == len(parts) else None


_Place = tuple[int | None, int | None, int | None, int | None]
_Check = dict[_Place, bool | None]


@lru_cache(maxsize=256)
def _checks(file: str, prints: bool) -> dict[_Place, _Check]:
    """The checks of a file by the places in them.

    A check has the passing answer of each part of its condition, in order, and None for the places
    around the parts.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[_Place, _Check] = {}
    caught = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.Try)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in (node for node in ast.walk(tree) if node not in caught):
        check: _Check = {}
        if isinstance(node, ast.Assert):
            check = {**_parts(node.test, True), _place(node): None}
        elif (
            isinstance(node, ast.If)
            and not node.orelse
            and (_ends_in_an_error(node.body) or (prints and all(map(_prints, node.body))))
        ):
            check = {**_parts(node.test, False), _place(node): None}
        found |= dict.fromkeys(check, check)
    return found


def _ends_in_an_error(body: list[ast.stmt]) -> bool:
    inside = (node for statement in body for node in ast.walk(statement))
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in inside)
    return isinstance(body[-1], ast.Raise) and not leaves


def _prints(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    called = ast.unparse(statement.value.func).lower()
    return bool(re.fullmatch(r"print|warnings\.warn|(\w+\.)*(log|logger|logging)\.\w+", called))


def _parts(test: ast.expr, answer: bool) -> _Check:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return {_place(test): None, **_parts(test.operand, not answer)}
    if isinstance(test, ast.BoolOp):
        inside = {k: a for part in test.values for k, a in _parts(part, answer).items()}
        return {_place(test): None, **inside}
    return {_place(test): answer}


def _place(node: ast.stmt | ast.expr) -> _Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset

"""One-token mutations of Python source: where they are, and what each makes of the text."""

from __future__ import annotations

import ast
import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

_SYMBOLS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|",
    ast.BitXor: "^", ast.MatMult: "@",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    ast.And: "and", ast.Or: "or", ast.Not: "not", ast.USub: "-", ast.Invert: "~",
}  # fmt: skip
_OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "<<": ">>", ">>": "<<",
    "&": "|", "|": "&", "^": "|", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=",
    "!=": "==", "is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or",
    "or": "and", "not": "", "~": "",
}  # fmt: skip
_PAIRS = "min max amin amax minimum maximum argmin argmax floor ceil any all".split()
_NAMES = dict(zip(_PAIRS, [x for a, b in zip(_PAIRS[::2], _PAIRS[1::2], strict=True)
                           for x in (b, a)], strict=True))  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One token of a file replaced by another.

    Attributes:
        path: The file, below the root of the repository.
        start: Offset of the token in the file's bytes.
        old: The token.
        new: What stands there instead.
        line: Number of the line, from 1.
        text: That line without its indentation.
        column: Offset of the token in `text`.
    """

    path: str
    start: int
    old: str
    new: str
    line: int
    text: str
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} → {self.new or '(nothing)'} in {self.text!r}"

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What names it however the rest of the file changes."""
        return self.path, self.text, self.column, self.new

    def is_listed(self, entry: Mapping[str, Any]) -> bool:
        """Whether an entry of ``equivalent.toml`` is about it: one without a column, the line."""
        own = {"file": self.path, "text": self.text, "column": self.column, "new": self.new}
        return all(entry[name] == value for name, value in own.items() if name in entry)

    def rank(self, seed: int) -> bytes:
        """Its place in the order of `seed`, whatever else may be in the sample."""
        return hashlib.blake2b(repr((seed, self.key)).encode(), digest_size=8).digest()

    def apply(self, source: bytes) -> bytes:
        """The mutated file."""
        old = self.old.encode()
        if source[self.start : self.start + len(old)] != old:
            raise ValueError(f"{self}: the file has changed")
        return source[: self.start] + self.new.encode() + source[self.start + len(old) :]


def mutations(root: Path, path: str) -> list[Mutation]:
    """Every mutation of a file that is still Python.

    Left alone: docstrings and other text, annotations, what is raised and a branch that ends there
    (a test of each error's words would be a copy of them), decorators, type aliases, `__all__`, and
    branches for type checkers.
    """
    source = (root / path).read_bytes()
    starts, found = _statements(source), []
    for start, old, new in _tokens(source):
        begin = source.rfind(b"\n", 0, start) + 1
        end = source.find(b"\n", start)
        raw = source[begin : end if end >= 0 else None].decode()
        indent = len(raw) - len(raw.lstrip())
        column = len(source[begin:start].decode()) - indent
        line = source.count(b"\n", 0, start) + 1
        mutation = Mutation(path, start, old, new, line, raw.strip(), column)
        place = bisect_right(starts, start)
        before, after = source[starts[place - 1] : start], source[start + len(old) : starts[place]]
        try:
            ast.parse(before + new.encode() + after)
        except SyntaxError:
            continue
        found.append(mutation)
    return found


def _statements(source: bytes) -> list[int]:
    """Where each statement of the module begins, decorators included, and where the last ends.

    What is Python as a statement is so in the file; to parse each file whole takes five times as
    long.
    """
    lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    first = (
        min(n.lineno for n in (statement, *getattr(statement, "decorator_list", ())))
        for statement in ast.parse(source).body
    )
    return [*sorted({lines[number - 1] for number in first}), len(source)]


def _tokens(source: bytes) -> Iterator[tuple[int, str, str]]:
    lines = [0]
    for piece in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(piece))

    def start_of(node: ast.expr) -> int:
        return lines[node.lineno - 1] + node.col_offset

    def end_of(node: ast.expr) -> int:
        return lines[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def between(first: int, last: int, symbol: str) -> Iterator[tuple[int, str, str]]:
        """The operator between two operands; comments in between hold none."""
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), source[first:last])
        place = re.search(re.escape(symbol).encode().replace(rb"\ ", rb"\s+"), gap)
        if place is not None:
            yield first + place.start(), place[0].decode(), _OTHER[symbol]

    def visit(node: ast.AST) -> Iterator[tuple[int, str, str]]:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if not _is_text(node):
                if type(op) in _SYMBOLS and _SYMBOLS[type(op)] in _OTHER:
                    yield from between(end_of(left), start_of(right), _SYMBOLS[type(op)])
            case ast.AugAssign(target=target, op=op, value=value):
                symbol = _SYMBOLS.get(type(op), "")
                if symbol in _OTHER:
                    yield from between(end_of(target), start_of(value), symbol)
            case ast.Compare(left=left, ops=ops, comparators=others):
                for op, first, last in zip(ops, [left, *others], others, strict=False):
                    yield from between(end_of(first), start_of(last), _SYMBOLS[type(op)])
            case ast.BoolOp(op=op, values=values):
                for first, last in pairwise(values):
                    yield from between(end_of(first), start_of(last), _SYMBOLS[type(op)])
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
                yield from between(start_of(node), start_of(operand), _SYMBOLS[type(node.op)])
            case ast.Constant(value=bool() as value):
                yield start_of(node), str(value), str(not value)
            case ast.Constant(value=int() | float() as value):
                old = source[start_of(node) : end_of(node)].decode()
                yield start_of(node), old, repr(value + 1 if value + 1 != value else value * 2)
            case ast.Call(func=ast.Name(id=name) as called) if name in _NAMES:
                yield start_of(called), name, _NAMES[name]
            case ast.Call(func=ast.Attribute(attr=name) as called) if name in _NAMES:
                yield end_of(called) - len(name), name, _NAMES[name]
        for child in _children(node):
            yield from visit(child)

    yield from visit(ast.parse(source))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    skipped: list[ast.AST | None] = []
    match node:
        case ast.Raise():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If(body=[*body, ast.Raise()]) if _only_names(body):
            skipped = [*body]
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            if name == "__all__" or _is_type(value):
                return
        case ast.AnnAssign(annotation=annotation):
            skipped = [annotation]
        case ast.arg(annotation=annotation):
            skipped = [annotation]
        case ast.FunctionDef(returns=returns, decorator_list=decorators):
            skipped = [returns, *decorators]
        case ast.ClassDef(decorator_list=decorators):
            skipped = [*decorators]
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
            skipped = [kind]
        case ast.Subscript(value=ast.Name(id=name), slice=of) if name in ("tuple", "list", "dict"):
            skipped = [of]
    for child in ast.iter_child_nodes(node):
        if not any(child is other for other in skipped):
            yield child


def _only_names(body: list[ast.stmt]) -> bool:
    """Whether statements do no more than name values: here, words of the error behind them."""
    return all(isinstance(statement, ast.Assign) for statement in body)


def _is_type(value: ast.expr) -> bool:
    """Whether an assignment names a type: a union, or a subscript of something like Callable."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return True
    return isinstance(value, ast.Subscript) and not isinstance(value.slice, ast.Constant)


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operator joins or formats text."""
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )

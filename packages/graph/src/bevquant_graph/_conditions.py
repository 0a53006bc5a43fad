"""The conditions on which torch specialised a graph, as guards of the graph's inputs."""

from __future__ import annotations

import ast
import operator
import re
import sys
import traceback
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx

from ._asserted import passing
from ._constants import OpenRange, squeezed_axes
from ._faults import author_line, is_authors
from ._size_guards import Guard, check_guards, parsed
from ._switches import switch_of
from ._tidy import ANSWER, CHECK, REQUIRE, fixed_number


class Condition(NamedTuple):
    """A condition on symbols of sizes (a sympy expression), and the line that asks.

    The term is None for the line that fixes sizes. `checks`: an error is the other answer.
    """

    term: Any
    file: str
    line: int
    checks: bool = False


@contextmanager
def places_noted(outermost: Container[CodeType]) -> Iterator[list[Condition]]:
    """For the length of the block torch notes the author's line beside every guard.

    Callers of `outermost` are not searched. Yields the conditions on numbers that depend on values
    (rows of a mask); the example answered them, and torch asserts the answers.
    """
    from torch._guards import SLoc  # and sympy
    from torch.fx.experimental.symbolic_shapes import (
        ShapeEnv,
        canonicalize_bool_expr,
        uninteresting_files,
    )

    def noted(_: Any, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:
        author, operators = None, []
        frame: FrameType | None = sys._getframe(1)
        # Called by `answered` below: its caller asks.
        frame = frame.f_back if frame and frame.f_code is answered.__code__ else frame
        asked: FrameType | None = None
        while frame is not None and author is None and frame.f_code not in outermost:
            file = frame.f_code.co_filename
            if asked is None and (file not in uninteresting_files() or _is_typed(frame)):
                ranges = isinstance(frame.f_locals.get("self"), OpenRange)
                asked = None if ranges else frame  # as torch's range: its caller asks
            author = f"{file}:{frame.f_lineno}" if is_authors(file) else None
            if frame.f_code is check_guards.__code__:  # of the program that is captured anew
                author = frame.f_locals["guard"].place or None
            operators.append(_operator(frame))
            frame = frame.f_back
        if asked is not None and framework_loc is None:
            framework_loc = traceback.FrameSummary(
                asked.f_code.co_filename, asked.f_lineno, " ".join(operators), lookup_line=False
            )
        return SLoc(framework_loc, author), ""

    asked: list[Condition] = []
    deferred = ShapeEnv.guard_or_defer_runtime_assert

    def answered(env: Any, term: Any, message: str, fx_node: Any = None) -> bool:
        # torch asserts only the answers that it defers.
        count = env.num_deferred_runtime_asserts
        made: bool = deferred(env, term, message, fx_node)
        if message.startswith(_ANSWERED) and env.num_deferred_runtime_asserts > count:
            place, own = noted(env)[0], canonicalize_bool_expr(term)
            # The symbol of a truth value goes from 0 to 1.
            truth = all(env.var_to_range[s].upper == 1 for s in own.free_symbols)
            found = _asked(own, place, "") if truth else _condition(own, place, agree=False)
            frame: FrameType | None = sys._getframe(1)
            while frame and not (frame.f_code in outermost or is_authors(frame.f_code.co_filename)):
                frame = frame.f_back
            checks = passing(frame) is not None
            asked.extend(() if found is None else (found._replace(checks=checks),))
        return made

    with (
        mock.patch.object(ShapeEnv, "_get_stack_summary", noted),
        mock.patch.object(ShapeEnv, "guard_or_defer_runtime_assert", answered),
    ):
        yield asked


_ANSWERED = "propagate_real_tensors"  # other asserts are operators' own checks


def _is_typed(frame: FrameType) -> bool:
    """Whether a frame runs code without a file that is no library's."""
    owner = str(frame.f_globals.get("__name__", "torch")).partition(".")[0]
    return frame.f_code.co_filename.startswith("<") and owner not in ("torch", "sympy")


def _operator(frame: FrameType) -> str:
    """Name of the operator or function that a frame of torch's runs."""
    name = _CALLED.get(frame.f_code.co_name)
    called = frame.f_code if name is None else frame.f_locals.get(name)
    return str(getattr(called, "__name__", getattr(called, "co_name", "")))


_CALLED = {"__call__": "self", "__torch_function__": "func"}


def conditions_of(nodes: Iterable[fx.Node]) -> tuple[Condition, ...]:
    """Conditions on sizes of inputs that torch specialised a program on.

    Left out are those that hold for all sizes, and the questions of torch's operators that decide
    neither a size nor a number of tensors, such as how strides compare.
    """
    nodes = list(nodes)
    sizes = (size for node in nodes if node.op == "placeholder" for _, size in _axes(node))
    env = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)
    guards = () if env is None else env.guards
    found = [_condition(guard.expr, guard.sloc) for guard in guards]
    return (*filter(None, found), *(c for node in nodes for c in _kept_axes(node)))


def _condition(term: Any, place: Any, *, agree: bool = True) -> Condition | None:
    """A condition and the place that asks (torch's SLoc); None where it decides nothing.

    Without `agree`, an operator's question whether two open sizes agree decides nothing, nor does a
    quantized layer's whether it has rows: they refuse others, or compute them, themselves.
    """
    asked: Any = place.framework_loc
    asked = asked if isinstance(asked, traceback.FrameSummary) else None
    own = asked is None or not _is_operators(asked.filename)
    own = own and (agree or asked is None or "bevquant_" not in asked.filename)
    if _always(term, 0 if own else 1) or not (own or _decides(term, asked.name, agree)):
        return None
    if asked is not None and "_verify_" in asked.name:  # of torch.nn.functional: raises otherwise
        return None
    typed = own and asked is not None and "bevquant_" not in asked.filename
    return _asked(term, place, f"{asked.filename}:{asked.lineno}" if typed and asked else "")


def _asked(term: Any, place: Any, otherwise: str) -> Condition:
    """A condition with the author's line of torch's SLoc, or another line where it has none."""
    file, _, line = (place.maybe_user_loc or otherwise).rpartition(":")
    return Condition(term, file, int(line or 0))


def _kept_axes(node: fx.Node) -> Iterator[Condition]:
    """That axes which a squeeze leaves are longer than 1; torch does not ask about open ones."""
    if getattr(node.target, "overloadpacket", None) is not torch.ops.aten.squeeze:
        return
    import sympy

    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    dim: Any = node.args[1] if len(node.args) > 1 else None
    for axis in squeezed_axes(len(shape), dim):
        size = shape[axis]
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            file, _, line = author_line(node).rpartition(":")
            yield Condition(sympy.Ne(size.node.expr, 1), file, int(line or 0))


def _is_operators(file: str) -> bool:
    """Whether a file is an operator library's; torch's layers and functions are forwards too."""
    parts = file.replace("\\", "/").split("/")
    if "torch" in parts:
        inside = parts[len(parts) - parts[::-1].index("torch") :]
        # Layers of torch.nn ask as forwards do; module.py only calls them.
        return inside[0] != "nn" or inside[1:] == ["modules", "module.py"]
    return "spconv" in parts or "bevquant_sparse" in parts


def _decides(term: Any, operators: str, agree: bool) -> bool:
    """Whether an operator's question decides a size, or the number of tensors or axes."""
    import sympy

    # Such questions ask whether sizes agree, and for the number of parts, axes or windows.
    sides = term.args if isinstance(term, sympy.core.relational.Relational) else ()
    if any(name in operators for name in ("squeeze", "split", "chunk", "unbind")):
        return True
    fixes = any(s.is_Symbol for s in sides) and any(s.is_number for s in sides)
    if isinstance(term, sympy.Eq) and not (agree or fixes):
        return False
    # Questions whether a size is 1 choose strides and kernels.
    return 1 not in sides and (isinstance(term, sympy.Eq) or "pool" in operators)


def _always(term: Any, least: int) -> bool:
    """Whether a condition holds for all sizes from `least` on."""
    import sympy
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    try:
        bounds = bound_sympy(term, {s: ValueRanges(least, int_oo) for s in term.free_symbols})
    except Exception:  # a function without a range
        return False
    known = bounds.is_singleton() and bounds.lower is sympy.true
    return bool(known) or _always_linear(term, least)


def _always_linear(term: Any, least: int) -> bool:
    """As `_always`, for sums of one size and its divisions by numbers: ``2*((s - 1)//2) < s``."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv

    if not isinstance(term, sympy.StrictLessThan | sympy.LessThan) or len(term.free_symbols) != 1:
        return False
    (size,), period = term.free_symbols, 1
    for part in sympy.preorder_traversal(term):
        if isinstance(part, FloorDiv) and part.args[1].is_Integer:
            period *= abs(int(part.args[1]))
        elif isinstance(part, sympy.Mul):
            if len(part.free_symbols) and sum(not one.is_Integer for one in part.args) != 1:
                return False
        elif not isinstance(part, type(term) | sympy.Add) and not (
            part.is_Symbol or part.is_Integer
        ):
            return False
    # Both periods are computed number by number.
    if period > 64:
        return False
    # Left minus right grows by one number from s to s + period, so the first two periods decide
    # about all sizes.
    differences = [int((term.lhs - term.rhs).subs(size, least + i)) for i in range(2 * period)]
    # A difference that grows from period to period exceeds every bound.
    grows = any(differences[i] < differences[i + period] for i in range(period))
    # Integers: left < right where left - right <= -1.
    most = -1 if isinstance(term, sympy.StrictLessThan) else 0
    return not grows and max(differences) <= most


def keep_answers(nodes: Iterable[fx.Node], answered: Iterable[Condition]) -> bool:
    """Mark assertions that require the example's values, with the source lines of `answered`.

    Returns whether each value has an assertion.
    """
    asserted = [(node, str(node.args[1])) for node in nodes if node.target is REQUIRE]
    for term, file, line, checks in answered:
        asserted = [(node, _narrowed(node, text, term)) for node, text in asserted]
        own = [node for node, text in asserted if f" {term} on node" in text]
        # torch may drop one that the range of its symbol, asserted too, implies.
        names = rf"\b({'|'.join(str(s) for s in term.free_symbols)})\b"
        own = own or [node for node, text in asserted if re.search(names, text)]
        if not own:
            return False
        # An answer also narrows the range of its symbol, which is asserted upstream.
        ranged = [n for n, text in asserted if re.search(rf" {names} [<>]=? \d+ on node", text)]
        for node in (*own, *(n for n in ranged if ANSWER not in n.meta)):
            switch = switch_of(file, line)
            only = f" (only with {switch})" if switch else ""
            place = f"{file}:{line}{only}" if file else ""
            node.meta[CHECK if checks else ANSWER] = place
    return True


def _narrowed(requirement: fx.Node, text: str, term: Any) -> str:
    """Require at most what an answer ``rows <= 1`` says; torch asserts a range that ends at 2."""
    import sympy

    if not (isinstance(term, sympy.LessThan) and term.rhs.is_Integer):
        return text
    found = re.search(rf" {re.escape(str(term.lhs))} <= (\d+) on node", text)
    if found is None or int(found[1]) <= term.rhs:
        return text
    (asked,) = requirement.all_input_nodes
    with requirement.graph.inserting_before(requirement):
        met = requirement.graph.call_function(operator.le, (asked.args[0], int(term.rhs)))
    met.meta.update(asked.meta)
    text = text.replace(found[0], f" {term} on node")
    requirement.args = (met, text)
    return text


def bound_guards(
    conditions: Sequence[Condition], names: Sequence[str], placeholders: Sequence[fx.Node]
) -> tuple[Guard, ...]:
    """The conditions in terms of the inputs of these names, and the sizes that are fixed."""
    sizes = {
        (name, axis): size
        for name, node in zip(names, placeholders, strict=True)
        for axis, size in _axes(node)
    }
    nodes = {place: size.node for place, size in sizes.items() if isinstance(size, torch.SymInt)}
    begun: dict[Any, _Place] = {}
    for place, node in nodes.items():
        begun.setdefault(node._expr, place)
    # A size that must be twice another one is this term from then on. The condition itself would
    # say that it equals itself.
    known = dict(begun)
    for place, node in nodes.items():
        known.setdefault(node.expr, place)
    guards: dict[Guard, None] = {}
    line: tuple[Any, ...] = ()
    for condition in conditions:
        if condition.term is None:
            line = condition[1:3]
            continue
        # The graph may be a part of another one, without all of its sizes.
        whole = _bound(condition, begun, sizes) or _bound(condition, known, sizes)
        bound = _fixed(condition, sizes) if whole is None else [whole]
        guards |= dict.fromkeys(bound)
    fixed = {guard.sizes[0] for guard in guards if guard.fixes is not None}
    for place, size in sizes.items():
        number = fixed_number(size)
        if number is not None and place not in fixed:
            guards[Guard(f"s0 == {number}", (place,), *line)] = None
    return tuple(guards)


_Place = tuple[str, int | None]


def _bound(
    condition: Condition, known: Mapping[Any, _Place], sizes: Mapping[_Place, Any]
) -> Guard | None:
    """The condition in terms of known sizes; None where it has others or no form as text."""
    import sympy
    from torch.utils._sympy.printers import PythonPrinter

    term, places = condition.term, list[_Place]()
    # The longest first, as they hold the shorter ones.
    for candidate in sorted(known, key=lambda t: -t.count_ops()):
        if candidate.free_symbols and term.has(candidate):
            own = sympy.Dummy(f"s{len(places)}", integer=True, nonnegative=True)
            term = term.xreplace({candidate: own})
            places.append(known[candidate])
    named = {s: sympy.Symbol(s.name, integer=True) for s in term.free_symbols if s.is_Dummy}
    if len(named) < len(term.free_symbols):
        return None
    try:
        printed = PythonPrinter().doprint(term.xreplace(named)).replace("torch.sym_float", "float")
        text = ast.unparse(parsed(printed))
    except (ValueError, NotImplementedError):
        return None
    # The text must hold for the example's sizes, as the condition does.
    example = {f"s{i}": _hint(sizes[place]) for i, place in enumerate(places)}
    own_names = tuple((name, None) for name in example)
    if not Guard(text, own_names).holds(example):
        return None
    return Guard(text, tuple(places), condition.file, condition.line)


def _fixed(condition: Condition, sizes: Mapping[_Place, Any]) -> Iterator[Guard]:
    """The sizes that follow from those of a condition, as in the example."""
    for place, size in sizes.items():
        if isinstance(size, torch.SymInt) and size.node.has_hint():
            if size.node.expr.free_symbols & condition.term.free_symbols:
                yield Guard(f"s0 == {_hint(size)}", (place,), condition.file, condition.line)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _axes(node: fx.Node) -> Iterator[tuple[int | None, Any]]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        yield from enumerate(value.shape)
    elif isinstance(value, torch.SymInt):
        yield None, value

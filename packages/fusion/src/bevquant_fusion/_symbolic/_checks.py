"""Read from the running code of a forward what it is about to do with a value."""

from __future__ import annotations

import dis
import sys
from bisect import bisect_left
from types import FrameType

_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_BEFORE_JUMP = frozenset({"TO_BOOL", "COMPARE_OP", "EXTENDED_ARG"})

# Modules that ask on behalf of the code that called them.
_BETWEEN = frozenset({"abc", "typing", "_collections_abc", "collections.abc", "beartype"})
_BETWEEN |= frozenset({"jaxtyping", "bevquant_fusion._symbolic._proxy"})


def calling_frame() -> FrameType:
    """The frame of the code that uses a traced value, type checkers and the proxy left out."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    return frame


def _is_between(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    generated = frame.f_code.co_filename.startswith("<@beartype")
    return generated or name in _BETWEEN or name.split(".")[0] in _BETWEEN


def reads_attribute(frame: FrameType) -> bool:
    """Whether ``frame`` is at ``x.name``, rather than at a call such as ``hasattr(x, "name")``."""
    opcode = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[opcode] in ("LOAD_ATTR", "LOAD_METHOD")


def asks_for_class(frame: FrameType) -> bool:
    """Whether ``frame`` is at ``isinstance(x, …)``, ``torch.is_tensor(x)`` or ``x.__class__``.

    The code of torch itself is not meant: what it asks is no part of the model.
    """
    if frame.f_code.co_name == "is_tensor" and frame.f_back is not None:
        return not _is_torch(frame.f_back)
    if _is_torch(frame):
        return False
    if reads_attribute(frame):
        return True
    if "isinstance" not in frame.f_code.co_names:
        return False
    instructions = list(dis.get_instructions(frame.f_code))
    here = instructions[bisect_left([i.offset for i in instructions], frame.f_lasti)]
    starts = [_start(i) for i in instructions if i.argval == "isinstance"]
    return _start(here) in starts


def _is_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in ("torch", "bevquant_fusion")


def _start(instruction: dis.Instruction) -> tuple[int | None, int | None] | None:
    """Where the expression of ``instruction`` starts: a call starts where its function does."""
    where = instruction.positions
    return None if where is None else (where.lineno, where.col_offset)


def way_that_does_not_raise(frame: FrameType) -> bool | None:
    """The truth value with which ``frame`` goes on, where the other one leads to ``raise``.

    Called while ``frame`` asks for the truth value of something. ``assert x`` goes on with True,
    ``if x: raise …`` with False. None where both ways go on, or it cannot be told.
    """
    instructions = list(dis.get_instructions(frame.f_code))
    here = bisect_left([i.offset for i in instructions], frame.f_lasti)
    # Python 3.13 converts to bool in an instruction of its own before the jump.
    while here + 1 < len(instructions) and instructions[here].opname in _BEFORE_JUMP:
        here += 1
    jump = instructions[here]
    if not jump.opname.startswith("POP_JUMP") or not isinstance(jump.argval, int):
        return None
    skipped = [i for i in instructions[here + 1 :] if i.offset < jump.argval]
    if not skipped or skipped[-1].opname != "RAISE_VARARGS":
        return None
    leaves = any(
        i.opname.startswith("RETURN") or (i.opcode in _JUMPS and i.argval >= jump.argval)
        for i in skipped
    )
    if leaves:
        return None
    if jump.opname.endswith("IF_TRUE"):
        return True
    return False if jump.opname.endswith("IF_FALSE") else None


def check_not(condition: object, message: str) -> None:
    """``torch._assert`` the other way round, for ``if condition: raise …``; can be traced too."""
    if condition:
        raise AssertionError(message)

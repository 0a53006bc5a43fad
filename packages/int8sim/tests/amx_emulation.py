"""AMX's tile instructions by their definition, in numpy, in place of a CPU's.

After the operations of Intel's manual (volume 2, LDTILECFG to TILERELEASE). A kernel under test is
compiled with calls of these where it would have instructions; what the manual forbids is an error
here as it is on a CPU.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

pytest.importorskip("numba", reason="the numba extra is not installed")

from llvmlite import ir
from numba import cfunc

from bevquant_int8sim._compiled import jit, kernels, tile_instructions

INT64 = ir.IntType(64)

WIDE = np.int64  # products and sums, before they wrap modulo 2³²
_thread = threading.local()
_errors: list[str] = []
ran: set[str] = set()  # names of the instructions that were executed


def emulate(monkeypatch):
    """Compile AMX kernels with calls; returns the list of what they did that is forbidden."""
    monkeypatch.setattr(tile_instructions, "_emit", _emit_call)
    monkeypatch.setattr(kernels, "compile_loop", _compile)
    kernels.kernel.cache_clear()
    _errors.clear()
    return _errors


def _compile(name, body):
    function = type(jit._template)(jit._template.__code__, {"body": body, "__name__": name}, name)
    return cfunc("void(int64, int64, int64)")(function)


def _emit_call(builder, name, *arguments):
    wide = [a if a.type == INT64 else _as_int64(builder, a) for a in arguments]
    callback = CALLBACKS[name]
    address = ctypes.cast(callback, ctypes.c_void_p).value
    kind = ir.FunctionType(ir.VoidType(), [INT64] * len(wide))
    builder.call(builder.inttoptr(INT64(address), kind.as_pointer()), wide)


def _as_int64(builder, value):
    if isinstance(value.type, ir.PointerType):
        return builder.ptrtoint(value, INT64)
    return builder.zext(value, INT64)


def _memory(address, size, dtype=np.uint8):
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype)


def _instruction(arguments):
    def decorate(function):
        def call(*numbers):
            ran.add(function.__name__.removeprefix("_"))
            try:
                function(*numbers)
            except Exception as error:
                _errors.append(f"{function.__name__}{numbers}: {error}")

        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(call)

    return decorate


def _require(condition, text):
    if not condition:
        raise ValueError(text)


@_instruction(1)
def _ldtilecfg(address):
    block = _memory(address, 64).copy()
    _require(block[0] == 1, "another palette than 1")
    _require(not block[1:16].any() and not block[32:48].any(), "what is reserved is not zero")
    _require(not block[56:].any(), "a palette of 8 tiles has no more")
    row_bytes, rows = block[16:32].view(np.uint16), block[48:56]
    _require((row_bytes <= 64).all() and (rows <= 16).all(), "a tile is too large")
    _require(((row_bytes == 0) == (rows == 0)).all(), "half a tile")
    _thread.tiles = [np.zeros((r, b), np.uint8) for r, b in zip(rows, row_bytes, strict=True)]


def _tile(number):
    tiles = getattr(_thread, "tiles", None)
    _require(tiles is not None, "tiles are not configured")
    _require(tiles[number].size, f"tile {number} is not configured")
    return tiles[number]


@_instruction(3)
def _tileloadd64(number, address, stride):
    tile = _tile(number)
    for row, line in enumerate(tile):
        line[:] = _memory(address + row * stride, len(line))


@_instruction(3)
def _tilestored64(number, address, stride):
    for row, line in enumerate(_tile(number)):
        _memory(address + row * stride, len(line))[:] = line


@_instruction(3)
def _tdpbssd(sums, left, right):
    c, a, b = _tile(sums), _tile(left), _tile(right)
    _require(len({sums, left, right}) == 3, "a tile twice")
    _require(len(c) == len(a) and c.shape[1] == b.shape[1], "sums of another shape")
    _require(a.shape[1] == 4 * len(b), "inputs and weights of different depth")
    rows = a.view(np.int8).astype(WIDE)
    columns = b.view(np.int8).reshape(len(b), -1, 4).transpose(0, 2, 1).reshape(a.shape[1], -1)
    total = c.view(np.int32) + rows @ columns.astype(WIDE)
    c.view(np.int32)[:] = total.astype(np.int32)  # modulo 2³²


@_instruction(0)
def _tilerelease():
    del _thread.tiles


CALLBACKS = {
    "ldtilecfg": _ldtilecfg,
    "tileloadd64": _tileloadd64,
    "tilestored64": _tilestored64,
    "tdpbssd": _tdpbssd,
    "tilerelease": _tilerelease,
}

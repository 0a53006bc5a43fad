"""The instructions of AMX, each as a line of LLVM IR: matrices in eight tile registers.

A tile has up to 16 rows of up to 64 bytes, as the configuration of its thread says (Intel's
Software Developer's Manual, volume 1, chapter "Programming with Intel AMX", palette 1). Numbers of
tiles are part of the instructions. Whatever else uses tiles in a thread configures them for itself,
so a kernel does so at its start and releases them at its end, and calls nothing in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from bevquant_int8sim._compiled.ir import BYTE, function, pointer

TILE_ROWS, TILE_BYTES = 16, 64


def configuration(tiles: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """The 64 bytes that `configure` reads: palette 1, rows and bytes of a row of each tile."""
    block = np.zeros(64, np.uint8)
    block[0] = 1
    for number, (rows, row_bytes) in enumerate(tiles):
        block[16 + 2 * number] = row_bytes
        block[48 + number] = rows
    return block


def configure(builder: ir.IRBuilder, address: Any) -> None:
    """Set the thread's tiles up from the 64 bytes at `address`; all become zero."""
    _emit(builder, "ldtilecfg", pointer(builder, address, BYTE))


def load(builder: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    """Read a tile's rows, `stride` bytes apart."""
    _emit(builder, "tileloadd64", BYTE(tile), pointer(builder, address, BYTE), stride)


def store(builder: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    """Write a tile's rows, `stride` bytes apart."""
    _emit(builder, "tilestored64", BYTE(tile), pointer(builder, address, BYTE), stride)


def multiply(builder: ir.IRBuilder, sums: int, left: int, right: int) -> None:
    """``sums[i, j] += Σ_k left[i, k] · right[k // 4, j, k % 4]``, int8 times int8 in int32.

    Nothing saturates, and sums wrap modulo 2³².
    """
    _emit(builder, "tdpbssd", BYTE(sums), BYTE(left), BYTE(right))


def release(builder: ir.IRBuilder) -> None:
    """Give the tiles back: the thread has none."""
    _emit(builder, "tilerelease")


def _emit(builder: ir.IRBuilder, name: str, *arguments: Any) -> None:
    kinds = [argument.type for argument in arguments]
    call = function(builder, f"llvm.x86.{name}", ir.VoidType(), *kinds)
    builder.call(call, arguments)

"""Convolutions one after the other as one call, with nothing of Python between them.

Preparing a layer's call, making tensors of what it writes and waking threads take as long as a
small layer. A chain does that once. What only its own layers read lies in one block of memory, in
which a place is written again as soon as it is no longer needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bevquant_int8sim._compiled.dense import Convolution
from bevquant_int8sim._compiled.launch import RepeatedCalls
from bevquant_sparse.runtime import workspace

_LINE = 64  # bytes of a cache line, at which each value begins


@dataclass(frozen=True, eq=False)
class Link:
    """A convolution of a chain."""

    # Made ready for its inputs.
    convolution: Convolution
    # Number of the value that it convolves, and of the one that it adds, if any. The values that a
    # chain is given come first, then what each link makes.
    reads: tuple[int, ...]


class Chain:
    """Convolutions that follow each other.

    The values that it is given come first, then what each link makes; `kept` are returned, in
    order.
    """

    def __init__(self, links: Sequence[Link], given: int, kept: Collection[int]) -> None:
        self._links, self._given, self._kept = links, given, kept
        # Arrays: rows of the values given, as each link reads them; then what each link makes.
        self._reads = [
            (rows, value)
            for link in links
            for rows, value in zip(link.convolution.rows, link.reads, strict=True)
            if value < given
        ]
        outside = iter(range(len(self._reads)))
        made = len(self._reads) - given  # added to the number of a value that a link makes
        parts = []
        for number, link in enumerate(links, start=given):
            source, *added = [
                next(outside) if value < given else value + made for value in link.reads
            ]
            parts.append((link.convolution.calls, (source, number + made, *added)))
        self._calls = RepeatedCalls.joined(parts)
        self._offsets, self._size = self._places()

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Results of the links for values of the same shapes and layouts."""
        block = workspace.empty((self._size,), np.uint8)
        kept = {
            number: self._links[number - self._given].convolution.new() for number in self._kept
        }
        read = [rows(given[value]) for rows, value in self._reads]
        places = [place for place, _held in read]
        start = block.ctypes.data
        for number, offset in enumerate(self._offsets, start=self._given):
            places.append(kept[number].data_ptr() if number in kept else start + offset)
        self._calls.run(places)
        return [
            self._links[number - self._given].convolution.seen(out) for number, out in kept.items()
        ]

    def _places(self) -> tuple[list[int], int]:
        """Where in the block each link writes, if it does there, and how large the block is."""
        last = {value: at for at, link in enumerate(self._links) for value in link.reads}
        lying: list[tuple[int, int, int]] = []  # begin, end, the link that reads it last
        offsets, size = [], 1
        for at, link in enumerate(self._links):
            offset, number = 0, at + self._given
            if number not in self._kept:
                lying = sorted(block for block in lying if block[2] >= at)
                need = -(-_bytes(link.convolution) // _LINE) * _LINE
                for begin, end, _ in lying:
                    if offset + need <= begin:
                        break
                    offset = max(offset, end)
                lying.append((offset, offset + need, last.get(number, at)))
                size = max(size, offset + need)
            offsets.append(offset)
        return offsets, size


def _bytes(convolution: Convolution) -> int:
    (rows, columns), kind = convolution.memory
    size: int = rows * columns * np.dtype(kind).itemsize
    return size


def lie_well(convolution: Convolution, made: Sequence[bool]) -> bool:
    """Whether it reads where they lie what the links before it made.

    `made` says of each value that the next link reads whether a link makes it. One that is given
    may be copied before the first link begins.
    """
    return all(rows.own or not inside for rows, inside in zip(convolution.rows, made, strict=True))

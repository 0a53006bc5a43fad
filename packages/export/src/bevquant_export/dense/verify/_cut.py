"""A file cut at its quantized tensors: each piece reads the model's integers.

So a difference is found at its cause and not downstream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from bevquant_export._differences import TensorDifference
from bevquant_export.dense.nodes._blocks import product_shape
from bevquant_export.dense.nodes._graph import Array
from bevquant_export.dense.nodes._weighted import float8_steps_apart, rounds_within
from bevquant_export.dense.verify._float_errors import FloatErrors
from bevquant_export.dense.verify._pieces import Piece, Pieces
from bevquant_export.dense.verify._rounding_boundary import RoundingBoundary
from bevquant_int8sim.program import Step

AT_ONCE = 2
"""Pieces that run at once, each on its share of the threads: what lies between their nodes is held
twice, so more would cost more memory than time. The model goes no further ahead of its file."""
_FEW = 0.01  # of a tensor's values


class CutFile:
    """A file cut at its quantized tensors, run beside the model.

    A piece runs as soon as the model has computed its inputs and outputs, on another thread while
    the model continues. Values that no piece needs any more are released, so the tensors of a model
    are never all in memory. With `outputs`, the producers of float outputs run too (`floats`).
    Pieces to `leave` do not run. Differences are explained in rows that `departs` without an
    explanation.
    """

    def __init__(
        self,
        pieces: Pieces,
        inputs: Mapping[str, Array],
        run_in: Callable[..., Any],
        pool: Executor,
        outputs: bool,
        departs: Callable[[TensorDifference], bool],
        leave: Callable[[Piece], bool],
    ) -> None:
        self._cut, self._departs = pieces, departs
        self._inputs, self._run_in, self._pool = inputs, run_in, pool
        self._running: deque[Future[None]] = deque()
        self._rows: dict[str, TensorDifference | None] = {}
        self._found: dict[str, tuple[Step, str, Array]] = {}
        self._values: dict[str, Array] = {}
        self._doubts: dict[str, tuple[str, Array, Array, tuple[int, ...]]] = {}
        self._float8_doubts: dict[str, tuple[Step, Array, Array, Array]] = {}
        self.floats: dict[str, Array] = {}
        self._boundary = RoundingBoundary(pieces.program, self._values, {}, pieces.profile)
        # Pieces to run, and their tensors that the model has not computed yet.
        self._missing = {
            piece: {*piece.reads, *piece.makes.values()}
            for piece in pieces.pieces
            if (piece.makes or outputs) and not leave(piece)
        }
        self._needed = Counter(name for piece in self._missing for name in piece.needs)

    def hold(self, values: Iterable[tuple[str, Any]]) -> None:
        """Keep values from which integers are computed again."""
        for name, value in values:
            if self._needed[name] and isinstance(value, Tensor):
                self._values[name] = value.cpu().numpy()

    def compare(self, step: Step, name: str, value: Array) -> None:
        """Take the model's value of a tensor, and run the pieces that waited for it."""
        tensor = self._cut.tensors[name]
        # Of two values that are one tensor (a ReLU of non-negative values), the first counts.
        if tensor not in self._rows:
            self._rows[tensor] = None
            self._found[tensor] = step, name, value
            for piece in [piece for piece, left in self._missing.items() if tensor in left]:
                self._missing[piece].remove(tensor)
                if not self._missing[piece]:
                    self._start(piece)

    def finish(self) -> None:
        """Run the pieces without a cut input."""
        for piece, missing in list(self._missing.items()):
            if missing:
                raise self._cut.absent(min(missing))
            self._start(piece)
        self._wait(0)

    def rows(self) -> tuple[TensorDifference, ...]:
        """Each tensor, in the order of the model."""
        return tuple(row for row in self._rows.values() if row is not None)

    def in_doubt(self) -> set[str]:
        """Floats whose errors may explain what is not explained; other doubts are dropped."""
        left = {row.tensor for row in self.rows() if row.unexplained and self._departs(row)}
        self._doubts = {name: doubt for name, doubt in self._doubts.items() if name in left}
        self._float8_doubts = {n: doubt for n, doubt in self._float8_doubts.items() if n in left}
        read = {read for doubt in self._doubts.values() for read in self._boundary.reads(doubt[0])}
        return read | {doubt[0].args[0].name for doubt in self._float8_doubts.values()}

    def count_again(self, floats: FloatErrors) -> None:
        """Count ties downstream of floats whose errors are known now."""
        cut = self._cut
        ties = RoundingBoundary(cut.program, floats.values, floats.errors, cut.profile)
        for tensor, doubt in self._doubts.items():
            if row := self._rows[tensor]:
                self._rows[tensor] = replace(row, ties=max(row.ties, ties.count(*doubt)))
        for tensor, (step, places, x, got) in self._float8_doubts.items():
            error = floats.errors.get(step.args[0].name)
            if (row := self._rows[tensor]) and error is not None:
                within = rounds_within(step, x, error, got).reshape(-1)[places]
                self._rows[tensor] = replace(row, ties=int(np.count_nonzero(within)))

    def leaves_few(self) -> bool:
        """Whether values are unexplained, few of each tensor: not those of a wrong operation."""
        left = [row for row in self.rows() if row.tensor in self._doubts and row.unexplained]
        return bool(left) and all(row.unexplained <= _FEW * row.elements for row in left)

    def _start(self, piece: Piece) -> None:
        del self._missing[piece]
        self._running.append(self._pool.submit(self._run, piece))
        self._wait(AT_ONCE)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` pieces are running; errors are raised in order."""
        while len(self._running) > most:
            self._running.popleft().result()

    def _run(self, piece: Piece) -> None:
        running = self._run_in(piece.proto, self._cut.profile.runner)
        taken = {port.name for port in running.get_inputs()}
        given = {name: value for name, value in self._inputs.items() if name in taken}
        for name in piece.reads:
            step, _, value = self._found[name]
            given[name] = (
                _as_read(step, value) if name in self._cut.float8 else self._cut.stored(value, name)
            )
        names = [port.name for port in piece.proto.graph.output]
        for name, got in zip(names, running.run(names, given), strict=True):
            if name in piece.makes:
                self._rows[piece.makes[name]] = self._row(piece.makes[name], got)
            else:
                self.floats[name] = got
        for name in piece.needs:
            self._needed[name] -= 1
            if not self._needed[name]:
                self._found.pop(name, None)
                self._values.pop(name, None)

    def _row(self, tensor: str, got: Array) -> TensorDifference:
        step, name, value = self._found[tensor]
        if tensor in self._cut.float8:
            return self._float8_row(tensor, step, value, got)
        value = np.atleast_1d(value)
        # A linear layer's result has two axes in some files, and its own behind a Reshape.
        got = got.reshape(value.shape)
        index = np.unravel_index(np.flatnonzero(self._cut.stored(value, tensor) != got), got.shape)
        places = np.stack(index, axis=1)
        zero = self._cut.profile.stored(self._cut.form(tensor))[1]
        want, made = value[index].astype(np.int32), got[index].astype(np.int32) - zero
        apart = np.abs(want - made)
        floats = self._boundary.rounds_floats(name)
        # Where rounding swaps two near-equal scores, the values of another row follow.
        near = (apart == 1) | (floats and self._cut.form(tensor).bits == 8)
        where = places[near], (want + made)[near] * 0.5, value.shape
        largest = int(apart.max(initial=0))
        size = max(int(value.max(initial=0)), -int(value.min(initial=0)))
        row = TensorDifference(
            step.path, step.op, tensor, int(value.size), len(places), largest,
            form=str(self._cut.form(tensor)), size=size,
        )  # fmt: skip
        if not self._departs(row):
            return row
        ties = self._boundary.count(name, *where)
        if ties < len(where[0]) and floats:
            self._doubts[tensor] = name, *where
        return replace(row, ties=ties)

    def _float8_row(self, tensor: str, step: Step, value: Array, got: Array) -> TensorDifference:
        """FP8 values of the file beside the model's; `count_again` counts ties."""
        want, got = value.reshape(-1), got.reshape(-1)
        places = np.flatnonzero(~((want == got) | (np.isnan(want) & np.isnan(got))))
        largest = float8_steps_apart(want[places], got[places], step)
        x = self._values.get(step.args[0].name)
        if len(places) and x is not None:
            self._float8_doubts[tensor] = step, places, x, got.reshape(x.shape)
        return TensorDifference(
            step.path, "quantize", tensor, value.size, len(places), largest, form=step.args[2]
        )


def _as_read(step: Step, value: Array) -> Array:
    """An FP8 tensor in the shape that its layer reads in the file."""
    if step.args[2] != "nvfp4":
        return np.asarray(value)
    return value.reshape(product_shape(value.shape, step.args[3]))

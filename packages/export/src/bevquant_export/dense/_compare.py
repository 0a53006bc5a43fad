"""onnxruntime's integers against the simulator's or the model's, tensor by tensor."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from bevquant_export.dense._float_errors import FloatErrors
from bevquant_export.dense._graph import Array
from bevquant_export.dense._half import in_half
from bevquant_export.dense._pieces import pieces_of
from bevquant_export.dense._profile import profile_of
from bevquant_export.dense._program_of import QdqProgram, inputs_of, program_of
from bevquant_export.dense._runnable import forced, session
from bevquant_export.dense._source import Program, Step
from bevquant_export.dense._ties import Ties
from bevquant_export.dense._written import QdqFile, TensorDifference
from bevquant_graph import is_sparse_tensor
from bevquant_int8sim import IntegerModel


def compare_qdq_onnx(
    file: QdqFile, model: nn.Module | IntegerModel, args: Any
) -> tuple[TensorDifference, ...]:
    r"""Run every operation of a file by itself and count what it makes other than `simulate`.

    A model of `bevquant_hybrid` is held against what it itself rounds to. Each operation reads the
    integers that the simulator has in that place, so a difference is counted where it arises and
    nowhere behind it. A file for onnxruntime is optimised as it is in use: what is fused runs
    fused. Files for TensorRT and hb_mapper run as they are written, in float, which checks what
    they say and not what those runtimes make of it.

    The simulator rounds a product in float64, onnxruntime one in float32: where the exact value is
    within

    .. math:: |v - (k + \tfrac12)| \le 8 \cdot 2^{-24} |v|

    of the border of two steps they may differ by one. Such values are counted as `ties`, and
    everything else that differs is `unexplained`. Sums that run in float are given the error that
    n float32 additions spread to, 4·√n·2⁻²⁴ of the sum of their terms' magnitudes; layers of
    `bevquant_hybrid`, whose biases onnxruntime rounds to int32, half a step of the accumulators.
    Layers, sums, bilinear resizing and requantization are computed again for that, averages are
    not: of these every difference counts as unexplained. Where functions of floats stand before a
    rounding, the model runs once more with these rounded at random, by 2⁻²⁴ or in half precision
    2⁻¹¹, and with the sums of layers before them as far off, which finds how far their results are.

    Args:
        file: From `export_qdq_onnx`.
        model: The model that it was written from, or what `simulate` made of it.
        args: Inputs, structured like the example inputs.

    Returns:
        One entry for every quantized tensor of the file, in order.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: The model has other tensors than the file.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from bevquant_export import export_qdq_onnx
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> x = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        >>> quantized = quantize_model(net, example_inputs=x).model
        >>> _ = calibrate(quantized, [x])
        >>> file = export_qdq_onnx(quantized, x, f"{tempfile.mkdtemp()}/net.onnx", "onnxruntime")
        >>> [(t.op, t.different, t.unexplained) for t in compare_qdq_onnx(file, quantized, x)]
        [('quantize', 0, 0), ('conv', 0, 0)]
    """
    integer = program_of(
        model, args, file.sum_ranges or False, verify=False
    )  # it was, before the file was written
    rows, _, _ = compared(file, file.path.read_bytes(), integer, args, session, outputs=False)
    return rows


def compared(
    file: QdqFile,
    content: bytes,
    integer: QdqProgram,
    args: Any,
    run_in: Callable[..., Any],
    *,
    outputs: bool,
) -> tuple[tuple[TensorDifference, ...], dict[str, tuple[Array, Array]], Any]:
    """What `compare_qdq_onnx` returns, and the outputs that run in float.

    Args:
        file: What is said of the file.
        content: The file.
        integer: The program that it was written from.
        args: Inputs.
        run_in: Makes a session, as `session`.
        outputs: Look at the outputs in float too.

    Returns:
        The quantized tensors; name to (what `integer` returns, what the file returns) of the
        outputs, from the same integers; and all that `integer` returns.
    """
    profile = profile_of(file.profile)
    args = in_half(args) if profile.half else args
    given = zip(file.inputs, _tensors(args), strict=True)
    inputs = {name: value.detach().cpu().numpy() for name, value in given}
    if profile.half:
        inputs = {
            n: v.astype(np.float16) if v.dtype == np.float32 else v for n, v in inputs.items()
        }
    cut = _CutFile(file, content, integer.program, inputs, run_in, outputs=outputs)
    cut.hold(inputs_of(integer.program, args))

    def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        named = _named(step.outputs[0], made[0])
        cut.hold(named)
        for name, value in named:
            if name in file.integers:
                cut.compare(step, name, value.cpu().numpy())

    returned = integer.run(args, observe=see)
    cut.finish()
    if wanted := cut.in_doubt():
        errors = FloatErrors(integer.program, wanted, half=profile.half)
        errors.run(integer, args)
        cut.count_again(errors)
    rows, results = cut.rows(), cut.floats
    floats = {
        name: (value.detach().cpu().numpy(), results[name])
        for name, value in zip(file.outputs, _tensors(returned), strict=False)
        # Others are quantized, and among the rows.
        if name in results and type(value) is Tensor and value.is_floating_point()
    }
    return rows, floats, returned


@dataclass(eq=False)
class _Piece:
    """Nodes between tensors that are cut.

    Attributes:
        proto: The nodes.
        reads: Tensors that it reads.
        makes: Its outputs to the tensors that they are.
        missing: Which of them the model has not made yet.
        needs: These tensors, and values of the program by which what it makes is computed again.
    """

    proto: Any
    reads: list[str]
    makes: dict[str, str]
    missing: set[str]
    needs: tuple[str, ...]


class _CutFile:
    """A file cut at its quantized tensors, beside the model as that runs.

    A piece runs as soon as the model has made all that it reads and makes, and what no piece needs
    any more is given back: at no time are all tensors of a model in memory.

    Args:
        file: What is said of the file.
        content: The file.
        program: That it was written from.
        inputs: Of the file.
        run_in: Makes a session, as `session`.
        outputs: Run what makes outputs in float too.

    Attributes:
        floats: Outputs in float.
    """

    def __init__(
        self,
        file: QdqFile,
        content: bytes,
        program: Program,
        inputs: Mapping[str, Array],
        run_in: Callable[..., Any],
        *,
        outputs: bool,
    ) -> None:
        self._file, self._inputs, self._run_in = file, inputs, run_in
        self._profile = profile_of(file.profile)
        self._rows: dict[str, TensorDifference | None] = {}
        self._found: dict[str, tuple[Step, str, Array]] = {}
        self._values: dict[str, Array] = {}
        self._doubts: dict[str, tuple[str, Array, Array, tuple[int, ...]]] = {}
        self.floats: dict[str, Array] = {}
        self._program = program
        self._ties = Ties(program, self._values, {}, self._profile)
        names: dict[str, list[str]] = defaultdict(list)
        for value, tensor in file.integers.items():
            names[tensor].append(value)
        proto, made = forced(content, tuple(names))
        self._pieces = []
        for part in pieces_of(proto):
            ports = {port.name for port in (*part.graph.input, *part.graph.output)}
            reads = [name for name in names if name in ports]
            makes = {made[name]: name for name in names if made[name] in ports}
            if makes or outputs:
                values = {v for t in makes.values() for n in names[t] for v in self._ties.reads(n)}
                missing = {*reads, *makes.values()}
                needs = (*missing, *values)
                self._pieces.append(_Piece(part, reads, makes, missing, needs))
        self._needed = Counter(name for piece in self._pieces for name in piece.needs)

    def hold(self, values: Iterable[tuple[str, Any]]) -> None:
        """Keep values by which integers are computed again."""
        for name, value in values:
            if self._needed[name] and isinstance(value, Tensor):
                self._values[name] = value.cpu().numpy()

    def compare(self, step: Step, name: str, value: Array) -> None:
        """Take what the model has in a tensor, and run what waited for it.

        Of two values that are one tensor, as a ReLU of what is positive already, the first counts.
        """
        tensor = self._file.integers[name]
        if tensor not in self._rows:
            self._rows[tensor] = None
            self._found[tensor] = step, name, value
            for piece in [piece for piece in self._pieces if tensor in piece.missing]:
                piece.missing.remove(tensor)
                if not piece.missing:
                    self._run(piece)

    def finish(self) -> None:
        """Run what reads no cut tensor.

        Raises:
            ValueError: The model has other tensors than the file.
        """
        for piece in list(self._pieces):
            if missing := sorted(piece.missing - set(self._rows)):
                raise ValueError(
                    f"compare_qdq_onnx: {self._file.path.name} has {missing[0]!r}, which the model "
                    "does not make; compare it with the model that it was written from"
                )
            self._run(piece)

    def rows(self) -> tuple[TensorDifference, ...]:
        """Each tensor, in the order of the model."""
        return tuple(row for row in self._rows.values() if row is not None)

    def in_doubt(self) -> set[str]:
        """What is rounded where values are a step off, and no ties without what functions lose."""
        return {read for doubt in self._doubts.values() for read in self._ties.reads(doubt[0])}

    def count_again(self, floats: FloatErrors) -> None:
        """Count ties behind floats whose errors are known now."""
        ties = Ties(self._program, floats.values, floats.errors, self._profile)
        for tensor, doubt in self._doubts.items():
            if row := self._rows[tensor]:
                self._rows[tensor] = replace(row, ties=max(row.ties, ties.count(*doubt)))

    def _run(self, piece: _Piece) -> None:
        self._pieces.remove(piece)
        running = self._run_in(piece.proto, self._profile.runner)
        taken = {port.name for port in running.get_inputs()}
        given = {name: value for name, value in self._inputs.items() if name in taken}
        given |= {name: self._stored(self._found[name][2]) for name in piece.reads}
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

    def _stored(self, value: Array) -> Array:
        """Integers as the file has them."""
        # A tensor without axes comes out of numpy's arithmetic as a number, which is no input.
        zero = self._profile.zero
        moved = np.asarray(value.astype(np.int16) + np.int16(zero)) if zero else value
        return moved.astype(self._profile.dtype, copy=False)

    def _row(self, tensor: str, got: Array) -> TensorDifference:
        step, name, value = self._found[tensor]
        value = np.atleast_1d(value)
        # A linear layer's result has two axes in some files, and its own behind a Reshape.
        got = got.reshape(value.shape)
        # In the order of the file's memory: the model's has channels last.
        differs = np.not_equal(self._stored(value), got, out=np.empty(got.shape, np.bool_))
        index = np.unravel_index(np.flatnonzero(differs), got.shape)
        places = np.stack(index, axis=1)
        want, made = value[index].astype(np.int32), got[index].astype(np.int32) - self._profile.zero
        apart = np.abs(want - made)
        near = apart == 1
        where = places[near], (want + made)[near] * 0.5, value.shape
        ties = self._ties.count(name, *where)
        if ties < len(where[0]) and self._ties.rounds_floats(name):
            self._doubts[tensor] = name, *where
        largest = int(apart.max(initial=0))
        return TensorDifference(
            step.path, step.op, tensor, int(value.size), len(places), largest, ties
        )


def _named(name: str, value: Any) -> list[tuple[str, Any]]:
    """A value, or the members of one that is a tuple."""
    if isinstance(value, list | tuple):
        return [(f"{name}[{i}]", part) for i, part in enumerate(value)]
    return [(name, value)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_sparse_tensor(value):
        return [value.features, value.indices]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []

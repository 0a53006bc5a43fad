"""onnxruntime's integers against the simulator's or the model's, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

from bevquant_export.dense._graph import Array
from bevquant_export.dense._half import in_half
from bevquant_export.dense._profile import profile_of
from bevquant_export.dense._program_of import QdqProgram, inputs_of, program_of
from bevquant_export.dense._runnable import forced, session
from bevquant_export.dense._source import Integers, Step
from bevquant_export.dense._ties import Ties
from bevquant_export.dense._written import QdqFile, TensorDifference
from bevquant_graph import is_sparse_tensor
from bevquant_int8sim import IntegerModel

__all__ = ["compare_qdq_onnx", "compared"]


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
    not: of these every difference counts as unexplained. Functions of floats may be off by 8·2⁻²⁴
    of their largest operand or result.

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
    rows, _ = compared(file, file.path.read_bytes(), integer, args, session, outputs=False)
    return rows


def compared(
    file: QdqFile,
    content: bytes,
    integer: QdqProgram,
    args: Any,
    run_in: Callable[..., Any],
    *,
    outputs: bool,
) -> tuple[tuple[TensorDifference, ...], dict[str, tuple[Array, Array]]]:
    """What `compare_qdq_onnx` returns, and the outputs that run in float.

    Args:
        file: What is said of the file.
        content: The file.
        integer: The program that it was written from.
        args: Inputs.
        run_in: Makes a session, as `session`.
        outputs: Look at the outputs in float too.

    Returns:
        The quantized tensors, and name to (what `integer` returns, what the file returns) of the
        outputs, from the same integers.
    """
    found: dict[str, tuple[Step, str, Any]] = {}
    inputs: dict[str, Any] = {}
    profile = profile_of(file.profile)
    args = in_half(args) if profile.half else args
    read = _read_by_rounding(integer)
    held = {n: v.cpu().numpy() for n, v in inputs_of(integer.program, args) if n in read}

    behind = _floats_behind(integer, read)
    sizes: dict[str, float] = {}

    def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        if step.op in ("float", "move") and step.outputs[0] in behind:
            before = max((sizes.get(name, 0.0) for name in step.inputs), default=0.0)
            # What is moved is rounded no more.
            tensors = _tensors([given, made]) if step.op == "float" else []
            floats = [t for t in tensors if t.is_floating_point() and t.numel()]
            own = max((float(t.abs().max()) for t in floats), default=0.0)
            sizes[step.outputs[0]] = before + own
        for name, value in _named(step.outputs[0], made[0]):
            if name in read:
                held[name] = value.cpu().numpy()
            if name in file.integers:
                # Two values may be one tensor, as a ReLU of what is positive already.
                found.setdefault(file.integers[name], (step, name, value.cpu().numpy()))

    returned = integer.run(args, observe=see)
    missing = set(file.integers.values()) - set(found)
    if missing:
        raise ValueError(
            f"compare_qdq_onnx: {file.path.name} has {sorted(missing)[0]!r}, which the model does "
            "not make; compare it with the model that it was written from"
        )
    for name, value in zip(file.inputs, _tensors(args), strict=True):
        inputs[name] = value.detach().cpu().numpy()
    for tensor, (_, _, value) in found.items():
        # A tensor without axes comes out of numpy's arithmetic as a number, which is no input.
        moved = np.asarray(value.astype(np.int32) + profile.zero) if profile.zero else value
        inputs[tensor] = moved.astype(profile.dtype, copy=False)
    proto, made = forced(content, tuple(found))
    running = run_in(proto, profile.runner)
    taken = {port.name for port in running.get_inputs()}
    given = {name: value for name, value in inputs.items() if name in taken}
    if profile.half:
        given = {n: v.astype(np.float16) if v.dtype == np.float32 else v for n, v in given.items()}
    own = [name for name in file.outputs if outputs and name not in made]
    results = dict(zip([*made, *own], running.run([*made.values(), *own], given), strict=True))
    ties = Ties(integer.program, held, sizes, profile)
    rows = []
    for tensor, (step, name, value) in found.items():
        want = value.astype(np.int32)
        # A linear layer's result has two axes in some files, and its own behind a Reshape.
        got = results[tensor].astype(np.int32).reshape(want.shape) - profile.zero
        apart = np.abs(want - got)
        different = int(np.count_nonzero(apart))
        rows.append(
            TensorDifference(
                step.path, step.op, tensor, int(apart.size), different,
                int(apart.max()) if different else 0,
                ties.count(name, want, got) if different else 0,
            )
        )  # fmt: skip
    floats = {
        name: (value.detach().cpu().numpy(), results[name])
        for name, value in zip(file.outputs, _tensors(returned), strict=False)
        # Others are quantized, and among the rows.
        if name in own and type(value) is Tensor and value.is_floating_point()
    }
    return tuple(rows), floats


def _read_by_rounding(integer: QdqProgram) -> set[str]:
    """Values that the operations read whose results are rounded: integers, and quantized floats."""
    program = integer.program
    quantized = {n for step in program.steps if step.op == "quantize" for n in step.inputs}
    return quantized | {
        name for name, value in program.values.items() if isinstance(value.form, Integers)
    }


def _floats_behind(integer: QdqProgram, read: set[str]) -> set[str]:
    """What is read by rounding, and every float that it is computed of."""
    found = set(read)
    for step in reversed(integer.program.steps):
        if step.op in ("float", "move") and found.intersection(step.outputs):
            found.update(step.inputs)
    return found


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

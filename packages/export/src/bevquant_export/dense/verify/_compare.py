"""Integers of onnxruntime compared with those of the simulator or the model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export._differences import TensorDifference
from bevquant_export._errors import QdqError
from bevquant_export._inputs import placed
from bevquant_export.dense._source import (
    QdqProgram,
    example_of,
    inputs_of,
    integer_model,
    location,
    program_of,
)
from bevquant_export.dense._written import QdqFile
from bevquant_export.dense.nodes._graph import Array
from bevquant_export.dense.nodes._profile import profile_of
from bevquant_export.dense.verify._cut import AT_ONCE, CutFile
from bevquant_export.dense.verify._float_errors import RUNS, FloatErrors
from bevquant_export.dense.verify._pieces import Piece, Pieces
from bevquant_export.lint._read import load_model, reading
from bevquant_export.runtime._alike import HALF, StableChoices, alike
from bevquant_export.runtime._session import (
    any_session,
    in_half,
    rounded_session,
    session,
    upgraded_opset,
)
from bevquant_graph import (
    arguments,
    check_kind,
    frames_remedy,
    in_order,
    members_of,
    rearranged,
    reported_by,
    same_constant,
)
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import Ref, SparseRef, Step, contiguous

_FEW = 4
_FLOAT = 2.0**-10  # of an output's largest value: float32 functions of the same integers
# Of models that round floats themselves (`bevquant_hybrid`), whose values are float32 sums: the
# share a step off, and where the file's biases are int32, which theirs are not.
_FLOAT_SUMS, _FLOAT_BIASES = 0.01, 0.25
_HALVES = 1e-4  # of values behind functions in half precision, whose errors are estimates
KnownErrors = dict[frozenset[str], FloatErrors]
"""Errors of one model on the same inputs, by those that are in half precision."""


@reported_by("compare_qdq_onnx")
def compare_qdq_onnx(
    file: QdqFile, model: nn.Module | IntegerModel, args: Any
) -> tuple[TensorDifference, ...]:
    r"""Run each operation of a file by itself and count the values that differ from `simulate`.

    Each operation reads the integers that the simulator has for its inputs, so a difference is
    counted at the operation that causes it and not downstream. Models of `bevquant_hybrid` are
    compared with their own rounding. Files for ONNX Runtime and OpenVINO run optimised, with fused
    operations, as in use. Files for TensorRT and hb_mapper run in float as written: this verifies
    the content of the file, not those runtimes.

    The simulator rounds products in float64, onnxruntime in float32. Where the exact value v is
    close to the middle of two steps,

    .. math:: |v - (k + \tfrac12)| \le 8 \cdot 2^{-24} |v|

    the two may differ by one step. These values are counted as `ties`; all others are
    `unexplained`. The allowed error is larger in these cases:

    * float sums of n terms: 4·√n·2⁻²⁴ of the sum of the terms' magnitudes;
    * layers of `bevquant_hybrid`, whose bias onnxruntime rounds to int32: half an accumulator step;
    * float functions upstream of a rounding: the model runs again with their results perturbed at
      random, by 2⁻²⁴, or 2⁻¹¹ in half precision, and the effect is the allowed error. Where that
      swaps two scores of a choice, a value may be several steps off.

    Layers, sums, bilinear resizing and requantization are computed again for this. Averages are
    not, and each of their differences is unexplained.

    Args:
        file: Result of `export_qdq_onnx`.
        model: The model that the file was written from, or the result of `simulate` for it.
        args: Inputs with the structure of the example inputs.

    Returns:
        One entry per quantized tensor of the file, in order.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: The file is damaged, the model has other tensors than the file, a number or
            array of the inputs that is a constant of the file is another one, or onnxruntime stops
            on these inputs.

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
    check_kind(file, QdqFile, "what export_qdq_onnx returned")
    args = _in_order(file, example_of(model, args))
    with reading(file.path, "compare_qdq_onnx"):
        proto = upgraded_opset(load_model(file.path, external_data=False))
    _check_tensors(file, proto, args)
    for wanted, given in zip(file.signature, arguments(args), strict=True):
        _refuse_other_constants(file, wanted, given, "inputs")
    integer = program_of(
        model, args, file.sum_ranges or False, verify=False
    )  # it was, before the file was written

    def run_in(proto: Any, runner: str) -> Any:
        with reading(file.path, "compare_qdq_onnx"):
            return session(proto, runner, lean=True, at_once=AT_ONCE)

    choices = StableChoices()
    with reading(file.path, "compare_qdq_onnx", LookupError, AttributeError):
        try:
            pieces = Pieces(file, file.path.read_bytes(), integer.program)
            rows, _, _ = compared(pieces, integer, args, run_in, choices, outputs=False)
        except Exception as error:
            if not _of_onnxruntime(error):
                raise
            raise ValueError(
                f"compare_qdq_onnx: onnxruntime does not run {file.path.name} on these inputs: "
                f"{error}; export again with a frame like this one"
            ) from error
    return rows


def _check_tensors(file: QdqFile, proto: Any, args: Any) -> None:
    """Refuse tensors of other types and sizes than the file's inputs."""
    from onnx.helper import tensor_dtype_to_np_dtype

    kinds = {p.name: p.type.tensor_type for p in proto.graph.input}
    for name, value in tensors_by_input(file, args).items():
        if name not in kinds or not isinstance(value, Tensor):
            continue
        sizes = [d.dim_value or d.dim_param for d in kinds[name].shape.dim]  # "" or a name is free
        pairs = enumerate(zip(sizes, value.shape, strict=False))
        others = [axis for axis, (size, came) in pairs if isinstance(size, int) and size != came]
        if others or len(sizes) != value.dim():
            batch = ", or with dynamic_batch=True for every batch" if others == [0] else ""
            raise QdqError(
                f"input {name} is of shape {list(value.shape)}, and {file.path.name} takes "
                f"{sizes}; export again with a frame like this one{batch}"
            )
        kind = tensor_dtype_to_np_dtype(kinds[name].elem_type).name
        came = str(value.dtype).removeprefix("torch.")
        # Inputs in half precision are rounded from float32 here.
        if came != kind and not (came == "float32" and "float" in kind):
            raise QdqError(
                f"input {name} is {came}, and {file.path.name} takes {kind}; "
                f"cast it (.to(torch.{kind})), or export again with a frame like this one"
            )


def _of_onnxruntime(error: Exception) -> bool:
    """Whether an error is one of onnxruntime's, whose classes have no common base."""
    return type(error).__module__.startswith("onnxruntime")


def compared(
    pieces: Pieces,
    integer: QdqProgram,
    args: Any,
    run_in: Callable[..., Any],
    choices: StableChoices,
    *,
    outputs: bool,
    known: KnownErrors | None = None,
    departs: Callable[[TensorDifference], bool] = lambda row: True,
    leave: Callable[[Piece], bool] = lambda piece: False,
) -> tuple[tuple[TensorDifference, ...], dict[str, tuple[Array, Array]], Any]:
    """Result of `compare_qdq_onnx`, and the float outputs.

    Returns the quantized tensors; for each output its value in `integer` and in the file, from the
    same integers; and the result of `integer`. Differences are explained in rows that `departs`
    without an explanation. Pieces to `leave` do not run. Comparisons of one model on the same
    `args` share `known`.
    """
    file, halves = pieces.file, pieces.halves
    args = required_of(file, integer, args)
    args = in_half(args, tensors_by_input(file, args), halves) if halves else args
    inputs = {
        name: value.detach().cpu().numpy().astype(np.float16)
        if name in halves
        else value.detach().cpu().numpy()
        for name, value in tensors_by_input(file, args).items()
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cut = CutFile(pieces, inputs, run_in, pool, outputs, departs, leave)
        cut.hold(inputs_of(integer.program, args))

        sizes = dict[str, int]()

        def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
            named = _named(step.outputs[0], made[0])
            cut.hold(named)
            for name, value in named:
                sizes[name] = value.numel() if isinstance(value, Tensor) else 1
                if name in file.integers or name in file.float8:
                    # The model's maps have channels last, the file's do not.
                    cut.compare(step, name, contiguous(value.cpu()).numpy())

        # Among equal scores the model chooses as ONNX does, so that both can be compared.
        with nullcontext() if choices.called is False else choices:
            returned = integer.run(args, observe=see)
        choices.called = bool(choices.called)
        cut.finish()
    if wanted := cut.in_doubt():
        known = {} if known is None else known
        fresh = FloatErrors(integer.program, half=pieces.profile.half, sizes=sizes)
        errors = known.setdefault(frozenset(halves), fresh)
        # Every operator of torch takes several times longer within.
        with choices if choices.called else nullcontext():
            if new := wanted - errors.runs.keys():
                errors.only(new)
                errors.run(integer, args)
            cut.count_again(errors)
            # Six values estimate a spread to 30 %, and single values lie outside by chance.
            if cut.leaves_few():
                errors.only(cut.in_doubt())
                errors.run(integer, args, 4 * RUNS)
                cut.count_again(errors)
    rows, results = cut.rows(), cut.floats
    floats = {
        name: (value.detach().cpu().numpy(), results[name])
        for name, value in placed(file.result, returned, "result")
        # Others are quantized, and among the rows.
        if name in results and type(value) is Tensor and value.is_floating_point()
    }
    return rows, floats, returned


def verified(
    file: QdqFile,
    content: bytes,
    integer: QdqProgram,
    args: Any,
    *,
    integer_sums: bool,
    known: KnownErrors | None = None,
) -> QdqFile:
    """Run the file on `args`; return its description with runtime and differences."""
    ran = ""

    def run_in(proto: Any, runner: str) -> Any:
        nonlocal ran
        made, ran = any_session(proto, runner, at_once=AT_ONCE)
        return made

    choices = StableChoices()
    with _run_by_onnxruntime("the example inputs"):
        pieces = Pieces(file, content, integer.program)
        rows, outputs, returned = compared(
            pieces, integer, args, run_in, choices, outputs=True, known=known
        )
    # Every operation has read the integer model's integers, so differences do not accumulate.
    for _, met in _departures(file, integer, rows, outputs, integer_sums=integer_sums):
        raise QdqError(
            f"{met}, when {ran} runs the file on the example inputs{choices.doubt}; "
            "nothing was written. verify=False writes it all the same"
        )
    profile = profile_of(file.profile)
    exact = integer_model(integer) is not None and not profile.half
    notes = (*file.notes, *choices.notes())
    returned = returned if exact else None
    swapped = [row for row in _swapped(file, rows) if not row.unexplained]
    if swapped:
        notes += (
            f"{sum(row.different for row in swapped):,} integers are of other rows than the "
            "model's, as float rounding swaps scores of a choice: "
            f"{', '.join(row.tensor for row in swapped)}",
        )
    return replace(file, verified=ran, differences=rows, returned=returned, notes=notes)


def departing(
    pieces: Pieces,
    integer: QdqProgram,
    args: Any,
    *,
    integer_sums: bool,
    inputs: str,
    choices: StableChoices,
    known: KnownErrors | None = None,
    found: Collection[str] = (),
    passed: set[bytes],
    least: float = 0.0,
) -> set[str]:
    """Tensors of a file that differ from the integer model by more than `verified` allows.

    Only pieces in half precision run, without those `passed`, to which others without a difference
    are added. Differences of `found`, and single steps up to a share `least` of a tensor's largest
    integer, need no explanation. `inputs` is the name of `args` in messages. Runs of one model
    share `choices`.
    """
    file, ran = pieces.file, list[Piece]()

    def leave(piece: Piece) -> bool:
        if not piece.in_half or piece.key in passed:
            return True
        ran.append(piece)
        return False

    def run_in(proto: Any, runner: str) -> Any:
        # onnxruntime computes chains of float16 in float32 on CPUs, the reference does not.
        return rounded_session(proto) or any_session(proto, runner, at_once=AT_ONCE)[0]

    def beyond(row: TensorDifference) -> bool:
        return row.largest > 1 or row.relative > least

    def departs(row: TensorDifference) -> bool:
        judged = row.tensor not in found and beyond(row)
        return judged and _departs(file, integer, row, integer_sums=integer_sums)

    with _run_by_onnxruntime(inputs):
        rows, outputs, _ = compared(
            pieces, integer, args, run_in, choices, outputs=True, known=known, departs=departs,
            leave=leave,
        )  # fmt: skip
    rows = tuple(filter(beyond, rows))
    departures = _departures(file, integer, rows, outputs, integer_sums=integer_sums)
    # A choice that half precision swaps is computed in float32.
    apart = {tensor for tensor, _ in departures} | {row.tensor for row in _swapped(file, rows)}
    passed.update(p.key for p in ran if apart.isdisjoint((*p.makes.values(), *p.own)))
    return apart


def _swapped(file: QdqFile, rows: tuple[TensorDifference, ...]) -> list[TensorDifference]:
    """Tensors of integers that are several steps off."""
    return [row for row in rows if row.largest > 1 and row.tensor not in file.float8.values()]


def refusal(integer: QdqProgram, args: Any) -> str:
    """The error with which a model refuses `args`; "" where it runs."""
    try:
        integer.run(args, observe=lambda *_: None)
    except Exception as error:  # of the model's own code, which may raise any
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _run_by_onnxruntime(inputs: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not _of_onnxruntime(error):
            raise
        raise QdqError(
            f"onnxruntime does not run the file on {inputs}: {error}; "
            "nothing was written. verify=False writes it all the same"
        ) from error


def _line(file: QdqFile, integer: QdqProgram, tensor: str) -> str:
    """``, file:line`` of the producer of a quantized tensor; "" where unknown."""
    values = {value for value, name in file.integers.items() if name == tensor}
    steps = (step for step in integer.program.steps if values & set(step.outputs))
    found = next(filter(None, (location(integer, step) for step in steps)), "")
    return f", {found}" if found else ""


def _departs(
    file: QdqFile, integer: QdqProgram, row: TensorDifference, *, integer_sums: bool
) -> bool:
    """Whether a tensor of the file differs by more than allowed."""
    profile, own_floats = profile_of(file.profile), integer_model(integer) is None
    share = _HALVES if profile.half else 0.0
    if own_floats:
        share = _FLOAT_BIASES if profile.integer_bias else _FLOAT_SUMS
    # A sum whose accumulators were quantized first may be off by one step anywhere.
    most = 1.0 if integer_sums and own_floats and row.op == "add" else share
    # Downstream of float functions, a few values may be off by one step without being ties.
    few = row.largest <= 1 and row.unexplained <= max(_FEW, most * row.elements)
    return row.is_wrong and not (most and few)


def _departures(
    file: QdqFile,
    integer: QdqProgram,
    rows: tuple[TensorDifference, ...],
    outputs: Mapping[str, tuple[Array, Array]],
    *,
    integer_sums: bool,
) -> Iterator[tuple[str, str]]:
    """Tensors of the file with a larger difference than allowed, and that difference."""
    for row in rows:
        if _departs(file, integer, row, integer_sums=integer_sums):
            yield (
                row.tensor,
                f"{row.path or 'a value of the forward'} ({row.op}"
                f"{_line(file, integer, row.tensor)}, {row.tensor} in the file): "
                f"{row.unexplained:,} of {row.elements:,} integers are others than the model's, by "
                f"up to {row.largest} steps",
            )
    for name, (want, got) in outputs.items():
        # 2⁻¹⁰ of the largest value, or noise 40 dB below it.
        if not alike(want, got, HALF if profile_of(file.profile).half else _FLOAT):
            yield (
                name,
                f"output {name} is not what the integer model returns, though every quantized "
                "tensor before it is: an operation in float behind the last of them is written "
                "as something else",
            )


def _named(name: str, value: Any) -> list[tuple[str, Any]]:
    """A value, or the members of a tuple."""
    if isinstance(value, list | tuple):
        return [(f"{name}[{i}]", part) for i, part in enumerate(value)]
    return [(name, value)]


def _in_order(file: QdqFile, args: Any) -> Any:
    """Inputs with the members of their dictionaries in the order of the file's example."""
    return rearranged(partial(in_order, file.signature), args)


def _refuse_other_constants(file: QdqFile, wanted: Any, given: Any, where: str) -> None:
    """Refuse inputs whose numbers and arrays are others than the file's constants."""
    if isinstance(wanted, Ref | SparseRef):
        return
    is_number = isinstance(wanted, bool | int | float | np.generic | np.ndarray)
    equal = np.isscalar(wanted) and np.isscalar(given) and wanted == given  # 1 and 1.0
    if is_number and not equal and not same_constant(wanted, given):
        raise QdqError(
            f"{where} is {wanted!r} in {file.path.name}, got {given!r}; give a frame with the "
            f"file's value, or export again with a frame like this one{frames_remedy(wanted)}"
        )
    own = members_of(given) or {}
    for key, member in (members_of(wanted) or {}).items():
        if key in own:
            _refuse_other_constants(file, member, own[key], f"{where}[{key!r}]")


def required_of(file: QdqFile, integer: QdqProgram, args: Any) -> Any:
    """The members of the inputs that the model reads, in the order of the file's inputs."""
    return _in_order(file, integer.program.members.required_inputs(args))


def tensors_by_input(file: QdqFile, args: Any) -> dict[str, Tensor]:
    """Tensors of a call by the file's inputs, bound by keys and positions."""
    given = placed(file.signature, arguments(args), f"{file.path.name}: inputs")
    # Files hold no float64.
    return {n: v.float() if getattr(v, "dtype", None) == torch.float64 else v for n, v in given}

"""`check_model`, `compile_model` and `export_hbir` under their documented names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import state_kept
from bevquant_hybrid._documented import tool
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._version import __version__
from bevquant_hybrid.compilation._arguments import (
    OPTIONS,
    bpu_calls,
    check_options,
    check_path,
    converted_model,
    forward_arguments,
    march_of,
    model_name,
    require_module,
)
from bevquant_hybrid.compilation._program_of import program_of, with_layouts
from bevquant_hybrid.operators import (
    OperatorCall,
    Violation,
    find_advice,
    find_violations,
    is_identity,
    load_support_table,
    runs_on_cpu,
    tensors_in,
)
from bevquant_hybrid.operators._script_runner import find_module
from bevquant_hybrid.runtime._file import write_program
from bevquant_hybrid.runtime._program import Program, flatten
from bevquant_quantizers.documents import text_table

_CAMERA_SCALE = 1 / 128


def check_model(
    module: nn.Module,
    example_inputs: Any,
    march: str | None = None,
    input_source: Sequence[str] | str = "ddr",
    advice: int | None = None,
    check_quanti_param: bool = True,
) -> int:
    """Check whether a BPU can run a model, and print all violations.

    Every operator call of one run is compared with the documented limits of the march. No compiler
    is called: undocumented limits are not checked.

    Args:
        module: Float with stubs, prepared, converted, or converted and traced.
        example_inputs: One tensor, or a tuple or list of the forward's arguments.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"`` (default: `set_march`).
        input_source: ``"ddr"``, ``"resizer"`` or ``"pyramid"``, or one for each input. The resizer
            and the pyramid deliver camera images: their QuantStub needs the scale 1/128.
        advice: Threshold in microseconds: layers that wait longer for memory are printed, as
            estimated from public figures by `bevquant_hybrid_tools` (if it is missing, a line says
            so). None: no estimate.
        check_quanti_param: Check that all scales are finite and positive.

    Returns:
        0 if nothing is violated, else 1. Remarks on precision do not count.

    Raises:
        TypeError: Not a module, or inputs of the wrong type.
        ValueError: A hybrid model, an unknown source or march, or no march is set.
        RuntimeError: The model does not run on the inputs.

    Example:
        >>> from bevquant_hybrid.quantization import QuantStub
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.AvgPool2d(8))
        >>> check_model(model, torch.ones(1, 3, 16, 16), march="bayes")
        This model is supported!
        HBDK model check PASS
        0
        >>> check_model(model, torch.ones(1, 3, 16, 16), march="bernoulli2")  # doctest: +ELLIPSIS
        1 condition of BERNOULLI2 is not met:
        module  operator            constraint   value  expected               what to do
        1       torch.nn.AvgPool2d  kernel_size  8      1 <= kernel_size <= 7  pool twice ...
        HBDK model check FAIL
        1
    """
    caller = "check_model"
    require_module(caller, module)
    name = march_of(march, caller)
    title = load_support_table().march(name).title
    arguments = forward_arguments(module, example_inputs, caller)
    count = sum(1 for _ in tensors_in(arguments))
    sources = check_options(caller, count, input_source=input_source)["input_source"]
    if check_quanti_param and (found := list(_scale_violations(module, title))):
        print("No integers can be computed with such scales, so operators were not looked at.")
        return _fail(found, title)
    calls = bpu_calls(caller, module, arguments)
    found = find_violations(calls, name)
    found += _camera_violations(module, calls, sources, title)
    _print_advice(calls, name)
    for path in _never_observed(module):
        print(f"advice: {path} has seen no values yet, so its scale is 1: calibrate or train first")
    if advice is not None:
        _print_utilisation([c for c in calls if not runs_on_cpu(c)], name, advice)
    if found:
        return _fail(found, title)
    if load_support_table().march(name).partial:
        print(f"Nothing that is known here of {title} speaks against this model.")
        return 0
    print("This model is supported!")
    print("HBDK model check PASS")
    return 0


def _camera_violations(
    module: nn.Module, calls: Sequence[OperatorCall], sources: Sequence[str], title: str
) -> Iterator[Violation]:
    """QuantStubs of camera inputs with another scale than the camera's."""
    stubs = [c for c in calls if c.operator.endswith(".QuantStub") and c.inputs == ("",)]
    if len(stubs) != len(sources):  # the record does not pair stubs with inputs
        stubs = stubs if set(sources).isdisjoint(("ddr",)) else []
        sources = [sources[0]] * len(stubs) if sources else []
    for call, source in zip(stubs, sources, strict=True):
        stub = find_module(module, call.path)
        if source == "ddr" or stub is None:  # or a second call: its path ends with a number
            continue
        scale = _scale_of(stub)
        if scale is not None and isclose(scale, _CAMERA_SCALE, rel_tol=1e-6):
            continue
        yield Violation(
            *(call.path, call.operator, title, "scale"),
            expected=f"1/128, as its input comes from the {source}",
            actual="not fixed" if scale is None else f"{scale:.6g}",
            remedy="QuantStub(scale=1 / 128)",
        )


def _scale_of(stub: nn.Module) -> float | None:
    for holder in (getattr(stub, "activation_post_process", None), stub):
        scale = getattr(holder, "scale", None)
        if isinstance(scale, Tensor | float) and torch.as_tensor(scale).numel() == 1:
            return float(scale)
    return None


def _scale_violations(module: nn.Module, title: str) -> Iterator[Violation]:
    """Scales that are not finite and positive."""
    for path, buffer in module.named_buffers():
        owner, _, name = path.rpartition(".")
        if not name.endswith("scale") or not buffer.is_floating_point():
            continue
        bad = buffer[~(torch.isfinite(buffer) & (buffer > 0))]
        if bad.numel():
            yield Violation(
                *(owner, _class_name(module, owner), title, name),
                expected="finite and above zero",
                actual=f"{float(bad.reshape(-1)[0])} ({bad.numel()} of {buffer.numel()})",
                remedy="calibrate or train on inputs without NaN, and look at the weights",
            )


def _class_name(module: nn.Module, path: str) -> str:
    found: Any = find_module(module, path)
    return str(getattr(found, "original_name", type(found).__name__))


def _never_observed(module: nn.Module) -> list[str]:
    return [
        path.removesuffix(".activation_post_process")
        for path, part in module.named_modules()
        if isinstance(part, FakeQuantize) and not part.observed
    ]


def violation_table(found: Sequence[Violation], title: str) -> str:
    """A model's violations of a march's limits, one line each."""
    what = "condition" if len(found) == 1 else "conditions"
    first = f"{len(found)} {what} of {title} {'is' if len(found) == 1 else 'are'} not met:"
    head = ["module", "operator", "constraint", "value", "expected", "what to do"]
    rows = [[v.path, v.operator, v.constraint, v.actual, v.expected, v.remedy] for v in found]
    return f"{first}\n{text_table([head, *rows])}"


def _fail(found: Sequence[Violation], title: str) -> int:
    print(violation_table(found, title))
    print("HBDK model check FAIL")
    return 1


def _print_advice(calls: Sequence[OperatorCall], march: str) -> None:
    """Print the table's remarks, each once with all its operators."""
    about: dict[str, list[str]] = {}
    # Remarks on stubs and identities hold for any model.
    telling = [c for c in calls if not (c.operator.endswith("Stub") or is_identity(c.operator))]
    for remark in find_advice(telling, march):
        about.setdefault(remark.text, []).append(remark.path)
    for text, paths in about.items():
        print(f"advice: {', '.join(paths)}: {text}")


def _print_utilisation(calls: Sequence[OperatorCall], march: str, threshold: float) -> None:
    """Layers that memory slows down by more than ``threshold`` microseconds."""
    slow = []
    try:
        estimates = tool("performance").estimate_layers(calls, march)
    except ImportError as missing:
        print(f"advice: which layers wait for memory is not estimated: {missing}")
        return
    for layer in estimates:
        waits = (layer.memory_seconds - layer.compute_seconds) * 1e6
        if waits > threshold:
            slow.append((waits, layer))
    if not slow:
        print(f"advice: no layer waits for memory for more than {threshold:g} us (an estimate)")
        return
    print(f"advice: layers that wait for memory for more than {threshold:g} us (an estimate):")
    rows = [["module", "operator", "waits (us)", "bytes", "op/byte", "what to do"]]
    for waits, layer in slow:
        moved = f"{layer.loaded_bytes + layer.stored_bytes:,}"
        last = "fuse it into the layer before it, or work on smaller maps"
        if layer.operations:
            last = "more operations per byte: larger batches, fewer groups, smaller maps"
        facts = f"{waits:.1f}", moved, f"{layer.intensity:.1f}"
        rows.append([layer.path, layer.operator, *facts, last])
    print(text_table(rows, right=(2, 3, 4)))


def compile_model(
    module: nn.Module,
    example_inputs: Any,
    hbm: str | os.PathLike[str],
    march: str | None = None,
    name: str | None = None,
    input_source: str | Sequence[str] = "ddr",
    input_layout: str | None = None,
    output_layout: str = "NCHW",
    opt: str | int = "O2",
    balance_factor: int = 2,
    progressbar: bool = True,
    jobs: int = 16,
    debug: bool = True,
    extra_args: Sequence[str] | None = None,
) -> int:
    """Write a converted model as an integer program that runs without its Python classes.

    **The file is not a BPU binary.** The vendor's compiler is not public: no chip runs this file,
    whatever its name. It is this project's own format, a safetensors file with the constants and a
    JSON list of operator calls with types, shapes and scales. `bevquant_hybrid.runtime.load` runs
    it with the functions of the fixed-point modules. Its outputs equal the converted model's, bit
    for bit.

    Args:
        module: Result of `convert` or `convert_fx`, not hybrid, or its `torch.jit.trace`.
        example_inputs: A tensor, or a list or tuple of the forward's arguments. The program accepts
            only their types and shapes.
        hbm: File to write; its folder is created.
        march: March that it is for; the one of `set_march` by default.
        name: Name of the model (default: its class name).
        input_source: ``"ddr"``, ``"resizer"`` or ``"pyramid"``, for all inputs or one for each;
            recorded in the file.
        input_layout: ``"NCHW"`` (None) or ``"NHWC"``: layout of four-axis inputs.
        output_layout: ``"NCHW"`` or ``"NHWC"``: layout of four-axis outputs.
        opt: 0 to 3, ``"O0"`` to ``"O3"``, ``"ddr"``, ``"fast"`` or ``"balance"``; recorded in the
            file, without effect on the program.
        balance_factor: For ``opt="balance"``; recorded in the file.
        progressbar: Accepted for old scripts.
        jobs: Accepted for old scripts.
        debug: Accepted for old scripts.
        extra_args: Further arguments of the vendor's compiler; recorded in the file.

    Returns:
        0. Every failure raises an exception.

    Raises:
        TypeError, ValueError: An argument does not fit, or the model calls an operator that integer
            programs or the march do not support. The message names the argument, or the operator
            and its module.
        RuntimeError: The program's result differs from the model's.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import QuantStub, get_default_qat_qconfig
        >>> from bevquant_hybrid.quantization import convert, prepare_qat
        >>> set_march(March.BAYES)
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(1, 2, 1))
        >>> model.qconfig = get_default_qat_qconfig()
        >>> qat, x = prepare_qat(model), torch.rand(1, 1, 4, 4)
        >>> _ = qat(x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compile_model(convert(qat.eval()), [x], hbm=f"{folder}/net.hbm", opt=3)
        compile_model: ...net.hbm holds 3 integer operators for bevquant_hybrid.runtime; it is no \
binary for a BPU, and no chip runs it
        0
    """
    given = locals()  # the arguments: nothing else has a name yet
    options = {name: given[name] for name in (*OPTIONS, "jobs")}
    path = check_path(hbm, "compile_model")
    _written("compile_model", module, example_inputs, path, march, name, options)
    return 0


def export_hbir(
    module: nn.Module, example_inputs: Any, hbir: str | os.PathLike[str], march: str | None = None
) -> tuple[list[str], list[str]]:
    """Write the program of `compile_model` and return the names of inputs and outputs.

    The vendor's intermediate format is not public either: the file is the same integer program.

    Args:
        module: As for `compile_model`.
        example_inputs: As for `compile_model`.
        hbir: File to write; its folder is created.
        march: March that it is for; the one of `set_march` by default.

    Returns:
        Names of the inputs, and names of the outputs (their places in the result).

    Raises:
        TypeError, ValueError, RuntimeError: As for `compile_model`.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import QuantStub, get_default_qat_qconfig
        >>> from bevquant_hybrid.quantization import convert, prepare_qat
        >>> set_march(March.BAYES)
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(1, 2, 1))
        >>> model.qconfig = get_default_qat_qconfig()
        >>> qat, x = prepare_qat(model), torch.rand(1, 1, 4, 4)
        >>> _ = qat(x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_hbir(convert(qat.eval()), (x,), f"{folder}/net.hbir")
        export_hbir: ...net.hbir holds 3 integer operators for bevquant_hybrid.runtime; it is no \
binary for a BPU, and no chip runs it
        (['input'], ['output'])
    """
    path = check_path(hbir, "export_hbir", "hbir")
    program = _written("export_hbir", module, example_inputs, path, march, None, {})
    return [port.name for port in program.inputs], [port.name for port in program.outputs]


def _written(
    caller: str,
    module: Any,
    example_inputs: Any,
    path: Path,
    march: str | None,
    name: str | None,
    given: dict[str, Any],
) -> Program:
    """Build a model's program, write it and print a summary."""
    chosen = march_of(march, caller)
    arguments = forward_arguments(module, example_inputs, caller)
    tensors = len(flatten(arguments, f"{caller}: example_inputs").tensors)
    options = check_options(caller, tensors, **given)
    model = converted_model(module, caller)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{caller}: name is a {type(name).__name__}: expected a string")
    called = model_name(caller, model, name)
    with state_kept(model):
        program = program_of(model, arguments, caller, called, chosen, options)
    _refuse_what_the_march_lacks(caller, module, arguments, chosen)
    program = with_layouts(program, options["input_layout"], options["output_layout"])
    write_program(program, path, f"bevquant-hybrid {__version__}")
    print(
        f"{caller}: {path} holds {len(program.steps)} integer operators for "
        "bevquant_hybrid.runtime; it is no binary for a BPU, and no chip runs it"
    )
    return program


def _refuse_what_the_march_lacks(
    caller: str, module: nn.Module, arguments: tuple[Any, ...], march: str
) -> None:
    """Refuse operators that a march does not have."""
    try:
        calls = bpu_calls(caller, module, arguments)
    except ValueError:
        return  # parts of it compute on floats, which the program has as they are
    found = find_violations(calls, march)
    if any(violation.constraint == "operator" for violation in found):
        raise ValueError(
            f"{caller}: {violation_table(found, load_support_table().march(march).title)}"
        )

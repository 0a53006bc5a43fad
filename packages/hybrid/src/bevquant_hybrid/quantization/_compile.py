"""`compile_model` and `export_hbir` under their documented names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

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
)
from bevquant_hybrid.compilation._program_of import program_of, with_layouts
from bevquant_hybrid.operators import find_violations, load_support_table
from bevquant_hybrid.quantization._check import violation_table
from bevquant_hybrid.runtime._file import write_program
from bevquant_hybrid.runtime._program import Program, flatten


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
    given = locals()
    options = {name: given[name] for name in (*OPTIONS, "jobs")}
    path = check_path(hbm, "compile_model")
    _written("compile_model", module, example_inputs, path, march, name, options)
    return 0


def export_hbir(
    module: nn.Module,
    example_inputs: Any,
    hbir: str | os.PathLike[str],
    march: str | None = None,
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

"""Running programs of `compile_model` without the model's Python classes."""

from __future__ import annotations

import os

from bevquant_graph import file_path
from bevquant_hybrid.runtime._file import read_program, write_program
from bevquant_hybrid.runtime._program import CompiledModel, Port, Program, operator_step
from bevquant_int8sim.program import Ref as Operand
from bevquant_int8sim.program import Step, Value

__all__ = [
    "CompiledModel",
    "Operand",
    "Port",
    "Program",
    "Step",
    "Value",
    "load",
    "operator_step",
    "write_program",
]


def load(path: str | os.PathLike[str]) -> CompiledModel:
    """Read a file of `bevquant_hybrid.quantization.compile_model`.

    Args:
        path: The ``.hbm`` file. Binaries of the vendor's compiler are refused.

    Returns:
        A callable with exactly the converted model's results.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It was not written by `compile_model`, is truncated or changed, has another
            schema, lacks a tensor, or calls an operator that programs do not allow. The message
            names it.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import (
        ...     DeQuantStub, QuantStub, compile_model, convert, get_default_qat_qconfig, prepare_qat
        ... )
        >>> set_march(March.BAYES)
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(1, 2, 1), DeQuantStub())
        >>> model.qconfig = get_default_qat_qconfig()
        >>> qat, x = prepare_qat(model), torch.rand(1, 1, 4, 4)
        >>> _ = qat(x)
        >>> converted = convert(qat.eval())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = compile_model(converted, [x], hbm=f"{folder}/net.hbm")  # doctest: +ELLIPSIS
        ...     compiled = load(f"{folder}/net.hbm")
        compile_model: ...net.hbm holds 4 integer operators for bevquant_hybrid.runtime...
        >>> torch.equal(compiled(x), converted(x))
        True
    """
    return CompiledModel(read_program(file_path(path, "program")))

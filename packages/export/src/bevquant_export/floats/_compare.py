"""A float file, and onnxruntime's floats against torch's, output by output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from bevquant_export.dense._runnable import session
from bevquant_export.floats._ports import called, tensors_in
from bevquant_export.lint._read import load_model


@dataclass(frozen=True)
class FloatDifference:
    """One output.

    Attributes:
        name: Of the output.
        elements: How many values it has.
        largest: Largest difference.
        relative: `largest` over the largest absolute value that torch has there.
    """

    name: str
    elements: int
    largest: float
    relative: float


@dataclass(frozen=True)
class FloatFile:
    """A float file.

    Attributes:
        path: The file.
        opset: Its operator set.
        inputs: Name to shape.
        outputs: Likewise.
        differences: onnxruntime against torch on the example, output by output; empty where that
            was not wanted.
    """

    path: Path
    opset: int
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]
    differences: tuple[FloatDifference, ...]

    def __str__(self) -> str:
        rows = (f"{row.name}: within {row.relative:.2g} of its largest" for row in self.differences)
        found = "; ".join(rows) or "not run"
        return f"{self.path}, operator set {self.opset}: {found}"


def compare_float_onnx(
    file: FloatFile, module: nn.Module, args: Any
) -> tuple[FloatDifference, ...]:
    """Run a file in onnxruntime and the module in torch, and compare every output.

    Args:
        file: From `export_float_onnx`.
        module: The module that it was written from.
        args: Inputs, structured like the example inputs.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: The module has other outputs than the file.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_export import compare_float_onnx, export_float_onnx
        >>> net, x = torch.nn.Linear(4, 2).eval(), torch.ones(1, 4)
        >>> file = export_float_onnx(net, x, f"{tempfile.mkdtemp()}/net.onnx")
        >>> [d.relative < 1e-5 for d in compare_float_onnx(file, net, -x)]
        [True]
    """
    wanted = [value for _, value in called(module, args)]
    if len(wanted) != len(file.outputs):
        raise ValueError(
            f"compare_float_onnx: the module has {len(wanted)} outputs, {file.path.name} "
            f"{len(file.outputs)}; compare it with the module that it was written from"
        )
    given = dict(zip(file.inputs, tensors_in(args), strict=True))
    return differences(load_model(file.path), given, dict(zip(file.outputs, wanted, strict=True)))


def differences(
    proto: Any, given: dict[str, Tensor], wanted: dict[str, Tensor]
) -> tuple[FloatDifference, ...]:
    """Run a model on `given` and compare with `wanted`, by the names of its outputs."""
    try:
        running = session(proto, "onnxruntime")
    except ImportError as error:
        raise ImportError(
            "a float file is held against torch with onnxruntime: pip install "
            "'bevquant-export[onnxruntime]', or write it unseen with tolerance=None"
        ) from error
    taken = {port.name for port in running.get_inputs()}  # one that is not read is no input
    inputs = {n: v.detach().cpu().numpy() for n, v in given.items() if n in taken}
    made = running.run(list(wanted), inputs)
    return tuple(
        _difference(name, np.asarray(value.detach().cpu()), got)
        for (name, value), got in zip(wanted.items(), made, strict=True)
    )


def _difference(name: str, want: Any, got: Any) -> FloatDifference:
    if want.shape != got.shape:
        raise ValueError(
            f"compare_float_onnx: output {name} is {list(got.shape)}, torch's {list(want.shape)}"
        )
    want, got = want.astype(np.float64), got.astype(np.float64)
    same = (want == got) | (np.isnan(want) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(want - got))
    apart = np.nan_to_num(apart, nan=np.inf)
    largest = float(apart.max()) if apart.size else 0.0
    finite = np.abs(want[np.isfinite(want)])
    scale = float(finite.max()) if finite.size else 0.0
    relative = 0.0 if largest == 0 else largest / scale if scale else float("inf")
    return FloatDifference(name, int(apart.size), largest, relative)

"""A written file as a function of its inputs; one for hb_mapper in a form that onnxruntime runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.dense._runnable import lifted, session
from bevquant_export.lint._read import load_model


def lift_horizon_onnx(path: str | os.PathLike[str]) -> Any:
    """The model of a file for hb_mapper, in operator set 13, which onnxruntime runs.

    Set 11, which the mapper takes, has no axis for scales per channel: onnx's checker passes such a
    file, and onnxruntime reads the scales along axis 1, which is wrong. Here every one of them gets
    its axis, and a softmax, which flattens in set 11, is written with that; what is computed stays
    the same. A file of another profile comes back as it is.

    Args:
        path: From ``export_qdq_onnx(…, profile="horizon")``.

    Returns:
        An ``onnx.ModelProto``, in memory.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_export import export_qdq_onnx
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> x = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).eval()
        >>> quantized = quantize_model(net, example_inputs=x).model
        >>> _ = calibrate(quantized, [x])
        >>> file = export_qdq_onnx(quantized, x, f"{tempfile.mkdtemp()}/net.onnx", "horizon")
        >>> lift_horizon_onnx(file.path).opset_import[0].version
        13
    """
    return lifted(load_model(path))


def open_onnx(
    file: str | os.PathLike[str] | Any, target: str | None = None
) -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    """A written file as a function: named inputs to named outputs, on the CPU.

    It runs in the engine itself where that is ONNX Runtime or OpenVINO, optimised as it is in use;
    for others node by node in ONNX Runtime, as it is written, with as many threads as torch has.
    Outputs in float16 come back as float32.

    Args:
        file: Of standard operators, or an ``onnx.ModelProto``.
        target: A name of `find_target`; None for node by node.

    Returns:
        Called with tensors, arrays or integers by name; names that the file does not read are
        passed over.

    Raises:
        ImportError: The engine is not installed; the extra that installs it is named.
        ValueError: The engine does not load the file.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_export import export_float_onnx
        >>> path = f"{tempfile.mkdtemp()}/net.onnx"
        >>> net, x = torch.nn.Linear(2, 1).eval(), torch.ones(1, 2)
        >>> _ = export_float_onnx(net, x, path, input_names=["x"], output_names=["y"])
        >>> bool((open_onnx(path, "onnxruntime")({"x": x})["y"] - net(x)).abs() < 1e-5)
        True
    """
    from bevquant_export.targets import find_target

    runner = "plain" if target is None else find_target(target).runner
    is_file = isinstance(file, str | os.PathLike)
    name = Path(file).name if is_file else "the model"
    try:
        running = session(lift_horizon_onnx(file) if is_file else file, runner, lean=True)
    except ImportError:
        raise
    except Exception as error:  # onnxruntime's own classes have no common base of their own
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"open_onnx: {runner} does not load {name}: {reason}") from error
    halves = {p.name for p in running.get_inputs() if getattr(p, "type", "") == "tensor(float16)"}
    names = [port.name for port in running.get_outputs()]
    taken = [port.name for port in running.get_inputs()]

    def run(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        given = {name: _array(inputs[name]) for name in taken}
        given = {n: v.astype(np.float16) if n in halves else v for n, v in given.items()}
        made = map(torch.from_numpy, running.run(names, given))
        floats = (value.float() if value.dtype == torch.float16 else value for value in made)
        return dict(zip(names, floats, strict=True))

    return run


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return np.array([value]) if isinstance(value, int) else value

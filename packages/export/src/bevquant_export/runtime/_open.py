"""A file as a function of its named inputs; files for hb_mapper in a form that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._cpu import refuse_saturation
from bevquant_export._size_guards import REMEDY, frames_of, guards_of
from bevquant_export._target import find_target
from bevquant_export.lint._read import load_model, reading
from bevquant_export.runtime._session import session, upgraded_opset
from bevquant_graph import check_guards, check_kind, file_path


def lift_horizon_onnx(path: str | os.PathLike[str]) -> Any:
    """Return a file for hb_mapper as a model in operator set 13, which onnxruntime runs.

    Set 11, which hb_mapper takes, has no axis attribute for scales per channel: onnx's checker
    accepts these files, but onnxruntime applies the scales along axis 1, which is wrong. In the
    returned model each Q/DQ node has its axis, and Softmax, which flattens in set 11, has an equal
    form of set 13. The computed values do not change. A file of another profile is returned
    unchanged.

    Args:
        path: File of ``export_qdq_onnx(…, profile="horizon")``.

    Returns:
        An ``onnx.ModelProto`` in memory.

    Raises:
        ValueError: The file is of another kind, or damaged.

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
    with reading(file_path(path, "ONNX file"), "lift_horizon_onnx"):
        return upgraded_opset(load_model(path))


def open_onnx(
    file: str | os.PathLike[str] | Any, target: str | None = None
) -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    """Return a file as a function that runs on the CPU, from named inputs to named outputs.

    Files for ONNX Runtime and OpenVINO run in that engine, optimised as in use. Others run node by
    node in ONNX Runtime, as written, with torch's number of threads. float16 outputs are returned
    as float32.

    Args:
        file: A file of standard operators, or an ``onnx.ModelProto``.
        target: A name of `find_target`; None runs node by node.

    Returns:
        A function of tensors, arrays or integers by name. Names that the file does not read are
        ignored; a missing one is a ValueError.

    Raises:
        ImportError: The engine is not installed; the message names the extra.
        ValueError: The engine does not load the file, or its integers would saturate on this CPU
            (`cpu_at_hand`). The returned function raises where a free size breaks a condition of
            the model (the message has condition, file and line), and where a table of coordinates
            has another number of frames than the file.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_export import export_float_onnx
        >>> path = f"{tempfile.mkdtemp()}/net.onnx"
        >>> net, x = torch.nn.Linear(2, 1).eval(), torch.ones(1, 2)
        >>> _ = export_float_onnx(net, x, path, input_names=["x"], output_names=["y"])
        >>> bool((open_onnx(path, "onnxruntime")({"x": x})["y"] - net(x)).abs() < 1e-5)
        True
    """
    is_file = isinstance(file, str | os.PathLike)
    if not is_file:
        import onnx

        check_kind(file, onnx.ModelProto, "the path of an ONNX file, or a ModelProto")
    called = Path(file).name if is_file else "the model"
    runner = "plain" if target is None else find_target(target).runner
    written = load_model(file, external_data=False) if is_file else file
    guards, frames = guards_of(written), frames_of(written)
    if runner != "plain":
        refuse_saturation(written, f"open_onnx: {called}")
    try:
        running = session(lift_horizon_onnx(file) if is_file else file, runner, lean=True)
    except ImportError:
        raise
    except Exception as error:  # onnxruntime's own classes have no common base of their own
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"open_onnx: {runner} does not load {called}: {reason}") from error
    numbers = {name for guard in guards for name, axis in guard.sizes if axis is None}
    halves = {p.name for p in running.get_inputs() if getattr(p, "type", "") == "tensor(float16)"}
    names = [port.name for port in running.get_outputs()]
    taken = [port.name for port in running.get_inputs()]

    def run(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"open_onnx: {called}: expected a dictionary of {', '.join(taken)}, "
                f"got a {type(inputs).__name__}"
            )
        if missing := [port for port in taken if port not in inputs]:
            raise ValueError(
                f"open_onnx: {called} reads {', '.join(taken)}; {', '.join(missing)} not given, "
                f"got {', '.join(inputs) or 'nothing'}"
            )
        given = {port: _array(inputs[port]) for port in taken}
        sizes = {n: int(v.flat[0]) if n in numbers else v.shape for n, v in given.items()}
        check_guards(guards, sizes, REMEDY)
        _check_frames(given, frames, called)
        given = {n: v.astype(np.float16) if n in halves else v for n, v in given.items()}
        made = map(torch.from_numpy, running.run(names, given))
        floats = (value.float() if value.dtype == torch.float16 else value for value in made)
        return dict(zip(names, floats, strict=True))

    return run


def _check_frames(given: Mapping[str, Any], frames: Mapping[str, int], file: str) -> None:
    """Refuse coordinates whose first column counts other frames than the file has."""
    for name, count in frames.items():
        if name in given and int(given[name][:, 0].max(initial=-1)) + 1 != count:
            raise ValueError(
                f"open_onnx: {file}: input {name}: expected batch indices up to {count - 1}, as "
                f"the file has {count} frames, got up to {int(given[name][:, 0].max(initial=-1))}; "
                "export again with a frame like this one"
            )


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return np.array([value]) if isinstance(value, int) else value

"""Written files executed on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from bevfusion_quant.export._files import FilePart
    from bevfusion_quant.export._write import Written

__all__ = ["named_inputs", "open_session", "runner", "session_of"]

Run = Callable[[tuple[Any, ...]], Sequence[Tensor]]


def runner(written: Written) -> Run:
    """A file as a function of its inputs.

    It runs in the engine itself where that is ONNX Runtime or OpenVINO, optimised as it is in use;
    for libspconv in integers here, for Autoware's plugin by the definition of its operators; for
    other engines node by node in ONNX Runtime, as it is written.
    """
    if written.linted == "libspconv":
        return _spconv(written)
    if written.linted == "autoware":
        return _plugin(written)
    return _onnxruntime(written)


def _spconv(written: Written) -> Run:
    from bevquant_export import load_sparse_onnx

    file = load_sparse_onnx(written.path)

    def run(args: tuple[Any, ...]) -> Sequence[Tensor]:
        made: Any = file(*args)
        return [made]

    return run


def _plugin(written: Written) -> Run:
    from bevquant_export.targets.autoware import run_on_frame

    def run(args: tuple[Any, ...]) -> Sequence[Tensor]:
        made = run_on_frame(written.path, args, written.made.permutation)
        return [made[name].float() for name in written.piece.file.outputs]

    return run


def _onnxruntime(written: Written) -> Run:
    optimised = written.linted in ("onnxruntime", "portable")
    session = (
        _openvino(written.path)
        if written.linted == "openvino"
        else open_session(written.path, optimised=optimised)
    )
    file = written.piece.file
    taken = {port.name for port in session.get_inputs()}  # what is not read is no input
    half = {p.name for p in session.get_inputs() if getattr(p, "type", "") == "tensor(float16)"}
    results = None if written.piece.kind == "sparse" else list(file.outputs)

    def run(args: tuple[Any, ...]) -> Sequence[Tensor]:
        given = {name: value for name, value in named_inputs(file, args).items() if name in taken}
        given = {n: v.astype(np.float16) if n in half else v for n, v in given.items()}
        made = [torch.from_numpy(value) for value in session.run(results, given)]
        return [value.float() if value.dtype == torch.float16 else value for value in made]

    return run


def _openvino(path: Path) -> Any:
    import onnx

    from bevfusion_quant.export._write import engine_of

    try:
        return engine_of("openvino").session(onnx.load(path))
    except ImportError as error:
        raise InputError(
            f"{path.name} was written, but openvino, which runs it, is not installed: pip install "
            "'bevquant-export[openvino]'"
        ) from error


def open_session(path: Path, *, optimised: bool) -> Any:
    """An onnxruntime session on the CPU, with as many threads as torch has.

    Files for hb_mapper are lifted to the operator set in which scales have their axis.
    """
    from bevquant_export import lift_horizon_onnx

    return session_of(lift_horizon_onnx(path), optimised=optimised, name=path.name)


def session_of(proto: Any, *, optimised: bool = False, name: str = "the file") -> Any:
    """The same of a model in memory."""
    import onnxruntime  # type: ignore[import-untyped,unused-ignore]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    if not optimised:
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    content = proto.SerializeToString()
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes have no common base of their own
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{name} was written, but onnxruntime {onnxruntime.__version__} does not load it: "
            f"{reason}; try another version"
        ) from error


def named_inputs(file: FilePart, args: tuple[Any, ...]) -> dict[str, Any]:
    """Arrays by the names that they have in a file; the sparse one takes the batch size too."""
    arrays = [np.array([a]) if isinstance(a, int) else a.detach().cpu().numpy() for a in args]
    return dict(zip((*file.inputs, "batch_size"), arrays, strict=False))

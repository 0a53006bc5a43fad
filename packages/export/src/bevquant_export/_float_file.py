"""Float modules as ONNX files, through torch's exporter, compared with torch before they appear."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export._differences import FloatDifference, TensorDifference, difference
from bevquant_export._errors import FloatFileError, refuse_no_values
from bevquant_export.floats._torch_exporter import OPSET, by_parameter, called, exported
from bevquant_export.floats._torch_exporter import input_names as named_inputs
from bevquant_export.floats._torch_exporter import output_names as named_outputs
from bevquant_export.lint._read import load_model, reading
from bevquant_export.runtime._alike import StableChoices
from bevquant_export.runtime._session import session
from bevquant_graph import HtmlTable, as_example, check_kind, file_path, reported_by
from bevquant_quantizers import TensorQuantizer, write_whole

__all__ = ["FloatDifference", "FloatFile", "compare_float_onnx", "export_float_onnx"]


@dataclass(frozen=True)
class FloatFile(HtmlTable):
    """Result of `export_float_onnx`.

    Attributes:
        path: The file.
        opset: Its operator set.
        inputs: Input names and shapes.
        outputs: Output names and shapes.
        parameters: For each input, the parameter of the forward that it stands for.
        places: For each output, its keys and positions in the module's return value.
        differences: Difference from torch on the example, per output; empty with
            ``tolerance=None``. Among equal scores, torch chooses the lowest index here, as ONNX
            does.
        notes: Deviations from the default, and the parts of a half-precision file that are float32.
    """

    path: Path
    opset: int
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]
    differences: tuple[TensorDifference, ...]
    notes: tuple[str, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = (f"{row.name}: within {row.relative:.2g} of its largest" for row in self.differences)
        found = "; ".join(rows) or "not run"
        return "\n".join((f"{self.path}, operator set {self.opset}: {found}", *self.notes))


@reported_by("export_float_onnx")
def export_float_onnx(
    module: nn.Module,
    args: Any,
    path: str | os.PathLike[str],
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int = OPSET,
    tolerance: float | None = 1e-3,
    half: bool = False,
    frames: Sequence[Any] = (),
) -> FloatFile:
    """Write a float module as ONNX with torch's exporter, and compare the file with torch.

    For parts that stay in float beside QDQ files: attention, softmax, query selection. ONNX Runtime
    runs the file on `args` before it gets its name; a file with other results is not written.
    Shapes are those of `args`. Nodes are named after modules
    (``decoder.0.norm1.LayerNormalization``) and constants after parameters. Paths and source code
    of this machine are removed from the file.

    Args:
        module: Module in evaluation mode, without quantizers. It is not changed.
        args: A batch as a loader gives it: positional inputs, a dict of named inputs, or one input,
            all tensors. A label is left out.
        path: The file. It is written to a temporary name and renamed.
        input_names: One name per input (default: the parameters' names).
        output_names: One name per returned tensor (default: keys and positions).
        opset: 18 or later.
        tolerance: Largest allowed difference from torch, relative to the largest absolute value of
            the output; None writes the file without running it.
        half: Write float16 inputs, outputs, weights and operations where all values fit, for
            TensorRT 11, which takes its types from the file. The rest is float32, with reasons in
            `FloatFile.notes`. `differences` are those of the float32 form. Results that differ from
            it by more than 2⁻⁶ on `args`, `frames`, zeros or rows of zeros are float32.
        frames: More inputs like `args`, whose largest values decide with ``half=True`` which
            operations are float16 (onnxruntime runs the file on them). Without frames, inputs may
            have any value of float16, and operations that could overflow are float32.

    Returns:
        The file, its inputs and outputs, and its differences from torch.

    Raises:
        ImportError: onnxscript is not installed, or onnxruntime, which the comparison needs.
        TypeError: `module` is not a module.
        ValueError: The module is in training mode or has quantizers, torch's exporter cannot write
            it, no input has values, or onnxruntime computes other ones. No file is written then.

    Example:
        >>> import tempfile, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)).eval()
        >>> path = f"{tempfile.mkdtemp()}/net.onnx"
        >>> file = export_float_onnx(net, torch.ones(1, 4), path, output_names=["y"])
        >>> file.inputs, file.outputs, file.opset
        ({'input': (1, 4)}, {'y': (1, 8)}, 18)
        >>> all(d.relative < 1e-5 for d in file.differences)
        True
    """
    target = file_path(path, "ONNX file")
    _check(module, opset, target)
    args = as_example(module, args)
    given = by_parameter(module, args)
    if tolerance is not None:
        refuse_no_values(given, FloatFileError)
    with StableChoices() as choices:
        results = dict(called(module, args))
    parameters = dict(zip(named_inputs(module, args, input_names), given, strict=True))
    places = dict(zip(named_outputs(list(results), output_names), results, strict=True))
    inputs = {name: given[parameter] for name, parameter in parameters.items()}
    outputs = {name: results[place] for name, place in places.items()}
    proto = exported(module, args, list(inputs), list(outputs), opset)
    found: tuple[TensorDifference, ...] = ()
    if tolerance is not None:
        found = _differences(proto, inputs, outputs)
        _hold(found, tolerance, module)
    reasons: tuple[str, ...] = ()
    if half:
        from bevquant_export.dense._half_trial import typed_floats

        more = [_bound(parameters, module, frame) for frame in frames]
        typed = typed_floats(proto, inputs, more, verify=tolerance is not None)
        proto, reasons = typed.proto, typed.reasons
    write_whole(target, proto.SerializeToString(deterministic=True))
    notes = (*choices.notes(), *reasons)
    return FloatFile(
        target, opset, _shapes(inputs), _shapes(outputs), found, notes, parameters, places
    )


def _bound(parameters: dict[str, str], module: nn.Module, args: Any) -> dict[str, Tensor]:
    """Inputs of a file to the tensors that a call gives for their parameters."""
    given = by_parameter(module, args)
    if given.keys() != {*parameters.values()}:
        raise ValueError(
            f"expected inputs {', '.join(parameters.values())} like those of the example, got "
            f"{', '.join(given) or 'none'}"
        )
    return {name: given[parameter] for name, parameter in parameters.items()}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _check(module: nn.Module, opset: int, target: Path) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"export_float_onnx: expected a module, got {type(module).__name__}")
    if opset < OPSET:
        raise FloatFileError(
            f"opset={opset}: expected {OPSET} or more; torch's exporter writes no earlier one"
        )
    if not target.parent.is_dir():
        raise FloatFileError(f"there is no folder {target.parent}; make it first")
    training = next((path for path, m in module.named_modules() if m.training), None)
    if training is not None:
        raise FloatFileError(f"{training or 'the module'} is in training mode; call eval() first")
    for path, child in module.named_modules():
        if _quantizes(child):
            raise FloatFileError(
                f"{path} quantizes; expected a float module. Write quantized "
                "ones with export_qdq_onnx, or disable() its quantizers"
            )


def _quantizes(module: nn.Module) -> bool:
    if isinstance(module, TensorQuantizer):
        return not module._disabled and module._if_quant
    return isinstance(module, torch.ao.quantization.FakeQuantizeBase)


def _hold(found: tuple[TensorDifference, ...], tolerance: float, module: nn.Module) -> None:
    worst = max(found, key=lambda d: d.relative)
    if not worst.relative <= tolerance:
        raise FloatFileError(
            f"onnxruntime makes output {worst.name} of {type(module).__name__} "
            f"other than torch: {worst.largest:g}, which is {worst.relative:.2g} of its largest "
            f"value; expected {tolerance:g} at most. Nothing was written; pass tolerance=None to "
            "write it nevertheless"
        )


def compare_float_onnx(
    file: FloatFile, module: nn.Module, args: Any
) -> tuple[TensorDifference, ...]:
    """Run a file in onnxruntime and the module in torch, and compare every output.

    A file of half precision receives its inputs rounded to float16, and the differences contain
    that rounding.

    Args:
        file: From `export_float_onnx`.
        module: The module that it was written from.
        args: Inputs, structured like the example inputs.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: The module has other outputs than the file, or the file is damaged.

    Example:
        >>> import tempfile, torch
        >>> net, x = torch.nn.Linear(4, 2).eval(), torch.ones(1, 4)
        >>> file = export_float_onnx(net, x, f"{tempfile.mkdtemp()}/net.onnx")
        >>> [d.relative < 1e-5 for d in compare_float_onnx(file, net, -x)]
        [True]
    """
    check_kind(file, FloatFile, "what export_float_onnx returned")
    check_kind(module, nn.Module, "a torch module")
    with StableChoices():
        wanted = dict(called(module, args))
    if wanted.keys() != {*file.places.values()}:
        raise ValueError(
            f"compare_float_onnx: the module has {len(wanted)} outputs, {file.path.name} "
            f"{len(file.outputs)}; compare it with the module that it was written from"
        )
    given = _bound(file.parameters, module, args)
    results = {name: wanted[place] for name, place in file.places.items()}
    with reading(file.path, "compare_float_onnx"):
        return _differences(load_model(file.path), given, results)


def _differences(
    proto: Any, given: dict[str, Tensor], wanted: dict[str, Tensor]
) -> tuple[TensorDifference, ...]:
    """Run a model on `given` and compare with `wanted`, by the names of its outputs."""
    try:
        running = session(proto, "onnxruntime")
    except ImportError as error:
        raise ImportError(
            "a float file is compared with torch in onnxruntime: pip install "
            "onnxruntime, or write it without comparison (tolerance=None)"
        ) from error
    ports = {port.name: port.type for port in running.get_inputs()}  # those that are read
    halves = {name for name, kind in ports.items() if kind == "tensor(float16)"}
    given = {n: v.half() if n in halves else v for n, v in given.items() if n in ports}
    inputs = {name: value.detach().cpu().numpy() for name, value in given.items()}
    made = running.run(list(wanted), inputs)
    return tuple(
        _difference(name, value.detach().cpu(), torch.from_numpy(np.asarray(got)))
        for (name, value), got in zip(wanted.items(), made, strict=True)
    )


def _difference(name: str, want: Tensor, got: Tensor) -> TensorDifference:
    if want.shape != got.shape:
        raise ValueError(
            f"compare_float_onnx: output {name} is {list(got.shape)}, torch's {list(want.shape)}"
        )
    return difference(name, got, want)

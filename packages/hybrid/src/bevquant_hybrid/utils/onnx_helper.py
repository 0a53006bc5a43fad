"""ONNX files of QAT models for hb_mapper, and of converted models for viewers."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch
from torch import nn
from torch.onnx import OperatorExportTypes, TrainingMode
from torch.onnx.errors import UnsupportedOperatorError

from bevquant_graph import check_kind
from bevquant_hybrid._convert import refuse_converted
from bevquant_hybrid.mapper import write_config
from bevquant_hybrid.march import March, get_march
from bevquant_hybrid.nn import DetectionPostProcess, DetectionPostProcessV1, RcnnPostProcess
from bevquant_hybrid.nn.qat.stubs import MARKS
from bevquant_hybrid.nn.quantized._weighted import FixedPoint
from bevquant_hybrid.undisturbed import positional, unobserved
from bevquant_quantizers.documents import write_whole

__all__ = ["export_quantized_onnx", "export_to_onnx"]

_OPSETS = (11, 13)
_OPTIONS = (  # handed on to torch's exporter
    *("export_params", "verbose", "training", "input_names", "output_names", "opset_version"),
    *("do_constant_folding", "dynamic_axes", "keep_initializers_as_inputs", "custom_opsets"),
)


def export_to_onnx(
    model: nn.Module,
    args: Any,
    f: str | os.PathLike[str] | IO[bytes],
    export_params: bool = True,
    verbose: bool = False,
    training: TrainingMode = TrainingMode.EVAL,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    operator_export_type: OperatorExportTypes | None = OperatorExportTypes.ONNX_FALLTHROUGH,
    opset_version: int = 11,
    do_constant_folding: bool = True,
    example_outputs: Any = None,
    strip_doc_string: bool = True,
    dynamic_axes: Any = None,
    keep_initializers_as_inputs: bool | None = None,
    custom_opsets: dict[str, int] | None = None,
    enable_onnx_checker: bool = False,
) -> None:
    """Write a float or QAT model as ONNX.

    Every fake quantizer becomes QuantizeLinear and DequantizeLinear; weights stay float, each with
    its own pair; CPU operators have none. Nodes are named ``<operator>_<place>``, such as
    ``Conv_32``, for hb_mapper's ``run_on_cpu``. The observers are off during the export. For a
    hybrid model, hb_mapper's settings are written too (``qat.yaml`` for ``qat.onnx``). They list
    the operators that the user put on the CPU although a BPU could run them: hb_mapper would
    quantize those with quantized inputs.

    Args:
        model: Float model, or result of `prepare_qat_fx` or `prepare_qat`; before convert.
        args: Example input, or a tuple of them.
        f: File name, or a file open for writing in binary.
        export_params: Write the weights too.
        verbose: Print the graph.
        training: As in `torch.onnx.export`.
        input_names: Names of the inputs.
        output_names: Names of the outputs.
        operator_export_type: None for standard operators alone; other values are accepted.
        opset_version: 11 for hb_mapper; 13 for onnxruntime (per-channel scales have an axis).
        do_constant_folding: Fold constants.
        example_outputs: Accepted for old scripts.
        strip_doc_string: Accepted for old scripts.
        dynamic_axes: As in `torch.onnx.export`.
        keep_initializers_as_inputs: As in `torch.onnx.export`.
        custom_opsets: As in `torch.onnx.export`.
        enable_onnx_checker: Run `onnx.checker` on the file before it is written.

    Raises:
        ImportError: onnx is not installed.
        ValueError: Another opset, a converted model, a 16-bit tensor, or, with standard operators
            alone, detection post-processing or `point_pillars_preprocess`.
    """
    given = locals()
    check_kind(model, nn.Module, "a torch module")
    onnx = _onnx()
    if opset_version not in _OPSETS:
        raise ValueError(f"export_to_onnx: opset_version={opset_version}: expected 11 or 13")
    refuse_converted(model, "export_to_onnx", ", or look at this one with export_quantized_onnx")
    with unobserved(model), _own_operators_named(model):
        kind = operator_export_type or OperatorExportTypes.ONNX
        proto = _exported(given, operator_export_type=kind)
    _join_equal_weights(proto.graph)
    forced = _take_marks_out(proto)
    _name_nodes(proto.graph)
    if enable_onnx_checker:
        onnx.checker.check_model(proto)
    _write(proto.SerializeToString(), f)
    if isinstance(f, str | os.PathLike) and getattr(model, "hybrid", False):
        write_config(f, get_march() or March.BAYES, [node.name for node in forced])


def export_quantized_onnx(
    model: nn.Module,
    args: Any,
    f: str | os.PathLike[str] | IO[bytes],
    export_params: bool = True,
    verbose: bool = False,
    training: TrainingMode = TrainingMode.EVAL,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    operator_export_type: OperatorExportTypes | None = OperatorExportTypes.ONNX_FALLTHROUGH,
    opset_version: int | None = None,
    do_constant_folding: bool = True,
    example_outputs: Any = None,
    dynamic_axes: Any = None,
    keep_initializers_as_inputs: bool | None = None,
    custom_opsets: dict[str, int] | None = None,
) -> None:
    """Write a converted model as ONNX for viewers.

    Each integer operation is one node of the domain ``bevquant_hybrid``. The operators that compute
    a table are upstream of its lookup. No runtime executes the file.

    Arguments are those of `export_to_onnx`, with a model of `convert_fx` or `convert`; an
    `operator_export_type` is accepted for old scripts, and the opset is 13 by default.

    Raises:
        ImportError: onnx is not installed.
        ValueError: The model is not converted.
    """
    given = locals()
    check_kind(model, nn.Module, "a torch module")
    if not any(isinstance(module, FixedPoint) for module in model.modules()):
        raise ValueError(
            "export_quantized_onnx: no module of the model computes in integers; convert it first, "
            "or write it with export_to_onnx"
        )
    kind = OperatorExportTypes.ONNX_FALLTHROUGH
    opset = opset_version or _OPSETS[-1]
    proto = _exported(given, operator_export_type=kind, opset_version=opset)
    _name_nodes(proto.graph)
    _write(proto.SerializeToString(), f)


def _exported(given: Mapping[str, Any], **settings: Any) -> Any:
    """Torch's export as an onnx model, with the arguments of an export function."""
    onnx = _onnx()
    buffer: Any = io.BytesIO()
    options = {name: given[name] for name in _OPTIONS} | settings
    options["keep_initializers_as_inputs"] = bool(options["keep_initializers_as_inputs"])
    with warnings.catch_warnings():
        # The exporter's deprecation, branches on settings, unknown operators.
        warnings.simplefilter("ignore")
        args = _positional(given["model"], given["args"])
        torch.onnx.export(given["model"], args, buffer, dynamo=False, **options)
    return onnx.load_from_string(buffer.getvalue())


def _name_nodes(graph: Any) -> None:
    for place, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{place}"


def _positional(model: nn.Module, args: Any) -> tuple[Any, ...]:
    if isinstance(args, tuple) and args and isinstance(args[-1], dict):
        return args
    if isinstance(args, tuple | dict):
        args = positional(model, args)
        # torch reads a last dictionary as keyword arguments; an empty one prevents that.
        return (*args, {}) if args and isinstance(args[-1], dict) else args
    return (args,)


def _join_equal_weights(graph: Any) -> None:
    """Remove the exporter's Identity nodes for equal weights."""
    weights = {weight.name for weight in graph.initializer}
    shared = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Identity" and node.input[0] in weights
    }
    _remove(graph, shared)


def _take_marks_out(proto: Any) -> list[Any]:
    """Remove the marks of `mark_forced` from a model and return the consumers of marked values."""
    graph = proto.graph
    marked = {n.output[0]: n.input[0] for n in graph.node if n.domain == MARKS}
    readers = {n.output[0] for n in graph.node if n.domain != MARKS and set(n.input) & set(marked)}
    _remove(graph, marked)
    domains = [entry for entry in proto.opset_import if entry.domain != MARKS]
    del proto.opset_import[:]
    proto.opset_import.extend(domains)
    return [node for node in graph.node if node.output[0] in readers]


def _remove(graph: Any, sources: Mapping[str, str]) -> None:
    """Remove the nodes that make some values; their consumers read the sources instead."""
    kept = [node for node in graph.node if node.output[0] not in sources]
    del graph.node[:]
    graph.node.extend(kept)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = sources.get(name, name)


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ImportError("export_to_onnx needs onnx: pip install onnx") from error
    return onnx


@contextlib.contextmanager
def _own_operators_named(model: nn.Module) -> Iterator[None]:
    """Refuse operators of this package that ONNX lacks; the message names the module."""
    try:
        yield
    except UnsupportedOperatorError as error:
        if "bevquant_hybrid::" not in str(error):
            raise
        detectors = DetectionPostProcess, DetectionPostProcessV1, RcnnPostProcess
        found = [path for path, m in model.named_modules() if isinstance(m, detectors)]
        raise ValueError(
            f"export_to_onnx: {', '.join(found) or 'the forward'} computes what ONNX has no "
            "operator for (detection post-processing, point_pillars_preprocess): leave it to the "
            "code around the model, or export with ONNX_FALLTHROUGH, for viewers"
        ) from error


def _write(content: bytes, f: str | os.PathLike[str] | IO[bytes]) -> None:
    if hasattr(f, "write"):
        f.write(content)
        return
    write_whole(f, content, parents=True)

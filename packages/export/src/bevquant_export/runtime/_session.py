"""Sessions that run a model on the CPU at hand; models in the operator set that these take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._cpu import refuse_saturation, saturates_here
from bevquant_export.runtime._plugins import without_plugins
from bevquant_graph import flatten, rebuild
from bevquant_quantizers.plugins import importable

version = cache(metadata.version)  # which reads files
_FLOAT16 = 10  # TensorProto's number
_ATTRIBUTES = {"ReduceSum": "axes", "Split": "split", "Squeeze": "axes", "Unsqueeze": "axes"}


def upgraded_opset(proto: Any) -> Any:
    """A model of operator set 11 or 12 in set 13: scales per channel get their axis."""
    imports = [entry for entry in proto.opset_import if entry.domain in ("", "ai.onnx")]
    if [entry.version for entry in imports] not in ([11], [12]):
        return proto
    from onnx import helper, numpy_helper

    imports[0].version = 13
    values = {c.name: c for c in proto.graph.initializer}
    values |= {n.output[0]: n.attribute[0].t for n in proto.graph.node if n.op_type == "Constant"}
    transposed = {n.input[1] for n in proto.graph.node if _has_outputs_second(n)}
    makers = {name: node for node in proto.graph.node for name in node.output}
    second = transposed | {makers[name].input[0] for name in transposed if name in makers}
    for node in proto.graph.node:
        # Attributes in set 11, tensors in set 13.
        if node.op_type in _ATTRIBUTES:
            _with_tensor(proto.graph, node, _ATTRIBUTES[node.op_type])
        # Set 11 has no axis, and onnxruntime applies these scales along axis 1. They are those of
        # output channels, unless a tool wrote an axis all the same.
        quantizes = node.op_type in ("QuantizeLinear", "DequantizeLinear")
        scale = values.get(node.input[1]) if quantizes else None
        if scale is None or list(scale.dims) in ([], [1]):
            continue
        if not any(a.name == "axis" for a in node.attribute):
            node.attribute.append(helper.make_attribute("axis", int(node.output[0] in second)))
        zero = values.get(node.input[2]) if len(node.input) > 2 else None
        if zero is not None and list(zero.dims) != list(scale.dims):
            # One number for all channels, which other tensors may share.
            each = np.broadcast_to(numpy_helper.to_array(zero), scale.dims)
            node.input[2] = f"{node.output[0]}.zero_points"
            proto.graph.initializer.append(numpy_helper.from_array(each.copy(), node.input[2]))
    nodes = [part for node in proto.graph.node for part in _flattened(node)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def _has_outputs_second(node: Any) -> bool:
    """Whether the second axis of a node's weight numbers output channels."""
    if node.op_type == "Gemm":
        return not any(a.name == "transB" and a.i for a in node.attribute)
    return node.op_type in ("ConvTranspose", "MatMul")


def _flattened(node: Any) -> list[Any]:
    """A node of set 11 as nodes of set 13 with an explicit flattening, where it flattens."""
    from onnx import helper

    if node.op_type not in ("Softmax", "LogSoftmax", "Hardmax"):
        return [node]
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    (given,), (made,) = node.input, node.output
    shape, rows, flat = (f"{made}.{part}" for part in ("shape", "rows", "flat"))
    return [
        helper.make_node("Shape", [given], [shape]),
        helper.make_node("Flatten", [given], [rows], axis=axis),
        helper.make_node(node.op_type, [rows], [flat], axis=1),
        helper.make_node("Reshape", [flat, shape], [made], node.name),
    ]


def _with_tensor(graph: Any, node: Any, name: str) -> None:
    """A node with a tensor in place of an attribute, where it has that."""
    from onnx import helper, numpy_helper

    for attribute in [a for a in node.attribute if a.name == name]:
        numbers = np.asarray(helper.get_attribute_value(attribute), np.int64)
        graph.initializer.append(numpy_helper.from_array(numbers, f"{node.name}.{name}"))
        node.input.append(f"{node.name}.{name}")
        node.attribute.remove(attribute)


def session(
    proto: Any, runner: str, *, lean: bool = False, at_once: int = 1, timed: bool = False
) -> Any:
    """A session that runs a model on the CPU, with onnxruntime's ``get_inputs`` and ``run``.

    `runner` is ``"onnxruntime"`` with all its optimisations, ``"plain"`` for it without any, or
    ``"openvino"``. `at_once` lean sessions share torch's threads; a `timed` one takes turns with
    another session, during whose turns its threads sleep.
    """
    proto = without_plugins(proto)
    # A file for CPUs that sum exactly: without optimisations its floats multiply.
    if saturates_here(proto):
        if _multiplies_integers(proto):
            refuse_saturation(proto, "the file")
        runner = "plain"
    if runner == "openvino":
        return _OpenVino(proto)
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "onnxruntime, which runs such files, is not installed: pip install onnxruntime"
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # onnxruntime's arena grows by doubling and keeps its memory between runs.
    if lean:
        options.intra_op_num_threads = max(torch.get_num_threads() // at_once, 1)
        options.enable_cpu_mem_arena = False
    if timed:
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if runner == "plain":
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@dataclass(frozen=True)
class _Input:
    name: str


class _OpenVino:
    """A model compiled by OpenVINO, called like a session of onnxruntime."""

    def __init__(self, proto: Any) -> None:
        try:
            import openvino
        except ImportError as error:
            raise ImportError(
                "openvino, which runs files of profile 'openvino', is not installed: pip install "
                "openvino"
            ) from error
        self._core = openvino.Core()
        self._proto = proto
        self._compiled: dict[tuple[Any, ...], Any] = {}
        made = {value.name for value in proto.graph.initializer}
        self._inputs = [_Input(p.name) for p in proto.graph.input if p.name not in made]

    def get_inputs(self) -> list[_Input]:
        return self._inputs

    def get_outputs(self) -> list[_Input]:
        return [_Input(port.name) for port in self._proto.graph.output]

    def run(self, names: list[str], given: Mapping[str, Any]) -> list[Any]:
        shapes = tuple(value.shape for value in given.values())
        if shapes not in self._compiled:
            self._compiled[shapes] = self._compile(given)
        made = self._compiled[shapes](dict(given))
        return [made[name] for name in names]

    def _compile(self, given: Mapping[str, Any]) -> Any:
        from onnx import helper

        # Integer kernels are chosen for known shapes, and an input without any ends the process.
        for port in self._proto.graph.input:
            kind = port.type.tensor_type.elem_type
            shape = list(given[port.name].shape)
            port.CopyFrom(helper.make_tensor_value_info(port.name, kind, shape))
        # Float layers in float32, as the file says: by default some CPUs take bfloat16.
        settings = {"INFERENCE_PRECISION_HINT": "f32"}
        model = self._core.read_model(self._proto.SerializeToString())
        return self._core.compile_model(model, "CPU", settings)


def reference_evaluator(proto: Any) -> Any:
    """ONNX's reference implementation of a model, without limits and loops of its operators."""
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_matmul import MatMul

    # It has this one from operator set 19 on. int32 biases have no zero point.
    def _run(
        self: Any, x: Any, scale: Any, zero: Any = None, axis: int = 1, **_: Any
    ) -> tuple[Any]:
        shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)] if scale.ndim else []
        centred = x.astype(np.int64)
        centred = centred if zero is None else centred - zero.reshape(shape).astype(np.int64)
        return (centred.astype(scale.dtype) * scale.reshape(shape),)

    # Its own one gathers from 64 values at most, by numpy.choose.
    def _gather(self: Any, x: Any, index: Any, axis: int = 0) -> tuple[Any]:
        sizes = [slice(None) if i == axis % x.ndim else slice(n) for i, n in enumerate(index.shape)]
        return (np.take_along_axis(x[tuple(sizes)], index, axis),)

    # numpy multiplies halves one by one, with sums in float32, fifty times slower than floats.
    def _matmul(self: Any, a: Any, b: Any) -> tuple[Any]:
        if a.dtype == b.dtype == np.float16:
            return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)
        made: tuple[Any] = MatMul._run(self, a, b)
        return made

    # Its own one is a loop of Python.
    def _erf(self: Any, x: Any) -> tuple[Any]:
        return (torch.from_numpy(np.asarray(x, np.float64)).erf().numpy().astype(x.dtype),)

    made = {"GatherElements": _gather, "MatMul": _matmul, "Erf": _erf}
    ours = [type(n, (OpRun,), {"op_domain": "", "_run": run}) for n, run in made.items()]
    if any(o.domain in ("", "ai.onnx") and o.version < 19 for o in proto.opset_import):
        ours.append(type("DequantizeLinear", (OpRun,), {"op_domain": "", "_run": _run}))
    return ReferenceEvaluator(proto, new_ops=ours)


class _Reference:
    """ONNX's reference implementation with the interface of a session, as far as it is used."""

    def __init__(self, proto: Any) -> None:
        self._proto, self._evaluator = proto, reference_evaluator(proto)

    def get_inputs(self) -> list[Any]:
        held = {tensor.name for tensor in self._proto.graph.initializer}
        return [value for value in self._proto.graph.input if value.name not in held]

    def run(self, names: list[str], feed: dict[str, Any]) -> list[Any]:
        with np.errstate(all="ignore"):  # exp(x) of float16 in a sigmoid
            return list(self._evaluator.run(names, feed))


def half_inputs(proto: Any) -> set[str]:
    """Inputs of a model that are float16."""
    return {p.name for p in proto.graph.input if p.type.tensor_type.elem_type == _FLOAT16}


def in_half(args: Any, names: Iterable[str], halves: Collection[str]) -> Any:
    """Inputs, rounded to float16 where the file's are (`halves`), in float32."""

    def rounded(name: str, value: Tensor) -> Tensor:
        is_half = name in halves and value.dtype == torch.float32
        return value.half().float() if is_half else value

    return with_tensors(rounded, names, args)


def with_tensors(change: Callable[[str, Tensor], Tensor], names: Iterable[str], args: Any) -> Any:
    """Arguments with other tensors; `change` makes one from its name and the old one."""
    tensors, tree = flatten(args)
    return rebuild(tree, list(map(change, names, tensors)))


def any_session(proto: Any, runner: str, *, at_once: int) -> tuple[Any, str]:
    """The best session on this machine, as of `session`, and its name."""
    saturates = saturates_here(proto)
    if runner == "openvino" and importable("openvino") and not saturates:
        return session(proto, runner), f"openvino {version('openvino')}"
    # Files for OpenVINO run in onnxruntime where it is not installed; without both, in ONNX's
    # reference. That also runs files whose products of integers would saturate here.
    if importable("onnxruntime") and not (saturates and _multiplies_integers(proto)):
        runner = "plain" if runner == "openvino" else runner
        made = session(proto, runner, lean=True, at_once=at_once)
        return made, f"onnxruntime {version('onnxruntime')}"
    return _Reference(without_plugins(proto)), f"onnx.reference {version('onnx')}"


def _multiplies_integers(proto: Any) -> bool:
    nodes = (node for part in (proto.graph, *proto.functions) for node in part.node)
    return any(node.op_type in ("MatMulInteger", "ConvInteger") for node in nodes)


# Loops of Python in ONNX's reference.
_SLOW = set("Conv ConvTranspose MaxPool AveragePool Resize GridSample".split())


def computes_in_half(proto: Any) -> bool:
    """Whether a model without own functions has float16 values."""
    casts = (node for node in proto.graph.node if node.op_type == "Cast")
    to_half = any(a.name == "to" and a.i == _FLOAT16 for node in casts for a in node.attribute)
    constants = any(tensor.data_type == _FLOAT16 for tensor in proto.graph.initializer)
    return to_half or constants or bool(half_inputs(proto))


def rounded_session(proto: Any) -> Any:
    """A session that rounds to float16 after each operation; None where not needed, or slow."""
    slow = any(node.op_type in _SLOW or node.domain for node in proto.graph.node)
    if slow or not computes_in_half(proto):
        return None
    # On CPUs onnxruntime computes float16 operations in float32 and drops the rounding between two
    # of them; ONNX's reference computes in float16.
    return _Reference(proto)

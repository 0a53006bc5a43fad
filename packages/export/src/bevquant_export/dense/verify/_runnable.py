"""A file as a function of its inputs; files for hb_mapper in a form that onnxruntime runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._size_guards import REMEDY, frames_of, guards_of
from bevquant_export.dense.nodes._sample import without_plugins
from bevquant_export.lint._read import load_model, reading
from bevquant_export.targets._cpu import refuse_saturation, saturates_here
from bevquant_graph import check_guards, check_kind, file_path, flatten, rebuild
from bevquant_quantizers.plugins import importable

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
    from bevquant_export.targets import find_target

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

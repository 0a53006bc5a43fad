"""Operations between layers, as a function of standard operators.

Its steps are written as in a file of the whole model for ONNX Runtime (`export_qdq_onnx`): on
floats, on coordinates of voxels, and on integers of layers that are not on voxels. The function is
part of a portable file, and runs by itself where the file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.runtime._session import reference_evaluator
from bevquant_export.sparse._beginning import REMEDY
from bevquant_export.voxels._body import DOMAIN, DOUBLE, FLOAT, INT32, INT64, OPSET
from bevquant_export.voxels._window import AXES, with_axes
from bevquant_quantizers.plugins import importable

if TYPE_CHECKING:
    from onnx import FunctionProto

    from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import Constant, NumberCall, Step

FRAMES = "frames_are_as_many_as_in_the_example"
_RULES = {
    "voxels_lie_in_the_grid_and_the_batch": "a voxel lies outside of the grid or the batch",
    "voxels_occur_once": "a voxel occurs twice; merge such voxels before",
    "features_are_numbers": "features contain NaN, which no integer stands for",
    FRAMES: "the model computes with the number of frames of the example, and got another one",
}


@dataclass(frozen=True, eq=False)
class Between:
    """Steps between layers."""

    steps: frozenset[str]  # In order, by their first output
    # Values that they read as features, in the order of the draft's readings
    tensors: tuple[str, ...]
    places: Mapping[str, str]  # Values read as coordinates, each with a tensor on these voxels
    value: str  # Their result
    coords: str  # Coordinates of the result, if these steps compute them; else empty
    grid: tuple[int, ...]  # Spatial shape of those
    on: str  # A tensor on the same voxels, if any; else empty
    frames: bool  # Whether a step depends on the number of frames
    cause: Step  # The step that has no operator in the dialect


class Bodies:
    """Functions for the operations between layers; `order` is that of coordinate columns."""

    def __init__(self, model: IntegerModel, example: Any, order: str) -> None:
        self.model, self.example, self.order = model, example, order

    @cached_property
    def source(self) -> Any:
        """The program with all sizes, and which of these are free."""
        from bevquant_export.dense._read_model import read_model

        whole = read_model(self.model, self.example, dynamic_batch=False, voxels=True)
        return replace(whole, program=replace(whole.program, sparse_inputs={}))

    @cached_property
    def frames(self) -> int:
        """Number of frames of the example."""
        tensors = (host for host in self.source.hosts.values() if hasattr(host, "batch_size"))
        return int(next(tensors).batch_size)

    def write(self, between: Between, places: Sequence[str], *, relu: bool) -> bytes:
        """The function, serialized; it reads the voxels of `places`, in order."""
        from onnx import helper, numpy_helper

        from bevquant_export.dense.nodes._emit import Emitter
        from bevquant_export.dense.nodes._graph import Graph, TensorState
        from bevquant_export.dense.nodes._profile import profile_of

        source, path = self.source, between.cause.path
        graph = Graph(profile_of("onnxruntime"), OPSET)
        emitter = Emitter(source, graph, {}, integer_sums=False)
        tensors = [graph.unique(f"x{i}") for i in range(len(between.tensors))]
        voxels = [graph.unique(f"voxels{i}") for i in range(len(places))]
        inputs = [*tensors, *voxels, graph.unique("batch_size")]
        if between.frames and tensors:
            tensors[0] = self._checked(graph, tensors[0])
        for name, made in zip(between.tensors, tensors, strict=True):
            emitter.states[name] = TensorState(made)
        there = dict(zip(places, voxels, strict=True))
        for value, place in between.places.items():
            emitter.states[value] = TensorState(self._columns(graph, there[place], value))
        for step in source.program.steps:
            if isinstance(step, Constant | NumberCall) or step.outputs[0] in between.steps:
                emitter.add(step)
        result = emitter.read(between.value)
        if source.dtypes.get(between.value) == torch.float64:
            result = graph.node("Cast", path, [result], to=FLOAT)
        if relu:
            result = graph.node("Relu", path, [result])
        outputs = [graph.node("Identity", path, [result])]
        if between.coords:
            outputs.append(self._with_three_axes(graph, emitter.read(between.coords), between))
        if graph.functions or graph.opset != OPSET:
            raise ValueError(
                f"export_sparse_onnx: {path or 'the forward'} computes between its layers what "
                f"operator set {OPSET} has not. " + REMEDY
            )
        constants = [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value, name))
            for name, value in graph.constants.items()
        ]
        function = helper.make_function(
            DOMAIN, "Steps", inputs, outputs, [*constants, *graph.nodes],
            [helper.make_operatorsetid("", OPSET)],
        )  # fmt: skip
        content: bytes = function.SerializeToString(deterministic=True)
        return content

    def _columns(self, graph: Any, voxels: str, value: str) -> str:
        """Coordinates of a file in the model's columns, without the axes that its grid lacks."""
        from onnx import helper

        columns = self.source.shapes[value][1]
        if columns <= AXES:
            missing = AXES + 1 - columns
            first = self.order == "zyx"
            kept = [0, *range(1 + missing, 1 + AXES)] if first else [*range(columns)]
            voxels = graph.node("Gather", "", [voxels, graph.numbers(kept)], axis=1)
        dtype = torch.empty(0, dtype=self.source.dtypes.get(value, torch.int32)).numpy().dtype
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        return str(graph.node("Cast", "", [voxels], to=kind))

    def _with_three_axes(self, graph: Any, coords: str, between: Between) -> str:
        """Inverse of `_columns`: zeros along the axes that the grid lacks."""
        path, columns = between.cause.path, self.source.shapes[between.coords][1]
        coords = graph.node("Cast", path, [coords], to=INT32)
        return with_axes(graph, path, coords, columns, 1 if self.order == "zyx" else columns)

    def _checked(self, graph: Any, x: str) -> str:
        """The input, unless the number of frames differs from the example's."""
        same = graph.node("Equal", FRAMES, ["batch_size", graph.numbers([self.frames])])
        other = graph.node("Cast", FRAMES, [graph.node("Not", FRAMES, [same])], to=INT64)
        nothing = graph.constant("float32_[0]", [0.0])
        # Rows are gathered from a tensor of one entry: any row but the first stops the run.
        zero = graph.node("Gather", FRAMES, [nothing, other], axis=0)
        return str(graph.node("Add", FRAMES, [x, zero]))


def silent_session(content: bytes, threads: int) -> Any:
    """An onnxruntime session on a CPU without log messages; errors are raised."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def session_run(session: Any, names: list[str] | None, feed: Mapping[str, Any]) -> list[Any]:
    """Result of onnxruntime."""
    try:
        made: list[Any] = session.run(names, feed)
    except Exception as error:  # onnxruntime's own, of several types without a public base
        message = next((text for rule, text in _RULES.items() if rule in str(error)), None)
        if message is None:
            raise
        raise ValueError(f"onnxruntime: {message}") from error
    return made


def run_body(body: bytes, inputs: Sequence[Tensor], *, made: int) -> list[Tensor]:
    """Result of a function of `Bodies`, in onnxruntime, or in ONNX's reference without it."""
    running, names = _runner(body, tuple(value.dtype for value in inputs), made)
    values = (value.detach().cpu().contiguous().numpy() for value in inputs)
    feed = dict(zip(names, values, strict=True))
    found = session_run(running, None, feed)
    return [torch.from_numpy(np.ascontiguousarray(value)) for value in found]


@lru_cache(maxsize=32)
def _runner(body: bytes, dtypes: tuple[torch.dtype, ...], made: int) -> tuple[Any, list[str]]:
    """Session of a function, created once for all frames, and the names of its inputs."""
    from onnx import FunctionProto, helper

    function: FunctionProto = FunctionProto.FromString(body)
    kinds = {torch.float32: FLOAT, torch.int64: INT64, torch.float64: DOUBLE}
    names = list(function.input)
    ports = [
        helper.make_tensor_value_info(name, kinds[dtype], None)
        for name, dtype in zip(names, dtypes, strict=True)
    ]
    results = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in zip(function.output, (FLOAT, INT32)[:made], strict=True)
    ]
    graph = helper.make_graph(list(function.node), "steps", ports, results)
    model = helper.make_model(graph, opset_imports=list(function.opset_import), ir_version=8)
    if not importable("onnxruntime"):
        return reference_evaluator(model), names
    return silent_session(model.SerializeToString(), 1), names

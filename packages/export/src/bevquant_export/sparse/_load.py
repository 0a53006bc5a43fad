"""Sparse ONNX files read back and run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._size_guards import REMEDY
from bevquant_export.sparse._axes import Voxels
from bevquant_export.sparse._check_graph import ConvConstants, numbered, tensor_ranges
from bevquant_export.sparse._graph import Conv, Graph, Node, first_on_input
from bevquant_export.sparse._proto import read_graph, recorded
from bevquant_export.sparse._run import Floats, FrameRun, Integers, See, TensorState
from bevquant_export.sparse._steps import session_run, silent_session
from bevquant_export.sparse.portable._lower import Lowered
from bevquant_export.sparse.portable._outputs import LayerOutput
from bevquant_export.targets._cpu import refuse_saturation
from bevquant_graph import Sizes, check_guards
from bevquant_int8sim import Recorded, SparseOutput

_STEPS = 127
_MODES = ("int8", "float")
Output = Tensor | SparseOutput | tuple[Tensor | SparseOutput, ...]


class SparseOnnxModel:
    """A sparse ONNX file that runs on the CPU, from `load_sparse_onnx`.

    Args:
        graph: Content of the file.
        backend: Kernels of ``bevquant_int8sim.int8_sparse_conv``, or ``"onnxruntime"``.
    """

    def __init__(self, graph: Graph, *, backend: str = "auto") -> None:
        self.graph = graph
        self.backend = backend
        convs = [node for node in graph.nodes if isinstance(node, Conv)]
        self._constants = {conv.name: ConvConstants(conv) for conv in convs}
        self._runtimes: dict[str, _OnnxruntimeRun] = {}
        first = first_on_input(graph)
        self._grid = None if first is None else first.input_spatial_shape

    @property
    def grid(self) -> tuple[int, ...] | None:
        """Spatial shape of the input, as the file states it."""
        return self._grid

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes in order of execution; `path` of each is the module that it was exported from."""
        return self.graph.nodes

    def __call__(
        self,
        features: Tensor,
        coords: Tensor,
        batch_size: int = 1,
        *,
        mode: str = "int8",
        spatial_shape: Sequence[int] | None = None,
    ) -> Output:
        """First result of `run`."""
        return _single(
            self.watch(
                features, coords, batch_size, _ignore, mode=mode, spatial_shape=spatial_shape
            )
        )

    def run(
        self,
        features: Tensor,
        coords: Tensor,
        batch_size: int = 1,
        *,
        mode: str = "int8",
        spatial_shape: Sequence[int] | None = None,
    ) -> tuple[Output, dict[str, Recorded]]:
        """Run one batch and keep the result of every node.

        Args:
            features: float ``[voxels, channels]``.
            coords: Integers ``[voxels, 4]``: batch, then the axes in the file's order.
            batch_size: Frames. The engine takes one.
            mode: ``"int8"``: int8 layers of the file in integers, the others in float32.
                ``"float"``: all in float32 on the file's weights.
            spatial_shape: Grid (default: the file's).

        Returns:
            The output (a tuple of several), a dense tensor or a `SparseOutput`, and for each node
            name its
            result: integers with their scale, or floats.

        Raises:
            TypeError: Features are not floats or coordinates not integers.
            ValueError: A shape, a coordinate or a range does not fit, a frame has more voxels than
                a layer's bound (which a portable file does not have), or the number of voxels
                breaks a condition of the model; the message names the node.
        """
        found: dict[str, Recorded] = {}

        def see(node: Node, made: TensorState, indices: Tensor | None) -> None:
            found[node.name] = _recorded(node, made)

        outputs = self.watch(
            features, coords, batch_size, see, mode=mode, spatial_shape=spatial_shape
        )
        return _single(outputs), found

    @torch.no_grad()
    def watch(
        self,
        features: Tensor,
        coords: Tensor,
        batch_size: int,
        see: See,
        *,
        mode: str = "int8",
        spatial_shape: Sequence[int] | None = None,
    ) -> tuple[Tensor | SparseOutput, ...]:
        """Run one batch; `see` gets each node, its result and the coordinates of its rows.

        Args:
            features: As in `run`, like the others.
            coords: Likewise.
            batch_size: Likewise.
            see: Called after each node; the coordinates of a dense tensor are None.
            mode: As in `run`.
            spatial_shape: Likewise.

        Returns:
            The outputs, always as a tuple.
        """
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: expected 'int8' or 'float'")
        grid = self._grid if spatial_shape is None else tuple(int(n) for n in spatial_shape)
        if grid is None:
            raise ValueError("no convolution reads the input; give spatial_shape")
        self._check(features, coords)
        sizes: Sizes = {"coords": tuple(coords.shape), "batch_size": int(batch_size)}
        check_guards(self.graph.guards, sizes, REMEDY)
        if self.backend == "onnxruntime":
            if grid != self._grid:
                raise ValueError(f"spatial_shape={grid}: a portable file has one, {self._grid}")
            if mode not in self._runtimes:
                self._runtimes[mode] = _OnnxruntimeRun(self.graph, mode)
            return self._runtimes[mode].run(features.float(), coords, int(batch_size), see)
        voxels = Voxels(coords.to(torch.int32).contiguous(), grid, int(batch_size))
        ranges = tensor_ranges(self.graph) if mode == "int8" else None
        run = FrameRun(self.graph, self._constants, ranges, self.backend, see)
        return run.run(features.float(), voxels)

    def _check(self, features: Tensor, coords: Tensor) -> None:
        channels = self.graph.channels
        wrong = features.dim() != 2 or (channels and features.shape[1] != channels)
        if wrong or tuple(coords.shape) != (len(features), 4):
            raise ValueError(
                f"features {tuple(features.shape)} and coords {tuple(coords.shape)}: expected "
                f"[voxels, {channels or 'channels'}] and [voxels, 4]: batch and three axes"
            )
        if not features.is_floating_point() or coords.is_floating_point():
            raise TypeError(
                f"features {features.dtype} and coords {coords.dtype}: expected floats and integers"
            )


def load_sparse_onnx(path: str | os.PathLike[str], *, backend: str = "auto") -> SparseOnnxModel:
    """Read, check and run a file of the libspconv dialect, ours or NVIDIA's, or a portable file.

    The check is stricter than the engine's parser, which reads a misspelt precision as fp16 and
    ignores a missing attribute. Integers follow ``bevquant_int8sim``: scales are range/127,
    rounding is half to even, values are clamped to −128…127, an int8 tensor has the range of its
    consumers. Further rounding inside the engine is not documented.

    The layers of a portable file (`lower_to_portable`) are read from its metadata and constants,
    and accepted only if they give this very file again. So the run has the values of its operators.

    Args:
        path: The file.
        backend: Kernels of ``bevquant_int8sim.int8_sparse_conv``; or ``"onnxruntime"``, which runs
            either dialect in its portable form, for `compare_sparse_onnx` and ``run``.

    Raises:
        ValueError: The file is damaged or outside the dialect; the message names the node.

    Example:
        >>> load_sparse_onnx("missing.onnx")
        Traceback (most recent call last):
        ...
        ValueError: load_sparse_onnx: missing.onnx: no such file as missing.onnx
    """
    try:
        return SparseOnnxModel(read_graph(path), backend=backend)
    except ValueError as error:
        raise ValueError(f"load_sparse_onnx: {error}") from error


def _single(outputs: tuple[Tensor | SparseOutput, ...]) -> Output:
    return outputs[0] if len(outputs) == 1 else outputs


def _ignore(node: Node, made: TensorState, indices: Tensor | None) -> None:
    pass


def _recorded(node: Node, made: TensorState) -> Recorded:
    """The stored form: integers, or floats that consumers round later."""
    place = node.path or node.name
    if isinstance(made, Integers):
        return Recorded(place, type(node).__name__, made.values, made.scale)
    return Recorded(place, type(node).__name__, made.floats(), None)


class _OnnxruntimeRun:
    """The portable form of a graph in onnxruntime's CPU provider, with every layer as an output.

    Args:
        graph: The graph to run.
        mode: ``"int8"``, or ``"float"`` for every layer in float32.
    """

    def __init__(self, graph: Graph, mode: str) -> None:
        named = numbered(graph)
        self._nodes = {new.name: old for new, old in zip(named.nodes, graph.nodes, strict=True)}
        self._graph = in_floats(named) if mode == "float" else named

    @cached_property
    def _lowered(self) -> Lowered:
        return recorded(self._graph, all_layers=True)

    @cached_property
    def _session(self) -> Any:
        refuse_saturation(self._lowered.model, "load_sparse_onnx: backend='onnxruntime': the file")
        content = self._lowered.model.SerializeToString()
        try:
            return silent_session(content, torch.get_num_threads())
        except ImportError as error:
            raise ImportError(
                "backend='onnxruntime' needs onnxruntime: pip install onnxruntime"
            ) from error

    def run(
        self, features: Tensor, coords: Tensor, batch_size: int, see: See
    ) -> tuple[Tensor | SparseOutput, ...]:
        """Outputs of the graph; `see` gets each convolution, sum and ReLU.

        Raises:
            ValueError: The file refused the voxels.
        """
        names = [value.name for value in self._session.get_outputs()]
        feed = {
            self._graph.features: features.detach().cpu().contiguous().numpy(),
            "coords": coords.cpu().to(torch.int32).contiguous().numpy(),
            "batch_size": np.array([batch_size], np.int64),
        }
        made = dict(zip(names, session_run(self._session, names, feed), strict=True))
        made["coords"] = feed["coords"]
        for layer in self._lowered.layers:
            value = torch.from_numpy(made[layer.tensor])
            state = Floats(value) if layer.amax is None else Integers(value, layer.amax / _STEPS)
            see(self._nodes[layer.node.name], state, torch.from_numpy(made[layer.coords]))
        return tuple(_output(layer, made, batch_size) for layer in self._lowered.results)


def _output(layer: LayerOutput, made: dict[str, Any], batch_size: int) -> Tensor | SparseOutput:
    value = torch.from_numpy(made[layer.tensor])
    if not layer.coords:
        return value
    indices = torch.from_numpy(made[layer.coords])
    return SparseOutput(value, indices, list(layer.grid), batch_size)


def in_floats(graph: Graph) -> Graph:
    """The graph with every layer in fp16, which runs in float32."""
    return replace(graph, nodes=tuple(node.in_floats() for node in graph.nodes))

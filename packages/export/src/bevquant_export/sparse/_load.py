"""Sparse ONNX files read back and run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._cpu import refuse_saturation
from bevquant_export._size_guards import REMEDY
from bevquant_export.sparse._check_graph import numbered
from bevquant_export.sparse._graph import Graph, Node, first_on_input
from bevquant_export.sparse._lower import LayerOutput, Lowered
from bevquant_export.sparse._proto import read_graph, recorded
from bevquant_export.sparse._run import FrameRun, See
from bevquant_export.sparse._steps import session_run, silent_session
from bevquant_graph import Sizes, check_guards
from bevquant_int8sim import Recorded, SparseOutput
from bevquant_int8sim.model import Coords

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
        self._opened: dict[str, tuple[Lowered, Any]] = {}  # by the mode
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

        def see(node: Node, scale: float | None, made: Callable[[], Tensor], _: Any) -> None:
            found[node.name] = Recorded(node.path or node.name, type(node).__name__, made(), scale)

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
        """`run` with all outputs as a tuple; `see` is called after each node (`See`)."""
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
            return self._in_onnxruntime(features.float(), coords, int(batch_size), mode, see)
        voxels = Coords(coords.to(torch.int32).contiguous(), grid, int(batch_size))
        graph = self.graph if mode == "int8" else self._in_floats
        return FrameRun(graph, self.backend, see).run(features.float(), voxels)

    @cached_property
    def _in_floats(self) -> Graph:
        return self.graph.in_floats()

    def _in_onnxruntime(
        self, features: Tensor, coords: Tensor, batch_size: int, mode: str, see: See
    ) -> tuple[Tensor | SparseOutput, ...]:
        """Run the portable form; `see` gets each convolution, sum and ReLU."""
        if mode not in self._opened:
            self._opened[mode] = _opened(self.graph, mode)
        lowered, session = self._opened[mode]
        names = [value.name for value in session.get_outputs()]
        feed = feed_of(self.graph, features, coords, batch_size)
        made = dict(zip(names, session_run(session, names, feed), strict=True))
        made["coords"] = feed["coords"]
        nodes = dict(zip((n.name for n in numbered(self.graph).nodes), self.nodes, strict=True))
        for layer in lowered.layers:
            value = partial(torch.from_numpy, made[layer.tensor])
            scale = None if layer.amax is None else layer.amax / _STEPS
            see(nodes[layer.node.name], scale, value, torch.from_numpy(made[layer.coords]))
        return tuple(_output(layer, made, batch_size) for layer in lowered.results)

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


def _ignore(node: Node, scale: float | None, made: Any, indices: Tensor | None) -> None:
    pass


def _opened(graph: Graph, mode: str) -> tuple[Lowered, Any]:
    """The portable form with every layer as an output, and its session in onnxruntime."""
    named = numbered(graph)
    lowered = recorded(named.in_floats() if mode == "float" else named, all_layers=True)
    refuse_saturation(lowered.model, "load_sparse_onnx: backend='onnxruntime': the file")
    try:
        return lowered, silent_session(lowered.model.SerializeToString(), torch.get_num_threads())
    except ImportError as error:
        message = "backend='onnxruntime' needs onnxruntime: pip install onnxruntime"
        raise ImportError(message) from error


def _output(layer: LayerOutput, made: dict[str, Any], batch_size: int) -> Tensor | SparseOutput:
    value = torch.from_numpy(made[layer.tensor])
    if not layer.coords:
        return value
    indices = torch.from_numpy(made[layer.coords])
    return SparseOutput(value, indices, list(layer.grid), batch_size)


def feed_of(
    graph: Graph, features: Tensor, coords: Tensor, batch_size: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of a portable file by name."""
    return {
        graph.features: features.detach().cpu().float().contiguous().numpy(),
        "coords": coords.cpu().to(torch.int32).contiguous().numpy(),
        "batch_size": np.array([batch_size], np.int64),
    }

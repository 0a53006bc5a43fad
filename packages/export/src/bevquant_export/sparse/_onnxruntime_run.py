"""Running a graph in onnxruntime, layer by layer visible."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.sparse._graph import Graph
from bevquant_export.sparse._held import Floats, Integers
from bevquant_export.sparse._names import numbered
from bevquant_export.sparse._run import See
from bevquant_export.sparse._steps import session_run, silent_session
from bevquant_export.sparse.portable import LayerOutput, Lowered, recorded
from bevquant_int8sim import SparseOutput

__all__ = ["OnnxruntimeRun"]

_STEPS = 127


class OnnxruntimeRun:
    """The portable form of a graph in onnxruntime's CPU provider, every layer an output.

    Args:
        graph: What runs.
        mode: ``"int8"``, or ``"float"`` for every layer in float32.
    """

    def __init__(self, graph: Graph, mode: str) -> None:
        named = numbered(graph)
        self._nodes = {new.name: old for new, old in zip(named.nodes, graph.nodes, strict=True)}
        self._graph = _in_floats(named) if mode == "float" else named

    @cached_property
    def _lowered(self) -> Lowered:
        return recorded(self._graph, all_layers=True)

    @cached_property
    def _session(self) -> Any:
        content = self._lowered.model.SerializeToString()
        try:
            return silent_session(content, torch.get_num_threads())
        except ImportError as error:
            raise ImportError(
                "backend='onnxruntime' needs onnxruntime: pip install "
                "'bevquant-export[onnxruntime]'"
            ) from error

    def run(
        self, features: Tensor, coords: Tensor, batch_size: int, see: See
    ) -> tuple[Tensor | SparseOutput, ...]:
        """The outputs of the graph; `see` gets each convolution, sum and ReLU.

        Raises:
            ValueError: The model refused the voxels.
        """
        names = [value.name for value in self._session.get_outputs()]
        feed = {
            "features": features.detach().cpu().contiguous().numpy(),
            "coords": coords.cpu().to(torch.int32).contiguous().numpy(),
            "batch_size": np.array([batch_size], np.int64),
        }
        made = dict(zip(names, session_run(self._session, names, feed), strict=True))
        made["coords"] = feed["coords"]
        for layer in self._lowered.layers:
            value = torch.from_numpy(made[layer.tensor])
            held = Floats(value) if layer.amax is None else Integers(value, layer.amax / _STEPS)
            see(self._nodes[layer.node.name], held, torch.from_numpy(made[layer.coords]))
        return tuple(_output(layer, made, batch_size) for layer in self._lowered.results)


def _output(layer: LayerOutput, made: dict[str, Any], batch_size: int) -> Tensor | SparseOutput:
    value = torch.from_numpy(made[layer.tensor])
    if not layer.coords:
        return value
    indices = torch.from_numpy(made[layer.coords])
    return SparseOutput(value, indices, list(layer.grid), batch_size)


def _in_floats(graph: Graph) -> Graph:
    """The graph with every layer in fp16, which runs in float32."""
    return replace(graph, nodes=tuple(node.in_floats() for node in graph.nodes))

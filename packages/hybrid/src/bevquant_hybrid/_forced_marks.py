"""Marks in an ONNX file at operators that a user put on the CPU, until their names are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["mark_forced", "take_marks_out"]

_DOMAIN = "bevquant_hybrid.marks"


def mark_forced(x: Tensor) -> Tensor:
    """Mark a value: whoever reads it was put on the CPU although a BPU could run it."""
    result: Tensor = _Mark.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op(f"{_DOMAIN}::Forced", x).setType(x.type())


def take_marks_out(proto: Any) -> list[Any]:
    """Remove the marks from a model and return the nodes that read a marked value."""
    graph = proto.graph
    marked = {n.output[0]: n.input[0] for n in graph.node if n.domain == _DOMAIN}
    readers = [n for n in graph.node if n.domain != _DOMAIN and set(n.input) & set(marked)]
    kept = [n for n in graph.node if n.domain != _DOMAIN]
    del graph.node[:]
    graph.node.extend(kept)
    names = {reader.output[0] for reader in readers}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = marked.get(name, name)
    domains = [entry for entry in proto.opset_import if entry.domain != _DOMAIN]
    del proto.opset_import[:]
    proto.opset_import.extend(domains)
    return [node for node in graph.node if node.output[0] in names]

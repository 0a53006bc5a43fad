"""Putting quantizers on additions and concatenations, whatever the class that computes them."""

from __future__ import annotations

from itertools import count
from typing import Any

from torch import fx, nn

from bevquant_fusion import rebuild_forward
from bevquant_qnn._add import QuantAdd
from bevquant_qnn._branches import Branches
from bevquant_qnn._concat import QuantConcat
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._float_parts import float_functions
from bevquant_qnn._graphs import forward_graphs
from bevquant_qnn._kinds import is_library_module, is_quantized
from bevquant_qnn._result import QuantizedModule, SkippedModule
from bevquant_qnn._takeover import attach_quantizer
from bevquant_quantizers import TensorQuantizer

__all__ = ["quantize_joins"]


def quantize_joins(
    model: nn.Module, config: QuantConfig, example_inputs: Any = None
) -> tuple[list[QuantizedModule], list[SkippedModule]]:
    """Quantize the additions and concatenations in the forward of every module of the model.

    - An addition of sparse tensors or their features becomes `self.quant_add(a, b)`.
    - A dense addition behind a convolution gets `self.residual_quantizer` on the other operand,
      the one with fewer layers before it: TensorRT then adds inside the convolution.
    - A concatenation fed by or read by quantized layers becomes `self.quant_concat(…)`.

    A module that changes is rebuilt from its traced forward; its class keeps its name.
    """
    done: list[QuantizedModule] = []
    skipped: list[SkippedModule] = []
    if not (config.quantize_add or config.quantize_concat):
        return done, skipped
    candidates = {path: m for path, m in model.named_modules() if _may_join(m)}
    graphs = forward_graphs(candidates, config, model, example_inputs)
    for path, module in candidates.items():
        graph = graphs[path]
        if isinstance(graph, fx.Graph):
            rewriter = _Rewriter(path, module, graph, config)
            rewriter.rewrite()
            done += rewriter.done
            functions = float_functions(rewriter.branches, products=example_inputs is None)
            if functions:
                called = ", ".join(functions)
                reason = f"its own forward calls {called}: without a quantized form, so in float"
                skipped.append(SkippedModule(path, reason))
            skipped += rewriter.skipped
        else:
            hint = "Pass example_inputs, or call" if example_inputs is None else "Call"
            reason = (
                f"additions and concatenations in its own forward, if any, stay float: {graph}. "
                f"{hint} QuantAdd and QuantConcat there yourself if it has some"
            )
            skipped.append(SkippedModule(path, reason))
    return done, skipped


def _may_join(module: nn.Module) -> bool:
    """Tell whether the module has a forward of the author's, around quantized layers."""
    return (
        not is_library_module(module)
        and not is_quantized(module)
        and any(is_quantized(child) for child in module.modules())
    )


class _Rewriter:
    """Edits the graph of one module and adds the children that the edits call."""

    def __init__(self, path: str, module: nn.Module, graph: fx.Graph, config: QuantConfig) -> None:
        self._path = path
        self._module = module
        self._graph = graph
        self._config = config
        self.branches = Branches(module, graph)
        self.done: list[QuantizedModule] = []
        self.skipped: list[SkippedModule] = []

    def rewrite(self) -> None:
        if self._config.quantize_add:
            for node in self.branches.additions():
                self._add(node)
        if self._config.quantize_concat:
            for node in self.branches.concatenations():
                self._concat(node)
        if self.done:
            rebuild_forward(self._module, self._graph)

    def _add(self, node: fx.Node) -> None:
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return
        if self.branches.is_sparse(left) or self.branches.is_sparse(right):
            if self.branches.hides_a_change(node):
                self._pass_over(node, "changes a tensor that is read under another name")
                return
            name = self._new_name("quant_add")
            if self._allowed(name):
                child = QuantAdd(quant_desc_input=self._config.input_descriptor())
                self._attach(name, child, "addition")
                self._replace(node, name, (left, right))
            return
        if self.branches.is_quantized(left) or self.branches.is_quantized(right):
            return
        main, residual = self._split(left, right)
        if not self.branches.ends_in_conv(main):
            self._pass_over(node, "is not behind a quantized convolution")
            return
        name = self._new_name("residual_quantizer")
        if self._allowed(name):
            quantizer = TensorQuantizer(self._config.input_descriptor())
            self._attach(name, quantizer, "residual input")
            with self._graph.inserting_before(node):
                quantized = self._graph.call_module(name, (residual,))
            node.args = tuple(quantized if arg is residual else arg for arg in (left, right))

    def _split(self, left: fx.Node, right: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return (main branch, residual): the residual has fewer layers before it."""
        if not self.branches.ends_in_conv(left):
            return right, left
        if not self.branches.ends_in_conv(right):
            return left, right
        deeper_left = self.branches.depth(left) >= self.branches.depth(right)
        return (left, right) if deeper_left else (right, left)

    def _concat(self, node: fx.Node) -> None:
        tensors = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        dim = node.kwargs.get("axis", dim)
        operands = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        nodes = [operand for operand in operands if isinstance(operand, fx.Node)]
        if len(nodes) < len(operands) or not isinstance(dim, int):
            self._pass_over(node, "has operands or an axis that are only known when it runs")
            return
        readers = self.branches.readers(node)
        if not readers and not self._path:
            self._pass_over(node, "is an output of the model that no layer reads")
            return
        if not self._quantizes(readers, nodes):
            self._pass_over(node, "is neither fed nor read by a quantized layer")
            return
        name = self._new_name("quant_concat")
        if self._allowed(name):
            child = QuantConcat(dim, quant_desc_input=self._config.input_descriptor())
            self._attach(name, child, "concatenation")
            self._replace(node, name, tuple(nodes))

    def _quantizes(self, readers: list[nn.Module], operands: list[fx.Node]) -> bool:
        feeders = [child for node in operands for child in self.branches.producers(node)]
        return any(is_quantized(part) for child in (*readers, *feeders) for part in child.modules())

    def _replace(self, node: fx.Node, name: str, args: tuple[fx.Node, ...]) -> None:
        with self._graph.inserting_before(node):
            call = self._graph.call_module(name, args)
        node.replace_all_uses_with(call)
        self._graph.erase_node(node)

    def _new_name(self, base: str) -> str:
        names = (base if index == 0 else f"{base}_{index}" for index in count())
        return next(name for name in names if not hasattr(self._module, name))

    def _attach(self, name: str, child: nn.Module, was: str) -> None:
        attach_quantizer(self._module, name, child)
        self.done.append(QuantizedModule(self._full(name), type(child).__name__, was))

    def _allowed(self, name: str) -> bool:
        pattern = self._config.excluded_by(self._full(name))
        if pattern is not None:
            self.skipped.append(SkippedModule(self._full(name), f"excluded by {pattern!r}"))
        return pattern is None

    def _pass_over(self, node: fx.Node, reason: str) -> None:
        kind = "concatenation" if "cat" in node.name else "addition"
        self.skipped.append(SkippedModule(self._path, f"{kind} `{node.name}` {reason}: left float"))

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

"""Which calls of a traced model are quantized operators, and where they run."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import DeQuantStub as TorchDeQuantStub
from torch.ao.quantization import QuantStub as TorchQuantStub
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from bevquant_graph import layer_class
from bevquant_hybrid._quant_stub import QuantStub
from bevquant_hybrid._scale_keeping import PASSING, rule_of
from bevquant_hybrid.nn import _functions as functions
from bevquant_hybrid.nn._pillars import PointPillarsScatter
from bevquant_hybrid.nn.intrinsic import ANCHORS, Fused
from bevquant_hybrid.nn.qat import has_qat_form
from bevquant_hybrid.operators import row_of_function, row_of_module
from bevquant_hybrid.operators._table import Listed, place_operator

from ._recipes import Recipe, Step, recipe_of
from ._settings import Names, anchor_path_of
from ._tracer import called_function, called_path, number_nodes, scope_of, with_items

_PASS_MODULES = (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Flatten, nn.Unflatten)
_PASS_FUNCTIONS = {operator.getitem, torch.flatten, torch.reshape, F.dropout, F.dropout2d}
_PASS_METHODS = set(PASSING.split())
# Modules that keep the scale of their input.
_KEEPING = (
    *(nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.MaxPool2d, nn.Upsample, nn.UpsamplingBilinear2d),
    *(nn.UpsamplingNearest2d, nn.ZeroPad2d, nn.ConstantPad2d, nn.ReplicationPad2d),
    *(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, functions.Interpolate),
    *(PointPillarsScatter, functions.GridSample),
)


def replace_functions(graph: Graph, root: nn.Module, march: str | None = None) -> list[str]:
    """Replace functions in place by calls of new modules of `root`; return the modules' names.

    The module of the k-th ``add`` in the forward of ``features.3`` is named
    ``features_3_generated_add_k``; in the model's own forward ``_generated_add_k``. Sizes, and
    functions that a quantized tensor passes through with its scale, stay as they are. A parameter
    that arithmetic reads gets a `QuantStub`, ``…_generated_quant_k``. In a hybrid model (`march`),
    functions that its mapper runs on the CPU stay functions.
    """
    numbers = number_nodes(graph)
    arithmetic = {
        path for path, m in root.named_modules() if isinstance(m, torch_quantized.FloatFunctional)
    }
    maker = _Maker(graph, root)
    for node in list(graph.nodes):
        if node in numbers:
            continue
        recipe = recipe_of(node, numbers, arithmetic, maker.attribute)
        if recipe is None or not _wanted(recipe, march):
            continue
        maker.replace(node, recipe)
    return maker.names


def _wanted(recipe: Recipe, march: str | None) -> bool:
    """Whether a model has the steps: one for the BPU alone always has."""
    if march is None or recipe.hybrid == "always":
        return True
    called = [step for step in recipe.steps if step.module is not None]
    return recipe.hybrid == "on the BPU" and all(
        mapper_place(step.module, step.target, march).place == "BPU" for step in called
    )


class _Maker:
    """Makes the nodes and modules of recipes."""

    def __init__(self, graph: Graph, root: nn.Module) -> None:
        self.graph, self.root = graph, root
        self.names: list[str] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def attribute(self, node: Node) -> Any:
        """What a get_attr node reads."""
        return operator.attrgetter(str(node.target))(self.root)

    def replace(self, node: Node, recipe: Recipe) -> None:
        """Put the steps in a node's place."""
        made: dict[Step, Node] = {}
        with self.graph.inserting_before(node):
            for step in recipe.steps:
                made[step] = self._node(step, node, made)
        result = recipe.result
        node.replace_all_uses_with(made[result] if isinstance(result, Step) else result)
        self.graph.erase_node(node)

    def _node(self, step: Step, source: Node, made: dict[Step, Node]) -> Node:
        def known(value: Any) -> Any:
            return made[value] if isinstance(value, Step) else value

        args: Any = map_aggregate(step.args, known)
        kwargs: Any = map_aggregate(step.kwargs, known)
        if step.module is None:
            kind = "call_method" if isinstance(step.target, str) else "call_function"
            node = self.graph.create_node(kind, step.target, args, kwargs)
        else:
            args = tuple(map_aggregate(args, lambda value: self._quantized(value, source)))
            name = self._named(step.operation, step.module, source)
            if step.target is None:
                node = self.graph.call_module(name, args, kwargs)
            else:
                owner = self.graph.get_attr(name)
                owner.meta["scope"] = scope_of(source)
                node = self.graph.call_method(step.target, (owner, *args), kwargs)
        node.meta = dict(source.meta)
        return node

    def _quantized(self, value: Any, source: Node) -> Any:
        """A parameter with a stub behind it; another value as it is."""
        if not (isinstance(value, Node) and value.op == "get_attr"):
            return value
        # Arithmetic modules are read by attribute too.
        if not isinstance(self.attribute(value), Tensor):
            return value
        stub = self.graph.call_module(self._named("quant", QuantStub(), source), (value,))
        stub.meta = dict(source.meta)
        return stub

    def _named(self, operation: str, module: Any, source: Node) -> str:
        """Give the root a module under the next free name, and return that."""
        scope = scope_of(source)
        prefix = scope.replace(".", "_")
        name = f"{prefix}_generated_{operation}_{self._counts[scope, operation]}"
        self._counts[scope, operation] += 1
        module.generated_in = scope
        self.root.add_module(name, module)
        self.names.append(name)
        return name


def mapper_place(module: nn.Module | None, method: str | None, march: str) -> Listed:
    """Where the mapper of a hybrid model runs a module, or a method of it, and why."""
    return place_operator(row_of_module(module, method), march)


class Kind(Enum):
    """A node's kind in the partition."""

    EDGE = "edge"  # inputs, outputs and attributes of the model, and dictionaries of values
    NUMBER = "number"  # a size, or what is computed of sizes
    QUANT = "quant"  # a QuantStub
    DEQUANT = "dequant"  # a DeQuantStub
    PASS = "pass"  # its value is its input's: Identity, dropout, views
    BPU = "bpu"  # computed on quantized values
    CPU = "cpu"  # computed on float values


def keeps_scale(module: nn.Module | None) -> bool:
    """Whether a module keeps the scale of its input, by the class whose function it computes."""
    return layer_class(module, *_KEEPING, *_PASS_MODULES) is not None


def has_weight(module: nn.Module | None) -> bool:
    """Whether a module is a convolution or linear layer that a BPU computes."""
    return layer_class(module, *ANCHORS, Fused) is not None


class Placement:
    """The kind of every node of a float graph.

    With `strip`, layers with only float inputs stay float too: those upstream of QuantStubs and
    downstream of DeQuantStubs.
    """

    def __init__(
        self,
        graph: Graph,
        root: nn.Module,
        qconfig_of: Callable[[str], Any],
        names: Names,
        hybrid: bool,
        march: str,
        strip: bool = False,
    ) -> None:
        self.strip = strip
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self._qconfig_of = qconfig_of
        self.names, self.hybrid, self.march = names, hybrid, march
        self._numbers = number_nodes(graph)
        self.kinds: dict[Node, Kind] = {}
        self._outside: set[Node] = set()  # float because nothing was quantized yet, or any more
        for node in graph.nodes:
            self.kinds[node] = self._kind(node)

    def module(self, node: Node) -> nn.Module | None:
        """The float module that a node calls, or whose method it calls; None for others."""
        path = called_path(node)
        found = self.modules.get(path) if path else None
        called = node.op == "call_module" or isinstance(found, torch_quantized.FloatFunctional)
        return found if called else None

    def path(self, node: Node) -> str:
        """Where the node's settings come from: its module, or the one whose forward holds it."""
        return called_path(node) if self.module(node) is not None else scope_of(node)

    def qconfig(self, node: Node) -> Any:
        """The qconfig of a node, or None."""
        return self._qconfig_of(self.path(node))

    def named(self, node: Node) -> bool:
        """Whether the user wants a node on the CPU."""
        # A fused layer goes by the name that it had in the user's model.
        path = self.path(node)
        module = self.modules.get(path)
        origin = anchor_path_of(module, path) if module is not None else path
        return self.names.cover((origin, scope_of(node)), self.modules)

    def forced(self, node: Node) -> bool:
        """Whether the BPU could run a node of the CPU: a user named it, or gave it no qconfig."""
        return self._could_run(node, self.module(node))

    def reason(self, node: Node) -> str:
        """Why a node runs on the CPU."""
        module = self.module(node)
        if self.hybrid and self.named(node):
            return "hybrid_dict names it, or a module around it"
        if node in self._outside:
            return "it reads float values alone"
        if self._could_run(node, module):
            return "it has no qconfig"
        listed = self._listed(node, module)
        if listed.place == "CPU":
            return listed.because
        return node.meta.get("reason") or "called so, it has no quantized form"

    def source(self, node: Node) -> Node:
        """The node whose value this one has, beyond everything that passes it on."""
        while self.kinds[node] is Kind.PASS and isinstance(node.args[0], Node):
            node = node.args[0]
        return node

    def inputs(self, node: Node) -> list[Node]:
        """Tensors that a node reads, each once."""
        return [
            n
            for n in node.all_input_nodes
            if self.kinds[n] is not Kind.NUMBER and not self._is_owner(n)
        ]

    def _is_owner(self, node: Node) -> bool:
        if node.op != "get_attr":
            return False
        return isinstance(self.modules.get(str(node.target)), nn.Module)

    def _kind(self, node: Node) -> Kind:
        if node.op in ("placeholder", "output", "get_attr") or node.target is with_items:
            self._outside.add(node)
            return Kind.EDGE
        if node in self._numbers:
            return Kind.NUMBER
        module = self.module(node)
        if isinstance(module, TorchQuantStub | QuantStub):
            return Kind.QUANT
        if isinstance(module, TorchDeQuantStub):
            self._outside.add(node)
            return Kind.DEQUANT
        # The user's word counts more than what the BPU has.
        if self.hybrid and self.named(node):
            return Kind.CPU
        outside = all(n in self._outside for n in self.inputs(node))
        # A node stays float if all that it reads is (model inputs, and results of DeQuantStubs); a
        # layer with a weight does so only with `strip`.
        if self._passes(node, module):
            kind = Kind.PASS
        elif self._has_bpu_form(node, module) and not (
            outside and (self.strip or not has_weight(module))
        ):
            return Kind.BPU
        else:
            kind = Kind.CPU
        if outside:
            self._outside.add(node)
        return kind

    def _passes(self, node: Node, module: nn.Module | None) -> bool:
        if module is not None:
            passes = layer_class(module, *_PASS_MODULES) is not None
        else:
            passes = node.target in (_PASS_METHODS if node.op == "call_method" else _PASS_FUNCTIONS)
        # The mapper of a hybrid model may run even a view on the CPU.
        return passes and (not self.hybrid or self._mapper_has(node, module))

    def _has_bpu_form(self, node: Node, module: nn.Module | None) -> bool:
        # What keeps its input's scale needs no qconfig: it has no fake quantizer.
        without = module is not None and layer_class(module, *_KEEPING) is None
        if without and self.qconfig(node) is None:
            return False
        return self._could_run(node, module)

    def _could_run(self, node: Node, module: nn.Module | None) -> bool:
        """Whether there is a BPU form of a node, given a qconfig."""
        if module is None:
            quantizes = rule_of(called_function(node)) is not None
        else:
            quantizes = layer_class(module, *_KEEPING) is not None or has_qat_form(module)
        return quantizes and (not self.hybrid or self._mapper_has(node, module))

    def _mapper_has(self, node: Node, module: nn.Module | None) -> bool:
        """Whether the mapper of a hybrid model runs an operator on the BPU of this march."""
        return self._listed(node, module).place == "BPU"

    def _listed(self, node: Node, module: nn.Module | None) -> Listed:
        """Where the mapper runs an operator, and why."""
        if module is not None:
            method = str(node.target) if node.op == "call_method" else None
            return mapper_place(module, method, self.march)
        function = called_function(node)
        name = getattr(function, "__name__", str(function))
        row = row_of_function(function, name, len(self.inputs(node)))
        return place_operator(row, self.march)

"""Graph modules that keep all attributes of the traced model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule

from bevquant_graph import check_kind
from bevquant_hybrid._leaf import MethodCall
from bevquant_hybrid.nn.qat._base import take_over


class GraphModuleWithAttr(GraphModule):
    """A graph module with every attribute of its source, in the source's order.

    It prints as the source did, followed by the code of its forward.
    """

    _source_name: str

    def __init__(self, root: nn.Module, graph: Graph, class_name: str | None = None) -> None:
        name = class_name or root.__dict__.get("_source_name") or type(root).__name__
        source_class = root.__dict__.get("_source_class") or type(root)
        super().__init__(root, graph, name)
        # `GraphModule` has taken over only what the graph reads.
        for store in ("_parameters", "_buffers", "_modules"):
            self.__dict__[store] = dict(root.__dict__[store])
        # What `GraphModule` has made for itself stays.
        for attribute, value in root.__dict__.items():
            self.__dict__.setdefault(attribute, value)
        self._source_name = name
        self.__dict__["_source_class"] = source_class
        # A wrapped method is called on this model from now on.
        for name, module in self._modules.items():
            if isinstance(module, MethodCall):
                self._modules[name] = module.of(self)

    def __getattr__(self, name: str) -> Any:
        """Look in the source's class too: methods that a wrapped method calls."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__.get("_source_class"), name, None)
            # Protocols look for special methods to find out whether they exist.
            if found is None or name.startswith("__"):
                raise
            return found.__get__(self) if callable(found) else found

    def _deepcopy_init(self) -> Callable[..., None]:
        return GraphModuleWithAttr.__init__

    def __str__(self) -> str:
        code = str(self.code).strip("\n")
        return f"{nn.Module.__repr__(self)}\n\n{code}\n"


class ObservedGraphModule(GraphModuleWithAttr):
    """A graph module prepared for calibration or quantization-aware training.

    Attributes:
        hybrid: Whether parts of it may run on the CPU.
        on_cpu: Its operators on the CPU, each with its line and the reason.
    """

    hybrid: bool
    on_cpu: tuple[Any, ...]


class QuantizedGraphModule(GraphModuleWithAttr):
    """A graph module that computes in integers where it was quantized.

    Attributes:
        hybrid: Whether parts of it may run on the CPU.
    """

    hybrid: bool


def clone_containers(root: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> nn.Module:
    """Copy the containers of a model; leaves, parameters and buffers stay the same objects."""
    check_kind(root, nn.Module, "a torch module")
    made: dict[int, nn.Module] = {}

    def clone(module: nn.Module, top: bool) -> nn.Module:
        if id(module) not in made:
            if not top and is_leaf(module):
                made[id(module)] = module
            else:
                copied: nn.Module = take_over(type(module), module)
                made[id(module)] = copied
                for name, child in module._modules.items():
                    if child is not None:
                        copied._modules[name] = clone(child, False)
        return made[id(module)]

    copied_root = clone(root, True)
    # Attributes that refer to copied modules (lists of layers, methods set on a module) refer to
    # the copies: a replacement in the copy is seen by its forward, and not by the original.
    for original, module in made.items():
        if id(module) == original:  # a leaf, which is the user's own
            continue
        for name, value in module.__dict__.items():
            if name not in ("_modules", "_parameters", "_buffers"):
                module.__dict__[name] = _of_clones(value, made)
    return copied_root


def _of_clones(value: Any, made: dict[int, nn.Module]) -> Any:
    """An attribute that leads to modules of a model, leading to those of its copy."""
    if isinstance(value, nn.Module):
        return made.get(id(value), value)
    # `block.forward = types.MethodType(traceable, block)` puts a method on one module.
    if isinstance(value, MethodType):
        owner = _of_clones(value.__self__, made)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if type(value) in (list, tuple):
        items = [_of_clones(item, made) for item in value]
        changed = any(a is not b for a, b in zip(items, value, strict=True))
        return type(value)(items) if changed else value
    if type(value) in (dict, OrderedDict):
        found = {name: _of_clones(item, made) for name, item in value.items()}
        return type(value)(found) if any(found[n] is not value[n] for n in found) else value
    return value


def replace_module(root: Any, path: str, module: nn.Module) -> None:
    """Put a module in the place of another, or at a new name."""
    parent, _, name = path.rpartition(".")
    root.get_submodule(parent)._modules[name] = module


def copied_graph(graph: Graph) -> Graph:
    """A graph whose names are those of its nodes alone, so that erased ones are free again."""
    made = Graph(tracer_cls=getattr(graph, "_tracer_cls", None))
    result = next(node for node in reversed(graph.nodes) if node.op == "output")
    made.output(made.graph_copy(graph, val_map={}), type_expr=result.type)
    return made

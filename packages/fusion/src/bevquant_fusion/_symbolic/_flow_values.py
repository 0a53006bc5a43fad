"""Which value each step of a traced region reads and makes, with aliases resolved.

A graph node is a name; a value is a tensor's content. ``x``, ``x.features`` and
``y.replace_feature(x.features)`` are three names of one value; after ``x.features = z``,
``x += z`` or an in-place ReLU the same name holds another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ._checks import check_not
from ._kinds import kind_of
from ._proxy import INPLACE_OPERATORS

_METADATA = frozenset(
    "shape size dtype device ndim dim numel nelement stride requires_grad is_cuda layout "
    "is_contiguous get_device element_size indices spatial_shape batch_size indice_dict grid "
    "spatial_size voxel_num benchmark find_indice_pair training".split()
)
_COPIES = frozenset({"shadow_copy"})


@dataclass(eq=False)
class Cell:
    """What a tensor holds now: usually one value, several where it cannot be told which.

    ``writers`` are the nodes that wrote to it in place, oldest first.
    """

    values: tuple[int, ...]
    writers: list[fx.Node] = field(default_factory=list)


@dataclass(eq=False)
class Ref:
    """What a name stands for: a tensor, or an object around one, with its elements.

    ``knows`` counts the in-place writers that the name was made after.
    """

    cell: Cell
    knows: int = 0
    elements: dict[Any, Ref] = field(default_factory=dict)

    def read(self) -> Iterator[int]:
        """Values that a reader of the whole object sees."""
        yield from self.cell.values
        for element in self.elements.values():
            yield from element.read()

    def alias(self) -> Ref:
        """Another name for the same tensor."""
        return Ref(self.cell, self.knows)


@dataclass(frozen=True, eq=False)
class Step:
    """One node that reads values and makes one."""

    node: fx.Node
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    same: bool = False


class ValueReader:
    """Walks a graph in order and gives every step its values.

    Args:
        root: Module the graph's ``call_module`` targets are relative to.
        fresh: Hands out value numbers.
    """

    def __init__(self, root: nn.Module, fresh: Callable[[], int]) -> None:
        self.root = root
        self.fresh = fresh
        self.steps: list[Step] = []
        self.inputs: list[int] = []
        self.outputs: set[int] = set()
        self.parameters_read: set[str] = set()
        self.inplace_seen: set[fx.Node] = set()
        self._refs: dict[fx.Node, Ref] = {}

    def run(self, graph: fx.Graph) -> None:
        """Fill ``steps``, ``inputs``, ``outputs`` and ``parameters_read``."""
        for node in graph.nodes:
            if node.op == "placeholder":
                self._refs[node] = Ref(Cell((self.fresh(),)))
                self.inputs.extend(self._refs[node].cell.values)
            elif node.op == "output":
                self.outputs.update(self._read(node.args))
            elif node.op == "get_attr":
                if node.target != "training":
                    self.parameters_read.add(str(node.target))
                self._refs[node] = Ref(Cell(()))
            else:
                self._refs[node] = self._step(node)

    def _read(self, *arguments: Any) -> tuple[int, ...]:
        found: list[int] = []

        def read(node: fx.Node) -> None:
            ref = self._refs[node]
            found.extend(ref.read())
            self.inplace_seen.update(ref.cell.writers[ref.knows :])

        fx.node.map_arg(arguments, read)
        return tuple(dict.fromkeys(found))

    def _first(self, node: fx.Node) -> Ref | None:
        return self._refs[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else None

    def _step(self, node: fx.Node) -> Ref:
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            plain = type(module) is nn.Identity and not module._forward_hooks
            if plain and not module._forward_pre_hooks and self._first(node) is not None:
                return self._pass_through(node)
            return self._new_value(node, inplace=bool(getattr(module, "inplace", False)))
        if node.op == "call_method":
            return self._method(node)
        return self._function(node)

    def _method(self, node: fx.Node) -> Ref:
        name, base = str(node.target), self._first(node)
        if name in _METADATA:
            return Ref(Cell(()))
        if base is not None and name in _COPIES:
            return base.alias()
        if name == "replace_feature" and len(node.args) == 2:
            return self._wrap(node.args[1])
        return self._new_value(node, inplace=name.endswith("_") and not name.endswith("__"))

    def _function(self, node: fx.Node) -> Ref:
        target, base = node.target, self._first(node)
        name = getattr(target, "__name__", "")
        if target is getattr and base is not None:
            if node.args[1] in _METADATA:
                return Ref(Cell(()))
            return base.alias() if node.args[1] == "features" else self._element(node, base)
        if target is setattr and base is not None:
            if node.args[1] == "features":
                written = self._wrap(node.args[2])
                base.cell, base.knows = written.cell, written.knows
            elif node.args[1] not in _METADATA:
                base.elements[node.args[1]] = self._wrap(node.args[2])
            return Ref(Cell(()))
        if name == "replace_feature" and len(node.args) == 2 and base is not None:
            result = self._wrap(node.args[1])
            # With spconv 1 the helper writes to the tensor it is given, with spconv 2 it does not.
            base.cell = Cell(tuple(dict.fromkeys(base.cell.values + result.cell.values)))
            base.knows = 0
            return result
        if name == "SparseConvTensor" and isinstance(target, type):
            return self._wrap(node.kwargs.get("features", node.args[0] if node.args else None))
        if target is operator.getitem and base is not None and self._is_element(node):
            return self._element(node, base)
        if target is torch._assert or target is check_not:
            return Ref(Cell(()))
        inplace = target in INPLACE_OPERATORS or target is operator.setitem
        return self._new_value(node, inplace=inplace or node.kwargs.get("inplace") is True)

    def _is_element(self, node: fx.Node) -> bool:
        """Whether ``base[index]`` picks from a container rather than slices a tensor."""
        base, index = node.args
        return (
            isinstance(index, int | str)
            and isinstance(base, fx.Node)
            and kind_of(base, self.root) is not torch.Tensor
        )

    def _element(self, node: fx.Node, base: Ref) -> Ref:
        key = node.args[1]
        if not base.cell.values and not base.elements:
            return Ref(Cell(()))
        if key not in base.elements:
            value = self.fresh()
            base.elements[key] = Ref(Cell((value,)))
            if base.cell.values:
                self.steps.append(Step(node, base.cell.values, (value,)))
        return base.elements[key]

    def _wrap(self, argument: Any) -> Ref:
        return self._refs[argument].alias() if isinstance(argument, fx.Node) else Ref(Cell(()))

    def _pass_through(self, node: fx.Node) -> Ref:
        base = self._first(node)
        assert base is not None
        self.steps.append(Step(node, base.cell.values, base.cell.values, same=True))
        return base

    def _new_value(self, node: fx.Node, *, inplace: bool) -> Ref:
        reads = self._read(node.args, node.kwargs)
        if not reads and node.op != "call_module":
            return Ref(Cell(()))
        value = self.fresh()
        self.steps.append(Step(node, reads, (value,)))
        base = self._first(node)
        if inplace and base is not None:
            base.cell.values = (value,)
            base.cell.writers.append(node)
            return Ref(base.cell, len(base.cell.writers))
        return Ref(Cell((value,)))

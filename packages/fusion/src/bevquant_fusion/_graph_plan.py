"""Which batch norm belongs to which layer, read off a captured graph.

From the input of a batch norm one walks back through whatever keeps channels apart (`_channels`).
Where the walk ends, one layer must have made it all, and nobody else may read these channels of it.
Otherwise, where no ReLU made it, one walks on from its output: all readers must be layers then.
What is left may belong to parallel layers (`_sums`).
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from bevquant_graph import Graph, layer_class, op_spec
from bevquant_sparse import is_sparse_conv

from ._channels import (
    channels_along,
    channels_into,
    distinct,
    is_float,
    keeps_channels,
    known_size,
    numbered,
    numbers_behind,
    source,
)
from ._fold import Fold, NormPaths, Part, Refused, Skipped, layer_problem, tensor_owners, tied_to
from ._foldable import DENSE, bn_problem, has_hooks, is_convolution, out_channels
from ._sums import Sums

_SHAPE_OF_SECOND = ("reshape_as", "view_as", "expand_as")
_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
_PRODUCTS = _CONVOLUTIONS | {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear}
_BATCH_NORM = torch.ops.aten.batch_norm.default


def from_graph(
    model: nn.Module, graph: Graph, plain: Collection[str] = (), *, alone: bool = False
) -> dict[str, Fold | Skipped]:
    """What becomes of every batch norm that the graph computes, modules and functional ones.

    Args:
        model: The model.
        graph: Its graph.
        plain: Layers that are made plain ones before anything is folded.
        alone: Whether what nothing takes becomes a depthwise convolution.
    """
    reader = Reader(model, graph, plain)
    found = reader.found
    for path in list(reader.norms):
        reader.plan(path)
    sums = Sums(reader, found)
    for path in [path for path, item in found.items() if isinstance(item, Skipped)]:
        with suppress(Refused):
            found[path] = (sums.alone if alone else sums.fold)(path, reader.norms[path])
    return found


class _Products(TorchFunctionMode):
    """Notes whether what multiplies by a layer's weight adds the layer's bias."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.with_bias: list[bool] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        if func in _PRODUCTS and any(value is self.layer.weight for value in given):
            self.with_bias.append(any(value is self.layer.bias for value in given))
        return func(*args, **(kwargs or {}))


class Reader:
    """What a graph says of its layers and batch norms."""

    def __init__(self, model: nn.Module, graph: Graph, plain: Collection[str]) -> None:
        self.model, self.graph, self.plain = model, graph, plain
        self.operations = list(graph.operations)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.owners = tensor_owners(model)
        self.names = {module: path for path, module in model.named_modules()}
        self.norms: dict[str, list[fx.Node]] = defaultdict(list)
        self.found: dict[str, Fold | Skipped] = {}
        self.layers: dict[str, list[fx.Node]] = defaultdict(list)
        self.readers: dict[str, list[fx.Node]] = defaultdict(list)
        self.callers: dict[str, set[str]] = defaultdict(set)  # of the members of a module
        for node in self.operations:
            stack = self.stack(node)
            for outer, inner in zip(["", *stack], stack, strict=False):
                if inner:
                    self.callers[inner.rpartition(".")[0]].add(outer)
            layer = self.layer(node)
            if layer is not None:
                self.layers[layer].append(node)
            if node.target is _BATCH_NORM:
                self.norms[self.owner(node)].append(node)
            for value in node.all_input_nodes:
                constant = graph.constant_path(value)
                if constant is not None:
                    self.readers[constant].append(node)

    # Modules

    def stack(self, node: fx.Node) -> list[str]:
        """Paths of the running modules, each module by its first path."""
        return [self.names[self.modules[path]] for path in self.graph.stack(node)]

    def layer(self, node: fx.Node) -> str | None:
        """The convolution or linear layer whose forward computes the node."""
        stack = reversed(self.stack(node))
        return next((path for path in stack if is_convolution(self.modules[path])), None)

    def owner(self, norm: fx.Node) -> str:
        """The module that has the statistics, or else the one whose forward normalises."""
        mean = self.graph.constant_path(norm.args[3])
        path = self.stack(norm)[-1] if mean is None else mean.rpartition(".")[0]
        first: str = self.names[self.modules[path]]
        return first

    def describe(self, node: fx.Node) -> str:
        """A step in words."""
        path = self.stack(node)[-1]
        module = self.modules[path]
        if is_convolution(module) or (path and next(module.children(), None) is None):
            return f"{path} ({type(module).__name__})"
        return f"{op_spec(node.target).name}()" + (f" in {path}" if path else "")

    # One batch norm

    def plan(self, path: str) -> Fold | Skipped:
        """What becomes of the batch norm at ``path``; of one that it is folded over, first that."""
        if path not in self.found:
            norms = self.norms[path]
            where = self.graph.location(norms[0])
            self.found[path] = Skipped(path, "reads what it makes itself", where)
            try:
                planned: Fold | Skipped = self.fold(path, norms)
            except Refused as refusal:
                planned = Skipped(path, str(refusal), where)
            del self.found[path]  # folds are made in the order in which they are planned
            self.found[path] = planned
        return self.found[path]

    def fold(self, path: str, norms: list[fx.Node]) -> Fold:
        """How the batch norm at ``path``, called at ``norms``, is folded."""
        numbers = self.numbers(path, norms)
        ends, inside = self.behind(norms)
        try:
            return self.fold_back(path, norms, numbers, ends, inside)
        except Refused:
            relu = any(op_spec(end.target).kind == "relu" for end in ends)
            ahead = None if relu else self.fold_ahead(path, norms, numbers)
            if ahead is None:
                raise
            return ahead

    def fold_back(
        self,
        path: str,
        norms: list[fx.Node],
        numbers: NormPaths,
        ends: list[fx.Node],
        inside: set[fx.Node],
    ) -> Fold:
        """The fold into the layer that made all that the batch norm reads.

        Raises:
            Refused: There is no such layer, or somebody else reads these channels of it.
        """
        for node in ends:
            if self.layer(node) is None:
                if node.op == "placeholder":
                    raise Refused("normalises an input of the model")
                raise Refused(f"follows {self.describe(node)}, not a convolution or linear layer")
        layers = {self.layer(node) for node in ends}
        if len(layers) != 1:
            shared = f"is shared: it is called {len(norms)} times, and" if norms[1:] else "reads"
            raise Refused(f"{shared} what several layers make: {', '.join(map(str, layers))}")
        conv = str(next(iter(layers)))
        own = all(self.applies_weights(conv, node) for node in ends)
        marks = {n: numbered(n, self.channel_axis(conv, n)) for n in ends}
        self.follow(marks, inside)
        part = self.taken(conv, norms, marks)
        self.refuse_other_readers(part, norms, inside, marks)
        self.refuse_sharing(conv, norms, ends)
        made = len(part.channels)
        problem = layer_problem(self.model, self.owners, conv, made, own_forward=own)
        if problem is not None:
            raise Refused(problem)
        self.refuse_hooks(ends[0], norms[0])
        caller = ["", *self.stack(norms[0])][-2]
        parent = path.rpartition(".")[0]
        indexed = any(outer != parent for outer in self.callers[parent])
        rest = self.rest(path, norms)
        parts = () if part.channels == tuple(range(made)) else (part,)
        return Fold(conv, path, numbers, caller, rest, indexed, parts)

    def follow(self, marks: dict[fx.Node, Tensor], inside: set[fx.Node]) -> None:
        """Number the values between a layer and a batch norm by the layer's channels."""
        for node in self.operations:
            if node in inside and node not in marks and keeps_channels(node) and is_float(node):
                found = numbers_behind(node, marks)
                if found is None or not distinct(found).all():
                    name = self.describe(source(node))
                    raise Refused(f"follows {name}, not a convolution or linear layer")
                marks[node] = found

    def taken(self, conv: str, norms: list[fx.Node], marks: dict[fx.Node, Tensor]) -> Part:
        """Which channel of a batch norm each channel of a layer goes to."""
        read = [channels_into(marks[norm.all_input_nodes[0]], 1) for norm in norms]
        if read[0] is None or any(other != read[0] for other in read):
            raise Refused(f"normalises another axis than that of the channels {conv} makes")
        made = out_channels(self.modules[conv])
        return Part(conv, tuple(read[0].get(channel + 1, -1) for channel in range(made)))

    def fold_ahead(self, path: str, norms: list[fx.Node], numbers: NormPaths) -> Fold | None:
        """The fold into all that read the batch norm; None where that is more than dense layers."""
        marks = {norm: numbered(norm, 1) for norm in norms}
        ends: dict[str, list[fx.Node]] = defaultdict(list)
        takes: dict[str, set[Any]] = defaultdict(set)
        for node in self.operations[self.operations.index(norms[0]) :]:
            read = [v for v in source(node).all_input_nodes if v in marks]
            if node in marks or not any(_reads_values(source(node), v) for v in read):
                continue
            layer = self.layer(node)
            found = None
            if layer is not None:
                if len(read) > 1 or not self.takes_norm(layer, node, read[0]):
                    return None
                ends[layer].append(node)
                takes[layer].add(channels_along(marks[read[0]], self.channel_axis(layer, read[0])))
                continue
            if node.target is _BATCH_NORM and read == [node.args[0]]:
                below = self.plan(self.owner(node))
                found = marks[read[0]] if isinstance(below, Fold) and below.ahead else None
            elif keeps_channels(node):
                if not is_float(node):
                    continue  # a split, whose parts are read one by one
                found = numbers_behind(node, marks)
            if found is None:
                return None
            if distinct(found).any():
                marks[node] = found
        if any(user.op == "output" for node in marks for user in node.users):
            return None
        parts = []
        try:
            for layer, nodes in ends.items():
                self.refuse_sharing(layer, norms, nodes)
                self.refuse_hooks(norms[0], nodes[0])
                (channels,) = takes[layer] if len(takes[layer]) == 1 else (None,)
                made = out_channels(self.modules[layer])
                problem = layer_problem(self.model, self.owners, layer, made, own_forward=True)
                if channels is None or problem is not None:
                    return None
                parts.append(Part(layer, tuple(c - 1 for c in channels)))
        except Refused:
            return None
        if not parts:
            return None
        caller, rest = ["", *self.stack(norms[0])][-2], self.rest(path, norms)
        return Fold(parts[0].layer, path, numbers, caller, rest, parts=tuple(parts), ahead=True)

    def takes_norm(self, layer: str, made: fx.Node, value: fx.Node) -> bool:
        """Whether a dense layer applies its weight to a value, and pads no zeros."""
        module: Any = self.modules[layer]
        if is_sparse_conv(module) or not self.applies_weights(layer, made):
            return False
        if made.args[0] is not value or getattr(module, "transposed", False):
            return False
        padding: Any = made.args[4] if len(made.args) > 4 else 0
        return padding == "valid" or not any([padding] if isinstance(padding, int) else padding)

    def numbers(self, path: str, norms: list[fx.Node]) -> NormPaths:
        """Where the numbers of the norm are, if they are its alone."""
        module = self.modules[path]
        if isinstance(module, _BatchNorm):
            problem = bn_problem(module, own_forward=True)
            if problem is not None:
                raise Refused(problem)
        if norms[1:] and len({(*self.stack(n), self.graph.location(n)) for n in norms}) > 1:
            raise Refused(f"is shared: it is called {len(norms)} times")
        found: list[str | None] = []
        for name, value in zip(("weight", "bias", "mean", "var"), norms[0].args[1:5], strict=True):
            constant = self.graph.constant_path(value)
            if value is not None and constant is None:
                raise Refused(f"the forward of {path or 'the model'} computes its {name}")
            found.append(constant)
            others = [n for n in self.readers[constant or ""] if n not in norms]
            if others:
                raise Refused(f"{constant} is read by {self.describe(others[0])}, too")
        weight, bias, mean, var = found
        if norms[0].args[5] or mean is None or var is None:
            raise Refused("keeps no running statistics, so it normalises by each batch")
        if self.modules[self.stack(norms[0])[-1]].training:
            raise Refused("is in training mode, so it normalises by each batch; call eval() first")
        tied = tied_to(self.owners, {p for p in found if p is not None})
        if tied is not None:
            raise Refused(f"{tied[0]} is tied to {tied[1]}")
        eps: Any = norms[0].args[7]
        return NormPaths(mean, var, weight, bias, float(eps))

    def constant(self, path: str) -> Tensor:
        """The parameter or buffer at ``path``."""
        found: Tensor = operator.attrgetter(path)(self.model)
        return found

    # The way back

    def behind(self, norms: list[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
        """Where the values come from, and all nodes on the way."""
        pending: list[fx.Node] = [n.all_input_nodes[0] for n in norms]
        ends, inside = [], set(norms)
        while pending:
            node = pending.pop()
            if node in inside:
                continue
            inside.add(node)
            if not keeps_channels(node):
                ends.append(node)
                continue
            inside.add(source(node))
            pending += [value for value in source(node).all_input_nodes if is_float(value)]
        return ends, inside

    def channel_axis(self, conv: str, node: fx.Node) -> int:
        """The axis of channels in what a layer reads or makes."""
        module, axes = self.modules[conv], int(node.meta["val"].dim())
        if is_sparse_conv(module) or isinstance(module, nn.Linear):
            return axes - 1
        weight: Any = module.weight
        return axes - (int(weight.dim()) - 2) - 1

    def applies_weights(self, conv: str, made: fx.Node) -> bool:
        """Whether the last that a layer's forward does is to apply its weight, and its bias.

        So that a class of one's own that pads its input before (``"same"`` as TensorFlow's) takes
        a batch norm as its base class does.
        """
        if conv in self.plain:
            return True
        module: Any = self.modules[conv]
        dense = "linear" if isinstance(module, nn.Linear) else None
        if dense is None and not is_sparse_conv(module):
            dense = f"conv{'_transpose' * module.transposed}{module.weight.dim() - 2}d"
        weight, bias, *rest = *made.args[1:], None, None
        if op_spec(made.target).name != dense or not isinstance(weight, fx.Node):
            return False
        if dense != "linear" and (rest[3] if len(rest) > 5 else 1) != module.groups:
            return False
        if self.graph.constant_path(weight) != f"{conv}.weight".lstrip("."):
            return False
        if isinstance(bias, fx.Node):
            return self.graph.constant_path(bias) == f"{conv}.bias".lstrip(".")
        return bias is None and module.bias is None and self.would_read_bias(conv, made)

    def would_read_bias(self, conv: str, made: fx.Node) -> bool:
        """Whether a layer without a bias hands the one that it is given to its product."""
        own = {n for n in self.layers[conv] if self.graph.call(n)[1] == self.graph.call(made)[1]}
        read = {v for n in own for v in n.all_input_nodes} - own
        given = [v for v in read if is_float(v) and not self.graph.constant_path(v)]
        sizes = _sizes(given[0].meta["val"].shape) if len(given) == 1 else None
        if sizes and layer_class(self.modules[conv], *DENSE) is type(self.modules[conv]):
            return True  # torch's own forward
        module: Any = copy.deepcopy(self.modules[conv])
        value = torch.zeros(out_channels(module), dtype=module.weight.dtype)
        module.bias = nn.Parameter(value.to(module.weight.device), requires_grad=False)
        products = _Products(module)
        try:
            with torch.no_grad(), products:
                module(torch.zeros(sizes or [], dtype=value.dtype, device=module.weight.device))
        except Exception:  # whatever a forward of one's own says to zeros
            return False
        return bool(products.with_bias) and all(products.with_bias)

    # What stands against it

    def refuse_other_readers(
        self, part: Part, norms: list[fx.Node], inside: set[fx.Node], marks: dict[fx.Node, Tensor]
    ) -> None:
        """Refuse where somebody else reads a channel that the batch norm takes."""
        others: dict[str, None] = {}
        channels = torch.tensor([i for i, norm in enumerate(part.channels, 1) if norm >= 0])
        for node in inside.difference(norms):
            for user in node.users:
                if user in inside or not (user.op == "output" or _reads_values(user, node)):
                    continue
                read = marks.get(node)
                if keeps_channels(user) and user.op != "output":
                    read = numbers_behind(user, marks) if is_float(user) else read
                if read is None or torch.isin(channels, distinct(read)).any():
                    out = user.op == "output"
                    others["the outside of the model" if out else self.describe(user)] = None
        if others:
            raise Refused(f"{part.layer}'s output is also read by {', '.join(others)}")

    def refuse_sharing(self, conv: str, norms: list[fx.Node], ends: list[fx.Node]) -> None:
        nodes = self.layers[conv]
        calls = {self.graph.call(n)[1] for n in nodes}
        if calls != {self.graph.call(n)[1] for n in ends}:
            raise Refused(f"{conv} is shared: it is called {len(calls)} times")
        for call in calls:
            own = {n for n in nodes if self.graph.call(n)[1] == call}
            given = {
                value
                for node in own
                for value in node.all_input_nodes
                if value not in own and is_float(value) and not self.graph.constant_path(value)
            }
            if len(given) > 1:
                raise Refused(f"{conv} takes {len(given)} tensors, so its output is a sum")
        for name, _ in self.modules[conv].named_parameters(recurse=False):
            others = [n for n in self.readers[f"{conv}.{name}".lstrip(".")] if n not in nodes]
            if others:
                raise Refused(f"{conv}.{name} is read by {self.describe(others[0])}, too")

    def refuse_hooks(self, made: fx.Node, norm: fx.Node) -> None:
        """Hooks of the modules that the value leaves or enters on its way see it."""
        left, entered = self.stack(made), self.stack(norm)
        for path in {*left} ^ {*entered}:
            if path and has_hooks(self.modules[path]):
                raise Refused(f"{self.layer(made)}'s output is also read by hook() in {path}")

    # What a class of its own does behind the normalisation

    def rest(self, path: str, norms: list[fx.Node]) -> tuple[str, ...] | None:
        """Names of the children that follow the normalisation; None where other code does."""
        module = self.modules[path]
        if not isinstance(module, _BatchNorm) or any(self.stack(n)[-1] != path for n in norms):
            return None
        if bn_problem(module) is None:
            return ()
        order = [name for name, child in module._modules.items() if child is not None]
        groups: list[tuple[str, list[fx.Node]]] = []
        value, known = norms[0], set(norms)
        for node in self.operations:
            stack = self.stack(node)
            if path not in stack or node in known or op_spec(node.target).kind == "size":
                continue
            below = stack[stack.index(path) + 1 :]
            name = below[0].removeprefix(f"{path}.").split(".")[0] if below else ""
            if not name or norms[1:]:
                return None
            if not groups or groups[-1][0] != name:
                value = groups[-1][1][-1] if groups else value
                groups.append((name, []))
            groups[-1][1].append(node)
            inputs = [i for i in node.all_input_nodes if not self.graph.constant_path(i)]
            if any(i is not value and i not in groups[-1][1] for i in inputs):
                return None
        ran = [name for name, _ in groups]
        if [name for name in order if name in ran] != ran:
            return None
        last = groups[-1][1][-1] if groups else norms[0]
        made = {*norms, *(n for _, nodes in groups for n in nodes)}
        if any(user not in made for n in made if n is not last for user in n.users):
            return None
        return tuple(order)


def _reads_values(user: fx.Node, node: fx.Node) -> bool:
    """Whether a step reads more of a value than its shape."""
    spec = op_spec(user.target)
    given = user.all_input_nodes if spec.name not in _SHAPE_OF_SECOND else list(user.args[:1])
    return spec.kind != "size" and node in given


def _sizes(shape: Any) -> list[int] | None:
    sizes = [known_size(size) for size in shape]
    return None if None in sizes else sizes

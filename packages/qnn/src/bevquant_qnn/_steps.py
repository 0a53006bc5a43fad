"""Steps of a model: one interface to captured and traced graphs."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from bevquant_graph import OPAQUE, Graph, OpSpec, called_name, layer_class, op_spec
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_quantizers import TensorQuantizer
from bevquant_sparse import is_sparse_conv, library_name

# Questions of quantization about the kind of a module.

_LIBRARIES = ("torch", "spconv", "bevquant_qnn", "bevquant_quantizers", "pytorch_quantization")
_CHAINS = ("Sequential", "SparseSequential")
_TABLES = frozenset(
    f"spconv.{of}tables.{name}" for of in ("", "pytorch.") for name in ("AddTable", "JoinTable")
)


def is_quantized(module: nn.Module) -> bool:
    """Whether the module quantizes its own input (ours or an adopted upstream module)."""
    return "_input_quantizer" in module._modules


def is_dense_conv(module: nn.Module) -> bool:
    """Whether the module is a quantized dense convolution."""
    return is_quantized(module) and layer_class(module, nn.modules.conv._ConvNd) is not None


def is_sparse_module(module: nn.Module) -> bool:
    """Whether the module takes sparse tensors: spconv's family, a sparse conv, or ours."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return (
        "SparseModule" in names
        or isinstance(module, QuantSparseConvolution)
        or is_sparse_conv(module)
    )


def has_sparse_conv(module: nn.Module) -> bool:
    """Whether the module is or contains a sparse convolution, quantized or float."""
    return any(
        isinstance(child, QuantSparseConvolution) or is_sparse_conv(child)
        for child in module.modules()
    )


def is_identity(module: nn.Module) -> bool:
    """Whether the module returns its input unchanged in evaluation mode."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return (
        layer_class(module, nn.Identity, _DropoutNd, nn.Flatten, nn.Unflatten) is not None
        or "SparseIdentity" in names
        or type(module).__name__ == "DropPath"
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module is a batch norm, synchronised or sparse ones included."""
    return layer_class(module, _BatchNorm) is not None


def is_plain_chain(module: nn.Module) -> bool:
    """Whether the module only calls its children one after the other."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
    return owner is not None and "forward" not in vars(module) and owner.__name__ in _CHAINS


def is_library_module(module: nn.Module) -> bool:
    """Whether the module's forward belongs to a library, not to the model's author."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return "forward" not in vars(module) and library_name(owner).split(".")[0] in _LIBRARIES


def only_shapes(module: nn.Module) -> bool:
    """Whether the module is an activation, a norm, a resize or an identity."""
    activation = getattr(layer_class(module), "__module__", "") == "torch.nn.modules.activation"
    resize = layer_class(module, nn.Upsample) is not None
    return is_identity(module) or is_batch_norm(module) or activation or resize


def is_table(module: nn.Module) -> bool:
    """Whether the module is spconv's `AddTable` or `JoinTable`, with the library's forward."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return "forward" not in vars(module) and library_name(owner) in _TABLES


def ends_in_conv(module: nn.Module) -> bool:
    """Whether a quantized dense conv makes the output, norms and activations aside."""
    if is_quantized(module):
        return is_dense_conv(module)
    if is_plain_chain(module):
        last = next((c for c in reversed(list(module.children())) if not only_shapes(c)), None)
        return last is not None and ends_in_conv(last)
    return any(is_dense_conv(child) for child in module.modules())


_QUESTIONS = frozenset({"shape", "ndim", "dtype", "device", "batch_size", "spatial_shape"})


class Call(NamedTuple):
    """One call of a module: the module, and which of its calls it is, from 0."""

    module: nn.Module
    number: int


class Steps:
    """The nodes of an `fx.Graph` that compute tensors, and which module calls they belong to.

    The graph is a captured one, of ATen operators, or what `torch.fx` traced where no example
    inputs are at hand: functions, methods, and calls of layers.

    Attributes:
        root: What the graph is of, the model or a part of it.
        paths: First paths of the modules in the model.
        source: The captured graph, if it is one.
        nodes: In order of execution.
        inputs: What the graph takes, `features` those of them that are of sparse tensors.
        lengths: How often each module is called.
    """

    def __init__(
        self,
        paths: Mapping[nn.Module, str],
        graph: fx.Graph,
        root: nn.Module,
        source: Graph | None = None,
    ) -> None:
        self.paths, self.source, self.root = paths, source, root
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._calls: dict[fx.Node, tuple[Call, ...]] = {}
        self._keys: dict[tuple[nn.Module, str], Call] = {}
        self.lengths: Counter[nn.Module] = Counter()
        self.nodes = [n for n in graph.nodes if n.op.startswith("call_")]
        self.inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.features: set[fx.Node] = set()
        if source is not None:
            self.inputs = list(source.placeholders)
            named = zip(source.input_names, source.placeholders, strict=True)
            self.features = {node for name, node in named if name.endswith(".features")}
        for node in self.nodes:
            self._calls[node] = tuple(self._stack(node))
        self._origins: dict[fx.Node, fx.Node] = {}

    def _stack(self, node: fx.Node) -> Iterator[Call]:
        entries = node.meta.get("nn_module_stack") or {}
        yield self._call(self.root, "")
        for key, (path, _) in entries.items():
            name = str(path)
            if self.source is not None:
                shell, _, name = name.partition(".")
                if shell != "model":
                    continue
            if name in self._modules and self._modules[name] is not self.root:
                yield self._call(self._modules[name], str(key))

    def _call(self, module: nn.Module, key: str) -> Call:
        if (module, key) not in self._keys:
            number = self.lengths[module]
            count = re.search(r"@(\d+)$", key)
            # torch counts the calls of a path; the calls of a module with several paths are counted
            # here.
            if count is not None and len([m for m in self._modules.values() if m is module]) == 1:
                number = int(count.group(1))
            self.lengths[module] = max(number + 1, self.lengths[module])
            self._keys[module, key] = Call(module, number)
        return self._keys[module, key]

    # Where a node is computed

    def calls(self, node: fx.Node) -> tuple[Call, ...]:
        """The calls that are running, outermost first; empty for an input."""
        return self._calls.get(node, ())

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module whose forward computes the node."""
        calls = self.calls(node)
        return calls[-1].module if calls else None

    def path(self, module: nn.Module | None) -> str:
        """First path of a module."""
        return "" if module is None else self.paths[module]

    def location(self, node: fx.Node) -> str:
        """``file:line`` of the author's code; "" where it is not known."""
        return "" if self.source is None else self.source.location(node)

    # What it does

    def spec(self, node: fx.Node) -> OpSpec:
        """What the operator does."""
        if node.op == "call_module":
            return op_spec(self._modules[str(node.target)])
        if node.target is getattr:
            return op_spec(str(node.args[1]))
        return op_spec(node.target)

    def name(self, node: fx.Node) -> str:
        """The operator in a word, as the forward calls it."""
        if node.op == "call_module":
            return str(node.target)
        return self.spec(node).name if self.source is None else called_name(node)

    def is_tensor(self, node: object) -> bool:
        """Whether a node is a computed tensor or an input: no size, no parameter."""
        if not isinstance(node, fx.Node) or node.op == "get_attr":
            return False
        if self.source is not None:
            value = node.meta.get("val")
            if isinstance(value, list | tuple):
                return True
            constant = self.source.constant_path(node) is not None
            return isinstance(value, Tensor) and value.is_floating_point() and not constant
        if node.target is getattr:
            return str(node.args[1]) not in _QUESTIONS | {"indices"}
        if self.spec(node).kind == "size" or isinstance(node.target, type):
            return _makes_sparse(node)
        first = node.args[0] if node.args else None
        if node.target is operator.getitem or node.target in _ARITHMETIC:
            # Arithmetic on sizes makes sizes.
            return any(self.is_tensor(a) for a in node.all_input_nodes) if first else False
        return True

    def read(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a node reads."""
        if _makes_sparse(node):
            read: Iterable[Any] = node.args[:1]
        elif node.op == "call_method" and node.target == "replace_feature":
            read = node.args[1:]
        else:
            read = node.all_input_nodes
        return [n for n in read if self.is_tensor(n)]

    def origin(self, node: fx.Node) -> fx.Node:
        """The node whose values a node has unchanged, in any shape or order."""
        way = []
        while node not in self._origins:
            way.append(node)
            before = self._same(node)
            if before is None:
                self._origins[node] = node
                break
            node = before
        for passed in way:
            self._origins[passed] = self._origins[node]
        return self._origins[node]

    def _same(self, node: fx.Node) -> fx.Node | None:
        """The one input whose values a node hands on, all of them and nothing else."""
        inputs = self.read(node) if node in self._calls else []
        if len(inputs) != 1:
            return None
        spec = self.spec(node)
        if node.op == "call_module":
            module = self._modules[str(node.target)]
            same = is_identity(module) or isinstance(module, TensorQuantizer)
            return inputs[0] if same else None
        if spec.kind in ("identity", "quantize") or spec.casts:
            return inputs[0]
        if self.source is None:
            keeps = spec.kind == "layout_op" and spec.layout not in _SELECTIONS
            hands_on = spec.name in ("features", "replace_feature") or _makes_sparse(node)
            return inputs[0] if keeps or hands_on else None
        if spec.kind != "layout_op" or len(_tensors(node)) > 1:
            return None
        value, before = node.meta["val"], inputs[0].meta["val"]
        if not isinstance(value, Tensor) or not isinstance(before, Tensor):
            return None
        return inputs[0] if _same_count(value, before) else None

    def opaque_calls(self, module: nn.Module) -> list[fx.Node]:
        """The nodes that stand for calls of a module that was not captured."""
        return [n for n in self.nodes if n.target is OPAQUE and self.module(n) is module]

    # Questions about one call of a module, seen from its forward

    def producers(self, node: fx.Node, call: Call) -> list[nn.Module]:
        """The nearest children upstream of `node`, through functions, activations and norms."""
        return self._nearest([node], call, lambda value: reversed(self.read(value)), only_shapes)

    def readers(self, node: fx.Node, call: Call) -> list[nn.Module]:
        """The children nearest after `node`, looking through functions and identities."""
        return self._nearest(self._users(node), call, self._users, is_identity)

    def is_read(self, node: fx.Node) -> bool:
        """Whether another module reads the values of `node`, anywhere in the model."""
        around = set(self.calls(node))
        pending, seen = self._users(node), set[fx.Node]()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            # A part's graph does not show the rest of the model, which may read its outputs.
            if value.op == "output" and self.paths[self.root]:
                return True
            if any(c not in around and not is_identity(c.module) for c in self.calls(value)):
                return True
            pending += self._users(value)
        return False

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """Readers of a node's values, without those that use it only as an index."""
        value = node.meta.get("val")
        if self.source is not None and isinstance(value, Tensor) and not value.is_floating_point():
            return []
        return [user for user in node.users if not self._asks_where(user, node)]

    def _asks_where(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether `user` only reads from `node` where, in which shape or type another is read."""
        if user.op == "output" or user.args[0] is node:
            return False
        spec = self.spec(user)
        return spec.places or spec.like or spec.casts

    def _nearest(
        self,
        start: Iterable[fx.Node],
        call: Call,
        onward: Callable[[fx.Node], Iterable[fx.Node]],
        passes: Callable[[nn.Module], bool],
    ) -> list[nn.Module]:
        found: dict[Call, None] = {}
        pending, seen = list(start), set()
        while pending:
            value = pending.pop()
            if value in seen or call not in self.calls(value):
                continue
            seen.add(value)
            child = self.child(value, call)
            if child is None or passes(child.module):
                pending += onward(value)
            else:
                found[child] = None
        return [child.module for child in found]

    def child(self, node: fx.Node, call: Call) -> Call | None:
        """The child's call that computes the node in a call of its parent; None for the parent."""
        calls = self.calls(node)
        after = calls.index(call) + 1
        return calls[after] if after < len(calls) else None

    def computes(self, node: fx.Node, call: Call) -> bool:
        """Whether the node is a function that a call's own forward computes, not a child's."""
        return call in self.calls(node) and self.child(node, call) is None

    def depths(self, call: Call) -> dict[fx.Node, int]:
        """How many layers with a weight lie behind each node of a call, on the longest way."""
        before: dict[Call, int] = {}
        found: dict[fx.Node, int] = {}
        for node in self.nodes:
            if call not in self.calls(node):
                continue
            child = self.child(node, call)
            depth = max((found.get(i, 0) for i in node.all_input_nodes), default=0)
            if child is not None:
                inside = [i for i in node.all_input_nodes if child in self.calls(i)]
                if len(inside) == len(node.all_input_nodes):
                    depth = before.get(child, 0)
                else:
                    outside = [i for i in node.all_input_nodes if i not in inside]
                    depth = max((found.get(i, 0) for i in outside), default=0)
                    before[child] = depth = max(before.get(child, 0), depth)
                own = 0 if is_identity(child.module) else max(1, _layers(child.module))
                depth += own
            found[node] = depth
        return found

    def is_sparse(self, node: fx.Node) -> bool:
        """Whether a value is a sparse tensor, or the features of one."""
        pending, seen = [node], set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            kind = self.spec(value).kind if value in self._calls else ""
            if self.source is not None:
                if kind in ("sparse_layer", "sparse_pool") or value in self.features:
                    return True
                shown = value.meta.get("val")
                # Features are [voxels, channels].
                rows = isinstance(shown, Tensor) and shown.dim() == 2
                pending += self.read(value) if rows and kind != "to_dense" else []
                continue
            if value.op == "call_module":
                module = self._modules[str(value.target)]
                if is_sparse_module(module) or has_sparse_conv(module):
                    return True
                # A layer with parameters makes a dense tensor of its own.
                if not is_identity(module) and next(module.parameters(), None) is not None:
                    continue
            if value.target is getattr and value.args[1] == "features":
                return True
            pending += self.read(value) if self.spec(value).name != "dense" else []
        return False


_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod}
)
# Of what moves values: these drop or repeat some. A captured graph knows by the sizes.
_SELECTIONS = ("part", "repeat", "pad", "shuffle")


def _makes_sparse(node: fx.Node) -> bool:
    """Whether a traced step puts features and coordinates together to a sparse tensor."""
    return isinstance(node.target, type) and node.target.__name__ == "SparseConvTensor"


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]


def _same_count(value: Tensor, before: Tensor) -> bool:
    """Whether two tensors have equally many elements, for all sizes."""
    counts: list[Any] = [value.numel(), before.numel()]
    if all(isinstance(c, int) for c in counts):
        return bool(counts[0] == counts[1])
    exprs = [c.node.expr if isinstance(c, torch.SymInt) else c for c in counts]
    if exprs[0] == exprs[1]:
        return True
    # Open sizes are compared by the example's.
    hints = [c.node.hint if isinstance(c, torch.SymInt) else c for c in counts]
    return None not in hints and hints[0] == hints[1]


def _layers(module: nn.Module) -> int:
    return sum(1 for child in module.modules() if "weight" in child._parameters)

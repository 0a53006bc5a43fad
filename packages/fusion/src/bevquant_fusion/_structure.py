"""Pairs of batch norm and layer by the structure of the modules alone.

Chains show their order. Residual blocks of sparse convolutions are recognised by the names that
these blocks share (``conv1``, ``bn1``, ``conv2``, …). `torch.fx` traces other forwards; modules
that it cannot trace are searched child by child. Classes are recognised by name: nothing of spconv
is imported. Captured graphs give more and better pairs: this is for calls without example inputs,
and for the inside of modules that cannot be captured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import copied, trace_around

from ._fold import Fold, layer_problem, norm_paths, tensor_owners
from ._foldable import fold_problem, has_hooks, is_convolution
from ._result import Skipped

_BLOCKS = frozenset({"SparseBasicBlock", "SparseBottleneck", "BasicBlock", "Bottleneck"})
_SPARSE = frozenset({"SparseModule", "SparseBatchNorm", "SparseSyncBatchNorm", "SparseReLU"})
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Hardswish)


def from_structure(
    model: nn.Module, roots: Iterable[str]
) -> tuple[dict[str, Fold | Skipped], dict[str, str]]:
    """Folds of the batch norms below ``roots``, and the modules that were not followed.

    A batch norm about which nothing is known is in neither.
    """
    reader = _Reader(model)
    for root in roots:
        reader.region(root)
    found: dict[str, Fold | Skipped] = {}
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and path in reader.calls:
            reason = reader.problem(path)
            if reason is not None:
                found[path] = Skipped(path, reason)
            else:
                conv = str(reader.producer(path)[0])
                parent = path.rpartition(".")[0]
                found[path] = Fold(conv, path, norm_paths(path, module), parent)
    return found, reader.untraced


def activations(model: nn.Module) -> list[tuple[str, bool]]:
    """In-place activations of sparse encoders, and whether their write is certainly unobserved.

    A sparse encoder is any module that is a sparse module itself or has one among its children.
    """
    found = []
    for path, parent in model.named_modules():
        children = list(parent.named_children())
        sparse = any(is_convolution(c) and _is_sparse_module(c) for _, c in children)
        if not sparse and not any(_is_sparse_module(m) for m in (parent, *parent.children())):
            continue
        for place, (name, child) in enumerate(children):
            if isinstance(child, _ACTIVATIONS) and getattr(child, "inplace", False):
                alone = is_sparse_chain(parent) and place > 0
                block = _is_sparse_module(parent) and _has_base(parent, _BLOCKS)
                found.append((f"{path}.{name}" if path else name, alone or block))
    return found


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module is one node: layers, sparse modules, modules with hooks, torch's own."""
    own = is_convolution(module) or isinstance(module, _BatchNorm) or _is_sparse_module(module)
    other = has_hooks(module) or "forward" in vars(module)
    return own or other or fx.Tracer().is_leaf_module(module, "")


class _Reader:
    def __init__(self, model: nn.Module) -> None:
        # Forwards may store what they see; the parameters are the model's own.
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.model: nn.Module = copied(model, "fuse_model", shared)
        self.names = {module: path for path, module in self.model.named_modules()}
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        self.owners = tensor_owners(model)
        self.calls: dict[str, list[fx.Node]] = defaultdict(list)
        self.path_of: dict[fx.Node, str] = {}
        self.untraced: dict[str, str] = {}

    def region(self, path: str) -> None:
        """Read the module at ``path``, and its children where its own structure is not enough."""
        module = self.modules[path]
        graph: fx.Graph | None
        if path in self.untraced or isinstance(module, nn.ModuleList | nn.ModuleDict):
            graph = None
        elif is_chain(module):
            graph = _row(_members(module))
        elif _is_sparse_module(module):
            graph = self.block(module) if _has_base(module, _BLOCKS) else None
            if graph is None and any(isinstance(m, _BatchNorm) for m in module.children()):
                self.untraced[path] = (
                    f"{type(module).__name__}.forward takes sparse tensors, which are followed "
                    "with example inputs only"
                )
        else:
            graph = self.traced(path, module)
        reached: set[nn.Module] = set()
        for node in graph.nodes if graph else ():
            if node.op == "call_module":
                called = module.get_submodule(str(node.target))
                reached.add(called)
                self.path_of[node] = self.names[called]
                self.calls[self.names[called]].append(node)
        self.below(module, reached)

    def below(self, module: nn.Module, reached: set[nn.Module]) -> None:
        for child in module.children():
            if is_convolution(child) or isinstance(child, _BatchNorm):
                continue
            # The graph passes through this child: only what it did not reach is read alone.
            if any(m in reached for m in child.modules() if m is not child):
                self.below(child, reached)
            elif any(isinstance(m, _BatchNorm) for m in child.modules()):
                self.region(self.names[child])

    def traced(self, path: str, module: nn.Module) -> fx.Graph | None:
        """The forward by `torch.fx`; modules that it cannot follow are one node each."""
        unknown: dict[nn.Module, Exception] = {}
        graph = trace_around(module, _is_leaf, unknown)
        if graph is None:
            error = unknown[module]
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            self.untraced[path] = f"{type(module).__name__}.forward: {reason}"
        return graph

    def block(self, module: nn.Module) -> fx.Graph | None:
        """The layers of a residual block in the order of their names, if its code has it."""
        names: list[str] = []
        for number in "123":
            for kind in ("conv", "bn", "norm"):
                child = getattr(module, f"{kind}{number}", None)
                if isinstance(child, nn.Module) and child not in map(module.get_submodule, names):
                    own = next((n for n, m in module.named_children() if m is child), None)
                    names += [] if own is None else [own]
        # Names in the code of a forward are in the order of their first use.
        code = getattr(type(module).forward, "__code__", None)
        used = [n for n in getattr(code, "co_names", ()) if n in module._modules or n[:4] == "norm"]
        numbers = [n[-1] for n in used if n[:4] in ("conv", "norm") or n[:2] == "bn"]
        kinds = [n[:4] == "conv" for n in used if n[:4] in ("conv", "norm") or n[:2] == "bn"]
        paired = kinds[::2] == [True] * (len(names) // 2) and not any(kinds[1::2])
        return _row(names) if paired and numbers == sorted(numbers) else None

    def producer(self, bn: str) -> tuple[str | None, fx.Node | None]:
        """The module and the step that produce the input of the batch norm."""
        value = self.calls[bn][0].args[0]
        while isinstance(value, fx.Node):
            # Identities hand their input on.
            if not isinstance(self.modules.get(self.path_of.get(value, "-")), nn.Identity):
                return self.path_of.get(value), value
            value = value.args[0]
        return None, None

    def problem(self, bn: str) -> str | None:
        """Why the batch norm stays, or None."""
        calls = self.calls[bn]
        if len(calls) > 1:
            return f"is shared: it is called {len(calls)} times"
        path, node = self.producer(bn)
        if node is None or node.op == "placeholder":
            return "normalises an input of the traced part of the model"
        module = None if path is None else self.modules[path]
        if module is None or path is None or not is_convolution(module):
            return f"follows {self.describe(node)}, not a convolution or linear layer"
        others = [self.describe(user) for user in self.readers(node) if user is not calls[0]]
        if others:
            return f"{path}'s output is also read by {', '.join(others)}"
        if len(self.calls[path]) > 1:
            return (
                f"{path} is shared: it is called {len(self.calls[path])} times{self.served(path)}"
            )
        given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
        if len(given) > 1:
            return (
                f"{path} takes {len(given)} tensors in a call; a batch norm can be folded where a "
                "layer multiplies one alone"
            )
        norm = self.modules[bn]
        problem = fold_problem(module, norm)
        if problem is not None:
            return problem if problem.startswith(type(norm).__name__) else f"{path}: {problem}"
        problem = layer_problem(self.model, self.owners, path, int(norm.num_features))
        if problem is not None:
            return problem
        for prefix in (path, bn):
            for other in node.graph.nodes:
                if other.op == "get_attr" and str(other.target).startswith(f"{prefix}."):
                    return f"{other.target} is read by a forward itself"
        return None

    def served(self, conv: str) -> str:
        """The batch norms that read a layer's output, as text; "" if there is one."""
        norms = [
            path
            for path in self.calls
            if isinstance(self.modules[path], _BatchNorm) and self.producer(path)[0] == conv
        ]
        return f", and serves {len(norms)} batch norms ({', '.join(norms)})" if norms[1:] else ""

    def readers(self, node: fx.Node) -> list[fx.Node]:
        found = []
        for user in node.users:
            if isinstance(self.modules.get(self.path_of.get(user, "-")), nn.Identity):
                found += self.readers(user)
            # Questions about the shape read no values.
            elif user.target not in ("size", "dim") and user.args[1:] not in [
                ("shape",),
                ("ndim",),
            ]:
                found.append(user)
        return found

    def describe(self, node: fx.Node) -> str:
        """A step in words."""
        if node.op == "output":
            return "the outside of the traced part"
        path = self.path_of.get(node)
        if path is not None:
            if has_hooks(self.modules[path]) and not is_convolution(self.modules[path]):
                return f"hook() in {path}"
            return f"{path} ({type(self.modules[path]).__name__})"
        if node.op == "call_method":
            return f".{node.target}()"
        return f"{getattr(node.target, '__name__', node.target)}()"


def _members(chain: nn.Module) -> list[str]:
    """Members of a chain in order of execution; chains inside it are part of it, unless hooked."""
    names: list[str] = []
    for name, member in chain._modules.items():
        if member is not None and is_chain(member) and not has_hooks(member):
            names += [f"{name}.{inner}" for inner in _members(member)]
        elif member is not None:
            names.append(name)
    return names


def _row(names: list[str]) -> fx.Graph:
    """Modules one after the other."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in names:
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph


def _has_base(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether any class in the module's MRO has one of ``names``."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _is_sparse_module(module: nn.Module) -> bool:
    """Whether the module takes and returns sparse tensors (spconv's ``SparseModule`` family)."""
    return _has_base(module, _SPARSE) or is_sparse_chain(module)


def is_chain(module: nn.Module) -> bool:
    """Whether ``module`` runs its children one after the other, by an unchanged forward."""
    if "forward" in vars(module):
        return False
    # By the name of the class: spconv 1 and 2, mmcv and mmdet3d have one each.
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
    return owner is nn.Sequential or getattr(owner, "__name__", "") == "SparseSequential"


def is_sparse_chain(module: nn.Module) -> bool:
    """Whether ``module`` is a chain of the ``SparseSequential`` kind."""
    return _has_base(module, frozenset({"SparseSequential"})) and is_chain(module)


def remove_member(chain: nn.Module, name: str) -> None:
    """Take ``name`` out of a chain; members numbered 0, 1, 2, … are numbered anew."""
    members = [(n, m) for n, m in chain._modules.items() if n != name]
    numbered = list(chain._modules) == [str(i) for i in range(len(chain._modules))]
    chain._modules.clear()
    for index, (old, member) in enumerate(members):
        chain._modules[str(index) if numbered else old] = member

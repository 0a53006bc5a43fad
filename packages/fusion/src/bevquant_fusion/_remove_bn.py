"""Take batch norms out of a model, in the way each place asks for.

Where a block's forward calls one that was folded, the forward is compiled again without that call.
One that no layer takes becomes a layer of its own.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bevquant_graph import Graph, check_kind, replace_modules

from ._fold import Fold
from ._foldable import bn_problem
from ._fuse_pair import Norm, as_convolution, norm_of
from ._plan import from_graph
from ._ranges import is_sparse
from ._result import Removal
from ._structure import is_chain, is_sparse_chain, remove_member


def remove_batch_norms(
    model: nn.Module, folds: Iterable[Fold], own: Mapping[Fold, nn.Module]
) -> dict[Fold, Removal]:
    """Remove the batch norm of each fold; the paths are those before any removal."""
    # A batch norm may be the child of several modules.
    places = Counter(
        child for owner in model.modules() for child in owner._modules.values() if child is not None
    )
    modules = dict(model.named_modules())
    removal: dict[Fold, Removal] = {}
    chains: dict[str, list[Fold]] = {}
    blocks: dict[str, list[Fold]] = {}
    for fold in folds:
        parent = fold.bn.rpartition(".")[0]
        once = bool(fold.bn) and places[modules[fold.bn]] == 1 and fold.caller == parent
        if fold in own:
            removal[fold] = "depthwise"
        elif fold.rest is None:
            removal[fold] = "neutral"
        elif fold.rest:
            removal[fold] = "rest"
        elif not once or not is_sparse(modules[fold.conv]):
            removal[fold] = "identity"
        elif is_sparse_chain(modules[parent]) and not fold.indexed:
            chains.setdefault(parent, []).append(fold)
        elif is_chain(modules[parent]):
            removal[fold] = "identity"
        else:
            blocks.setdefault(parent, []).append(fold)
    for parent, members in blocks.items():
        done = drop_calls(modules[parent], [f.bn.rpartition(".")[2] for f in members])
        removal |= dict.fromkeys(members, "rebuilt" if done else "identity")
    identities: dict[nn.Module, nn.Module] = {}
    for fold, how in removal.items():
        if how == "neutral":
            neutralise(norm_at(model, fold))
        elif how != "rebuilt":
            module = modules[fold.bn]
            left = OrderedDict((name, module._modules[name]) for name in fold.rest or ())
            made: nn.Module
            if left:
                first = {"norm": own[fold]} if fold in own else {}
                made = nn.Sequential(OrderedDict({**first, **left}))
                made.training = module.training
            else:
                made = own.get(fold) or nn.Identity().train(module.training)
            identities[module] = made
    replace_modules(model, identities)
    for parent, members in chains.items():
        # From the end, so that renumbering leaves the names still to be removed alone.
        order = list(modules[parent]._modules)
        for fold in sorted(members, key=lambda f: -order.index(f.bn.rpartition(".")[2])):
            remove_member(modules[parent], fold.bn.rpartition(".")[2])
            removal[fold] = "removed"
    return removal


def norm_at(model: nn.Module, fold: Fold) -> Norm:
    """The numbers of a fold's batch norm."""
    paths = fold.norm
    mean, var = operator.attrgetter(paths.mean, paths.var)(model)
    weight, bias = (
        None if path is None else operator.attrgetter(path)(model)
        for path in (paths.weight, paths.bias)
    )
    return Norm(mean, var, paths.eps, weight, bias)


def neutralise(norm: Norm) -> bool:
    """Make a batch norm an exact identity, if a variance near 1 − ε makes it one, by trial."""
    like = norm.var.detach()
    one, zero = torch.ones_like(like), torch.zeros_like(like)
    start = one - norm.eps
    probe = torch.linspace(-3, 3, 4096, dtype=torch.float64).to(like)
    probe = torch.cat([probe, probe * 1e-3, probe * 1e3]).reshape(-1, 1).repeat(1, len(like))
    # 1 − ε is rounded, and so is the root: one of the neighbours may be exact.
    for var in (start, start.nextafter(one), start.nextafter(zero - 1)):
        same = F.batch_norm(probe, zero, var, one, zero, False, 0.0, norm.eps)
        if torch.equal(same, probe):
            with torch.no_grad():
                for tensor, value in (*zip(norm[:2], (zero, var), strict=True), (norm.weight, one)):
                    if tensor is not None:
                        tensor.copy_(value)
                if norm.bias is not None:
                    norm.bias.zero_()
            return True
    return False


_BASE = "_bevquant_class_with_all_calls"
_GONE = "_bevquant_calls_gone"  # names asked for, and those that the forward called


def drop_calls(block: nn.Module, names: list[str]) -> bool:
    """Delete the children ``names`` of ``block`` and their calls from its forward.

    ``self.bn1(x)`` becomes ``x``, on the same line of the same file. False, and nothing changed,
    where the forward has no source, is decorated, or mentions the children in any other way.
    """
    cls: Any = type(block)
    gone = {m for name, m in block._modules.items() if name in names}
    attributes = {name for name in dir(cls) if isinstance(getattr(cls, name), property)} | {*names}
    known = frozenset(a for a in attributes if getattr(block, a, None) in gone)
    if "forward" in vars(block):
        return False
    new: Any = _class_without(getattr(cls, _BASE, cls), getattr(cls, _GONE, (known,))[0] | known)
    if new is None or {getattr(block, a, None) for a in getattr(new, _GONE)[1] & known} != gone:
        return False
    # A subclass of the same name: pickling, copying and ``isinstance`` go on as before.
    block.__class__ = new
    for name in names:
        delattr(block, name)
    return True


@cache
def _class_without(base: Any, names: frozenset[str]) -> type[nn.Module] | None:
    forward, called = _without_calls(base.forward, names)
    if forward is None:
        return None
    namespace = {
        _BASE: base, _GONE: (names, called), "forward": forward, "__reduce_ex__": _reduce,
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
    }  # fmt: skip
    return type(base.__name__, (base,), namespace)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    cls: Any = type(self)
    return _restore, (getattr(cls, _BASE), getattr(cls, _GONE)[0]), dict(vars(self))


def _restore(base: Any, names: frozenset[str]) -> nn.Module:
    cls = _class_without(base, names)
    if cls is None:
        raise ValueError(
            f"{base.__qualname__}.forward was folded without calls of {', '.join(sorted(names))}; "
            "its source is not the one that it was saved with"
        )
    made: nn.Module = object.__new__(cls)
    return made


def _without_calls(
    forward: Any, names: frozenset[str]
) -> tuple[Callable[..., Any] | None, frozenset[str]]:
    if not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return None, frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return None, frozenset()
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None, frozenset()
    if not function.args.args:
        return None, frozenset()
    dropper = _Dropper(function.args.args[0].arg, names)
    dropper.visit(function)
    if dropper.other or not dropper.dropped:
        return None, frozenset()
    # Tracebacks keep their lines.
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)
    free = forward.__code__.co_freevars
    # Free variables need a function around this one that has them.
    outer = ast.parse(f"def outer({', '.join(free)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [function]
    ast.copy_location(outer, function)
    for argument in outer.args.args:
        ast.copy_location(argument, function)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    flags = forward.__code__.co_flags & 0x1FF0000  # what `from __future__` set
    compiled = compile(module, forward.__code__.co_filename, "exec", flags, dont_inherit=True)
    code = _code_of(compiled, function.name)
    cells = dict(zip(free, forward.__closure__ or (), strict=True))
    made = FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )  # fmt: skip
    made.__kwdefaults__, made.__qualname__ = forward.__kwdefaults__, forward.__qualname__
    made.__module__, made.__doc__ = forward.__module__, forward.__doc__
    return made, frozenset(dropper.dropped)


def _code_of(code: CodeType, name: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            return constant if constant.co_name == name else _code_of(constant, name)
    raise AssertionError(f"{name} was compiled but is not there")


class _Dropper(ast.NodeTransformer):
    """Replaces ``self.name(x)`` by ``x``, and notes any other use of the names."""

    def __init__(self, owner: str, names: frozenset[str]) -> None:
        self.owner, self.names = owner, names
        self.dropped: set[str] = set()
        self.other = False

    def visit_Call(self, node: ast.Call) -> Any:
        one = (
            len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        )
        if one and isinstance(node.func, ast.Attribute) and self.is_named(node.func):
            self.dropped.add(node.func.attr)
            return self.visit(node.args[0])
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        # A private name would have to be mangled as in the class's own source.
        private = node.attr.startswith("__") and not node.attr.endswith("__")
        self.other |= self.is_named(node) or private
        return self.generic_visit(node)

    def is_named(self, node: ast.Attribute) -> bool:
        own = isinstance(node.value, ast.Name) and node.value.id == self.owner
        return own and node.attr in self.names


def norm_as_convolution(bn: nn.Module, axes: int) -> nn.Module:
    """Depthwise 1×1 convolution that computes ``bn``: W = γ/√(σ² + ε), b = β − μ·W.

    Args:
        bn: A batch norm in evaluation mode with running statistics.
        axes: Number of axes of its input ``[N, C, …]`` after the channels, 1 to 3.

    Raises:
        ValueError: Another kind of module, a batch norm without running statistics, or a weight
            that is not finite.

    Example:
        >>> norm_as_convolution(nn.BatchNorm2d(4).eval(), 2)
        Conv2d(4, 4, kernel_size=(1, 1), stride=(1, 1), groups=4)
    """
    problem = bn_problem(bn, own_forward=True)
    if problem is not None:
        raise ValueError(f"norm_as_convolution: {problem}")
    return as_convolution(norm_of(bn), axes)


def norms_to_convolutions(
    model: nn.Module, graph: Graph, stays: Callable[[str], bool] = lambda path: False
) -> dict[str, str]:
    """Replace batch norms that cannot be folded by depthwise 1×1 convolutions.

    In evaluation mode a batch norm is W·x + b per channel, W = γ/√(σ² + ε), b = β − μ·W (computed
    in float64, rounded once). A batch norm in front of an activation (a ResNet with pre-activation,
    DenseNet) is never folded; as a convolution it can be quantized. A class with further operations
    (timm's ``BatchNormAct2d``) becomes an ``nn.Sequential`` of that convolution, ``norm``, and its
    other children. Not replaced are batch norms that `fuse_model` would fold, that are in training
    mode, that read an input of the model or rows ``[N, C]``, that a function calls, or whose weight
    would not be finite.

    Args:
        model: Changed in place: parameters of these batch norms are new ones afterwards.
        graph: ``bevquant_graph.capture`` of it.
        stays: Whether the batch norm at a path is not replaced.

    Returns:
        Path of each convolution, and the class of the batch norm that it replaced.

    Example:
        >>> import torch
        >>> from bevquant_graph import capture
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)).eval()
        >>> norms_to_convolutions(net, capture(net, torch.ones(1, 3, 2, 2)))
        {'2': 'BatchNorm2d'}
        >>> net[2]
        Conv2d(4, 4, kernel_size=(1, 1), stride=(1, 1), groups=4)
    """
    own: dict[Fold, nn.Module] = {}
    check_kind(model, nn.Module, "a torch module")
    check_kind(graph, Graph, "what capture returned")
    for path, fold in from_graph(model, graph, alone=True).items():
        if isinstance(fold, Fold) and fold.axes and not stays(path):
            with suppress(ValueError):  # its weight would not be finite
                own[fold] = as_convolution(norm_at(model, fold), fold.axes)
    names = {fold: type(model.get_submodule(fold.bn)).__name__ for fold in own}
    remove_batch_norms(model, own, own)
    return {f"{f.bn}.norm" if f.rest else f.bn: name for f, name in names.items()}

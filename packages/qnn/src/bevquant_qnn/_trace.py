"""Following a model without example inputs: by its chains of modules, and by `torch.fx`.

A graph captured on example inputs knows more: the branch of a forward that depends on the class or
size of its input, sparse tensors, and readers of a tensor that is changed in place.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from typing import Any

from torch import fx, nn

from bevquant_graph import trace_around
from bevquant_qnn._functional_calls import CALLS, Site, plan_of, site_of
from bevquant_qnn._functional_ops import Followed, FunctionalOp, may_hold_functional_ops
from bevquant_qnn._steps import Steps, is_library_module, is_plain_chain, is_quantized
from bevquant_quantizers import TensorQuantizer

_FUNCTIONAL = "bevquant_join"
_TRACE = fx.Tracer.trace.__code__


def trace(model: nn.Module) -> Followed:
    """Follow the model's forward on symbols; where that fails, the forwards of its children."""
    parts = _Parts(model)
    parts.follow(model)
    return parts.found


class _Parts:
    """Followed parts of a model, and their modules."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in model.named_modules()}
        self.found = Followed()
        self.reached: set[nn.Module] = set()

    def follow(self, root: nn.Module) -> None:
        unknown: dict[nn.Module, Exception] = {}
        graph = None
        if not isinstance(root, nn.ModuleList | nn.ModuleDict):
            graph = trace_around(root, _is_leaf, unknown, _note)
        self.found.unfollowed |= {self.paths[m]: _reason(m, e) for m, e in unknown.items()}
        if graph is not None:
            steps = Steps(self.paths, graph, root)
            self.found.parts.append(steps)
            self.found.ops += _functional_ops(steps)
            self.reached |= {call.module for node in steps.nodes for call in steps.calls(node)}
            self.reached -= set(unknown)
        self.below(root)

    def below(self, root: nn.Module) -> None:
        for child in root.children():
            if any(m in self.reached for m in child.modules()):
                self.below(child)
            elif not _is_leaf(child) and next(child.children(), None) is not None:
                self.follow(child)


def _reason(module: nn.Module, error: Exception) -> str:
    name = f"{type(module).__name__}.forward"
    if isinstance(error, fx.proxy.TraceError):
        met = str(error).splitlines()[0]
        if "control flow" in met:
            met = "branches on the value of a tensor"
        return f"{name} {met}"
    return f"{name} cannot be traced: {type(error).__name__}: {str(error).splitlines()[0][:200]}"


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, TensorQuantizer) or is_quantized(module):
        return True
    if is_plain_chain(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return is_library_module(module) or "forward" in vars(module)


def _note(node: fx.Node) -> None:
    """Record the place of an addition or a concatenation."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or name not in _NAMES:
        return
    frames = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in CALLS and frame.f_code is not _TRACE:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    own = [f for f in frames if not _is_fx(f.f_globals.get("__name__", ""))]
    if own:
        node.meta[_FUNCTIONAL] = site_of(own), _in_place(own[0])


_NAMES = {
    "add": "add", "add_": "add", "iadd": "add",
    "cat": "cat", "concat": "cat", "concatenate": "cat",
}  # fmt: skip


def _is_fx(name: str) -> bool:
    return name.startswith(("torch.fx", "torch._ops", "torch.overrides", trace_around.__module__))


def _in_place(frame: Any) -> bool:
    """Whether the code is at ``a += b`` or ``a.add_(b)``."""
    here = next(i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti)
    if here.opname == "BINARY_OP":
        return here.argrepr.endswith("=")
    return False


def _functional_ops(steps: Steps) -> list[FunctionalOp]:
    found = []
    passes: Counter[tuple[Any, Site]] = Counter()
    for node in steps.nodes:
        if _FUNCTIONAL not in node.meta:
            continue
        site, in_place = node.meta[_FUNCTIONAL]
        call = steps.calls(node)[-1]
        kind = _NAMES[node.target if node.op == "call_method" else node.target.__name__]
        two = len(node.args) == 2 and not node.kwargs and all(map(steps.is_tensor, node.args))
        ops = may_hold_functional_ops(call.module, ahead=True)
        if (kind == "add" and not two) or "out" in node.kwargs or not ops:
            continue
        in_place = in_place or node.target == "add_"
        planned = {item.site: item.targets for item in plan_of(call.module)}.get(site, ())
        number = passes[call, site]
        passes[call, site] += 1
        done = number < len(planned) and planned[number] is not None
        found.append(FunctionalOp(call, kind, site, number, steps, node, done, in_place))
    return found

"""Decide from the data flow which batch norm goes into which layer, and why the others stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._dataflow import Call, DataFlow
from ._foldable import bn_problem, fold_problem, is_convolution


@dataclass(frozen=True)
class Skipped:
    """A batch norm that stays, and why.

    Attributes:
        bn: Its path in the model.
        reason: One sentence that names what stands in the way.
    """

    bn: str
    reason: str


@dataclass(frozen=True)
class Pair:
    """A batch norm that reads all that one layer makes, and nobody else does."""

    conv: str
    bn: str
    scope: str


def plan_fusion(model: nn.Module, flow: DataFlow) -> tuple[list[Pair], list[Skipped]]:
    """Put every batch norm of ``model`` into exactly one of the two lists."""
    owners = _parameter_owners(model)
    pairs: list[Pair] = []
    skipped: list[Skipped] = []
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        reason = next(_problems(model, flow, owners, path, module), None)
        if reason is None:
            call = flow.calls_of(path)[0]
            producer = flow.producer(call.inputs[0])
            if producer is not None:
                pairs.append(Pair(producer.path, path, call.scope))
                continue
        skipped.append(Skipped(path, reason or "has no producer"))
    return pairs, skipped


def _problems(
    model: nn.Module,
    flow: DataFlow,
    owners: dict[int, list[str]],
    path: str,
    bn: _BatchNorm,
) -> Iterator[str]:
    problem = bn_problem(bn)
    if problem is not None:
        yield problem
    calls = flow.calls_of(path)
    if not calls:
        yield _never_called(flow, path)
    if len(calls) > 1:
        yield f"is shared: it is called {len(calls)} times"
    call = calls[0]
    if len(call.inputs) != 1:
        yield f"reads {len(call.inputs)} values that cannot be told apart"
    value = call.inputs[0]
    producer = flow.producer(value)
    if producer is None:
        yield "normalises what comes from outside the traced part of the model"
        return
    conv = model.get_submodule(producer.path) if producer.kind == "module" else None
    if conv is None or not is_convolution(conv):
        yield f"follows {describe(producer)}, not a convolution or linear layer"
        return
    others = [describe(r) for r in flow.readers(value) if r is not call]
    if value in flow.outputs:
        others.append("the outside of the traced part")
    if others:
        yield f"{producer.path}'s output is also read by {', '.join(others)}"
    made = flow.calls_of(producer.path)
    if len(made) > 1:
        yield f"{producer.path} is shared: it is called {len(made)} times"
    # None at all is an input that no trace follows, such as a buffer.
    if len(producer.inputs) > 1:
        yield f"{producer.path} takes {len(producer.inputs)} tensors, so its output is a sum"
    problem = fold_problem(conv, bn)
    if problem is not None:
        yield f"{producer.path}: {problem}"
    for name, parameter in conv.named_parameters(recurse=False):
        tied = [p for p in owners[id(parameter)] if p != f"{producer.path}.{name}".lstrip(".")]
        if tied:
            yield f"{producer.path}.{name} is tied to {', '.join(tied)}"
    for module in (producer.path, path):
        read = sorted(p for p in flow.parameters_read if p.startswith(f"{module}."))
        if read:
            yield f"{read[0]} is read by a forward itself"


def describe(call: Call) -> str:
    """A step in words."""
    where = f" in {call.scope}" if call.scope and call.kind != "module" else ""
    what = {"module": f"{call.path} ({call.name})", "method": f".{call.name}()"}
    return what.get(call.kind, f"{call.name}()") + where


def _never_called(flow: DataFlow, path: str) -> str:
    parts = path.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        parent = ".".join(parts[:depth])
        if parent in flow.untraced:
            return (
                f"{parent or 'the model'} cannot be followed, and only chains of modules inside it "
                f"are folded: {flow.untraced[parent]}"
            )
    return "is never called by the forward of the model"


def _parameter_owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip("."))
    return owners

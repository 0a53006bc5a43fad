"""One quantizer per tensor: merging the quantizers whose tensors must have one range."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from bevquant_qnn._add import QuantAdd
from bevquant_qnn._concat import QuantConcat
from bevquant_qnn._flow import Flow
from bevquant_qnn._result import SharedQuantizer, SkippedModule, activation_quantizers
from bevquant_quantizers import TensorQuantizer

__all__ = ["share_quantizers"]


class _Groups:
    """Disjoint sets of whatever can be hashed."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def find(self, item: object) -> object:
        root = item
        while self._parent.setdefault(root, root) is not root:
            root = self._parent[root]
        while self._parent[item] is not root:
            self._parent[item], item = root, self._parent[item]
        return root

    def union(self, a: object, b: object) -> None:
        self._parent[self.find(b)] = self.find(a)


def share_quantizers(
    model: nn.Module, flow: Flow
) -> tuple[list[SharedQuantizer], list[SkippedModule]]:
    """Give all readers of one tensor, and of tensors that are joined, one quantizer object.

    The object that stays is the first in model order. Quantizers with other settings (bits, axis,
    sign, learned range, switched off) are left apart and reported.
    """
    groups = _Groups()
    tensors: dict[object, list[int]] = defaultdict(list)
    for read in flow.reads:
        groups.union(("tensor", read.tensor), read.quantizer)
    for output, operand in flow.joins:
        groups.union(("tensor", output), ("tensor", operand))
    for read in flow.reads:
        root = groups.find(read.quantizer)
        if read.tensor not in tensors[root]:
            tensors[root].append(read.tensor)
    holders = list(activation_quantizers(model))
    read_by_pass = {read.quantizer for read in flow.reads}
    members: dict[object, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for path, owner, name in holders:
        if owner._modules[name] in read_by_pass:
            members[groups.find(owner._modules[name])].append((path, owner, name))
    shared: list[SharedQuantizer] = []
    notes: list[SkippedModule] = []
    for root, group in members.items():
        names = "; ".join(dict.fromkeys(flow.name_of(tensor) for tensor in tensors[root]))
        for part, refused in _compatible(group):
            notes += refused
            readers = tuple(path for path, _, _ in part)
            _merge(part)
            if len(part) > 1:
                shared.append(SharedQuantizer(names, readers, _reason(part, len(tensors[root]))))
    return shared, notes


def _compatible(
    group: list[tuple[str, nn.Module, str]],
) -> list[tuple[list[tuple[str, nn.Module, str]], list[SkippedModule]]]:
    """Split a group by settings; every part but the first comes with its notes."""
    parts: dict[tuple[object, ...], list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for member in group:
        parts[_settings(member[1]._modules[member[2]])].append(member)
    first = next(iter(parts.values()))[0][0]
    result: list[tuple[list[tuple[str, nn.Module, str]], list[SkippedModule]]] = []
    for index, part in enumerate(parts.values()):
        reason = (
            f"reads the same tensor as {first}, but their quantizers differ in settings; not shared"
        )
        notes = [SkippedModule(path, reason) for path, _, _ in part] if index else []
        result.append((part, notes))
    return result


def _settings(quantizer: nn.Module | None) -> tuple[object, ...]:
    names = ("num_bits", "axis", "unsigned", "narrow_range", "_learn_amax", "_disabled")
    calibrator = getattr(quantizer, "_calibrator", None)
    return (*(getattr(quantizer, name) for name in names), type(calibrator))


def _merge(part: list[tuple[str, nn.Module, str]]) -> None:
    _, owner, name = part[0]
    kept: TensorQuantizer = owner._modules[name]  # type: ignore[assignment]
    ranges = [o._modules[n].amax for _, o, n in part]  # type: ignore[union-attr]
    known = [amax for amax in ranges if isinstance(amax, torch.Tensor)]
    if known:
        # A range that covers every reader's own; equal ranges stay as they are.
        widest = torch.stack([amax.detach().to(known[0]) for amax in known]).amax(0)
        kept.amax = widest.cpu().numpy()
    for _, owner, name in part:
        owner._modules[name] = kept


def _reason(part: list[tuple[str, nn.Module, str]], tensors: int) -> str:
    adds = [path.rpartition(".")[0] for path, owner, _ in part if isinstance(owner, QuantAdd)]
    concats = [path.rpartition(".")[0] for path, owner, _ in part if isinstance(owner, QuantConcat)]
    if tensors == 1:
        return "they read the same tensor"
    reasons = [f"operands of {path} have one range" for path in (*adds, *concats)]
    return "they read the same tensors; " + "; ".join(dict.fromkeys(reasons))

"""One quantizer per tensor: merging the quantizers whose tensors must have one range."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from bevquant_qnn._add import QuantAdd, QuantConcat
from bevquant_qnn._flow import Flow
from bevquant_qnn._holders import Holder, activation_quantizers
from bevquant_qnn._result import SharedQuantizer, SkippedModule
from bevquant_quantizers import TensorQuantizer, merge


class Groups:
    """Disjoint sets of hashable values."""

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


def ranges_of(flow: Flow) -> Groups:
    """The sets of quantizers and tensors that must have one range."""
    groups = Groups()
    for read in flow.reads:
        groups.union(("tensor", read.tensor), read.quantizer)
    for output, operand in flow.joins:
        groups.union(("tensor", output), ("tensor", operand))
    return groups


def share_quantizers(
    model: nn.Module, flow: Flow
) -> tuple[list[SharedQuantizer], list[SkippedModule]]:
    """Give all readers of one tensor, and of tensors that are joined, one quantizer object.

    The object that stays is the first in model order; its range, if any of them has one, becomes
    the widest of all, and what their calibrators have collected is merged. Quantizers with other
    settings (bits, axis, sign, learned range, switched off) are left apart and reported.
    """
    groups = ranges_of(flow)
    floats: dict[TensorQuantizer, bool] = defaultdict(lambda: True)
    for read in flow.reads:
        floats[read.quantizer] &= read.from_float
    for quantizer, from_float in floats.items():
        quantizer.reads_float |= from_float  # an earlier call saw it without its factors' product
    tensors: dict[object, dict[object, None]] = defaultdict(dict)
    for read in flow.reads:
        tensors[groups.find(read.quantizer)][read.tensor] = None
    members: dict[object, list[Holder]] = defaultdict(list)
    for holder in activation_quantizers(model):
        root = groups.find(holder.quantizer)
        if root in tensors:
            members[root].append(holder)
    shared: list[SharedQuantizer] = []
    notes: list[SkippedModule] = []
    for root, group in members.items():
        names = "; ".join(dict.fromkeys(flow.name_of(tensor) for tensor in tensors[root]))
        first, *others = _by_settings(group)
        for part in (first, *others):
            notes += _merge(part)
            if len(part) > 1:
                readers = tuple(holder.path for holder in part)
                shared.append(SharedQuantizer(names, readers, _reason(part, len(tensors[root]))))
        for holder in (holder for part in others for holder in part):
            reason = f"same tensor as {first[0].path}, but their settings differ: not shared"
            notes.append(SkippedModule(holder.path, reason))
    return shared, notes


def _by_settings(group: list[Holder]) -> list[list[Holder]]:
    parts: dict[tuple[object, ...], list[Holder]] = defaultdict(list)
    names = ("num_bits", "axis", "unsigned", "narrow_range", "_learn_amax", "_disabled")
    for holder in group:
        quantizer = holder.quantizer
        settings = (getattr(quantizer, name) for name in names)
        parts[(*settings, type(quantizer._calibrator))].append(holder)
    return list(parts.values())


def _merge(part: list[Holder]) -> list[SkippedModule]:
    """Give every holder the first one's quantizer, with the others' ranges and counts."""
    notes: list[SkippedModule] = []
    quantizers = list(dict.fromkeys(holder.quantizer for holder in part))
    kept = quantizers[0]
    kept.reads_float = all(q.reads_float for q in quantizers)
    ranges = [q.amax.detach() for q in quantizers if q.amax is not None]
    if len(quantizers) > 1 and ranges:
        # A range that covers every reader's own.
        widest = torch.stack([amax.to(ranges[0]).view_as(ranges[0]) for amax in ranges]).amax(0)
        kept.amax = widest.cpu().numpy()
    calibrators = [q._calibrator for q in quantizers if q._calibrator is not None]
    if len(calibrators) > 1:
        try:
            kept._calibrator = merge(calibrators)
        except ValueError as error:
            reason = f"statistics collected before are dropped ({error}); calibrate again"
            notes = [SkippedModule(holder.path, reason) for holder in part[1:]]
    for holder in part:
        holder.put(kept)
    return notes


def _reason(part: list[Holder], tensors: int) -> str:
    if tensors == 1:
        return "they read the same tensor"
    joins = [h.owner_path for h in part if isinstance(h.owner, QuantAdd | QuantConcat)]
    if not joins:
        return "a layer that is used several times reads several tensors"
    operands = "; ".join(f"operands of {path} have one range" for path in dict.fromkeys(joins))
    return f"they read the same tensors; {operands}"

"""Take folded batch norms out of a model, in the way each place asks for."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_graph import replace_modules
from bevquant_sparse import is_sparse_conv

from ._chains import is_chain, is_sparse_chain, remove_member
from ._fold import Fold
from ._fuse_pair import Norm
from ._without_calls import drop_calls

Removal = Literal["identity", "removed", "rebuilt", "rest", "neutral"]


def remove_batch_norms(model: nn.Module, folds: Iterable[Fold]) -> dict[Fold, Removal]:
    """Remove the batch norm of each fold; the paths are those before any removal."""
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
        if fold.rest is None:
            removal[fold] = "neutral"
        elif fold.rest:
            removal[fold] = "rest"
        elif not once or not is_sparse_conv(modules[fold.conv]):
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
            made = nn.Sequential(left) if left else nn.Identity()
            made.training = module.training
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

    def at(path: str) -> Tensor:
        found: Tensor = operator.attrgetter(path)(model)
        return found

    paths = fold.norm
    weight, bias = (None if p is None else at(p) for p in (paths.weight, paths.bias))
    return Norm(at(paths.mean), at(paths.var), paths.eps, weight, bias)


def neutralise(norm: Norm) -> bool:
    """Make a batch norm give exactly what it gets: mean 0, variance 1 − ε, weight 1, bias 0.

    Returns:
        Whether there is such a variance; it is tried out. Nothing is changed otherwise.
    """
    like = norm.var.detach()
    one, zero = torch.ones_like(like), torch.zeros_like(like)
    start = one - norm.eps
    probe = torch.linspace(-3, 3, 4096, dtype=torch.float64).to(like)
    probe = torch.cat([probe, probe * 1e-3, probe * 1e3]).reshape(-1, 1).repeat(1, len(like))
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

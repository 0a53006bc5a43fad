"""Fold the parts of a model one after the other, each on what it gets in a run of the whole."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ._fuse_model import FusionResult, fuse_model


def fuse_parts(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    parts: Iterable[str],
    *,
    unchecked: Collection[str] = (),
) -> FusionResult:
    """`fuse_model` of some modules of a model, each captured and compared by itself.

    For a model whose forward cannot be followed as a whole (voxelization, views, queries between
    its parts), or whose activations do not fit memory together.

    Args:
        model: Stays as it is.
        example_inputs: The model's positional ones; the model is run on them once, and each part is
            folded on what it was called with first.
        parts: Paths of modules, none inside another; those that the model does not have are passed
            over.
        unchecked: Parts that are folded by their structure, without inputs: of a detection head,
            say, in which rounding decides which cells become queries, outputs before and after
            cannot be compared one by one.

    Returns:
        A copy with the parts folded, in evaluation mode, and the account of all parts with paths of
        the whole model; `max_error` is the largest of theirs.

    Raises:
        ValueError: The model runs none of the parts.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), nn.ReLU())
        >>> result = fuse_parts(net.eval(), (torch.randn(1, 1, 4, 4),), ["0"])
        >>> [(item.conv, item.bn) for item in result.fused], result.max_error < 1e-5
        ([('0.0', '0.1')], True)
    """
    model, parts = copy.deepcopy(model), tuple(parts)
    results = []
    for path, inputs in _inputs(model, example_inputs, parts).items():
        given = None if path in unchecked else inputs
        result = fuse_model(model.get_submodule(path), example_inputs=given)
        model.set_submodule(path, result.model)
        results.append(_below(path, result))
    if not results:
        raise ValueError(f"fuse_parts: the model runs none of {', '.join(parts)}: name its modules")
    errors = [r.max_error for r in results if r.max_error is not None]
    return FusionResult(
        model.eval(),
        fused=tuple(item for r in results for item in r.fused),
        skipped=tuple(item for r in results for item in r.skipped),
        not_inplace=tuple(path for r in results for path in r.not_inplace),
        untraced={path: why for r in results for path, why in r.untraced.items()},
        max_error=max(errors, default=None),
        plain=tuple(path for r in results for path in r.plain),
    )


def _inputs(
    model: nn.Module, example_inputs: tuple[Any, ...], parts: Iterable[str]
) -> dict[str, tuple[Any, ...]]:
    """What each part is called with, in the order of the calls."""
    seen: dict[str, tuple[Any, ...]] = {}
    known = dict(model.named_modules())
    with ExitStack() as stack, torch.no_grad():
        for path in known.keys() & set(parts):
            hook = known[path].register_forward_pre_hook(
                lambda module, args, path=path: seen.setdefault(path, args) and None
            )
            stack.callback(hook.remove)
        model(*example_inputs)
    return seen


def _below(path: str, result: FusionResult) -> FusionResult:
    """The same account with full paths."""

    def join(below: str) -> str:
        return f"{path}.{below}" if below else path

    return replace(
        result,
        fused=tuple(replace(f, conv=join(f.conv), bn=join(f.bn)) for f in result.fused),
        skipped=tuple(replace(s, bn=join(s.bn)) for s in result.skipped),
        not_inplace=tuple(map(join, result.not_inplace)),
        plain=tuple(map(join, result.plain)),
        untraced={join(p): why for p, why in result.untraced.items()},
    )

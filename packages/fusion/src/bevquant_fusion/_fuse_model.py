"""Fold every batch norm of a model that can be folded, and say what became of each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ._dataflow import as_inputs, build_dataflow
from ._fuse_pair import fold_into
from ._plan import Pair, Skipped, plan_fusion
from ._remove_bn import Removal, remove_batch_norms, stop_inplace
from ._tracer import Inputs
from ._verify import in_float64, relative_difference, run, tolerance

_HOW = {
    "identity": "now nn.Identity",
    "removed": "taken out of its SparseSequential",
    "rebuilt": "deleted, forward rebuilt without it",
}


@dataclass(frozen=True)
class Fused:
    """A batch norm that was folded.

    Attributes:
        conv: Path of the layer that took it, before the rewrite (a ``SparseSequential`` numbers
            its members anew).
        bn: Path of the batch norm before the rewrite.
        how: ``"identity"``, ``"removed"`` or ``"rebuilt"``: what stands in its place.
    """

    conv: str
    bn: str
    how: Removal


@dataclass(frozen=True, eq=False)
class FusionResult:
    """What ``fuse_model`` did. ``print(result)`` shows it as a table.

    Attributes:
        model: The fused model: a copy, or the model itself with ``inplace=True``.
        fused: Batch norms that are gone.
        skipped: Batch norms that stay, each with the reason. Every batch norm of the model is in
            exactly one of the two.
        not_inplace: Activations of sparse encoders whose ``inplace`` became False, by their path
            before the rewrite.
        untraced: Modules whose forward could not be followed, with the reason.
        max_error: Largest relative difference of any output on the example inputs; in float64
            where a choice between values (the largest ones, say) came out differently by rounding;
            None without example inputs.
    """

    model: nn.Module = field(repr=False)
    fused: tuple[Fused, ...]
    skipped: tuple[Skipped, ...]
    not_inplace: tuple[str, ...] = ()
    untraced: Mapping[str, str] = field(default_factory=dict)
    max_error: float | None = None

    def __str__(self) -> str:
        rows = [(f.bn, f"into {f.conv or 'the model'}", _HOW[f.how]) for f in self.fused]
        rows += [(s.bn or "the model", "kept", s.reason) for s in self.skipped]
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        total = f"{len(self.fused)} batch norms folded, {len(self.skipped)} kept"
        if self.max_error is not None:
            total += f", outputs within {self.max_error:.1e} of the unfused model"
        return "\n".join([*lines, total])


def fuse_model(model: nn.Module, example_inputs: Any = None, inplace: bool = False) -> FusionResult:
    """Fold batch norms into the convolutions and linear layers that feed them.

    The pairs are found from the data flow (``trace_dataflow``), never from the order in which
    modules are registered: a batch norm is folded only where it reads the output of exactly one
    call of a convolution or linear layer, and nothing else reads that output. Where a module's
    forward cannot be followed, only what lies wholly inside its traceable descendants is folded:
    a convolution directly followed by its batch norm in an ``nn.Sequential`` or
    ``SparseSequential``, or a block whose own forward can be followed. That takes for granted
    that the untraceable module uses such a descendant by calling it; ``example_inputs`` checks it.

    A folded batch norm becomes ``nn.Identity`` in dense code, leaves its ``SparseSequential``
    (members numbered 0, 1, 2, … are numbered anew), and is deleted from a block that runs sparse
    convolutions, whose forward is rebuilt without it. Activations in sparse encoders get
    ``inplace=False``. Parameters are replaced: make optimizers afterwards.

    Args:
        model: Batch norms in training mode are kept, so call ``eval()`` first.
        example_inputs: Tuple of arguments, dict of keyword arguments, or one argument. Where
            given, model and result are run on it in evaluation mode and compared.
        inplace: Change ``model`` itself rather than a copy.

    Returns:
        The fused model with a line for every batch norm.

    Raises:
        ValueError: The outputs on ``example_inputs`` differ by more than rounding (1e-10 of the
            largest output in float64, 1e-3 in float32), in float64 too, or the fused model does
            not run; ``model`` is then unchanged.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> result = fuse_model(net, torch.randn(1, 3, 2, 2))
        >>> result.fused
        (Fused(conv='0', bn='1', how='identity'),)
        >>> result.model[1], type(net[1]).__name__
        (Identity(), 'BatchNorm2d')
    """
    inputs = as_inputs(example_inputs)
    if inputs is None:
        return _fuse(model if inplace else copy.deepcopy(model), None)
    before = run(model, inputs)
    result = _fuse(copy.deepcopy(model), inputs)
    try:
        after = run(result.model, inputs)
    except Exception as error:
        raise ValueError(
            f"the fused model does not run on the example inputs: {error}. (spconv's own CPU "
            "kernels refuse a bias: call bevquant_sparse.use_bevquant_kernels(model) first.)"
        ) from error
    difference = relative_difference(before, after)
    if not difference <= tolerance(before):
        exact = _difference_in_float64(model, inputs)
    else:
        exact = difference
    if exact is None:
        raise ValueError(
            f"the fused model's outputs differ from the model's by {difference:.2e} (relative), "
            f"beyond {tolerance(before):.0e}: some module is used in a way its forward does not "
            f"show\n{result}"
        )
    if inplace:
        result = _fuse(model, inputs)
    return replace(result, max_error=exact)


def _difference_in_float64(model: nn.Module, inputs: Inputs) -> float | None:
    """The difference that folding makes in float64, or None where that is no rounding either.

    A model that picks its largest values or compares them makes another choice for a difference as
    small as rounding in float32, and what follows is then far apart. In float64 it is not.
    """
    exact = copy.deepcopy(model).double()
    inputs = in_float64(inputs)
    try:
        before = run(exact, inputs)
        after = run(_fuse(exact, inputs).model, inputs)
        difference = relative_difference(before, after)
    except Exception:  # whatever a model that does not run in float64 raises
        return None
    return difference if difference <= tolerance(before) else None


def _fuse(model: nn.Module, inputs: Inputs | None) -> FusionResult:
    flow = build_dataflow(model, inputs)
    pairs, skipped = plan_fusion(model, flow)
    folded: list[Pair] = []
    for pair in pairs:
        try:
            fold_into(model.get_submodule(pair.conv), model.get_submodule(pair.bn))
        except ValueError as error:
            skipped.append(Skipped(pair.bn, f"{pair.conv}: {error}"))
        else:
            folded.append(pair)
    not_inplace = stop_inplace(model, flow)
    how = remove_batch_norms(model, flow, folded)
    return FusionResult(
        model=model,
        fused=tuple(Fused(p.conv, p.bn, how[p]) for p in folded),
        skipped=tuple(skipped),
        not_inplace=tuple(not_inplace),
        untraced=flow.untraced,
    )

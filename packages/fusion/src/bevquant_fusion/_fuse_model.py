"""Fold every batch norm of a model that can be folded, and say what became of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from bevquant_graph import (
    CaptureError,
    Graph,
    arguments,
    as_module,
    capture,
    evaluation,
    first_fault,
    refilled,
    refuse_unusable,
    replace_modules,
    running,
)

from ._fold import Fold, Skipped
from ._foldable import with_batch_norms
from ._fuse_pair import as_convolution, fold_into, fold_parts
from ._plan import Plan, plan_fusion
from ._products import made_plain
from ._remove_bn import Removal, neutralise, norm_at, remove_batch_norms
from ._structure import activations

_Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_HOW = {
    "identity": "now nn.Identity",
    "removed": "taken out of its SparseSequential",
    "rebuilt": "deleted, and its call with it",
    "rest": "now what followed the normalisation",
    "neutral": "still called, as an exact identity",
    "depthwise": "now a depthwise 1×1 convolution",
}


@dataclass(frozen=True)
class Fused:
    """A batch norm that was folded.

    Attributes:
        conv: Path of the layer that took it, before the rewrite (a ``SparseSequential`` numbers
            its members anew); the first of several.
        bn: Path of the batch norm before the rewrite.
        how: What stands in its place: ``"identity"``; ``"removed"`` (from a
            ``SparseSequential``); ``"rebuilt"`` (its block's forward is without the call);
            ``"rest"``: an ``nn.Sequential`` of its own children, as of timm's ``BatchNormAct2d``;
            ``"neutral"``: its statistics and weights are such that it gives what it gets, because
            a forward calls ``F.batch_norm`` itself. That holds in evaluation mode;
            ``"depthwise"``: a depthwise 1×1 convolution, in a sum with convolutions of what it
            reads; it is its own ``conv``.
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
        plain: Layers whose forward computed their weight from parameters alone (standardised
            weights), by their path; they are layers of torch's own over that weight now.
    """

    model: nn.Module = field(repr=False)
    fused: tuple[Fused, ...]
    skipped: tuple[Skipped, ...]
    not_inplace: tuple[str, ...] = ()
    untraced: Mapping[str, str] = field(default_factory=dict)
    max_error: float | None = None
    plain: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [(f.bn, f"into {f.conv or 'the model'}", _HOW[f.how]) for f in self.fused]
        rows += [(path, "plain", "its weight was computed from parameters") for path in self.plain]
        for item in self.skipped:
            where = f" ({item.location})" if item.location else ""
            rows.append((item.bn or "the model", "kept", item.reason + where))
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        total = f"{len(self.fused)} batch norms folded, {len(self.skipped)} kept"
        if self.max_error is not None:
            total += f", outputs within {self.max_error:.1e} of the unfused model"
        elif self.untraced:
            total += "; example_inputs would let forwards be followed: " + ", ".join(
                path or "the model" for path in self.untraced
            )
        return "\n".join([*lines, total])


def fuse_model(
    model: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    inplace: bool = False,
    *,
    graph: Graph | None = None,
) -> FusionResult:
    """Fold batch norms into the convolutions and linear layers beside them.

    With ``example_inputs`` the model is captured (``bevquant_graph.capture``), and a batch norm is
    folded where the channels that one convolution or linear layer makes go to it and nowhere else,
    at most through what moves values and keeps channels apart, or averages them over places; and
    else, where no ReLU feeds it, into the layers behind it, if only dense ones that pad no zeros
    read it. One of a sum or a concatenation of layers before it goes into all of them, and one that
    stands in a sum with convolutions of what it reads (RepVGG's identity branch) becomes a
    depthwise 1×1 convolution. Functional
    ``F.batch_norm``, classes that do more than normalise, what more they do being kept, and frozen
    batch norms in arithmetic (``FrozenBatchNorm2d``) are folded too. A layer that computes its
    weight from parameters alone in every call (standardised weights) becomes a plain one over that
    weight. Without example inputs, and inside modules that cannot be captured, the
    structure of the modules tells: a convolution directly followed by its batch norm in an
    ``nn.Sequential`` or ``SparseSequential``, residual blocks by their names, other forwards as
    `torch.fx` sees them. That takes for granted that a module which cannot be followed uses its
    parts by calling them; ``example_inputs`` checks it.

    A folded batch norm becomes ``nn.Identity`` in dense code, leaves its ``SparseSequential``
    (members numbered 0, 1, 2, … are numbered anew), and is deleted from a block that runs sparse
    convolutions, with its call. Activations in sparse encoders get ``inplace=False``, unless that
    changes the outputs. Parameters are replaced: make optimizers afterwards.

    Args:
        model: Batch norms in training mode are kept, so call ``eval()`` first. Of an exported
            program its module (``bevquant_graph.module_of``) is fused, on the program's own example
            inputs where none are given.
        example_inputs: Tuple of arguments, dict of keyword arguments, or one argument. Where
            given, model and result are run on it in evaluation mode and compared.
        inplace: Change ``model`` itself rather than a copy.
        graph: ``capture(model, example_inputs)``, where that was done already; frozen batch norms
            stay then, as it shows their arithmetic.

    Returns:
        The fused model with a line for every batch norm.

    Raises:
        ValueError: The outputs on ``example_inputs`` differ by more than rounding (1e-10 of the
            largest output in float64, 1e-3 in float32), in float64 too, or the fused model does
            not run; ``model`` is then unchanged. Or ``graph`` is that of another model.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> result = fuse_model(net, torch.randn(1, 3, 2, 2))
        >>> result.fused
        (Fused(conv='0', bn='1', how='identity'),)
        >>> result.model[1], type(net[1]).__name__
        (Identity(), 'BatchNorm2d')
    """
    module, example_inputs = as_module(model, example_inputs)
    return _fused(module, example_inputs, inplace, graph)


def _fused(
    model: nn.Module, example_inputs: Any, inplace: bool, graph: Graph | None
) -> FusionResult:
    if graph is not None and graph.model is not model:
        raise ValueError(
            f"graph: expected one captured from this {type(model).__name__}, got one of another "
            f"{type(graph.model).__name__}; pass capture(model, example_inputs)"
        )
    refuse_unusable(model, "fuse_model")
    failure, planned = "", model
    if graph is None:
        planned = with_batch_norms(model)
        if example_inputs is not None:
            try:
                # The outputs are compared below.
                graph = capture(planned, example_inputs, check=False, open_sizes=False)
            except CaptureError as error:
                failure = str(error)
    plan = plan_fusion(planned, graph, failure)
    if example_inputs is None:
        stopped = [path for path, alone in activations(model) if alone]
        return _fuse(model if inplace else copy.deepcopy(model), plan, stopped)
    inputs: _Inputs = arguments(example_inputs)
    with running(model, "fuse_model", "Give inputs that it takes; it is as it was before"):
        before = run(model, inputs)
    stopped = _may_stop(model, inputs, before)
    result = _fuse(copy.deepcopy(model), plan, stopped)
    try:
        after = run(result.model, inputs)
    except Exception as error:
        raise ValueError(
            f"the fused model does not run on the example inputs: {error}. (spconv's own CPU "
            "kernels refuse a bias: call bevquant_sparse.use_bevquant_kernels(model) first.)"
        ) from error
    difference = relative_difference(before, after)
    exact: float | None = difference
    if not difference <= tolerance(before):
        exact = _difference_in_float64(model, inputs, plan, stopped)
    if exact is None:
        fault = first_fault(model, lambda: run(model, inputs))
        raise ValueError(
            f"the fused model's outputs differ from the model's by {difference:.2e} (relative), "
            f"beyond {tolerance(before):.0e}: "
            + (fault or f"some module is used in a way its forward does not show\n{result}")
        )
    if inplace:
        result = _fuse(model, plan, stopped)
    return replace(result, max_error=exact)


def _difference_in_float64(
    model: nn.Module, inputs: _Inputs, plan: Plan, stopped: Iterable[str]
) -> float | None:
    """The difference that folding makes in float64, or None where that is no rounding either.

    A model that picks its largest values or compares them makes another choice for a difference as
    small as rounding in float32, and what follows is then far apart. In float64 it is not. What
    computes in float32 all the same (``softmax(dtype=torch.float32)``) is held to what that has.
    """
    exact = copy.deepcopy(model).double()
    inputs = in_float64(inputs)
    try:
        with _float64_by_default():
            with _Types() as made:
                before = run(exact, inputs)
            after = run(_fuse(exact, plan, stopped).model, inputs)
        difference = relative_difference(before, after)
    except Exception:  # whatever a model that does not run in float64 raises
        return None
    allowed = max(tolerance(before), *(_TOLERANCE.get(dtype, 0.0) for dtype in made.seen))
    return difference if difference <= allowed else None


class _Types(TorchFunctionMode):
    """Notes the types of what functions make while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.seen.add(made.dtype)
        return made


def _may_stop(model: nn.Module, inputs: _Inputs, before: list[Any]) -> list[str]:
    """Activations of sparse encoders that need not write in place.

    Where the old name of what an activation writes to is read afterwards, ``inplace=False`` would
    change the result: the outputs are compared, and then activation by activation.
    """
    candidates = activations(model)
    paths = [path for path, _ in candidates]
    if all(alone for _, alone in candidates):
        return paths
    copied = copy.deepcopy(model)

    def same(stopped: list[str]) -> bool:
        for path in paths:
            activation: Any = copied.get_submodule(path)
            activation.inplace = path not in stopped
        return relative_difference(before, run(copied, inputs)) <= tolerance(before)

    return paths if same(paths) else [path for path in paths if same([path])]


def _fuse(model: nn.Module, plan: Plan, stopped: Iterable[str]) -> FusionResult:
    skipped = list(plan.skipped)
    layers = {model.get_submodule(path): path for path in plan.plain}
    replace_modules(model, {layer: made_plain(layer) or layer for layer in layers})
    folded: list[Fold] = []
    own: dict[Fold, nn.Module] = {}
    for fold in plan.folds:
        norm = norm_at(model, fold)
        if fold.rest is None and not neutralise(copy.deepcopy(norm)):
            reason = f"no variance makes it an exact identity with eps={fold.norm.eps}"
            skipped.append(Skipped(fold.bn, f"is called by a forward itself, and {reason}"))
            continue
        try:
            if fold.parts:
                parts = [(model.get_submodule(p.layer), p) for p in fold.parts]
                fold_parts(parts, norm, ahead=fold.ahead)
            elif fold.axes:
                own[fold] = as_convolution(norm, fold.axes)
            else:
                fold_into(model.get_submodule(fold.conv), norm)
        except ValueError as error:
            skipped.append(Skipped(fold.bn, f"{fold.conv}: {error}"))
        else:
            folded.append(fold)
    for path in stopped:
        activation: Any = model.get_submodule(path)
        activation.inplace = False
    how = remove_batch_norms(model, folded, own)
    return FusionResult(
        model=model,
        fused=tuple(Fused(f.conv, f.bn, how[f]) for f in folded),
        skipped=tuple(skipped),
        not_inplace=tuple(stopped),
        untraced=plan.untraced,
        plain=plan.plain,
    )


def run(model: nn.Module, inputs: _Inputs) -> list[Tensor]:
    """Outputs of ``model`` in evaluation mode, on copies of ``inputs``, as a flat list."""
    args, kwargs = _duplicate(inputs)
    with evaluation(model), torch.no_grad():
        return [t.detach().clone() for t in _tensors(model(*args, **kwargs))]


def relative_difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest |after − before| of any output, over the largest |before| of that output.

    Infinite where an output has another shape: a model that chooses rows has chosen others.
    """
    if len(before) != len(after):
        raise ValueError(f"the model made {len(before)} tensors, the fused one makes {len(after)}")
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() == 0 or not a.is_floating_point():
            continue
        difference = (a.double() - b.double()).abs().max().item()
        scale = a.double().abs().max().item()
        worst = max(worst, difference / scale if scale else difference)
        if difference != difference:
            return float("nan")
    return worst


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """What a forward makes itself, ``torch.zeros(n)`` say, is float64 too."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def tolerance(outputs: list[Tensor]) -> float:
    """Allowed relative difference for the widest tolerance among the outputs' dtypes."""
    return max((_TOLERANCE.get(t.dtype, 0.0) for t in outputs), default=0.0)


def in_float64(inputs: _Inputs) -> _Inputs:
    """Copies of ``inputs``, floating-point tensors as float64."""
    args, kwargs = _duplicate(inputs, lambda t: t.double() if t.is_floating_point() else t)
    return args, kwargs


def _duplicate(value: Any, convert: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    if isinstance(value, Tensor):
        return convert(value.detach())
    if hasattr(value, "replace_feature"):
        return value.replace_feature(convert(value.features.detach()))
    if isinstance(value, list | tuple):
        return refilled(type(value), [_duplicate(v, convert) for v in value])
    if isinstance(value, dict):
        return {k: _duplicate(v, convert) for k, v in value.items()}
    return copy.deepcopy(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "features"):
        yield value.features
    elif isinstance(value, dict):
        for key in value:
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))

"""Fold every batch norm that can be folded of a model, or of its parts one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from bevquant_graph import (
    CaptureError,
    FunctionCalls,
    Graph,
    alone,
    arguments,
    as_module,
    called,
    capture,
    check_kind,
    copied,
    evaluation,
    first_fault,
    ordinary_tensors,
    own_inputs,
    refuse_unusable,
    replace_modules,
    running,
)
from bevquant_sparse import adopt_kernels, borrowed_kernels

from ._computed_weights import computed_weights, keep_computed_weights
from ._fold import Fold
from ._foldable import with_batch_norms
from ._fuse_pair import as_convolution, fold_into, fold_parts
from ._plan import Plan, plan_fusion
from ._products import made_plain
from ._remove_bn import neutralise, norm_at, remove_batch_norms
from ._result import Fused, FusionResult, Skipped, joined
from ._structure import activations

_Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
_Change = Callable[[], nn.Module] | None
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_PIECE = 1 << 15  # values that are compared at once: they stay in the cache


def fuse_model(
    model: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    inplace: bool = False,
    *,
    graph: Graph | None = None,
) -> FusionResult:
    """Fold batch norms into adjacent convolutions and linear layers.

    With ``example_inputs`` the model is captured (``bevquant_graph.capture``). A batch norm is
    folded into

    - the layer in front of it, where the batch norm is the layer's only consumer; layout operators
      that keep channels apart and averages over places may be between the two;
    - all layers in front of it, for a sum, difference or concatenation of layers;
    - the layers behind it, where no ReLU feeds it and its consumers are dense layers without zero
      padding;
    - a depthwise 1×1 convolution of its own, in a sum or difference with convolutions of the same
      input (RepVGG's identity branch).

    Functional ``F.batch_norm``, classes with further operations (which are kept), and frozen batch
    norms in arithmetic (``FrozenBatchNorm2d``) are folded too. A layer that computes its weight
    from parameters alone in every call (standardised weights, ``weight_norm``, ``spectral_norm``,
    other parametrizations, pruning masks) becomes a plain layer with that weight; so does a sparse
    convolution of spconv 1 that runs along the rulebook of another kernel
    (``bevquant_sparse.adopt_kernels``).

    Without example inputs, and inside modules that cannot be captured, the module structure
    decides: a convolution directly followed by its batch norm in an ``nn.Sequential`` or
    ``SparseSequential``, residual blocks by their names, other forwards as `torch.fx` traces them.
    This assumes that a module uses its parts by calling them; ``example_inputs`` verifies it.

    A folded batch norm becomes ``nn.Identity`` in dense code. It is removed from its
    ``SparseSequential`` (whose members are renumbered) and from a block that runs sparse
    convolutions, with its call. Activations in sparse encoders get ``inplace=False``, unless that
    changes the outputs. Parameters are replaced: create optimizers afterwards.

    Args:
        model: A model in evaluation mode; batch norms in training mode are kept. Of an exported
            program, the module (``bevquant_graph.module_of``) is fused, on the program's own
            example inputs where none are given.
        example_inputs: Tuple of arguments, dict of keyword arguments, or one argument. Model and
            result are run on it in evaluation mode and compared.
        inplace: Change ``model`` itself instead of a copy.
        graph: ``capture(model, example_inputs)``, where it was captured already. Frozen batch norms
            are not folded then, because the graph shows their arithmetic.

    Returns:
        The fused model with one line per batch norm.

    Raises:
        ValueError: The outputs on ``example_inputs`` differ by more than rounding (1e-10 of the
            largest output in float64, 1e-3 in float32), in float64 too, or the fused model does not
            run; ``model`` is unchanged then. Or ``graph`` belongs to another model.

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
    refuse_unusable(module, "fuse_model")
    computed = () if graph is not None else computed_weights(module)
    with alone(module):
        if not computed:
            return _fused(module, example_inputs, (lambda: module) if inplace else None, graph)
        kept = keep_computed_weights(copied(module, "fuse_model"))
        if example_inputs is not None:
            _refuse_other_outputs(module, kept, arguments(example_inputs), computed)
        change = partial(keep_computed_weights, module) if inplace else lambda: kept
        result = _fused(kept, example_inputs, change, None)
    return replace(result, plain=(*computed, *result.plain))


def _refuse_other_outputs(
    model: nn.Module, kept: nn.Module, inputs: _Inputs, computed: tuple[str, ...]
) -> None:
    """Refuse weights kept as parameters that are not those of the model's calls."""
    before = _recorded(model, inputs)
    difference = _relative_difference(before, _run(kept, inputs))
    if not difference <= _tolerance(before):
        raise ValueError(
            f"fuse_model: with the weights of {', '.join(computed)} as parameters the outputs "
            f"differ by {difference:.2e} (relative); remove what computes them yourself "
            "(torch.nn.utils.parametrize.remove_parametrizations)"
        )


def _recorded(model: nn.Module, inputs: _Inputs) -> list[Any]:
    with running(model, "fuse_model", "Give inputs that it takes; it is as it was before"):
        return _run(model, inputs)


@ordinary_tensors()
def fuse_parts(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    parts: Iterable[str],
    *,
    unchecked: Collection[str] = (),
) -> FusionResult:
    """Run `fuse_model` on some modules of a model, each captured and compared by itself.

    For a model that cannot be captured as a whole (voxelization, views, queries between its parts),
    or whose activations do not fit into memory together.

    Args:
        model: The model; it is not changed.
        example_inputs: Its positional inputs. The model is run on them once, and each part is
            folded on the inputs of its first call.
        parts: Paths of modules, none inside another. Paths that the model does not have are
            ignored.
        unchecked: Parts that are folded by their structure, without inputs: a detection head, for
            example, in which rounding decides which cells become queries, so outputs before and
            after cannot be compared one by one.

    Returns:
        A copy with the parts folded, in evaluation mode, and the record of all parts with paths of
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
    check_kind(model, nn.Module, "a torch module")
    check_kind(example_inputs, (tuple, list), "a tuple of positional inputs")
    computed, parts = computed_weights(model), tuple(parts)
    model = keep_computed_weights(copied(model, "fuse_parts"))
    results = {}
    for path, (inputs, before) in _part_calls(model, example_inputs, parts, unchecked).items():
        given = None if path in unchecked else inputs
        results[path] = _fused(model.get_submodule(path), given, None, None, before)
        model.set_submodule(path, results[path].model)
    if not results:
        raise ValueError(f"fuse_parts: the model runs none of {', '.join(parts)}: name its modules")
    result = joined(model.eval(), results)
    return replace(result, plain=(*computed, *result.plain))


def _part_calls(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    parts: Iterable[str],
    unchecked: Collection[str],
) -> dict[str, tuple[tuple[Any, ...], list[Tensor] | None]]:
    """Arguments and results of each part's first call, in the order of the calls."""
    seen: dict[str, tuple[tuple[Any, ...], list[Tensor] | None]] = {}
    known = dict(model.named_modules())
    given: dict[str, tuple[Any, ...]] = {}

    def enter(path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        given.setdefault(path, own_inputs(args))  # the part may write to them

    def leave(path: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if path not in seen:
            seen[path] = given[path], None if path in unchecked else _kept(output)

    with ExitStack() as stack, evaluation(model), torch.no_grad():
        for path in known.keys() & set(parts):
            stack.callback(known[path].register_forward_pre_hook(partial(enter, path)).remove)
            stack.callback(known[path].register_forward_hook(partial(leave, path)).remove)
        called(model, example_inputs)
    return seen


def _fused(
    model: nn.Module,
    example_inputs: Any,
    change: _Change,
    graph: Graph | None,
    before: list[Tensor] | None = None,
) -> FusionResult:
    """`fuse_model` with one plan for a copy, which is compared, and for the model to change.

    ``change`` gives the model to change once the fused copy is right; without it the result is the
    copy. ``before`` is the recorded output of a part of another model.
    """
    if graph is not None and graph.model is not model:
        raise ValueError(
            f"graph: expected one captured from this {type(model).__name__}, got one of another "
            f"{type(graph.model).__name__}; pass capture(model, example_inputs)"
        )
    if graph is None and example_inputs is not None:
        adopted = _with_own_kernels(model, example_inputs, change, before)
        if adopted is not None:
            return adopted
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
        return _fuse(change() if change else copied(model, "fuse_model"), plan, stopped)
    inputs: _Inputs = arguments(example_inputs)
    seen = before is not None
    if before is None:
        before = _recorded(model, inputs)
    stopped = _may_stop(model, inputs, before)
    result = _fuse(copied(model, "fuse_model"), plan, stopped)
    try:
        after = _run(result.model, inputs)
    except Exception as error:
        raise ValueError(
            f"the fused model does not run on the example inputs: {error}. (spconv's own CPU "
            "kernels refuse a bias: call bevquant_sparse.use_bevquant_kernels(model) first.)"
        ) from error
    difference = _relative_difference(before, after)
    exact: float | None = difference
    # Not ``>``, which NaN passes.
    if not difference <= _tolerance(before):
        if seen:  # the model may have written to the inputs afterwards
            return _fused(model, example_inputs, change, None)
        exact = _difference_in_float64(model, inputs, plan, stopped)
    if exact is None:
        fault = first_fault(model, lambda: _run(model, inputs))
        fault = fault or f"{_changed_norm(model, result, inputs)}\n{result}"
        raise ValueError(
            f"the fused model's outputs differ from the model's by {difference:.2e} (relative), "
            f"beyond {_tolerance(before):.0e}: {fault}"
        )
    if change is not None:
        result = _fuse(change(), plan, stopped)
    return replace(result, max_error=exact)


def _with_own_kernels(
    model: nn.Module, example_inputs: Any, change: _Change, before: list[Tensor] | None
) -> FusionResult | None:
    """The result where a sparse convolution runs along another one's kernel; otherwise None."""
    seen, inputs = [before], arguments(example_inputs)
    borrowed = borrowed_kernels(model, lambda: seen.append(_run(model, inputs)))
    if not borrowed:
        return None

    def adopted(given: Callable[[], nn.Module]) -> nn.Module:
        adopt_kernels(own := given(), borrowed)
        return own

    own = adopted(partial(copied, model, "fuse_model"))
    changed = None if change is None else partial(adopted, change)
    result = _fused(own, example_inputs, changed, None, seen[-1])
    return replace(result, plain=(*borrowed, *result.plain))


def _difference_in_float64(
    model: nn.Module, inputs: _Inputs, plan: Plan, stopped: Iterable[str]
) -> float | None:
    """The difference that folding makes in float64, or None if that exceeds rounding too."""
    # A model that selects its largest values may decide otherwise for a difference as small as
    # float32's rounding, and its outputs are then far apart; in float64 they are not.
    exact = copied(model, "fuse_model").double()
    inputs = own_inputs(inputs, lambda t: t.double() if t.is_floating_point() else t)
    types = set[torch.dtype]()

    def note(func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        types.update([made.dtype] if isinstance(made, Tensor) else [])
        return made

    try:
        with _float64_by_default():
            with FunctionCalls(note):
                before = _run(exact, inputs)
            after = _run(_fuse(exact, plan, stopped).model, inputs)
        difference = _relative_difference(before, after)
    except Exception:  # whatever a model that does not run in float64 raises
        return None
    # Parts that compute in float32 in any case (``softmax(dtype=torch.float32)``) have its
    # tolerance.
    allowed = max(_tolerance(before), *(_TOLERANCE.get(dtype, 0.0) for dtype in types))
    return difference if difference <= allowed else None


def _changed_norm(model: nn.Module, result: FusionResult, inputs: _Inputs) -> str:
    """The fold that changed the output of its batch norm, as far as both models show."""
    seen: list[dict[str, list[Tensor]]] = []
    for run in (model, result.model):
        known, made = dict(run.named_modules()), dict[str, list[Tensor]]()
        with ExitStack() as stack:
            for fold in result.fused:
                if fold.how in ("identity", "rest", "neutral") and fold.bn in known:
                    note = partial(_note, made, fold.bn)
                    stack.callback(known[fold.bn].register_forward_hook(note).remove)
            _run(run, inputs)
        seen.append(made)
    before, after = seen
    layers = {fold.bn: fold.conv for fold in result.fused}
    for bn, wanted in before.items():
        if bn in after and not _relative_difference(wanted, after[bn]) <= _tolerance(wanted):
            return (
                f"the first batch norm with another result is {bn}, folded into {layers[bn]}. "
                "No module computes at random; probably a forward uses one of the two, or their "
                "parameters, otherwise than by calling them"
            )
    return (
        "no folded batch norm has another result, and no module computes at random; probably a "
        "forward reads a layer's output or parameters before the batch norm"
    )


def _note(made: dict[str, list[Tensor]], path: str, _: Any, __: Any, output: Any) -> None:
    made.setdefault(path, _kept(output))


def _may_stop(model: nn.Module, inputs: _Inputs, before: list[Any]) -> list[str]:
    """Activations of sparse encoders that need not write in place."""
    candidates = activations(model)
    paths = [path for path, _ in candidates]
    if all(alone for _, alone in candidates):
        return paths
    own = copied(model, "fuse_model")

    def same(stopped: list[str]) -> bool:
        for path in paths:
            activation: Any = own.get_submodule(path)
            activation.inplace = path not in stopped
        return _relative_difference(before, _run(own, inputs)) <= _tolerance(before)

    # Where the input's old name is read afterwards, ``inplace=False`` changes the result.
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


def _run(model: nn.Module, inputs: _Inputs) -> list[Tensor]:
    """Outputs of ``model`` in evaluation mode, on copies of ``inputs``, as a flat list."""
    with evaluation(model), torch.no_grad():
        return _kept(called(model, *inputs))


def _kept(output: Any) -> list[Tensor]:
    return [t.detach().clone() for t in _tensors(output)]


def _relative_difference(before: list[Tensor], after: list[Tensor]) -> float:
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
        pieces = zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True)
        largest = [(one.double() - other.double()).abs_().max() for one, other in pieces]
        difference = torch.stack(largest).max().item()
        scale = a.abs().max().item()
        worst = max(worst, difference / scale if scale else difference)
        # ``max`` may lose a NaN.
        if difference != difference:
            return float("nan")
    return worst


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """Tensors that a forward creates, such as ``torch.zeros(n)``, are float64 too."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def _tolerance(outputs: list[Tensor]) -> float:
    """Allowed relative difference for the widest tolerance among the outputs' dtypes."""
    return max((_TOLERANCE.get(t.dtype, 0.0) for t in outputs), default=0.0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in value:
            yield from _tensors(value[key])
    elif hasattr(value, "features"):
        yield value.features
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))

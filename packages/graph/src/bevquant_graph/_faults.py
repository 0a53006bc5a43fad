"""Location of a failure: module, file and line in the model's own code."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._calls import FunctionCalls
from ._kinds import check_kind
from ._signature import flatten


class CallError(ValueError):
    """A call that a public function refuses: the function's name, then the problem.

    Attributes:
        function: The function that was called.
        problem: The message without it.

    Example:
        >>> with reported_by("export_qdq_onnx"):
        ...     raise CallError("input x is float64", function="simulate")
        Traceback (most recent call last):
        bevquant_graph._faults.CallError: export_qdq_onnx: input x is float64
    """

    function = ""

    def __init__(self, problem: str, *, function: str = "") -> None:
        super().__init__(problem)
        self.problem, self.function = problem, function or self.function

    def __str__(self) -> str:
        return f"{self.function}: {self.problem}"


@contextmanager
def reported_by(function: str) -> Iterator[None]:
    """Let `CallError`s of a block begin with the public function that was called.

    Also a decorator of that function.
    """
    try:
        yield
    except CallError as error:
        error.function = function
        raise


def problem_of(error: Exception) -> str:
    """The message of an error, without the function's name of a `CallError`."""
    return error.problem if isinstance(error, CallError) else str(error)


class CaptureError(CallError):
    """A forward that cannot be captured: location, cause and remedy.

    Attributes:
        reason: Cause and location alone; "" where the graph differs from the model.
    """

    function = "capture"

    def __init__(self, problem: str, reason: str = "") -> None:
        super().__init__(problem)
        self.reason = reason


@lru_cache(maxsize=1 << 14)  # every capture needs all imported files
def is_authors(file: str) -> bool:
    """Whether a source file is neither torch's nor this project's, nor part of Python."""
    parts = file.replace("\\", "/").split("/")
    ours = any(part.startswith("bevquant_") for part in parts)
    library = "torch" in parts or ("lib" in parts and "python3" in file)
    return not (ours or library or "<" in file)


def author_lines(node: fx.Node) -> list[tuple[str, int]]:
    """File and line of each of the author's calls that a node comes from, outermost first."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return [(file, int(line)) for file, line in places if is_authors(file)]


def author_line(node: fx.Node) -> str:
    """``file:line`` of the author's code that computes a node; "" where it is not known."""
    noted: str = (node.meta.get("custom") or {}).get("bevquant_place", "")
    own = author_lines(node)
    return noted or ("{}:{}".format(*own[-1]) if own else "")


def where(error: BaseException, model: nn.Module, beside: Collection[str] = ()) -> tuple[str, str]:
    """Path of the innermost module that an error comes from, and ``file:line`` of the author's.

    Modules of `beside` are passed over, with their submodules.
    """
    # While it is traced a module may be seen through a proxy, which has the module's attributes.
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    found, place = "", ""
    for frame, line in _frames(error):
        file = frame.f_code.co_filename
        if not place and is_authors(file):
            place = f"{file}:{line}"
        owner = frame.f_locals.get("self")
        path = paths.get(id(vars(owner)), "") if isinstance(owner, nn.Module) else ""
        if path and not found and not any(path == b or path.startswith(f"{b}.") for b in beside):
            found = path
    return found, place


def _frames(error: BaseException | None) -> Iterator[tuple[Any, int]]:
    """Frames of an error and of those that it came from, innermost first."""
    # A chain of causes may end in itself.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from reversed(list(traceback.walk_tb(error.__traceback__)))
        error = error.__cause__ or error.__context__


def spconv_call(error: BaseException) -> str:
    """The function of ``spconv.pytorch.functional`` that an error comes from, and the remedy."""
    home = "spconv.pytorch.functional"
    calls = [f.f_code.co_qualname for f, _ in _frames(error) if f.f_globals.get("__name__") == home]
    if not calls:
        return ""
    name = calls[-1].partition(".")[0]  # the outermost one
    remedy = _SUMS if name.startswith("sparse_add") else _OTHERS
    return f"spconv's {name}, {remedy}"


_SUMS = (
    "which adds over the union of the voxels, by tables on CUDA: use sparse_add, or, where both "
    "have the same voxels, as in a residual block, x + y or AddTable"
)
_OTHERS = (
    "which has no form in a graph: use spconv's modules, on bevquant's kernels "
    "(bevquant_sparse.use_bevquant_kernels)"
)
_SPCONV = (
    ". On a CPU spconv's own kernels refuse a bias, and what its builds for CUDA choose has no "
    "form for CPUs: call bevquant_sparse.use_bevquant_kernels(model) first"
)


@contextmanager
def running(
    model: nn.Module,
    who: str,
    advice: str,
    inputs: str = "these example_inputs",
    errors: type[Exception] = Exception,
) -> Iterator[None]:
    """Add module, file, line and advice to an error of a running model."""
    try:
        yield
    except errors as error:
        path, place = where(error, model)
        module = model.get_submodule(path)
        if any(
            frame.f_globals.get("__name__") == "spconv.pytorch.conv" for frame, _ in _frames(error)
        ):
            advice += _SPCONV
        elif spconv_call(error):
            advice += f". It calls {spconv_call(error)}"
        error.add_note(
            f"{who}: the model does not run on {inputs}: {type(error).__name__} in "
            f"{described(path, module, place)}. {advice}"
        )
        raise


def described(path: str, module: nn.Module, place: str = "") -> str:
    """A module in words: path, class and line, of its forward where no other is known."""
    place = place or forward_line(module)
    return f"{path or 'the model'} ({type(module).__name__}{f', {place}' if place else ''})"


def forward_line(module: nn.Module) -> str:
    """``file:line`` of a module's forward; "" for library code."""
    forward = getattr(type(module), "forward", None)
    # A decorator's wrapper begins in another line than the forward.
    code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
    if code is None or not is_authors(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


# Classes of torch that compute in integers. FloatFunctional, which lies among them, is a float
# addition or concatenation written as a module.
_IN_INTEGERS = re.compile(r"torch\.(ao\.)?nn\..*\bquantized\.(?!.*\b(FX)?FloatFunctional$)")


_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
}


def refuse_unusable(model: Any, who: str, *, finite: bool = True) -> None:
    """Refuse models that cannot be captured, and parameters that are not finite.

    Args:
        model: The given model.
        who: The calling function.
        finite: Whether parameters are checked for NaN and infinite values.

    Raises:
        TypeError: Not a torch module.
        ValueError: Scripted, compiled, quantized or distributed by torch; parameters on the meta
            device, complex ones, or with NaN or infinite values. The message names module path and
            remedy.
    """
    check_kind(model, nn.Module, "a torch module")
    for path, module in model.named_modules():
        kind = type(module)
        names = {f"{c.__module__}.{c.__name__}" for c in kind.__mro__}
        met = ""
        if isinstance(module, torch.jit.ScriptModule):
            met = (
                "is scripted, so that its code is not seen; give the Python model it was made from"
            )
        elif "torch._dynamo.eval_frame.OptimizedModule" in names:
            met = "is compiled; give the module itself (._orig_mod), and compile the result"
        elif names & _WRAPPERS:
            met = "trains a model in several processes; give the model itself (.module)"
        elif any(_IN_INTEGERS.match(name) for name in names):
            met = "is quantized by torch already; give the float model"
        if met:
            raise ValueError(f"{who}: {described(path, module)} {met}")
        for name, value in module._parameters.items():
            met = ""
            # Lazy parameters have no values before the first call.
            if value is not None and not torch.nn.parameter.is_lazy(value):
                met = _unusable(value, finite)
            if met:
                full = f"{path}.{name}" if path else name
                raise ValueError(f"{who}: parameter {full} of {described(path, module)} {met}")


def _unusable(value: Tensor, finite: bool) -> str:
    if value.is_meta:
        return "is on the meta device, without values; load weights (to_empty, load_state_dict)"
    if value.is_complex():
        return (
            f"is complex ({value.dtype}), for which there are no integers; compute with real and "
            "imaginary parts as channels"
        )
    if finite and value.is_floating_point() and not all_finite(value):
        count = int((~value.isfinite()).sum())
        return f"has {count} NaN or infinite values; load a checkpoint that trained without them"
    return ""


def all_finite(value: Tensor) -> bool:
    """Whether no value is NaN or infinite, in a fifth of the time of ``isfinite().all()``.

    A minimum and a maximum propagate NaN, and infinite values are one or the other.

    Example:
        >>> all_finite(torch.tensor([1.0, float("nan")])), all_finite(torch.tensor([]))
        (False, True)
    """
    if not value.numel():
        return True
    low, high = value.detach().aminmax()
    return math.isfinite(low) and math.isfinite(high)


def first_fault(model: nn.Module, run: Callable[[], Any]) -> str:
    """The module that returns different values in a second run, or NaN for finite inputs.

    Args:
        model: The model.
        run: Runs it, each time on the same inputs.

    Returns:
        The innermost such module, in words, with a remedy; "" if there is none.
    """
    first, second = _observed(model, run), _observed(model, run)
    # Inner modules end first, so the first module that fits is the innermost.
    for (path, module, taken, given), (_, _, taken2, given2) in zip(first, second, strict=False):
        if _finite(taken) and not _finite(given):
            return (
                f"{described(path, module)} makes NaN or infinite values of finite ones; mend its "
                "parameters, or give inputs as in real use"
            )
        if taken == taken2 and given != given2:
            return (
                f"{described(path, module)} gives other values in a second run on the same inputs: "
                "it computes with random numbers, a counter or a clock; make that an input, or "
                "switch it off in evaluation mode"
            )
    # The model itself ends last.
    if first and not _finite(first[-1][2]):
        return "the example inputs hold NaN or infinite values; give inputs as in real use"
    return ""


def lower_precision(run: Callable[[], Any]) -> str:
    """The line at which a run first computes in half precision by autocast, in words; else ""."""
    found: list[str] = []

    def look(function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if not found and isinstance(made, Tensor) and torch.is_autocast_enabled(made.device.type):
            kind = torch.get_autocast_dtype(made.device.type)
            if made.dtype == kind != torch.float32:
                stack = traceback.walk_stack(None)
                files = ((frame.f_code.co_filename, line) for frame, line in stack)
                place = next((f"{file}:{line}" for file, line in files if is_authors(file)), "")
                found.append(
                    f"torch.autocast makes {place or 'it'} compute in {kind}, which a graph does "
                    "not have; pass enabled=False to torch.autocast until the model is exported"
                )
        return made

    with FunctionCalls(look):
        run()
    return found[0] if found else ""


def _observed(model: nn.Module, run: Callable[[], Any]) -> list[Any]:
    found: list[Any] = []
    names = {module: path for path, module in model.named_modules()}
    before: list[Any] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        before.append(_print((args, kwargs)))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        found.append((names[module], module, before.pop(), _print(output)))

    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        run()
    return found


def _print(value: Any) -> tuple[Any, ...]:
    """A fingerprint that differs for tensors of different bits, with high probability."""
    tensors = [t.detach() for t in flatten(value)[0] if isinstance(t, Tensor)]
    flat = [t.to(torch.complex128 if t.is_complex() else torch.float64).flatten() for t in tensors]
    # The first sum has NaN and infinite values, the second the order: a permutation changes it.
    return tuple(
        (tuple(t.shape), str(f.abs().sum().item()), str((f * _weights(f)).sum().item()))
        for t, f in zip(tensors, flat, strict=True)
    )


def _weights(flat: Tensor) -> Tensor:
    """Weights between 1 and 2, other ones for neighbours and for rows of any length."""
    return 1 + torch.arange(len(flat), device=flat.device, dtype=torch.float64).mul(0.618034).frac()


def _finite(prints: tuple[Any, ...]) -> bool:
    return not any("nan" in total or "inf" in total for _, *totals in prints for total in totals)

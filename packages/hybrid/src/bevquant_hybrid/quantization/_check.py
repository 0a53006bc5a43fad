"""check_model: whether a BPU can run a model, by the documented limits of every operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid._documented import tool
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid.compilation._arguments import (
    bpu_calls,
    check_options,
    forward_arguments,
    march_of,
    require_module,
)
from bevquant_hybrid.operators import (
    OperatorCall,
    Violation,
    find_advice,
    find_violations,
    load_support_table,
    runs_on_cpu,
    tensors_in,
)
from bevquant_hybrid.operators._script_runner import find_module
from bevquant_quantizers.documents import text_table

_CAMERA_SCALE = 1 / 128
_SELF_EVIDENT = ("Stub", ".Identity", ".Dropout", ".Dropout2d")  # their remarks hold for any model


def check_model(
    module: nn.Module,
    example_inputs: Any,
    march: str | None = None,
    input_source: Sequence[str] | str = "ddr",
    advice: int | None = None,
    check_quanti_param: bool = True,
) -> int:
    """Check whether a BPU can run a model, and print all violations.

    Every operator call of one run is compared with the documented limits of the march. No compiler
    is called: undocumented limits are not checked.

    Args:
        module: Float with stubs, prepared, converted, or converted and traced.
        example_inputs: One tensor, or a tuple or list of the forward's arguments.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"`` (default: `set_march`).
        input_source: ``"ddr"``, ``"resizer"`` or ``"pyramid"``, or one for each input. The resizer
            and the pyramid deliver camera images: their QuantStub needs the scale 1/128.
        advice: Threshold in microseconds: layers that wait longer for memory are printed, as
            estimated from public figures by `bevquant_hybrid_tools` (if it is missing, a line says
            so). None: no estimate.
        check_quanti_param: Check that all scales are finite and positive.

    Returns:
        0 if nothing is violated, else 1. Remarks on precision do not count.

    Raises:
        TypeError: Not a module, or inputs of the wrong type.
        ValueError: A hybrid model, an unknown source or march, or no march is set.
        RuntimeError: The model does not run on the inputs.

    Example:
        >>> from bevquant_hybrid.quantization import QuantStub
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.AvgPool2d(8))
        >>> check_model(model, torch.ones(1, 3, 16, 16), march="bayes")
        This model is supported!
        HBDK model check PASS
        0
        >>> check_model(model, torch.ones(1, 3, 16, 16), march="bernoulli2")  # doctest: +ELLIPSIS
        1 condition of BERNOULLI2 is not met:
        module  operator            constraint   value  expected               what to do
        1       torch.nn.AvgPool2d  kernel_size  8      1 <= kernel_size <= 7  pool twice ...
        HBDK model check FAIL
        1
    """
    caller = "check_model"
    require_module(caller, module)
    name = march_of(march, caller)
    title = load_support_table().march(name).title
    arguments = forward_arguments(module, example_inputs, caller)
    count = sum(1 for _ in tensors_in(arguments))
    sources = check_options(caller, count, input_source=input_source)["input_source"]
    if check_quanti_param and (found := list(_scale_violations(module, title))):
        print("No integers can be computed with such scales, so operators were not looked at.")
        return _fail(found, title)
    calls = bpu_calls(caller, module, arguments)
    found = find_violations(calls, name)
    found += _camera_violations(module, calls, sources, title)
    _print_advice(calls, name)
    for path in _never_observed(module):
        print(f"advice: {path} has seen no values yet, so its scale is 1: calibrate or train first")
    if advice is not None:
        _print_utilisation([c for c in calls if not runs_on_cpu(c)], name, advice)
    if found:
        return _fail(found, title)
    if load_support_table().march(name).partial:
        print(f"Nothing that is known here of {title} speaks against this model.")
        return 0
    print("This model is supported!")
    print("HBDK model check PASS")
    return 0


def _camera_violations(
    module: nn.Module, calls: Sequence[OperatorCall], sources: Sequence[str], title: str
) -> Iterator[Violation]:
    """QuantStubs of camera inputs with another scale than the camera's."""
    stubs = [c for c in calls if c.operator.endswith(".QuantStub") and c.inputs == ("",)]
    if len(stubs) != len(sources):  # the record does not pair stubs with inputs
        stubs = stubs if set(sources).isdisjoint(("ddr",)) else []
        sources = [sources[0]] * len(stubs) if sources else []
    for call, source in zip(stubs, sources, strict=True):
        stub = find_module(module, call.path)
        if source == "ddr" or stub is None:  # or a second call: its path ends with a number
            continue
        scale = _scale_of(stub)
        if scale is not None and isclose(scale, _CAMERA_SCALE, rel_tol=1e-6):
            continue
        yield Violation(
            *(call.path, call.operator, title, "scale"),
            expected=f"1/128, as its input comes from the {source}",
            actual="not fixed" if scale is None else f"{scale:.6g}",
            remedy="QuantStub(scale=1 / 128)",
        )


def _scale_of(stub: nn.Module) -> float | None:
    for holder in (getattr(stub, "activation_post_process", None), stub):
        scale = getattr(holder, "scale", None)
        if isinstance(scale, Tensor | float) and torch.as_tensor(scale).numel() == 1:
            return float(scale)
    return None


def _scale_violations(module: nn.Module, title: str) -> Iterator[Violation]:
    """Scales that are not finite and positive."""
    for path, buffer in module.named_buffers():
        owner, _, name = path.rpartition(".")
        if not name.endswith("scale") or not buffer.is_floating_point():
            continue
        bad = buffer[~(torch.isfinite(buffer) & (buffer > 0))]
        if bad.numel():
            yield Violation(
                *(owner, _class_name(module, owner), title, name),
                expected="finite and above zero",
                actual=f"{float(bad.reshape(-1)[0])} ({bad.numel()} of {buffer.numel()})",
                remedy="calibrate or train on inputs without NaN, and look at the weights",
            )


def _class_name(module: nn.Module, path: str) -> str:
    found: Any = find_module(module, path)
    return str(getattr(found, "original_name", type(found).__name__))


def _never_observed(module: nn.Module) -> list[str]:
    return [
        path.removesuffix(".activation_post_process")
        for path, part in module.named_modules()
        if isinstance(part, FakeQuantize) and not part.observed
    ]


def violation_table(found: Sequence[Violation], title: str) -> str:
    """A model's violations of a march's limits, one line each."""
    what = "condition" if len(found) == 1 else "conditions"
    first = f"{len(found)} {what} of {title} {'is' if len(found) == 1 else 'are'} not met:"
    head = ["module", "operator", "constraint", "value", "expected", "what to do"]
    rows = [[v.path, v.operator, v.constraint, v.actual, v.expected, v.remedy] for v in found]
    return f"{first}\n{text_table([head, *rows])}"


def _fail(found: Sequence[Violation], title: str) -> int:
    print(violation_table(found, title))
    print("HBDK model check FAIL")
    return 1


def _print_advice(calls: Sequence[OperatorCall], march: str) -> None:
    """Print the table's remarks, each once with all its operators."""
    about: dict[str, list[str]] = {}
    for remark in find_advice([c for c in calls if not c.operator.endswith(_SELF_EVIDENT)], march):
        about.setdefault(remark.text, []).append(remark.path)
    for text, paths in about.items():
        print(f"advice: {', '.join(paths)}: {text}")


def _print_utilisation(calls: Sequence[OperatorCall], march: str, threshold: float) -> None:
    """Layers that memory slows down by more than ``threshold`` microseconds."""
    slow = []
    try:
        estimates = tool("performance").estimate_layers(calls, march)
    except ImportError as missing:
        print(f"advice: which layers wait for memory is not estimated: {missing}")
        return
    for layer in estimates:
        waits = (layer.memory_seconds - layer.compute_seconds) * 1e6
        if waits > threshold:
            slow.append((waits, layer))
    if not slow:
        print(f"advice: no layer waits for memory for more than {threshold:g} us (an estimate)")
        return
    print(f"advice: layers that wait for memory for more than {threshold:g} us (an estimate):")
    rows = [["module", "operator", "waits (us)", "bytes", "op/byte", "what to do"]]
    for waits, layer in slow:
        moved = f"{layer.loaded_bytes + layer.stored_bytes:,}"
        last = "fuse it into the layer before it, or work on smaller maps"
        if layer.operations:
            last = "more operations per byte: larger batches, fewer groups, smaller maps"
        facts = f"{waits:.1f}", moved, f"{layer.intensity:.1f}"
        rows.append([layer.path, layer.operator, *facts, last])
    print(text_table(rows, right=(2, 3, 4)))

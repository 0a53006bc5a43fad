"""Memory of a CUDA device along the operators of a model, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import run_on
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.qtensor import as_float
from bevquant_hybrid.undisturbed import positional
from bevquant_hybrid_tools.quant_profiler._calls import named_operators, on_device
from bevquant_hybrid_tools.quant_profiler._tables import curves_page, write_text


@dataclass(frozen=True)
class MemoryReading:
    """Memory when an operator was through."""

    name: str  # the operator's, or (start) and (end)
    phase: str  # "forward" or "backward"
    allocated: int  # bytes of all tensors
    peak: int  # the most since the reading before


def show_cuda_memory_consumption(
    model: nn.Module,
    example_inputs: Any,
    device: torch.device | str,
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
    out_dir: str | os.PathLike[str] | None = None,
    file_name: str | None = None,
    custom_backward: Callable[[Any], None] | None = None,
) -> Path:
    """Run a copy of a model forward and backward and draw its memory on the device.

    Args:
        model: Float, calibration or QAT model; not changed. The run uses its mode.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        device: A CUDA device.
        check_leaf_module: Whether a module is one operator; None as in `get_module_called_count`.
        out_dir: Folder of the page; None for the current one.
        file_name: Of the page, without suffix; None for ``mem_info``.
        custom_backward: Function that gets the result and calls backward; None: the result is one
            tensor, and its sum is differentiated.

    Returns:
        The path of the HTML page.

    Raises:
        TypeError: The result is not one tensor, and there is no `custom_backward`.
        ValueError: The device is no CUDA device, or there is none.
    """
    caller, where = "show_cuda_memory_consumption", torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        there = "" if torch.cuda.is_available() else "; torch finds none on this machine"
        raise ValueError(f"{caller}: device={str(where)!r}: expected a CUDA device{there}")
    copied, inputs = on_device(model, example_inputs, where)

    def read() -> tuple[int, int]:
        torch.cuda.synchronize(where)
        found = torch.cuda.memory_allocated(where), torch.cuda.max_memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        return found

    torch.cuda.reset_peak_memory_stats(where)
    readings = read_memory(copied, inputs, read, check_leaf_module, custom_backward)
    most = max(readings, key=lambda reading: reading.peak)
    title = (
        f"{type(model).__name__} on {torch.cuda.get_device_name(where)}: at most "
        f"{most.peak / 2**20:.1f} MiB, {most.phase} of {most.name}"
    )
    names = [r.name if r.name.startswith("(") else f"{r.name} ({r.phase})" for r in readings]
    curves = {
        "allocated (MiB)": [reading.allocated / 2**20 for reading in readings],
        "peak since the operator before (MiB)": [reading.peak / 2**20 for reading in readings],
    }
    return write_text(out_dir, f"{file_name or 'mem_info'}.html", curves_page(title, names, curves))


def read_memory(
    model: nn.Module,
    example_inputs: Any,
    read: Callable[[], tuple[int, int]],
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
    backward: Callable[[Any], None] | None = None,
) -> list[MemoryReading]:
    """Read memory behind every operator's forward, and behind the first step of its backward.

    Args:
        model: Where its inputs are.
        example_inputs: As for `show_cuda_memory_consumption`.
        read: Gives bytes allocated, and the most since it was called last.
        check_leaf_module: As for `show_cuda_memory_consumption`.
        backward: As for `show_cuda_memory_consumption`.

    Returns:
        In the order of execution.

    Raises:
        TypeError: The result is not one tensor, and there is no `backward`.
    """
    readings: list[MemoryReading] = []
    taken: set[int] = set()
    kept: list[Any] = []  # else another step could get a dead one's identity

    def note(name: str, phase: str) -> None:
        readings.append(MemoryReading(name, phase, *read()))

    def behind(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            note(name, "forward")
            with torch._C.DisableTorchFunctionSubclass():  # a QTensor's own place in the graph
                made = [tensor.grad_fn for tensor in tensors_in(output)]
            for step in made:
                if step is not None and id(step) not in taken:  # else the operator did nothing
                    taken.add(id(step))
                    kept.append(step)
                    step.register_hook(lambda *_: note(name, "backward"))
                    return

        return hook

    operators, _ = named_operators(model, check_leaf_module)
    hooks = [module.register_forward_hook(behind(name)) for name, module in operators.items()]
    note("(start)", "forward")
    try:
        output = run_on(model, positional(model, example_inputs), {})
        if backward is not None:
            backward(output)
        elif isinstance(output, Tensor):
            as_float(output).sum().backward()
        else:
            raise TypeError(
                "show_cuda_memory_consumption: the model returns a "
                f"{type(output).__name__}: expected one tensor; give a custom_backward that is "
                "called with the result"
            )
    finally:
        for hook in hooks:
            hook.remove()
    note("(end)", "backward")
    return readings

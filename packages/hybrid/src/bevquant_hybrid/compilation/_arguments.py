"""Checked arguments of functions on BPU models, and a model's operator calls."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid._fx._graph_module import GraphModuleWithAttr
from bevquant_hybrid.march import KNOWN, get_march
from bevquant_hybrid.nn.qat import is_qat
from bevquant_hybrid.nn.quantized._weighted import FixedPoint
from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.operators import OperatorCall, is_float, trace_calls
from bevquant_hybrid.undisturbed import positional

OPTIONS = (  # of a compilation, which the program notes
    *("input_source", "input_layout", "output_layout", "opt", "balance_factor", "extra_args"),
)
_OPTIMIZATIONS = ("O0", "O1", "O2", "O3", "ddr", "fast", "balance")
_SOURCES = ("ddr", "resizer", "pyramid")
_LAYOUTS = ("NCHW", "NHWC", "BPU_RAW")


def converted_model(module: Any, caller: str) -> nn.Module:
    """Return the model if it can be compiled."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{caller}: module is a {type(module).__name__}: expected a converted model, or a "
            "traced one"
        )
    if isinstance(module, GraphModuleWithAttr) and getattr(module, "hybrid", False):
        raise ValueError(
            f"{caller}: module is a hybrid model, whose parts on the CPU no program holds; write "
            "the model of prepare_qat_fx with export_to_onnx and give the file to hb_mapper, or "
            "prepare it without hybrid=True"
        )
    fixed = isinstance(module, torch.jit.ScriptModule)
    for path, part in module.named_modules():
        if isinstance(part, FakeQuantizeBase):
            raise ValueError(
                f"{caller}: module trains quantized or is calibrated ({path} is a "
                f"{type(part).__name__}); give what convert or convert_fx returns of it"
            )
        fixed = fixed or isinstance(part, FixedPoint)
    if not fixed:
        raise ValueError(
            f"{caller}: module has no fixed-point module; prepare it with prepare_qat or "
            "prepare_qat_fx and give what convert or convert_fx returns"
        )
    return module


def forward_arguments(model: Any, example_inputs: Any, caller: str) -> tuple[Any, ...]:
    """Return example inputs, or a loader's batch, as the arguments of a forward (`positional`)."""
    if not isinstance(example_inputs, Tensor | list | tuple | Mapping):
        raise TypeError(
            f"{caller}: example_inputs is a {type(example_inputs).__name__}: expected a tensor, or "
            "a list, tuple or dict of the forward's arguments"
        )
    if not isinstance(example_inputs, Tensor) and not example_inputs:
        raise ValueError(f"{caller}: example_inputs is empty: expected the forward's arguments")
    return positional(model, example_inputs)


def march_of(march: Any, caller: str) -> str:
    """Return the requested march, or the one of `set_march`."""
    chosen = get_march() if march is None else str(march).strip().lower().replace("_", "-")
    if chosen is None:
        raise ValueError(
            f"{caller}: march=None and no march is set; call "
            "bevquant_hybrid.march.set_march(March.BAYES) first, or give march="
        )
    if chosen not in KNOWN:
        raise ValueError(f"{caller}: march={march!r}: expected one of {', '.join(KNOWN)}")
    return chosen


def check_path(file: Any, caller: str, what: str = "hbm") -> Path:
    """Return the path of the file."""
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"{caller}: {what} is a {type(file).__name__}: expected the path of a file")
    path = Path(file)
    if not path.name or path.is_dir():
        raise ValueError(f"{caller}: {what}={os.fspath(file)!r}: expected the path of a file")
    return path


def check_options(
    caller: str,
    tensors: int,
    *,
    input_source: Any = "ddr",
    input_layout: Any = None,
    output_layout: Any = "NCHW",
    opt: Any = "O2",
    balance_factor: Any = 2,
    jobs: Any = 16,
    extra_args: Any = None,
) -> dict[str, Any]:
    """Return the options of a compilation with `tensors` inputs, as recorded in the program."""
    sources = [input_source] if isinstance(input_source, str) else input_source
    if not isinstance(sources, Sequence) or not all(s in _SOURCES for s in sources):
        raise ValueError(
            f"{caller}: input_source={input_source!r}: expected one of {', '.join(_SOURCES)}, or "
            "one for each input"
        )
    if len(sources) not in (1, tensors):
        raise ValueError(
            f"{caller}: input_source={input_source!r}: {len(sources)} sources for {tensors} inputs"
        )
    for what, layout in (("input_layout", input_layout), ("output_layout", output_layout)):
        if layout not in (*_LAYOUTS, None) or (layout is None and what == "output_layout"):
            raise ValueError(f"{caller}: {what}={layout!r}: expected one of {', '.join(_LAYOUTS)}")
        if layout == "BPU_RAW":
            raise ValueError(
                f"{caller}: {what}='BPU_RAW': how a BPU lays tensors out is not public; take NCHW "
                "or NHWC"
            )
    known = opt in _OPTIMIZATIONS if isinstance(opt, str) else type(opt) is int and 0 <= opt <= 3
    if not known:
        raise ValueError(
            f"{caller}: opt={opt!r}: expected 0 to 3 or one of {', '.join(_OPTIMIZATIONS)}"
        )
    for what, number in (("balance_factor", balance_factor), ("jobs", jobs)):
        if type(number) is not int or number < 0:
            raise ValueError(f"{caller}: {what}={number!r}: expected an integer from 0")
    extra = [] if extra_args is None else extra_args
    if not isinstance(extra, list | tuple) or not all(isinstance(arg, str) for arg in extra):
        raise TypeError(f"{caller}: extra_args={extra_args!r}: expected a list of strings")
    return {
        "input_source": list(sources) * (tensors if len(sources) == 1 else 1),
        "input_layout": input_layout or "NCHW",
        "output_layout": output_layout,
        "opt": f"O{opt}" if isinstance(opt, int) else opt,
        "balance_factor": balance_factor,
        "extra_args": list(extra),
    }


def require_module(caller: str, module: object) -> None:
    """Refuse other values than modules."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: expected a module, got {type(module).__name__}")


def bpu_calls(caller: str, module: nn.Module, arguments: tuple[Any, ...]) -> list[OperatorCall]:
    """List the calls of a model, run once: float with stubs, prepared, converted or traced."""
    require_module(caller, module)
    calls = trace_calls(module, arguments)
    script = isinstance(module, torch.jit.ScriptModule)
    if script and not any(call.operator.endswith("Stub") for call in calls):
        raise ValueError(
            f"{caller}: nothing in the traced model is quantized; give torch.jit.trace what "
            "convert or convert_fx returns"
        )
    on_cpu = [f"{call.path} ({call.operator})" for call in calls if is_float(call)]
    # Of a float model, float operators are no sign that it is hybrid.
    made = any(is_fixed_point(part) or is_qat(part) for part in module.modules())
    if on_cpu and (script or made):
        raise ValueError(
            f"{caller} takes models that the BPU runs alone, and this one is hybrid: on the CPU, "
            f"in floats, run {', '.join(on_cpu)}. Look at its parts with visualize_partition, and "
            "hand it to hb_mapper with utils.onnx_helper.export_to_onnx and mapper.write_config"
        )
    return calls


def model_name(caller: str, module: nn.Module, name: str | None = None) -> str:
    """The given name, or the original class name of a traced or converted model.

    Example:
        >>> model_name("perf_model", nn.Sequential())
        'Sequential'
    """
    source: Any = getattr(module, "_source_name", None) or getattr(module, "original_name", None)
    name = name or str(source or type(module).__name__)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{caller}: name={name!r}: expected letters, digits, '_', '-' and '.', and no folder"
        )
    return name

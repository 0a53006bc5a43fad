"""How every layer of a prepared model is quantized, and what is unusual about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_graph import layer_class
from bevquant_hybrid._fake_quant._calib import _WrappedCalibFakeQuantize
from bevquant_hybrid._fx._placement import has_weight
from bevquant_hybrid._observers._fixed import FixedScaleObserver
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.utils.quant_profiler._calls import Call, record_calls, tensors_in
from bevquant_hybrid.utils.quant_profiler._files import write_text
from bevquant_hybrid.utils.quant_profiler._leaves import Selection
from bevquant_hybrid.utils.quant_profiler._tables import Cell, grid_table

__all__ = ["QConfigReport", "check_qconfig"]

NO_QCONFIG = "qconfig = None"
_OUTPUTS = ("Module Name", "Module Type", "Input dtype", "out dtype", "ch_axis")
_WEIGHTS = ("Module Name", "Module Type", "weight dtype", "ch_axis")
_MESSAGES = ("Module Name", "Module Type", "Msg")
# What goes from float to quantized or back.
_CROSSINGS = (qat.QuantStub, qat.DeQuantStub, FakeQuantizeBase, _WrappedCalibFakeQuantize)
_QUESTION = "Please check if these OPs qconfigs are expected.."


@dataclass(frozen=True)
class QConfigReport:
    """Rows of the three tables, as they are printed.

    Attributes:
        outputs: Name, class, dtype of the inputs, dtype of the output, axis of its scales or
            ``qconfig = None``.
        weights: Name, class, dtype of the weight, axis of its scales or ``qconfig = None``.
        messages: Name, class, what to look at.
    """

    outputs: tuple[tuple[Cell, ...], ...]
    weights: tuple[tuple[Cell, ...], ...]
    messages: tuple[tuple[Cell, ...], ...]


def check_qconfig(
    model: nn.Module,
    example_inputs: Any,
    prefixes: str | Iterable[str] = (),
    types: type | Iterable[type] = (),
    custom_check_func: Callable[[nn.Module, Any, Any], None] | None = None,
    out_dir: str | os.PathLike[str] | None = None,
) -> QConfigReport:
    """Run a prepared model, list how each layer is quantized, and print what to look at.

    All is written to ``qconfig_info.txt``. Printed are outputs that are not quantized, fixed
    scales, weights of another type than qint8, layers with a weight and no qconfig, and layers
    whose inputs and output differ in type (stubs and boundaries apart).

    Args:
        model: Result of prepare_qat, prepare_calibration or their fx forms; it runs in evaluation
            mode and observes nothing.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        prefixes: Starts of names: only these; the name of a module means it and what it holds.
        types: Classes: only these (and those of `prefixes`).
        custom_check_func: Called with each of these modules, its positional arguments and its
            result.
        out_dir: Folder of the file; None for the current one.

    Returns:
        The rows of the tables. ``(i)`` behind a name marks the i-th repeated call, ``[add]`` the
        method of a FloatFunctional.

    Raises:
        ValueError: The model is not prepared.
    """
    if not any(isinstance(module, FakeQuantizeBase) for module in model.modules()):
        raise ValueError(
            "check_qconfig: the model has no fake quantizer; pass a calibration or QAT model, "
            "before it is converted"
        )
    wanted = Selection(model, prefixes, types, "check_qconfig")

    def watch(path: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if custom_check_func is not None and wanted.takes(path, module):
            custom_check_func(module, args, result)

    outputs, weights, messages = [], [], []
    for call in record_calls(model, example_inputs, watch=watch):
        module = call.module
        if (
            module is None
            or layer_class(module, nn.Identity)
            or not wanted.takes(call.path, module)
        ):
            continue
        method = f"[{call.method}]" if call.method else ""
        name = f"{call.path}{method}" + (f"({call.repeat})" if call.repeat else "")
        start = (name, str(type(module)))
        given, made = _dtypes((call.args, call.kwargs)), _dtypes(call.output)
        outputs.append((*start, _told(given), _told(made), _axis_of_output(module)))
        weight = _weight(module)
        if weight is not None:
            weights.append((*start, *weight))
        messages += [(*start, text) for text in _remarks(call, given, made)]
    report = QConfigReport(tuple(outputs), tuple(weights), tuple(messages))
    question = f"{_QUESTION}\n{grid_table(_MESSAGES, report.messages)}" if messages else ""
    parts = [f"Each layer out qconfig:\n{grid_table(_OUTPUTS, report.outputs)}"]
    parts += [f"Weight qconfig:\n{grid_table(_WEIGHTS, report.weights)}"] * bool(weights)
    parts += [question] * bool(question)
    write_text(out_dir, "qconfig_info.txt", "\n\n".join(parts) + "\n")
    if question:
        print(question)
    return report


def _dtypes(value: Any) -> list[Any]:
    """Types of all tensors: names of quantized ones, torch's own of others."""
    return [str(t.dtype) if isinstance(t, QTensor) else t.dtype for t in tensors_in(value)]


def _told(dtypes: list[Any]) -> str:
    return str(dtypes[0]) if len(dtypes) == 1 else str(dtypes)


def _fake_quant(module: nn.Module) -> Any:
    """What quantizes a module's output: its own, or the module itself at a boundary."""
    found: Any = getattr(module, "activation_post_process", None)
    if isinstance(module, FakeQuantizeBase):
        return module
    return found if isinstance(found, FakeQuantizeBase) else None


def _axis_of_output(module: nn.Module) -> Cell:
    fake_quant = _fake_quant(module)
    return NO_QCONFIG if fake_quant is None else _axis(fake_quant)


def _axis(fake_quant: Any) -> int:
    """Axis of the scales; −1 for one scale, also where statistics are only counted."""
    observer = fake_quant.activation_post_process
    return int(getattr(fake_quant, "ch_axis", getattr(observer, "ch_axis", -1)))


def _weight(module: nn.Module) -> tuple[Cell, Cell] | None:
    if isinstance(module, Weighted):
        return str(module.weight_fake_quant.dtype), _axis(module.weight_fake_quant)
    if has_weight(module):
        dtypes = [str(parameter.dtype) for parameter in module.parameters()]
        return dtypes[0], NO_QCONFIG
    return None


def _remarks(call: Call, given: list[Any], made: list[Any]) -> Iterable[str]:
    module, fake_quant = call.operator, _fake_quant(call.operator)
    if isinstance(module, Weighted):
        if module.weight_fake_quant.dtype != "qint8":
            yield f"{module.weight_fake_quant.dtype} weight!!!"
        if fake_quant is None:
            yield "output is not quantized"
    elif has_weight(module):
        yield NO_QCONFIG
    if not isinstance(module, _CROSSINGS) and any(
        dtype != other for dtype in given for other in made
    ):
        yield f"input dtype {_told(given)} is not same with out dtype {_told(made)}"
    observer = getattr(fake_quant, "activation_post_process", None)
    if isinstance(observer, FixedScaleObserver):
        yield f"Fixed scale {observer.fixed_scale.item()}"

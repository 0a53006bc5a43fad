"""The form of a prepared model that is measured: a copy that rounds and observes nothing."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from bevquant_hybrid._fake_quant._calib import CalibFakeQuantize
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._fx._calibrated import is_calibration
from bevquant_hybrid._fx._graph_module import ObservedGraphModule, QuantizedGraphModule
from bevquant_hybrid._fx._prepare import prepare
from bevquant_hybrid.quantization.fake_quantize import FakeQuantState, set_fake_quantize
from bevquant_hybrid.quantization.qconfig import (
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
)

from ._suggest_trial import NoScaleError, Trials
from ._wishes import read_wishes

__all__ = ["measured_form", "rounding_off"]


def measured_form(
    model: nn.Module,
    march: str,
    hybrid_dict: Mapping[str, Iterable[Any]] | None,
    qconfig_dict: dict[str, Any] | None,
) -> tuple[ObservedGraphModule, Trials, tuple[str, ...]]:
    """Copy a prepared model into its training form, with its observers off and rounding on.

    A calibrated model is prepared with `qconfig_dict`; by default with the fake quantizers of
    `get_default_qat_qconfig`, in the types that it was calibrated for.

    Returns:
        The copy, what builds it with other placements, and the names of what runs on the CPU
        though a BPU could run it.

    Raises:
        TypeError: No model of `prepare_calibration_fx` or `prepare_qat_fx`.
        ValueError: Ranges are missing, the qconfig does not fit, or the model was prepared with
            another march or `hybrid_dict`.
    """
    if isinstance(model, QuantizedGraphModule):
        raise TypeError(
            "suggest_cpu: the model is converted to integers; pass the one that convert_fx was "
            "given"
        )
    if not isinstance(model, ObservedGraphModule):
        raise TypeError(
            f"suggest_cpu: expected a model from prepare_calibration_fx or prepare_qat_fx, got "
            f"{type(model).__name__}; prepare it and run calibration batches first"
        )
    _refuse_uncalibrated(model)
    made: ObservedGraphModule = copy.deepcopy(model)
    trials = Trials(made, march)
    names = _names(trials, hybrid_dict)
    _refuse_other_placement(made, trials, names, march)
    if is_calibration(made):
        floats = () if made.hybrid else names  # in a hybrid model the names say it
        wishes = qconfig_dict if qconfig_dict is not None else _as_calibrated(made, floats)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all was said when the model was prepared
            made = prepare(made, wishes, made.hybrid, {"module_name": [*names]}, "suggest_cpu")
    elif qconfig_dict is not None:
        raise ValueError(
            "suggest_cpu: qconfig_dict is for calibrated models; this one is prepared for training "
            "and keeps its fake quantizers"
        )
    left = [path for path, m in made.named_modules() if isinstance(m, CalibFakeQuantize)]
    if left:
        raise ValueError(
            f"suggest_cpu: {left[0]} would still only calibrate; give its layer a qconfig with "
            "fake quantizers in qconfig_dict, and no qconfig attribute of its own"
        )
    set_fake_quantize(made, FakeQuantState.VALIDATION)
    made.eval()
    return made, Trials(made, march), names


def _names(trials: Trials, hybrid_dict: Mapping[str, Iterable[Any]] | None) -> tuple[str, ...]:
    if hybrid_dict is None:
        return trials.kept_float()
    names, classes = read_wishes(hybrid_dict)
    return tuple(dict.fromkeys([*names, *trials.names_of_classes(classes)]))


def _refuse_other_placement(
    model: ObservedGraphModule, trials: Trials, names: tuple[str, ...], march: str
) -> None:
    """Refuse a model that does not run where its march and names say."""
    try:
        nodes = [node.name for node in trials.build(names).model.graph.nodes]
    except NoScaleError as error:
        raise ValueError(
            f"suggest_cpu: with hybrid=True the result of {error} must be quantized behind the "
            "CPU, and the model has no range for it; prepare and calibrate it with hybrid=True"
        ) from error
    given = [node.name for node in model.graph.nodes]
    if model.hybrid and nodes != given:
        differs = [n for n in given if n not in nodes] + [n for n in nodes if n not in given]
        raise ValueError(
            f"suggest_cpu: the model does not run where march {march!r} and the names "
            f"{[*names]} put it (node {(differs or given)[0]}); pass the hybrid_dict that it was "
            "prepared with, and set that march"
        )


def _refuse_uncalibrated(model: ObservedGraphModule) -> None:
    used = {str(n.target) for n in model.graph.nodes if n.op in ("call_module", "get_attr")}
    missing = []
    for path, module in model.named_modules():
        if not isinstance(module, CalibFakeQuantize | FakeQuantize) or module.observed:
            continue
        parts = path.split(".")
        holders = {".".join(parts[: i + 1]) for i in range(len(parts))}
        if not path.endswith("weight_fake_quant") and holders & used:
            missing.append(path.removesuffix(".activation_post_process"))
    if missing:
        raise ValueError(
            f"suggest_cpu: {', '.join(dict.fromkeys(missing))}: no range was observed there; run "
            "calibration batches through the model first, or load a calibrated state"
        )


def _as_calibrated(model: ObservedGraphModule, floats: tuple[str, ...]) -> dict[str, Any]:
    """A qconfig_dict in the integer types that a model was calibrated for."""
    types: dict[str, str | None] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith("bevquant_hybrid.nn.qat.") and hasattr(
            module, "activation_post_process"
        ):
            own = module.activation_post_process
            types[path] = None if own is None else str(own.dtype)
    common = Counter(kind for kind in types.values() if kind).most_common(1)[0][0]
    return {
        "": get_default_qat_qconfig(dtype=common),
        "module_name": [
            (path, get_default_qat_qconfig(dtype=kind) if kind else get_default_qat_out_qconfig())
            for path, kind in types.items()
            if kind != common
        ]
        + [(name, None) for name in floats],
    }


@contextmanager
def rounding_off(model: nn.Module) -> Iterator[None]:
    """The float form of a copied model: every fake quantizer off, for a while."""
    fake_quants = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    try:
        for fake_quant in fake_quants:
            fake_quant.disable_fake_quant()
        yield
    finally:
        for fake_quant in fake_quants:
            fake_quant.enable_fake_quant()

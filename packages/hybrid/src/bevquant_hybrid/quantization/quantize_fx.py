"""Quantization of traced models: fuse, prepare, convert."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from bevquant_hybrid._convert import convert_in_place
from bevquant_hybrid._fx._graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    QuantizedGraphModule,
)
from bevquant_hybrid._fx._prepare import fuse, prepare
from bevquant_hybrid._fx._settings import Names

__all__ = [
    "GraphModuleWithAttr",
    "ObservedGraphModule",
    "QuantizedGraphModule",
    "convert_fx",
    "fuse_fx",
    "prepare_calibration_fx",
    "prepare_qat_fx",
]


def fuse_fx(
    model: nn.Module, fuse_custom_config_dict: dict[str, Any] | None = None
) -> GraphModuleWithAttr:
    """Trace a model and fuse batch norms, additions and activations into their upstream layers.

    Args:
        model: Float model; not changed, but it shares the modules that were not fused with the
            result.
        fuse_custom_config_dict: Accepted for old scripts; every attribute is preserved.

    Returns:
        A graph module with the model's attributes.

    Raises:
        ValueError: The forward cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
        >>> fuse_fx(model).get_submodule("0")
        ConvReLU2d(
          (0): Conv2d(1, 1, kernel_size=(1, 1), stride=(1, 1))
          (1): ReLU()
        )
    """
    return fuse(model, Names(None), "fuse_fx")


def prepare_qat_fx(
    model: nn.Module,
    qconfig_dict: dict[str, Any] | None = None,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    optimize_graph: bool = False,
    hybrid: bool = False,
    hybrid_dict: dict[str, list[Any]] | None = None,
) -> ObservedGraphModule:
    """Prepare a model for quantization-aware training.

    Args:
        model: Float model, the result of `fuse_fx`, or a calibrated model, whose scales are the
            initial ones. It is not changed; parameters that fusing does not change are shared.
        qconfig_dict: ``{"": qconfig, "module_type": [(class, qconfig)], "module_name": [(name,
            qconfig)]}``; later ones take precedence, and a module's own ``qconfig`` attribute over
            all. None as a qconfig leaves a module float.
        prepare_custom_config_dict: Accepted for old scripts; every attribute is preserved.
        optimize_graph: On BERNOULLI2, one scale for inputs and output of each concatenation; no
            effect on other marches, which rescale the inputs.
        hybrid: Let operators run on the CPU: those without a BPU form, and those in `hybrid_dict`.
        hybrid_dict: ``{"module_type": [class], "module_name": [name]}``, each with its submodules.

    Returns:
        A graph module whose repr is the model's, followed by its forward.

    Raises:
        RuntimeError: No march is set.
        ValueError: The forward cannot be traced, a qconfig is missing or does not fit, or the model
            is already prepared.

    Warns:
        UserWarning: A name matches no module, a BPU layer has a float input, a layer has no
            qconfig, or a scale was never calibrated.

    Example:
        >>> import torch
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import QuantStub, get_default_qat_qconfig
        >>> set_march(March.BAYES)
        >>> model = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1))
        >>> qat = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
        >>> qat(torch.ones(1, 1, 2, 2)).dtype
        qint8
    """
    return prepare(model, qconfig_dict, hybrid, hybrid_dict, "prepare_qat_fx", optimize_graph)


def prepare_calibration_fx(
    model: nn.Module,
    qconfig_dict: dict[str, Any] | None = None,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    optimize_graph: bool = False,
    hybrid: bool = False,
    hybrid_dict: dict[str, list[Any]] | None = None,
) -> ObservedGraphModule:
    """Prepare a model for calibration: `prepare_qat_fx` with `get_default_calib_qconfig`.

    Arguments, errors and warnings are those of `prepare_qat_fx`, which needs the same values later.
    """
    caller = "prepare_calibration_fx"
    return prepare(model, qconfig_dict, hybrid, hybrid_dict, caller, optimize_graph)


def convert_fx(
    graph_module: nn.Module,
    inplace: bool | dict[str, Any] | None = False,
    convert_custom_config_dict: dict[str, Any] | None = None,
    _remove_qconfig: bool = True,
    fast_mode: bool = False,
    rounding: str = "half_up",
) -> QuantizedGraphModule:
    """Convert a QAT model to integers; in a hybrid model, only the BPU parts.

    Args:
        graph_module: Result of `prepare_qat_fx`.
        inplace: Convert the model itself instead of a copy. (A dictionary or None here is
            `convert_custom_config_dict`, as in older signatures.)
        convert_custom_config_dict: Accepted for old scripts; every attribute is preserved.
        _remove_qconfig: Remove the qconfig attributes.
        fast_mode: Accepted for old scripts.
        rounding: Ties of integer operations: ``"half_up"`` or ``"half_even"``.

    Returns:
        The converted model in evaluation mode.

    Raises:
        TypeError: Not a result of `prepare_qat_fx`.
        RuntimeError: No march is set.
        ValueError: A calibration model, or settings that a BPU does not execute.

    Warns:
        UserWarning: A scale was never observed.
    """
    if not isinstance(graph_module, GraphModuleWithAttr):
        raise TypeError(
            f"convert_fx: expected a model from prepare_qat_fx, got {type(graph_module).__name__}"
        )
    model = graph_module if inplace is True else copy.deepcopy(graph_module)
    convert_in_place(model, "convert_fx", _remove_qconfig, rounding)
    converted = QuantizedGraphModule(model, model.graph)
    converted.eval()
    return converted

"""`prepare`, of the newer generation of the API."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import nn

from bevquant_hybrid._fx._prepare import fuse
from bevquant_hybrid._fx._prepare import prepare as prepare_traced
from bevquant_hybrid._fx._settings import Names
from bevquant_hybrid.quantization.qconfig_setter import QconfigSetterBase
from bevquant_hybrid.quantization.quantize import prepare_qat, run_once

__all__ = ["PrepareMethod", "prepare"]


class PrepareMethod(Enum):
    """How a model's structure is found."""

    EAGER = "eager"  # no graph: modules are replaced one by one, as by `prepare_qat`
    SYMBOLIC = "symbolic"  # by tracing, as by `prepare_qat_fx`
    JIT = "jit"  # as SYMBOLIC; the result is run on the example inputs
    # As JIT; layers upstream of QuantStubs and downstream of DeQuantStubs stay float,
    # whatever their settings
    JIT_STRIP = "jit_strip"


def prepare(
    model: nn.Module,
    example_inputs: Any = None,
    qconfig_setter: QconfigSetterBase | Sequence[QconfigSetterBase] | None = None,
    method: PrepareMethod = PrepareMethod.JIT_STRIP,
) -> nn.Module:
    """Prepare a float model for calibration and quantization-aware training.

    Functions become modules, layers are fused, and fake quantizers are inserted. Calibration and
    training differ in `set_fake_quantize` and in the observers of their qconfigs.

    Args:
        model: Float model with stubs; not changed.
        example_inputs: Arguments of the forward, or one tensor; required for JIT and JIT_STRIP. The
            result is run on them once, unobserved, to find errors early.
        qconfig_setter: One setter, or several (earlier ones take precedence); None for the modules'
            ``qconfig`` attributes.
        method: How the structure is found. Only EAGER supports a forward that depends on data.

    Returns:
        The prepared model, in the mode (training or evaluation) of `model`.

    Raises:
        RuntimeError: No march is set.
        TypeError: The setter has the wrong type.
        ValueError: No example inputs, or as `prepare_qat_fx` raises.

    Example:
        >>> import torch
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import QuantStub
        >>> from bevquant_hybrid.quantization.qconfig_setter import default_qat_qconfig_setter
        >>> set_march(March.NASH_E)
        >>> net = nn.Sequential(QuantStub(), nn.Conv2d(1, 2, 1))
        >>> qat = prepare(net, (torch.ones(1, 1, 2, 2),), default_qat_qconfig_setter)
        >>> type(qat.get_submodule("1")).__module__
        'bevquant_hybrid.nn.qat.conv2d'
    """
    method = PrepareMethod(method)
    if method in (PrepareMethod.JIT, PrepareMethod.JIT_STRIP) and example_inputs is None:
        raise ValueError(
            f"prepare: method={method}: expected example_inputs, arguments of the forward; or give "
            "method=PrepareMethod.SYMBOLIC"
        )
    if method is PrepareMethod.EAGER:
        if qconfig_setter is not None:
            raise ValueError(
                "prepare: PrepareMethod.EAGER knows no structure that a setter could read; set "
                "qconfigs as attributes of modules, or use another method"
            )
        made = prepare_qat(model)
    else:
        fused = fuse(model, Names(None), "prepare")
        settings = _qconfig_dict(qconfig_setter, fused)
        strip = method is PrepareMethod.JIT_STRIP
        made = prepare_traced(fused, settings, False, None, "prepare", strip=strip)
    if example_inputs is not None:
        run_once(made, example_inputs)
    return made


def _qconfig_dict(setter: Any, fused: Any) -> dict[str, Any] | None:
    if setter is None:
        return None
    setters = list(setter) if isinstance(setter, list | tuple) else [setter]
    found: dict[str, Any] = {}
    for one in reversed(setters):
        if not isinstance(one, QconfigSetterBase):
            raise TypeError(f"prepare: qconfig_setter: {one!r}: expected a QconfigSetter")
        found.update(one.qconfigs(fused.graph, fused))
    made: dict[str, Any] = {"": found.pop("")} if "" in found else {}
    made["module_name"] = found
    return made

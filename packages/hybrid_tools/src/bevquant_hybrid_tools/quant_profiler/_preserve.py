"""Choose modules that a conversion leaves as they train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.ao.nn.quantized import FloatFunctional

from bevquant_hybrid.nn import qat
from bevquant_hybrid_tools.quant_profiler._calls import Selection


def set_preserve_qat_mode(
    model: nn.Module,
    prefixes: str | Iterable[str] = (),
    types: type | Iterable[type] = (),
    value: bool = True,
) -> list[str]:
    """Mark modules, so that convert leaves them in QAT form between fixed-point ones.

    It tells which conversion to integers costs accuracy. Of what is fused, the convolution's or
    linear layer's mark counts; of a function that fx made a module of, that module's in the QAT
    model. ``module.preserve_qat_mode = True`` does the same; a module without a mark goes by the
    one that holds it.

    Args:
        model: Float or QAT model.
        prefixes: Starts of names; the name of a module means it and what it holds.
        types: Classes. In a QAT model a float class means the QAT modules that stand for it.
        value: The mark.

    Returns:
        The names that were marked.

    Raises:
        TypeError: Prefixes that are no strings, types that are no classes.

    Warns:
        UserWarning: A prefix that no name starts with.

    Example:
        >>> set_preserve_qat_mode(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()), types=(nn.Conv2d,))
        ['0']
    """
    wanted = Selection(model, prefixes, types, "set_preserve_qat_mode")
    marked = []
    for path, module in model.named_modules():
        if wanted.names(path) or any(_stands_for(module, kind) for kind in wanted.types):
            module.preserve_qat_mode = value
            marked.append(path)
    return marked


def _stands_for(module: Any, kind: type) -> bool:
    """Whether a module is of a class, or the QAT form of one that is."""
    if isinstance(module, qat.FloatFunctional) and issubclass(kind, FloatFunctional):
        return True
    if isinstance(module, qat.SegmentLUT) and isinstance(module.function, kind):
        return True
    made_of = module.__dict__.get("_float_class")
    return isinstance(module, kind) or (made_of is not None and issubclass(made_of, kind))

"""Which row of the table a module or a torch function belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._table import SupportTable

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FUSED = re.compile(r"^(Conv|Linear)")
_OWN = __package__.partition(".")[0]
_STUBS = {"Quantize": "QuantStub", "DeQuantize": "DeQuantStub"}


def is_leaf(module: nn.Module, table: SupportTable) -> bool:
    """Whether a call of ``module`` is one operator, rather than what its forward computes."""
    if row_of_module(module, table):
        return True
    return type(module).__module__.startswith(("torch.nn.modules", "torch.ao.nn")) and not (
        isinstance(module, _CONTAINERS)
    )


def row_of_module(module: nn.Module, table: SupportTable) -> str:
    """The row of a module, or ``""``: by its class, or by what its class derives from.

    A class may say it itself, with an attribute ``bpu_operator``.
    """
    declared = getattr(type(module), "bpu_operator", "")
    if declared:
        return str(declared)
    function = getattr(module, "function", None)
    if type(module).__module__.startswith(f"{_OWN}.") and isinstance(function, nn.Module):
        return row_of_module(function, table)  # a table is the function that it tabulates
    for cls in type(module).__mro__:
        for name in _names_of_class(cls, table):
            row = table.find(name)
            if row is not None:
                return row.name
    return ""


def _names_of_class(cls: type, table: SupportTable) -> list[str]:
    home, name = cls.__module__, cls.__name__
    if home.startswith(f"{_OWN}."):
        name = _STUBS.get(name, name)
        if _FUSED.match(name):  # ConvAddReLU2d is a Conv2d that does more at its end
            name = re.sub(r"BN|Add|ReLU6?", "", name)
        replaced = table.replaced_by.get(f"horizon.nn.{name}", ())
        return [f"torch.nn.{name}", f"torch.quantization.{name}", *replaced]
    if home.startswith(("torch.nn.modules", "torch.ao.nn.qat", "torch.ao.quantization")):
        return [f"torch.nn.{name}", f"torch.quantization.{name}"]
    if home.startswith("torchvision."):
        return [f"torchvision.ops.{name}", f"torchvision.models.detection.rpn.{name}"]
    return []


def row_of_function(
    function: Callable[..., Any], name: str, table: SupportTable, tensors: int
) -> str:
    """The row of a torch function or tensor method, or its plain name where it has none.

    Args:
        function: As `torch.overrides.TorchFunctionMode` hands it over.
        name: How it is called there.
        table: Where its row is looked for.
        tensors: How many tensors it reads: ``torch.max`` of two is ``torch.maximum``.
    """
    if isinstance(function, torch._ops.OpOverload):
        row = table.find(function._schema.name)
        return row.name if row is not None else function._schema.name
    if name.lstrip("_") in ("max", "min") and tensors == 2:
        return f"torch.{name.lstrip('_')}imum"
    method = getattr(torch.Tensor, name, None) is function or hasattr(function, "__objclass__")
    spaces = ["torch.Tensor.", "torch.", "torch.nn.functional."]
    if not method:
        spaces = ["torch.nn.functional.", "torch.", "torch.Tensor."]
        if getattr(torch, name, None) is function:
            spaces = ["torch.", "torch.nn.functional.", "torch.Tensor."]
    for space in spaces:
        for spelling in (name, name.lstrip("_") if not name.startswith("__") else name):
            row = table.find(space + spelling)
            if row is not None:
                return row.name
    return spaces[0] + name

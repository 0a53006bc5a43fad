"""Fusing by hand: a layer with the batch norm, addition and activation that follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import layer_class
from bevquant_hybrid._fx._fuse import fused
from bevquant_hybrid.nn.intrinsic import ACTIVATIONS, ANCHORS

Fuser = Callable[..., list[nn.Module]]


def fuse_known_modules(
    mod_list: list[nn.Module],
    is_qat: bool = False,
    additional_fuser_method_mapping: dict[Any, Any] | None = None,
) -> list[nn.Module]:
    """Fuse a list of modules: a ``fuser_func`` for `torch.quantization.fuse_modules`.

    The order is Conv2d, Conv3d, ConvTranspose2d or Linear, then optionally batch norm,
    FloatFunctional, and ReLU or ReLU6. The batch norm is folded with its running statistics, in
    training and evaluation mode alike (`set_qat_mode` can keep it). The result replaces the layer;
    with a FloatFunctional it replaces that, and ``add(x, y)`` then computes conv(x) + y.

    Args:
        mod_list: Modules in the order of their calls.
        is_qat: Accepted for compatibility with torch.
        additional_fuser_method_mapping: Accepted for compatibility with torch.

    Returns:
        As many modules: the fused one, and `nn.Identity` for the others.

    Raises:
        ValueError: Another sequence of classes.

    Example:
        >>> fuse_known_modules([nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)])
        [Conv2d(1, 1, kernel_size=(1, 1), stride=(1, 1)), Identity()]
    """
    roles = [_role(module) for module in mod_list]
    order = [role for role in ("conv", "bn", "add", "act") if role in roles]
    if roles != order or roles[:1] != ["conv"] or len(roles) < 2:
        raise ValueError(
            f"cannot fuse {[type(m).__name__ for m in mod_list]}: expected a layer "
            f"({', '.join(c.__name__ for c in ANCHORS)}), then any of batch norm, FloatFunctional "
            "and ReLU or ReLU6, in this order"
        )
    parts = dict(zip(roles, mod_list, strict=True))
    place = roles.index("add") if "add" in roles else 0
    made: list[nn.Module] = [nn.Identity() for _ in mod_list]
    made[place] = fused(parts["conv"], parts.get("bn"), "add" in roles, parts.get("act"))
    return made


def _role(module: nn.Module) -> str:
    if layer_class(module) in ANCHORS:
        return "conv"
    if layer_class(module, _BatchNorm):
        return "bn"
    if isinstance(module, torch_quantized.FloatFunctional):
        return "add"
    return "act" if layer_class(module) in ACTIVATIONS else type(module).__name__


def fuse_modules(
    model: nn.Module,
    modules_to_fuse: list[str] | list[list[str]],
    inplace: bool = False,
    fuser_func: Fuser = fuse_known_modules,
    fuse_custom_config_dict: dict[str, Any] | None = None,
) -> nn.Module:
    """Fuse named modules; `torch.quantization.fuse_modules` with this package's fuser.

    Args:
        model: Float model.
        modules_to_fuse: Names, or lists of names, in the order of their calls.
        inplace: Change the model itself.
        fuser_func: As in torch.
        fuse_custom_config_dict: As in torch.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU6())
        >>> type(fuse_modules(model, ["0", "1"])[0]).__name__
        'ConvReLU62d'
    """
    made: nn.Module = torch.ao.quantization.fuse_modules(
        model,
        modules_to_fuse,
        inplace=inplace,
        fuser_func=fuser_func,
        fuse_custom_config_dict=fuse_custom_config_dict,
    )
    return made

"""Weights that torch computes in every call: parametrizations, weight norm, pruning masks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_Hook = WeightNorm | SpectralNorm | prune.BasePruningMethod


def computed_weights(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules with such weights; in training mode they stay as they are."""
    return tuple(
        path
        for path, module in model.named_modules()
        if not module.training and (parametrize.is_parametrized(module) or any(_hooks(module)))
    )


def keep_computed_weights(model: nn.Module) -> nn.Module:
    """The model, with every such weight changed to a parameter of its value in evaluation mode."""
    for path in computed_weights(model):
        module = model.get_submodule(path)
        if parametrize.is_parametrized(module):
            _keep_parametrized(module)
        for hook in tuple(_hooks(module)):
            if isinstance(hook, prune.BasePruningMethod):
                prune.remove(module, hook._tensor_name)
            elif isinstance(hook, WeightNorm):
                remove_weight_norm(module, hook.name)
            else:
                remove_spectral_norm(module, hook.name)
    return model


def _keep_parametrized(module: nn.Module) -> None:
    """As `remove_parametrizations`, which takes the property from the class of all copies."""
    lists = dict(module.parametrizations.named_children())  # type: ignore[union-attr]
    values = {name: getattr(module, name).detach().clone() for name in lists}
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, value in values.items():
        if any(True for _ in lists[name].parameters()):
            module.register_parameter(name, nn.Parameter(value))
        else:
            module.register_buffer(name, value)


def _hooks(module: nn.Module) -> Iterator[_Hook]:
    return (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Hook))

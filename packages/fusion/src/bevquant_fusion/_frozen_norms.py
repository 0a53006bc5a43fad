r"""Batch norms written as arithmetic: `FrozenBatchNorm2d` of torchvision, detectron2 and DETR.

They hold the four tensors of a batch norm under its names and compute

.. math:: y = x\, s + (\beta - \mu s), \qquad s = \gamma / \sqrt{\sigma^2 + \varepsilon}

in operations that no graph tells from other products and sums. What such a module computes is
therefore held against a batch norm's result, and the fusion is planned with torch's own in its
place. The paths of the numbers are the same.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import replace_modules

from ._foldable import has_hooks

_NAMES = ("running_mean", "running_var", "weight", "bias")
_USUAL_EPS = (1e-5, 1e-3)  # of classes that have it in their forward alone


class _BatchNormOfAnyRank(nn.BatchNorm2d):
    def _check_input_dim(self, input: Tensor) -> None:
        pass


def with_batch_norms(model: nn.Module) -> nn.Module:
    """A copy in which torch's batch norms stand for frozen ones; the model itself without any."""
    frozen = {m: norm for m in model.modules() if m is not model and (norm := _as_norm(m))}
    if not frozen:
        return model
    copies: dict[int, nn.Module] = {}
    copied = copy.deepcopy(model, copies)
    replace_modules(copied, {copies[id(module)]: norm for module, norm in frozen.items()})
    return copied


def _as_norm(module: nn.Module) -> nn.Module | None:
    """The batch norm that computes the same; None where the module is something else."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    tensors.pop("num_batches_tracked", None)
    if isinstance(module, _BatchNorm) or {*tensors} != {*_NAMES} or has_hooks(module):
        return None
    sizes = {tensor.shape for tensor in tensors.values()}
    if len(sizes) > 1 or tensors["weight"].dim() != 1 or not tensors["weight"].numel():
        return None
    mean, var, weight, bias = (tensors[name].detach().double() for name in _NAMES)
    probe = torch.linspace(-3, 3, 8 * len(mean), dtype=torch.float64).to(mean.device)
    probe = probe.view(4, 2, -1).movedim(-1, 1).unsqueeze(-1).contiguous()
    try:
        with torch.no_grad():
            made = copy.deepcopy(module).double()(probe.clone())
    except Exception:  # a forward may raise anything
        return None
    if not isinstance(made, Tensor) or made.shape != probe.shape:
        return None
    for eps in (getattr(module, "eps", None), *_USUAL_EPS):
        if not isinstance(eps, float):
            continue
        wanted = F.batch_norm(probe, mean, var, weight, bias, training=False, eps=eps)
        if torch.allclose(made.double(), wanted, rtol=1e-9, atol=1e-9):
            norm = _BatchNormOfAnyRank(len(mean), eps, device="meta")
            for name, tensor in tensors.items():
                value = tensor.detach()
                own = name in norm._parameters
                setattr(norm, name, nn.Parameter(value, requires_grad=False) if own else value)
            return norm.eval()
    return None

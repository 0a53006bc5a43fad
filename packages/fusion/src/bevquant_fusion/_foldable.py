r"""Whether a layer and a batch norm can be folded at all, judged by the two modules alone.

A batch norm may be written as arithmetic, as `FrozenBatchNorm2d` of torchvision, detectron2 and
DETR: four tensors under its names, and

.. math:: y = x\, s + (\beta - \mu s), \qquad s = \gamma / \sqrt{\sigma^2 + \varepsilon}

in operations that no graph tells from other products and sums. What such a module computes is
therefore held against a batch norm's result, and the fusion is planned with torch's own in its
place (`with_batch_norms`). The paths of the numbers are the same.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from bevquant_graph import copied, is_library_class, only_guards, replace_modules
from bevquant_sparse import WeightLayout, get_weight, layout_of

from ._ranges import children_problem, is_sparse

DENSE = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
_RANKS: dict[type[nn.Module], int] = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}


def is_convolution(module: object) -> bool:
    """Whether batch norm can be folded into modules of this class."""
    return isinstance(module, DENSE) or is_sparse(module)


def fold_problem(conv: nn.Module, bn: nn.Module) -> str | None:
    """Why ``bn`` cannot be folded into ``conv``; None where it can."""
    return conv_problem(conv) or bn_problem(bn) or _pair_problem(conv, bn)


def bn_problem(bn: nn.Module, *, own_forward: bool = False) -> str | None:
    """Why this batch norm cannot be folded; with ``own_forward``, a graph shows its forward."""
    name = type(bn).__name__
    if not isinstance(bn, nn.modules.batchnorm._BatchNorm):
        return f"{name} is not a batch norm"
    if _uninitialised(bn):
        return f"{name} is not initialised; run the model once first"
    if bn.running_mean is None or bn.running_var is None:
        return f"{name} keeps no running statistics, so it normalises by each batch"
    if bn.training:
        return f"{name} is in training mode, so it normalises by each batch; call eval() first"
    return _extras(bn, () if own_forward else ("forward",))


def conv_problem(conv: nn.Module, *, own_forward: bool = False) -> str | None:
    """Why no batch norm can be folded into it; with ``own_forward``, a graph shows its forward."""
    name = type(conv).__name__
    if not is_convolution(conv):
        return f"{name} is not a convolution or linear layer"
    if _uninitialised(conv):
        return f"{name} is not initialised; run the model once first"
    problem = _extras(conv, () if own_forward else ("forward", "_conv_forward"))
    if problem is not None:
        return problem
    # A graph has such an activation as an operation; spconv's enum has "None_" for none.
    for attribute in () if own_forward else ("act_type", "activation", "act"):
        value: Any = getattr(conv, attribute, None)
        if value is not None and getattr(value, "name", "") != "None_":
            return f"{name} applies an activation of its own ({attribute}={value})"
    problem = None if own_forward else children_problem(conv)
    if problem is not None:
        return problem
    if is_sparse(conv):
        try:
            weight = get_weight(conv, layout_of(conv))
        except (TypeError, ValueError) as error:
            return str(error)
    else:
        weight = cast(Tensor, conv.weight)
    if not weight.is_floating_point():
        return f"{name} has weights of dtype {weight.dtype}, which cannot be scaled exactly"
    return None


def out_channels(conv: nn.Module) -> int:
    """Channels that ``conv`` makes."""
    if is_sparse(conv):
        return WeightLayout.KRSC.channels(get_weight(conv, WeightLayout.KRSC))[1]
    layer: Any = conv
    return int(layer.out_features if isinstance(conv, nn.Linear) else layer.out_channels)


def _pair_problem(conv: Any, bn: Any) -> str | None:
    made, expected = out_channels(conv), int(bn.num_features)
    if made != expected:
        return (
            f"{type(conv).__name__} makes {made} channels but {type(bn).__name__} normalises "
            f"{expected}"
        )
    rank = 1 if is_sparse(conv) or isinstance(conv, nn.Linear) else conv.weight.ndim - 2
    wanted = next((r for cls, r in _RANKS.items() if isinstance(bn, cls)), 1)
    # SyncBatchNorm takes maps of any rank.
    if rank != wanted and not isinstance(bn, nn.SyncBatchNorm):
        return f"{type(bn).__name__} does not fit the output of {type(conv).__name__}"
    return None


def _uninitialised(module: nn.Module) -> bool:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(is_lazy(t) for t in tensors)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook observes the module's inputs or outputs."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def _extras(module: nn.Module, methods: tuple[str, ...]) -> str | None:
    """Anything that makes the module do more than its stock class says."""
    name = type(module).__name__
    if has_hooks(module):
        return f"{name} has hooks (weight_norm and spectral_norm work by hooks too)"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return f"{name} has parametrized weights"
    for method in methods:
        if method in vars(module):
            return f"{name}.{method} was replaced on the instance"
        classes = [c for c in type(module).__mro__ if method in vars(c)]
        # A forward that differs for empty inputs alone is its base's.
        if method == "forward":
            classes = [c for c in classes if not only_guards(c)]
        owner = next(iter(classes), None)
        if owner is not None and not is_library_class(owner):
            return f"{owner.__module__}.{owner.__qualname__} has a {method} of its own"
    return None


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
    made = copied(model, "fuse_model")
    twins = dict(zip(model.modules(), made.modules(), strict=True))
    replace_modules(made, {twins[module]: norm for module, norm in frozen.items()})
    return made


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

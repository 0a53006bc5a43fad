"""2:4 sparsity: of four weights side by side along the input channels, at most two are not zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import HtmlTable, check_kind, layer_class
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_sparse import WeightLayout, is_sparse_conv, layout_of, permute_weight


@dataclass(frozen=True)
class SparseLayer:
    """A layer in the form 2:4.

    Attributes:
        path: Path in the model.
        zeros: Share of its weights that are zero.
        energy: Σw² of the kept weights over Σw² of all; 1 if all others were zero before.
    """

    path: str
    zeros: float
    energy: float


@dataclass(frozen=True)
class SparsityReport(HtmlTable):
    """Result of `sparsify`.

    Attributes:
        layers: In model order.
        skipped: (path, reason) of layers that stay dense.
    """

    layers: tuple[SparseLayer, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers are 2:4 sparse; zeros, energy kept"]
        lines += [f"  {x.path}: {x.zeros:.0%}, {x.energy:.1%}" for x in self.layers]
        lines += [f"  {path}: dense, {reason}" for path, reason in self.skipped]
        return "\n".join(lines)


def sparsify(model: nn.Module, exclude: Sequence[str] = ()) -> SparsityReport:
    """Set the two smallest of four weights to zero, along the input channels, in place.

    For each output channel and kernel position, the input channels 4i … 4i + 3 keep the two weights
    of the largest magnitude (NVIDIA's 2:4 form, Mishra et al. 2021, arXiv 2104.08378; of equal
    ones the first). These are convolutions, linear layers and sparse convolutions, float or
    quantized. Files keep the zeros, and ``trtexec --sparsity=enable`` finds them. Batch norms may
    be folded before or afterwards.

    `keep_sparsity` holds the zeros during training; `QatTrainer` calls it. `round_weights` keeps
    them, and with ``sparsity=True`` chooses them by the error of the layer's output.

    Args:
        model: Changed in place.
        exclude: Paths or globs of layers that stay dense.

    Returns:
        Layers with their shares, and layers that stay dense with the reason.

    Raises:
        ValueError: A pattern of `exclude` names no layer.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> report = sparsify(net)
        >>> [(row.path, row.zeros) for row in report.layers], report.skipped
        ([('2', 0.5)], (('0', 'its 3 input channels are no multiple of 4'),))
    """
    check_kind(model, nn.Module, "a torch module")
    found = dict(_layers(model))
    unmatched = [p for p in exclude if not any(fnmatchcase(path, p) for path in found)]
    if unmatched:
        raise ValueError(
            f"sparsify: no layer is named by exclude={unmatched}; expected paths or globs of "
            f"layers such as {next(iter(found), 'none')}"
        )
    layers: list[SparseLayer] = []
    skipped: list[tuple[str, str]] = []
    for path, module in found.items():
        excluded = any(fnmatchcase(path, pattern) for pattern in exclude)
        reason = "excluded" if excluded else why_dense(module)
        if reason:
            skipped.append((path, reason))
            continue
        weight = module.weight.detach()
        mask = _mask(module)
        kept = weight * mask
        energy = float(kept.double().square().sum() / weight.double().square().sum().clamp(1e-300))
        with torch.no_grad():
            module.weight.copy_(kept)
        layers.append(SparseLayer(path, float((kept == 0).double().mean()), energy))
    return SparsityReport(tuple(layers), tuple(skipped))


def keep_sparsity(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Set the zeros of 2:4 layers to zero again after each step of an optimizer.

    Args:
        model: Its layers that are 2:4 sparse now keep their zeros.
        optimizer: Of the training.

    Returns:
        Paths of these layers.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 2))
        >>> report = sparsify(net)
        >>> optimizer = torch.optim.SGD(net.parameters(), 0.1)
        >>> keep_sparsity(net, optimizer)
        ('0',)
        >>> net(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> int((net[0].weight == 0).sum())
        8
    """
    check_kind(model, nn.Module, "a torch module")
    check_kind(optimizer, torch.optim.Optimizer, "an optimizer of torch")
    masks = {path: (m.weight, m.weight.detach() != 0) for path, m in _layers(model) if is_2_4(m)}

    @torch.no_grad()
    def put_zeros(*_: Any) -> None:
        for weight, mask in masks.values():
            weight.mul_(mask.to(weight.device))

    if masks:
        optimizer.register_step_post_hook(put_zeros)
    return tuple(masks)


def is_2_4(module: Any) -> bool:
    """Whether the layer's weight is in the form 2:4, and not all zero."""
    if why_dense(module):
        return False
    weight = _by_channel(module)
    counts = (weight != 0).unflatten(1, (-1, 4)).sum(2)
    return bool(counts.any()) and int(counts.max()) <= 2


def mask_2_4(size: Tensor) -> Tensor:
    """The two largest of four along axis 1, the first of equal ones.

    Args:
        size: [out, in, …], `in` a multiple of 4.
    """
    fours = size.unflatten(1, (-1, 4))
    best = fours.argsort(dim=2, descending=True, stable=True)[:, :, :2]
    mask = torch.zeros_like(fours, dtype=torch.bool).scatter_(2, best, True)
    return mask.flatten(1, 2)


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if layer_class(module, nn.modules.conv._ConvNd, nn.Linear) is not None or _on_voxels(module)
    ]


def _on_voxels(module: nn.Module) -> bool:
    return is_sparse_conv(module) or layer_class(module, QuantSparseConvolution) is not None


def why_dense(module: Any) -> str:
    """Why a layer has no form 2:4; empty if it has one."""
    if layer_class(module, nn.modules.conv._ConvTransposeNd) is not None:
        return "it is a transposed convolution, for which engines have no such form"
    inputs = _by_channel(module).shape[1]
    if inputs % 4:
        return f"its {inputs} input channels are no multiple of 4"
    return ""


def _by_channel(module: Any) -> Tensor:
    """The weight as [out, in/groups, …]."""
    weight: Tensor = module.weight.detach()
    if not _on_voxels(module):
        return weight
    size = tuple(map(int, module.kernel_size))
    return permute_weight(weight, layout_of(module), WeightLayout.KCRS, kernel_size=size)


def _mask(module: Any) -> Tensor:
    mask = mask_2_4(_by_channel(module).abs())
    if not _on_voxels(module):
        return mask
    size = tuple(map(int, module.kernel_size))
    return permute_weight(mask, WeightLayout.KCRS, layout_of(module), kernel_size=size)

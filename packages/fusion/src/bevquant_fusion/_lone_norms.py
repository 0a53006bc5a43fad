"""Batch norms that no layer takes, as layers of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch import nn

from bevquant_graph import Graph

from ._fold import Fold
from ._foldable import bn_problem
from ._fuse_pair import as_convolution, norm_of
from ._plan import from_graph
from ._remove_bn import norm_at, remove_batch_norms


def norm_as_convolution(bn: nn.Module, axes: int) -> nn.Module:
    """The depthwise 1×1 convolution that computes ``bn``: W = γ/√(σ² + ε), b = β − μ·W.

    Args:
        bn: A batch norm in evaluation mode with running statistics.
        axes: How many axes its input ``[N, C, …]`` has behind the channels, 1 to 3.

    Raises:
        ValueError: It is another kind of module, or normalises by each batch; the weight would not
            be finite.

    Example:
        >>> norm_as_convolution(nn.BatchNorm2d(4).eval(), 2)
        Conv2d(4, 4, kernel_size=(1, 1), stride=(1, 1), groups=4)
    """
    problem = bn_problem(bn, own_forward=True)
    if problem is not None:
        raise ValueError(f"norm_as_convolution: {problem}")
    return as_convolution(norm_of(bn), axes)


def norms_to_convolutions(
    model: nn.Module, graph: Graph, stays: Callable[[str], bool] = lambda path: False
) -> dict[str, str]:
    """Put depthwise 1×1 convolutions in the places of batch norms that no layer can take.

    In evaluation mode a batch norm is W·x + b per channel, W = γ/√(σ² + ε), b = β − μ·W (computed
    in float64, rounded once). One before an activation (a ResNet with pre-activation, DenseNet) is
    never folded; as a convolution it can be quantized. A class that does more (timm's
    ``BatchNormAct2d``) becomes an ``nn.Sequential`` of that convolution, ``norm``, and its other
    children. What `fuse_model` would fold stays, and so does what is in training mode, reads an
    input of the model or rows ``[N, C]``, is called by a function, or would have a weight that is
    not finite.

    Args:
        model: Changed in place: parameters of these batch norms are new ones afterwards.
        graph: ``bevquant_graph.capture`` of it.
        stays: Whether the batch norm at a path is left alone.

    Returns:
        Path of each convolution, and the class of the batch norm that it was.

    Example:
        >>> import torch
        >>> from bevquant_graph import capture
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)).eval()
        >>> norms_to_convolutions(net, capture(net, torch.ones(1, 3, 2, 2)))
        {'2': 'BatchNorm2d'}
        >>> net[2]
        Conv2d(4, 4, kernel_size=(1, 1), stride=(1, 1), groups=4)
    """
    own: dict[Fold, nn.Module] = {}
    for path, fold in from_graph(model, graph, alone=True).items():
        if isinstance(fold, Fold) and fold.axes and not stays(path):
            with suppress(ValueError):  # its weight would not be finite
                own[fold] = as_convolution(norm_at(model, fold), fold.axes)
    names = {fold: type(model.get_submodule(fold.bn)).__name__ for fold in own}
    remove_batch_norms(model, own, own)
    return {f"{f.bn}.norm" if f.rest else f.bn: name for f, name in names.items()}

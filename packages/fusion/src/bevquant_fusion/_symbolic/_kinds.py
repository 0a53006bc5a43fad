"""What is known of the class of a traced value: a tensor, a sparse tensor, or nothing."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from bevquant_graph import layer_class
from bevquant_sparse import is_sparse_conv

from ._sparse_names import has_base, is_sparse_module, sparse_tensor_class

KIND = "bevquant_kind"  # node.meta key where the class is known from outside

_TENSOR_METHODS = frozenset(
    "dense relu relu_ view reshape permute transpose contiguous flatten squeeze unsqueeze float "
    "half to clone detach add add_ mul mul_ sum mean softmax sigmoid tanh expand repeat".split()
)
_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.imul}
)
_NOT_ONE_TENSOR = frozenset(
    "split chunk unbind max min sort topk meshgrid size numel adaptive_max_pool2d".split()
)
_TENSOR_MODULES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.Linear,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.SiLU,
    nn.GELU,
    nn.Sigmoid,
    nn.Hardswish,
    nn.Upsample,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
# What gives the class of what it takes. Batch norms that were folded leave an Identity behind;
# quantizers go by name, as no package below this one has them.
_HAND_ON = (nn.Identity, nn.modules.dropout._DropoutNd)
_HAND_ON_NAMES = frozenset({"TensorQuantizer"})


def kind_of(node: fx.Node, root: nn.Module) -> type | None:
    """The class of the value that ``node`` makes, or None where the graph does not tell."""
    if KIND in node.meta:
        known: type | None = node.meta[KIND]
        return known
    if node.op == "get_attr":
        return bool if node.target == "training" else torch.Tensor
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if _hands_on(module) and node.args and isinstance(node.args[0], fx.Node):
            return kind_of(node.args[0], root)
        return _of_module(module)
    if node.op == "call_method":
        if node.target == "replace_feature":
            return sparse_tensor_class()
        return torch.Tensor if node.target in _TENSOR_METHODS else None
    if node.op == "call_function":
        return _of_function(node, root)
    return None


def _hands_on(module: nn.Module) -> bool:
    return layer_class(module, *_HAND_ON) is not None or has_base(module, _HAND_ON_NAMES)


def _of_module(module: nn.Module) -> type | None:
    if is_sparse_conv(module):
        return sparse_tensor_class()
    if is_sparse_module(module):
        return None  # ToDense is a sparse module too
    return None if layer_class(module, *_TENSOR_MODULES) is None else torch.Tensor


def _of_function(node: fx.Node, root: nn.Module) -> type | None:
    name = getattr(node.target, "__name__", "")
    if node.target is getattr:
        return torch.Tensor if node.args[1] == "features" else None
    if name in ("replace_feature", "SparseConvTensor"):
        return sparse_tensor_class()
    if node.target in _ARITHMETIC or node.target is operator.getitem:
        first = node.args[0]
        known = kind_of(first, root) if isinstance(first, fx.Node) else None
        # An element of something that is no tensor may be anything.
        return known if known is torch.Tensor or node.target in _ARITHMETIC else None
    package = str(getattr(node.target, "__module__", None) or type(node.target).__module__)
    if package.split(".")[0] == "torch" and name not in _NOT_ONE_TENSOR:
        return torch.Tensor
    return None

"""Questions of quantization about the kind of a module."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from bevquant_graph import layer_class
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_sparse import is_sparse_conv, library_name

_LIBRARIES = ("torch", "spconv", "bevquant_qnn", "bevquant_quantizers", "pytorch_quantization")
_CHAINS = ("Sequential", "SparseSequential")
_TABLES = frozenset(
    f"spconv.{of}tables.{name}" for of in ("", "pytorch.") for name in ("AddTable", "JoinTable")
)


def is_quantized(module: nn.Module) -> bool:
    """Whether the module quantizes its own input (ours or an adopted upstream module)."""
    return "_input_quantizer" in module._modules


def is_dense_conv(module: nn.Module) -> bool:
    """Whether the module is a quantized dense convolution."""
    return is_quantized(module) and layer_class(module, nn.modules.conv._ConvNd) is not None


def is_sparse_module(module: nn.Module) -> bool:
    """Whether the module takes sparse tensors: spconv's family, a sparse conv, or ours."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return (
        "SparseModule" in names
        or isinstance(module, QuantSparseConvolution)
        or is_sparse_conv(module)
    )


def has_sparse_conv(module: nn.Module) -> bool:
    """Whether the module is or contains a sparse convolution, quantized or float."""
    return any(
        isinstance(child, QuantSparseConvolution) or is_sparse_conv(child)
        for child in module.modules()
    )


def is_identity(module: nn.Module) -> bool:
    """Whether the module returns its input unchanged in evaluation mode."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return (
        layer_class(module, nn.Identity, _DropoutNd, nn.Flatten, nn.Unflatten) is not None
        or "SparseIdentity" in names
        or type(module).__name__ == "DropPath"
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module is a batch norm, synchronised or sparse ones included."""
    return layer_class(module, _BatchNorm) is not None


def is_plain_chain(module: nn.Module) -> bool:
    """Whether the module only calls its children one after the other."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
    return owner is not None and "forward" not in vars(module) and owner.__name__ in _CHAINS


def is_library_module(module: nn.Module) -> bool:
    """Whether the module's forward belongs to a library, not to the model's author."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return "forward" not in vars(module) and library_name(owner).split(".")[0] in _LIBRARIES


def only_shapes(module: nn.Module) -> bool:
    """Whether the module is an activation, a norm, a resize or an identity."""
    activation = getattr(layer_class(module), "__module__", "") == "torch.nn.modules.activation"
    resize = layer_class(module, nn.Upsample) is not None
    return is_identity(module) or is_batch_norm(module) or activation or resize


def is_table(module: nn.Module) -> bool:
    """Whether the module is spconv's `AddTable` or `JoinTable`, with the library's forward."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return "forward" not in vars(module) and library_name(owner) in _TABLES


def ends_in_conv(module: nn.Module) -> bool:
    """Whether a quantized dense conv makes the output, norms and activations aside."""
    if is_quantized(module):
        return is_dense_conv(module)
    if is_plain_chain(module):
        last = next((c for c in reversed(list(module.children())) if not only_shapes(c)), None)
        return last is not None and ends_in_conv(last)
    return any(is_dense_conv(child) for child in module.modules())

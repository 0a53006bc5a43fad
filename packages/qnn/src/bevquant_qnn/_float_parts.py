"""Float computations beside the quantized layers: layers of other kinds, and function calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from bevquant_qnn._attention import QuantMultiheadAttention
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._held_weight import HeldWeight
from bevquant_qnn._replace import has_quantized_form
from bevquant_qnn._result import SkippedModule
from bevquant_qnn._steps import Steps, is_batch_norm, is_library_module, is_quantized
from bevquant_quantizers import TensorQuantizer

# Kinds of operators that make new values in float, and operators of these kinds that only move
# them or are fused into a layer. Additions have their own notes.
_COMPUTES = frozenset({"float", "layer", "matmul", "norm", "resize", "avg_pool"})
_MOVES = frozenset(
    "SparseConvTensor adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d copy cpu cuda "
    "data dense dtype empty_like features new_empty new_zeros replace_feature setattr to_dense "
    "type zeros_like".split()
)
_ATTENTION = "its projections are quantized; attention itself, products and softmax, stays float"


def float_layers(
    model: nn.Module, config: QuantConfig, reported: Collection[str]
) -> Iterator[SkippedModule]:
    """Yield layers without a quantized form, beside those with a note (`reported`) already."""
    inside: set[str] = set()
    held = [m for m in model.modules() if isinstance(m, HeldWeight)]
    applied = {id(tensor) for m in held for tensor in m.held}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if isinstance(module, QuantMultiheadAttention) and "quant_attention" not in module._modules:
            yield SkippedModule(path, _ATTENTION)
        if (
            is_quantized(module)
            or isinstance(module, TensorQuantizer)
            or (path and parent in inside)
        ):
            inside.add(path)
        elif path not in reported and _computes_with_own(module, applied):
            pattern = config.excluded_by(path)
            yield SkippedModule(path, f"excluded by {pattern!r}" if pattern else _reason(module))


def float_functions(steps: Steps, module: nn.Module, *, products: bool) -> tuple[str, ...]:
    """Names of the functions by which a forward computes values, in the order of their calls.

    With example inputs, `products` (convolutions, matrix products) have a note of their own.
    """
    names: dict[str, None] = {}
    for node in steps.nodes:
        if steps.module(node) is module and steps.is_tensor(node) and steps.read(node):
            spec = steps.spec(node)
            product = bool(spec.product)
            moves = spec.casts or spec.name in _MOVES
            if spec.kind in _COMPUTES and not moves and (products or not product):
                names["interpolate" if spec.kind == "resize" else steps.name(node)] = None
    return tuple(names)


def _computes_with_own(module: nn.Module, applied: Collection[int]) -> bool:
    own = [p for p in module._parameters.values() if p is not None and id(p) not in applied]
    if not own or has_quantized_form(module):
        return False
    # Parameters without gradient in an author's module hold a geometry or the like.
    return is_library_module(module) or any(parameter.requires_grad for parameter in own)


def _reason(module: nn.Module) -> str:
    name = type(module).__name__
    if is_batch_norm(module):
        why = "in training mode" if module.training else "not folded into a layer before it"
        return f"{name} stays float: it is {why}"
    if is_library_module(module):
        return f"{name} has no quantized form: it stays float"
    return f"operations of {name} with its own parameters stay float"

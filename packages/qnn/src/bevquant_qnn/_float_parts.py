"""What computes in float beside the quantized layers: layers of other kinds, and function calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx, nn

from bevquant_qnn._branches import Branches
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._kinds import is_batch_norm, is_library_module, is_quantized
from bevquant_qnn._replace import has_quantized_form
from bevquant_qnn._result import SkippedModule
from bevquant_quantizers import TensorQuantizer

__all__ = ["float_functions", "float_layers"]

# Functions and methods that move values or questions about them, and what is fused into a layer.
_MOVES = frozenset(
    "adaptive_max_pool1d broadcast_to cat chunk clone concat concatenate contiguous cpu cuda "
    "data dense detach device dim dropout dtype exactly expand expand_as features flatten flip "
    "float gather getattr getitem half hook index_select indices int item long max_pool1d "
    "max_pool2d max_pool3d movedim narrow ndim new_empty new_zeros numel pad permute "
    "pixel_shuffle relu relu_ repeat replace_feature reshape roll setattr shape size "
    "spatial_shape split squeeze stack swapaxes tensor_split tile to to_dense transpose type "
    "type_as unbind unflatten unsqueeze view view_as".split()
)
_JOINS = frozenset({"add", "add_", "iadd"})
_ASKS = frozenset({"shape", "size", "dim", "ndim", "numel", "device", "dtype", "batch_size"})
# Products are found in the pass over example inputs, whatever function computes them.
_PRODUCTS = frozenset(
    "addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "einsum linear matmul mm scaled_dot_product_attention".split()
)


def float_layers(
    model: nn.Module, config: QuantConfig, reported: Collection[str]
) -> Iterator[SkippedModule]:
    """Yield the layers with parameters of their own for which there is no quantized form.

    Args:
        model: Its layers are replaced already.
        config: What was left out on purpose.
        reported: Paths of layers that have a note already.
    """
    inside: set[str] = set()
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if (
            is_quantized(module)
            or isinstance(module, TensorQuantizer)
            or (path and parent in inside)
        ):
            inside.add(path)
        elif path not in reported and _computes_with_own(module):
            pattern = config.excluded_by(path)
            yield SkippedModule(path, f"excluded by {pattern!r}" if pattern else _reason(module))


def float_functions(branches: Branches, *, products: bool) -> tuple[str, ...]:
    """Names of the functions that a forward computes values by, in the order of their calls.

    Args:
        branches: The graph of the forward.
        products: Whether convolutions and matrix products count; the pass over example inputs
            reports them.
    """
    names: dict[str, None] = {}
    numbers: set[fx.Node] = set()
    for node in branches.graph.nodes:
        if node.op not in ("call_function", "call_method") or isinstance(node.target, type):
            continue
        name = getattr(node.target, "__name__", str(node.target))
        asked = str(node.args[1]) if node.target is getattr else name
        inputs = node.all_input_nodes
        if asked in _ASKS or (inputs and all(i in numbers for i in inputs)):
            numbers.add(node)
        elif name not in _MOVES | _JOINS | (frozenset() if products else _PRODUCTS) and node.users:
            names[name] = None
    return tuple(names)


def _computes_with_own(module: nn.Module) -> bool:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not own or has_quantized_form(module):
        return False
    # Parameters without gradient in an author's module hold a geometry or the like.
    return is_library_module(module) or any(parameter.requires_grad for parameter in own)


def _reason(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return (
            f"torch's {name} computes its projections and the attention in one function: they "
            "stay float; use an attention written with plain Linear layers to quantize them"
        )
    if is_batch_norm(module):
        return f"{name} stays float: it is not folded into a layer before it"
    if is_library_module(module):
        return f"{name} has no quantized form: it stays float"
    return f"what {name} computes with its own parameters stays float"

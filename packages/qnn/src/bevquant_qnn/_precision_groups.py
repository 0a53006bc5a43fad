"""Which layers must have one precision: those that read one tensor through one quantizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from bevquant_graph import check_kind
from bevquant_qnn._share import Groups
from bevquant_qnn._steps import is_quantized
from bevquant_quantizers import TensorQuantizer


@dataclass(frozen=True)
class PrecisionGroup:
    """Layers that share quantizers, so that they run at one precision.

    Attributes:
        modules: Paths of the layers with weights, then of additions, concatenations and pools; of
            a residual input, the path of its quantizer. Each in model order.
        weights: The weight quantizers, each object once.
        inputs: The quantizers of activations, each object once.
    """

    modules: tuple[str, ...]
    weights: tuple[TensorQuantizer, ...] = field(repr=False, compare=False)
    inputs: tuple[TensorQuantizer, ...] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The first path."""
        return self.modules[0]

    @property
    def quantizers(self) -> tuple[TensorQuantizer, ...]:
        """All of its quantizers."""
        return self.inputs + self.weights


def precision_groups(model: nn.Module) -> list[PrecisionGroup]:
    """Return the groups of layers that can have a precision of their own, in model order.

    Layers that have a quantizer in common are one group: the consumers of one tensor, the operands
    of an addition, the operands of a concatenation and its consumers. A tensor has one format, so
    these cannot have different precisions.

    Args:
        model: From `quantize_model`.

    Example:
        >>> from torch import nn
        >>> from bevquant_qnn import quantize_model
        >>> net = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))).model
        >>> [group.modules for group in precision_groups(net)]
        [('0',), ('1',)]
    """
    together = Groups()
    paths: dict[str, list[tuple[bool, TensorQuantizer]]] = {}
    for path, held in _units(model):
        paths[path] = held
        for _, quantizer in held:
            together.union(quantizer, held[0][1])
    members: dict[object, list[str]] = defaultdict(list)
    for path, held in paths.items():
        members[together.find(held[0][1])].append(path)
    groups = []
    for modules in members.values():
        modules.sort(key=lambda path: not any(weight for weight, _ in paths[path]))
        held = [pair for path in modules for pair in paths[path]]
        groups.append(
            PrecisionGroup(
                tuple(modules),
                tuple(dict.fromkeys(q for weight, q in held if weight)),
                tuple(dict.fromkeys(q for weight, q in held if not weight)),
            )
        )
    return groups


def _units(model: nn.Module) -> Iterator[tuple[str, list[tuple[bool, TensorQuantizer]]]]:
    """Yield the paths that hold quantizers, and (whether it reads a weight, quantizer) of each."""
    check_kind(model, nn.Module, "a torch module")
    seen: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        held = [
            (name, child)
            for name, child in module._modules.items()
            if isinstance(child, TensorQuantizer)
        ]
        if held and is_quantized(module):
            # One layer under two paths is one layer.
            if module not in seen:
                seen.add(module)
                yield path, [("weight" in name, quantizer) for name, quantizer in held]
        else:
            for name, quantizer in held:
                yield f"{path}.{name}" if path else name, [("weight" in name, quantizer)]

"""Who reads which tensor: the form in which both analyses hand on what they found."""

from __future__ import annotations

from dataclasses import dataclass, field

from bevquant_quantizers import TensorQuantizer

__all__ = ["Flow", "Read"]


@dataclass(frozen=True)
class Read:
    """One quantizer reading one tensor.

    Attributes:
        quantizer: The reader.
        tensor: Number of the tensor in the flow.
    """

    quantizer: TensorQuantizer
    tensor: int


@dataclass
class Flow:
    """The reads of one pass through a model.

    Attributes:
        reads: In order of execution.
        joins: (output, operand) of quantized concatenations: the output holds the operand's
            values unchanged.
        names: What produced each tensor, in words.
        unfolded: (batch norm, convolution): paths of a batch norm that reads a quantized
            convolution directly.
        products: (path, what): modules whose own forward computes a product by a function call.
        blind_spots: (path, reason): modules whose inside could not be followed.
    """

    reads: list[Read] = field(default_factory=list)
    joins: list[tuple[int, int]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    unfolded: list[tuple[str, str]] = field(default_factory=list)
    products: list[tuple[str, str]] = field(default_factory=list)
    blind_spots: list[tuple[str, str]] = field(default_factory=list)

    def name_of(self, tensor: int) -> str:
        """Return the tensor's description."""
        return self.names.get(tensor, f"tensor {tensor}")

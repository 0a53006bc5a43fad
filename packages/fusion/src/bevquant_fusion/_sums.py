"""Batch norms of sums and concatenations, and batch norms that are an addend themselves.

With y = s·x + t per channel and layers Wᵢuᵢ + bᵢ that nothing else reads:

- a norm of a concatenation: each layer takes s and t of its channels;
- a norm of a sum, s·Σ (Wᵢuᵢ + bᵢ) + t: each layer takes s, one of them t;
- a norm beside or behind convolutions in a sum with what they read, as in blocks that
  re-parameterization makes one convolution of (RepVGG, Ding et al. 2021, section 3.3): it is a
  depthwise 1×1 convolution with weight s and bias t, and becomes one.

The last is not added to the convolution beside it: s on the diagonal of its weight makes the range
of a quantized weight many times wider (timm's repvgg_a0: 21 dB of SQNR against 27).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from bevquant_graph import op_spec

from ._fold import Fold, Part, Refused, layer_problem
from ._foldable import out_channels
from ._graph_reader import Reader
from ._result import Skipped


class Sums:
    """The way through sums and concatenations to the layers that make them.

    Args:
        reader: What the graph says.
        found: What is planned so far.
    """

    def __init__(self, reader: Reader, found: dict[str, Fold | Skipped]) -> None:
        self.reader, self.found = reader, found

    def fold(self, path: str, norms: list[fx.Node]) -> Fold:
        """How a batch norm that no single layer takes goes into what is parallel.

        Raises:
            Refused: It does not.
        """
        reader = self.reader
        numbers = reader.numbers(path, norms)
        if len(norms) != 1:
            raise Refused
        norm = norms[0]
        caller, rest = ["", *reader.stack(norm)][-2], reader.rest(path, norms)
        try:
            parts = self.parts(norm, int(reader.constant(numbers.mean).shape[0]))
        except Refused:
            axes = norm.meta["val"].dim() - 2
            if rest is None or not self.is_branch(norm):
                raise
            return Fold(path, path, numbers, caller, rest, axes=axes)
        return Fold(parts[0].layer, path, numbers, caller, rest, parts=tuple(parts))

    def alone(self, path: str, norms: list[fx.Node]) -> Fold:
        """The depthwise convolution that a batch norm is which nothing takes.

        Raises:
            Refused: It reads an input of the model, or rows, or does more than normalise.
        """
        reader = self.reader
        numbers, rest = reader.numbers(path, norms), reader.rest(path, norms)
        axes = norms[0].meta["val"].dim() - 2
        given = [norm.all_input_nodes[0].op for norm in norms]
        if not path or rest is None or axes < 1 or "placeholder" in given:
            raise Refused
        return Fold(path, path, numbers, ["", *reader.stack(norms[0])][-2], rest, axes=axes)

    def parts(self, norm: fx.Node, channels: int) -> list[Part]:
        """What each layer takes of a norm of a sum or a concatenation of what layers make."""
        reader = self.reader
        value: Any = norm.args[0]
        parts, first = [], 0
        for addends in self.concatenated(value, norm):
            layers = [self.layer(node) for node in addends]
            made = 0 if layers[0] is None else out_channels(reader.modules[layers[0]])
            for index, (node, layer) in enumerate(zip(addends, layers, strict=True)):
                if layer is None or layer_problem(
                    reader.model, reader.owners, layer, made, own_forward=True
                ):
                    raise Refused
                reader.refuse_hooks(node, norm)
                parts.append(Part(layer, tuple(range(first, first + made)), index == 0))
            first += made
        if first != channels:
            raise Refused
        return parts

    def is_branch(self, norm: fx.Node) -> bool:
        """Whether a norm reads what convolutions read with which it is in a sum, or such a sum."""
        value: Any = norm.args[0]
        top = norm
        while (above := _only_reader(top)) is not None and _is_sum(above):
            top = above
        given = value if top is not norm else None
        if given is None and _is_sum(value) and _only_reader(value) is norm:
            top = value
        addends = [node for node in self.added(top) if node is not norm]
        read = {self.made(node).args[0] for node in addends if self.layer(node) is not None}
        others = [given] if given is not None else [n for n in addends if self.layer(n) is None]
        return norm.meta["val"].dim() > 2 and bool(read) and read.issuperset(others)

    # Sums

    def concatenated(self, value: fx.Node, user: fx.Node) -> list[list[fx.Node]]:
        """The addends of every part of the channels."""
        given: Any = value.args
        if op_spec(value.target).name != "cat" or _only_reader(value) is not user:
            return [self.added(value, user)]
        axis = given[1] if len(given) > 1 else value.kwargs.get("dim", 0)
        if axis not in (1, 1 - value.meta["val"].dim()):
            raise Refused
        return [self.added(item, value) for item in given[0]]

    def added(self, value: fx.Node, user: fx.Node | None = None) -> list[fx.Node]:
        """The addends of a value that nothing but ``user`` reads; itself where it is no sum."""
        if not _is_sum(value) or (user is not None and _only_reader(value) is not user):
            return [value]
        found = [node for operand in value.all_input_nodes for node in self.added(operand, value)]
        if len(set(found)) < len(found):
            raise Refused
        return found

    def made(self, node: fx.Node) -> Any:
        """What a layer made of it: the node, or what the batch norm reads that it is."""
        if node.op == "call_function" and op_spec(node.target).kind == "norm":
            fold = self.found.get(self.reader.owner(node))
            if isinstance(fold, Fold) and not (fold.parts or fold.axes):
                return node.all_input_nodes[0]
        return node

    def layer(self, node: fx.Node) -> str | None:
        """The layer that makes a value for one reader, with the batch norm that it takes."""
        reader, made = self.reader, self.made(node)
        layer = None if made.op != "call_function" else reader.layer(made)
        if layer is None or len(node.users) != 1 or not reader.applies_weights(layer, made):
            return None
        reader.refuse_sharing(layer, [node], [made])
        return layer if reader.channel_axis(layer, made) == 1 else None


def _is_sum(node: fx.Node) -> bool:
    """Whether a step adds two tensors of one shape, or a tensor and 0, and nothing else."""
    if node.op != "call_function" or op_spec(node.target).kind != "add" or len(node.args) != 2:
        return False
    values = [node.meta.get("val") for node in node.all_input_nodes]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    two = len(values) == len(shapes) == 2 and shapes[0] == shapes[1]
    return not node.kwargs and (two or (len(shapes) == 1 and 0 in node.args))


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None

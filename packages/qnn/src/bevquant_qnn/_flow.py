"""Readers of each tensor, from the steps of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from bevquant_graph import OPAQUE
from bevquant_qnn._add import QuantAdd, QuantConcat
from bevquant_qnn._functional_calls import Target
from bevquant_qnn._functional_ops import Followed, FunctionalOp
from bevquant_qnn._matmul import QuantAttention, QuantMatmul, equation_and_operands
from bevquant_qnn._steps import Steps, is_batch_norm, is_library_module, is_quantized
from bevquant_quantizers import TensorQuantizer

# Operators that integers pass as integers; every other one makes floats.
_KEEP_INTEGERS = frozenset(
    "identity layout_op concat relu add max_pool avg_pool resize sample quantize sparse_pool "
    "to_dense".split()
)


@dataclass(frozen=True)
class Read:
    """One quantizer reading one tensor."""

    quantizer: TensorQuantizer
    # The tensor, by its place in the flow.
    tensor: object
    # The node that hands it over, `node` the one that reads it.
    value: fx.Node
    node: fx.Node
    # Whether float operations or inputs of the model make the tensor, or the concatenation of it
    # with others.
    from_float: bool
    # The steps of both nodes.
    steps: Steps


@dataclass
class Flow:
    """The reads of one pass through a model.

    Attributes:
        reads: In order of execution.
        ops: (output, operand) of quantized concatenations: the output holds the operand's
            values unchanged.
        names: What produced each tensor, in words.
        unfolded: (batch norm, convolution): paths of a batch norm that reads a quantized
            convolution directly.
        products: (path, what): modules whose own forward computes a product by a function call.
        blind_spots: (path, reason): modules whose inside could not be followed.
    """

    reads: list[Read] = field(default_factory=list)
    joins: list[tuple[object, object]] = field(default_factory=list)
    names: dict[object, str] = field(default_factory=dict)
    unfolded: list[tuple[str, str]] = field(default_factory=list)
    products: list[tuple[str, str]] = field(default_factory=list)
    blind_spots: list[tuple[str, str]] = field(default_factory=list)

    def name_of(self, tensor: object) -> str:
        """Return the tensor's description."""
        return self.names.get(tensor, "a tensor")


def follow(found: Followed, placed: Iterable[tuple[FunctionalOp, nn.Module, Target]]) -> Flow:
    """Find the tensor that each quantizer reads; `placed` are the joins that have a child now."""
    reader = _Reader(found, placed)
    for steps in found.parts:
        for index, node in enumerate(steps.inputs):
            reader.flow.names.setdefault(reader.tensor(steps, node), f"model input {index}")
        for node in steps.nodes:
            reader.step(steps, node)
    reader.flow.blind_spots += found.unfollowed.items()
    return reader.flow


class _Reader:
    def __init__(
        self, found: Followed, placed: Iterable[tuple[FunctionalOp, nn.Module, Target]]
    ) -> None:
        self.flow, self.same = Flow(), found.same
        self.entered: set[object] = set()
        self.floats: dict[tuple[Steps, fx.Node], bool] = {}
        self.placed = {(op.steps, op.node): (op, child, t) for op, child, t in placed}

    def tensor(self, steps: Steps, node: fx.Node) -> object:
        """Representative of a tensor, named after its producer."""
        origin = steps.origin(node)
        found = self.same.get((steps, origin), (steps, origin))
        if origin not in steps.inputs:
            module = steps.module(origin)
            path = steps.path(module)
            whole = module is not None and (is_library_module(module) or is_quantized(module))
            sent = self.placed.get((steps, origin))
            if sent is not None and sent[2].operand is None:
                path, whole = f"{path}.{sent[2].name}".lstrip("."), True
            what = "output of" if whole else f"{steps.name(origin)} in"
            name = f"{what} {path or 'the model'}"
            self.flow.names.setdefault(found, name)
        return found

    def step(self, steps: Steps, node: fx.Node) -> None:
        values = steps.read(node)
        if (steps, node) in self.placed:
            self.functional(*self.placed[steps, node])
        for call in steps.calls(node):
            module = call.module
            entering = [v for v in values if call not in steps.calls(v)]
            quantizer = _input_quantizer(module)
            if not entering or quantizer is None:
                continue
            if isinstance(module, QuantMatmul):
                self.factors(module, steps, equation_and_operands(node.args)[1], node)
                continue
            if not isinstance(module, QuantAdd | QuantConcat):
                if (steps, call) in self.entered:
                    continue  # a sparse convolution may add another tensor after its own product
                entering = entering[:1]
            self.entered.add((steps, call))
            whole = node if isinstance(module, QuantConcat) else None
            self.flow.reads += [self.reading(quantizer, steps, v, node, whole) for v in entering]
            if isinstance(module, QuantConcat):
                self.joined(steps, node, values)
        self.note(steps, node, values)

    def note(self, steps: Steps, node: fx.Node, values: list[fx.Node]) -> None:
        """Notes about a step that no quantizer reads for."""
        module = steps.module(node)
        if module is None:
            return
        path = steps.path(module)
        if is_batch_norm(module):
            for value in values:
                maker = steps.module(steps.origin(value))
                if maker is not None and "_weight_quantizer" in maker._modules:
                    pair = (path, steps.path(maker))
                    if pair not in self.flow.unfolded:
                        self.flow.unfolded.append(pair)
        product = steps.spec(node).product
        # A layer with a forward of its own is reported as a layer already.
        kinds = nn.modules.conv._ConvNd | nn.Linear | QuantMatmul
        layer = isinstance(module, kinds) or is_library_module(module)
        sent = (steps, node) in self.placed
        if product and steps.source is not None and not layer and not sent:
            if (path, product) not in self.flow.products:
                self.flow.products.append((path, product))

    def functional(self, op: FunctionalOp, child: nn.Module, target: Target) -> None:
        """Reads of a functional operation by the child that it is sent to."""
        assert op.node is not None
        if isinstance(child, QuantMatmul | QuantAttention):
            self.factors(child, op.steps, op.operands, op.node)
            return
        operands = [v for v in op.operands if op.steps.is_tensor(v)]
        quantizer = child if isinstance(child, TensorQuantizer) else _input_quantizer(child)
        assert quantizer is not None
        chosen: list[Any] = operands if target.operand is None else [op.operands[target.operand]]
        whole = op.node if isinstance(child, QuantConcat) else None
        self.flow.reads += [self.reading(quantizer, op.steps, v, op.node, whole) for v in chosen]
        if isinstance(child, QuantConcat):
            self.joined(op.steps, op.node, chosen)

    def factors(
        self, child: QuantMatmul | QuantAttention, steps: Steps, operands: Any, node: fx.Node
    ) -> None:
        """Reads of a product of activations, each by a quantizer of its own."""
        for quantizer, value in zip(child.operand_quantizers, operands, strict=True):
            if steps.is_tensor(value):
                self.flow.reads.append(self.reading(quantizer, steps, value, node))

    def reading(
        self,
        quantizer: TensorQuantizer,
        steps: Steps,
        value: fx.Node,
        node: fx.Node,
        whole: fx.Node | None = None,
    ) -> Read:
        """A read of `value`, as an operand of the concatenation `whole` where it is one."""
        tensor, floats = self.tensor(steps, value), self.from_float(steps, whole or value)
        return Read(quantizer, tensor, value, node, floats, steps)

    def from_float(self, steps: Steps, value: fx.Node) -> bool:
        """Whether no integers can reach a tensor: neither a quantized layer's nor a part's.

        A concatenation of integers with floats, as of features with reference points, is floats.
        """
        if (steps, value) not in self.floats:
            self.floats[steps, value] = self._from_float(steps, value)
        return self.floats[steps, value]

    def _from_float(self, steps: Steps, value: fx.Node) -> bool:
        if steps.path(steps.root):
            return False  # who makes the inputs of a part is not known
        pending, seen = [value], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node in seen or node in steps.inputs:
                continue
            seen.add(node)
            if node.target is OPAQUE or self.makes_integers(steps, node):
                return False
            if steps.spec(node).kind == "concat":
                read = steps.read(node)  # nothing where all are constants
                if read and not any(self.from_float(steps, operand) for operand in read):
                    return False
            elif steps.spec(node).kind in _KEEP_INTEGERS:
                read = steps.read(node)
                # Other operands may be positions.
                pending += read[:1] if steps.spec(node).places else read
        return True

    def makes_integers(self, steps: Steps, node: fx.Node) -> bool:
        module: Any = steps.module(node)
        if node.op == "call_module":
            module = steps.root.get_submodule(str(node.target))
        if (steps, node) in self.placed:
            module = self.placed[steps, node][1]
        # A concatenation hands floats on where channels have ranges of their own.
        return module is not None and is_quantized(module) and not isinstance(module, QuantConcat)

    def joined(self, steps: Steps, node: fx.Node, operands: Iterable[fx.Node]) -> None:
        whole = self.tensor(steps, node)
        self.flow.joins += [(whole, self.tensor(steps, value)) for value in operands]


def _input_quantizer(module: nn.Module) -> TensorQuantizer | None:
    found = module._modules["_input_quantizer"] if is_quantized(module) else module
    return found if isinstance(found, TensorQuantizer) else None

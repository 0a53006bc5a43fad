"""Quantizers on the operands of additions, concatenations and products in forwards of any class."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor, fx, nn

from bevquant_graph import PASSED_OVER
from bevquant_qnn._add import QuantAdd, QuantConcat
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._float_parts import float_functions
from bevquant_qnn._functional_calls import CallSite, Site, Target, functional_class, plan_of
from bevquant_qnn._held_weight import PRODUCT_CALLS, Product, holds_weight
from bevquant_qnn._matmul import QuantAttention, QuantMatmul, equation_and_operands
from bevquant_qnn._result import QuantizedModule, SkippedModule
from bevquant_qnn._steps import Call, Steps, ends_in_conv, is_library_module, is_quantized, is_table
from bevquant_qnn._takeover import attach_quantizer
from bevquant_quantizers import QuantDescriptor, TensorQuantizer

_MASKS = "has an operand with infinite values, as a mask of an attention"


@dataclass(frozen=True, eq=False)
class FunctionalOp:
    """An addition or a concatenation in a module's own forward."""

    # The call of the module that makes it.
    call: Call
    # ``"add"``, ``"cat"``, ``"sample"``, ``"product"`` with a parameter, ``"matmul"`` of two
    # activations or ``"attention"``.
    kind: str
    # Its place in the forward, and the number of times that this call passed it before.
    site: Site
    occurrence: int
    # What the model computes, `node` the step; None where it is in none.
    steps: Steps
    node: fx.Node | None
    # It has its quantizer already.
    planned: bool = False
    # It changes a tensor in place that is read under another name.
    hidden: bool = False
    # What is multiplied, of a product.
    product: Product | None = None
    # It adds or concatenates infinite values, as those of a mask.
    masks: bool = False
    # Site and occurrence of an earlier addition of the same two tensors, of which this one is no
    # step of its own: attention asks whether key and value are equal, and reads one of them.
    again: tuple[Site, int] | None = None

    @property
    def operands(self) -> list[object]:
        """What is added, concatenated or sampled."""
        assert self.node is not None
        if self.kind == "sample":
            return list(self.node.args[:1])
        if self.kind == "attention":
            named: dict[str, object] = dict(
                zip(("query", "key", "value"), self.node.args, strict=False)
            )
            return list((named | self.node.kwargs).values())[:3]
        if self.kind == "matmul":
            return equation_and_operands(self.node.args)[1]
        if self.kind != "cat":
            return list(self.node.args[: 2 if self.kind == "add" else 1])
        given = self.node.args[0] if self.node.args else self.node.kwargs.get("tensors")
        return list(given) if isinstance(given, list | tuple) else [given]

    @property
    def dim(self) -> object:
        """The axis of a concatenation."""
        assert self.node is not None
        dim = self.node.args[1] if len(self.node.args) > 1 else self.node.kwargs.get("dim", 0)
        return self.node.kwargs.get("axis", dim)


@dataclass
class Followed:
    """Operations of a model, as far as it could be followed."""

    # The steps of the model, or of its parts.
    parts: list[Steps] = field(default_factory=list)
    # Additions and concatenations of its own forwards.
    ops: list[FunctionalOp] = field(default_factory=list)
    # Path and reason of modules whose own forward could not be followed.
    unfollowed: dict[str, str] = field(default_factory=dict)
    # Equal tensors of several parts: (steps, node) to their representative.
    same: dict[object, object] = field(default_factory=dict)


def may_hold_functional_ops(module: nn.Module, *, ahead: bool = False) -> bool:
    """Whether the module's forward may join tensors that quantized layers make or read.

    With `ahead`, products that are not quantized yet count as layers, and so does a module without
    children: it may join outputs of the layers around it.
    """
    if ahead and is_bare(module):
        return True

    def is_layer(child: nn.Module) -> bool:
        return is_quantized(child) or (
            ahead and holds_weight(child) and not is_library_module(child)
        )

    return is_table(module) or (
        not is_library_module(module)
        and not is_quantized(module)
        and not isinstance(module, QuantAttention)
        and any(map(is_layer, module.modules()))
    )


def is_bare(module: nn.Module) -> bool:
    """Whether the module is an author's forward without children: ``Concat(dim)``."""
    held = (module.children(), module.parameters(), module.buffers())
    return not is_library_module(module) and all(next(iter(of), None) is None for of in held)


def quantize_functional_ops(
    model: nn.Module,
    config: QuantConfig,
    found: Followed,
    observed: bool,
    kept: Collection[nn.Module] = (),
) -> tuple[
    list[QuantizedModule], list[SkippedModule], list[tuple[FunctionalOp, nn.Module, Target]]
]:
    """Quantize what the forward of every module of the model adds, concatenates and multiplies.

    Layers are replaced already, and `kept` are those that the settings leave float. The forward
    stays its author's (`_functional_calls`); the module's class keeps its name. Returns what was
    added, what stays float, and the child of each operation that has one now.
    """
    done: list[QuantizedModule] = []
    skipped: list[SkippedModule] = []
    placed: list[tuple[FunctionalOp, nn.Module, Target]] = []
    own: dict[nn.Module, list[FunctionalOp]] = defaultdict(list)
    for op in found.ops:
        own[op.call.module].append(op)

    def place(path: str, module: nn.Module, *, products: bool) -> list[SkippedModule]:
        ops = [op for op in own[module] if (op.kind == "product") == products]
        placer = _Placer(path, module, ops, config, kept)
        placer.place()
        done.extend(placer.done)
        placed.extend(placer.placed)
        return placer.skipped

    # Products first: their layers decide which operations around them are quantized.
    for path, module in list(model.named_modules()):
        place(path, module, products=True)
    joins = config.quantize_add, config.quantize_concat, config.quantize_sample
    if not (any(joins) or config.quantize_matmul):
        return done, skipped, placed
    for path, module in list(model.named_modules()):
        # No operation of its code can have a child: torch.fx writes it anew in every copy.
        traced = isinstance(module, fx.GraphModule) and any(map(is_quantized, module.modules()))
        if not (may_hold_functional_ops(module) or traced or own[module]):
            continue
        pattern = config.excluded_by(path)
        reason = found.unfollowed.get(path) if pattern is None else f"it is excluded by {pattern!r}"
        if traced and reason is None:
            reason = "torch.fx wrote it; quantize the model that was traced instead"
        if is_table(module) and reason is None and not observed:
            reason = "its inputs are unknown without example inputs"
        if reason is not None:
            hint = "Call" if observed else "Pass example_inputs, or call"
            reason = (
                f"additions and concatenations in its own forward, if any, stay float: {reason}. "
                f"{hint} QuantAdd and QuantConcat there yourself if it has some"
            )
            skipped.append(SkippedModule(path, reason))
            continue
        left = place(path, module, products=False)
        functions = {
            name: None
            for steps in found.parts
            for name in float_functions(steps, module, products=not observed)
        }
        if functions:
            called = ", ".join(functions)
            reason = f"its own forward calls {called}: without a quantized form, so in float"
            skipped.append(SkippedModule(path, reason))
        skipped += left
    return done, skipped, placed


class _Placer:
    """Decides on the functional operations of one module and adds children that compute them."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        ops: list[FunctionalOp],
        config: QuantConfig,
        kept: Collection[nn.Module],
    ) -> None:
        self._path, self._module, self._config = path, module, config
        self._functional_ops, self._kept, self._bare = ops, kept, is_bare(module)
        self._targets: dict[tuple[Site, int], Target] = {}
        self.done: list[QuantizedModule] = []
        self.skipped: list[SkippedModule] = []

    def place(self) -> None:
        first: dict[tuple[Site, int], FunctionalOp] = {}
        for op in self._functional_ops:
            # One child would serve every call.
            if self._bare and op.steps.lengths[self._module] > 1:
                self._pass_over(op, "is that of a module which is called several times")
            elif not op.planned and op.again is None:
                # Later calls share the child of the first one.
                first.setdefault((op.site, op.occurrence), op)
        for op in first.values():
            if op.product is not None and op.node is not None:
                self._product(op, op.product)
        for op in first.values():
            if op.kind == "add" and self._config.quantize_add:
                self._add(op)
        for op in first.values():
            if op.kind == "cat" and self._config.quantize_concat:
                self._concat(op)
            elif op.kind == "sample" and self._config.quantize_sample:
                self._sample(op)
            elif op.kind in ("matmul", "attention") and self._config.quantize_matmul:
                self._matmul(op)
        for op in self._functional_ops:  # equal sums stay equal
            if op.again in self._targets:
                self._targets[op.site, op.occurrence] = self._targets[op.again]
        if self._targets:
            # The author's forward and names stay.
            self._module.__class__ = functional_class(type(self._module), self._plan())

    @property
    def placed(self) -> Iterator[tuple[FunctionalOp, nn.Module, Target]]:
        """The functional operations that have a child now, in every call."""
        for op in self._functional_ops:
            target = self._targets.get((op.site, op.occurrence))
            if target is not None and op.node is not None:
                yield op, self._module.get_submodule(target.name), target

    def _plan(self) -> tuple[CallSite, ...]:
        known = {item.site: item for item in plan_of(self._module)}
        passes: dict[Site, Counter[tuple[Steps, Call]]] = defaultdict(Counter)
        for op in self._functional_ops:
            passes[op.site][op.steps, op.call] += 1
        for site in dict.fromkeys(site for site, _ in self._targets):
            most = max(passes[site].values())
            before = known[site].targets if site in known else ()
            targets = [self._targets.get((site, i)) for i in range(most)]
            both = [t or (before[i] if i < len(before) else None) for i, t in enumerate(targets)]
            known[site] = CallSite(site, tuple(both), frozenset(passes[site].values()))
        return tuple(known.values())

    def _product(self, op: FunctionalOp, product: Product) -> None:
        names = product.names_in(self._module)
        if names is None or not op.steps.is_tensor(op.operands[0]):
            return
        kind = PRODUCT_CALLS[product.function]
        linear = issubclass(kind, nn.Linear)
        holder = names[0].rpartition(".")[0]
        owner = self._module.get_submodule(holder)
        left = self._config.excluded_by(self._full(holder) if holder else self._path)
        if owner in self._kept or left or (linear and not self._config.quantize_linear):
            return

        def layer(read: QuantDescriptor) -> nn.Module:
            weight = self._config.weight_descriptor(0)
            settings = {"quant_desc_input": read, "quant_desc_weight": weight}
            return kind.of(self._module, product, names, **settings)

        base = "quant_linear" if linear else "quant_conv"
        self._attach(op, base, layer, f"product with {self._full(names[0])}")

    def _add(self, op: FunctionalOp) -> None:
        node, steps = op.node, op.steps
        if node is None:
            self._pass_over(op, "is not found upstream of the model's outputs")
            return
        left, right = op.operands
        if not (steps.is_tensor(left) and steps.is_tensor(right)):
            return
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        if steps.is_sparse(left) or steps.is_sparse(right):
            if op.hidden:
                self._pass_over(op, "changes a tensor that is read under another name")
                return
            self._attach(op, "quant_add", lambda d: QuantAdd(quant_desc_input=d), "addition")
            return
        if any(isinstance(steps.module(value), TensorQuantizer) for value in (left, right)):
            return
        if op.masks:
            self._pass_over(op, _MASKS)
            return
        # TensorRT adds the residual inside the convolution that makes the other operand.
        operand = self._residual(op, left, right)
        if operand is None:
            self._pass_over(op, "is not behind a quantized convolution")
            return
        self._attach(op, "residual_quantizer", TensorQuantizer, "residual input", operand)

    def _residual(self, op: FunctionalOp, left: fx.Node, right: fx.Node) -> int | None:
        """Which operand is the residual: behind no convolution, or with fewer layers before it."""
        steps = op.steps
        around = self._around(op)
        behind = [
            any(ends_in_conv(child) for child in steps.producers(value, around))
            for value in (left, right)
        ]
        if not all(behind):
            return behind.index(False) if any(behind) else None
        depths = steps.depths(around)
        return 1 if depths.get(left, 0) >= depths.get(right, 0) else 0

    def _concat(self, op: FunctionalOp) -> None:
        node, steps = op.node, op.steps
        if node is None:
            self._pass_over(op, "is not found upstream of the model's outputs")
            return
        operands, dim = op.operands, op.dim
        nodes = [operand for operand in operands if isinstance(operand, fx.Node)]
        if not any(steps.is_tensor(operand) for operand in nodes):
            return
        if node.meta.get(PASSED_OVER):
            self._pass_over(op, "joins one tensor with nothing")
            return
        if op.masks:
            self._pass_over(op, _MASKS)
            return
        joined = [operand.meta.get("val") for operand in nodes]
        if any(isinstance(value, Tensor) and not value.is_floating_point() for value in joined):
            self._pass_over(op, "joins integers, such as batch indices, with floats")
            return
        if len(nodes) < len(operands) or not isinstance(dim, int):
            self._pass_over(op, "has operands or an axis that are only known when it runs")
            return
        # What a part of the model hands on may be read by layers outside of it.
        computed = any(steps.computes(steps.origin(value), op.call) for value in nodes)
        if not steps.is_read(node) and (computed or not self._path):
            self._pass_over(op, "is an output of the model, or places, that no layer reads")
            return
        if not is_table(self._module) and not self._is_near_layers(op, nodes):
            return
        self._attach(
            op, "quant_concat", lambda d: QuantConcat(dim, quant_desc_input=d), "concatenation"
        )

    def _sample(self, op: FunctionalOp) -> None:
        node, steps = op.node, op.steps
        if node is None:
            self._pass_over(op, "is not found among what the model's outputs are made of")
            return
        (value,) = op.operands
        if not isinstance(value, fx.Node) or not steps.is_tensor(value):
            return
        if isinstance(steps.module(value), TensorQuantizer):
            return
        # Positions and weights of the sampling stay float.
        if self._is_near_layers(op, [value]):
            self._attach(op, "sample_quantizer", TensorQuantizer, "sampled tensor", 0)

    def _matmul(self, op: FunctionalOp) -> None:
        if op.node is None:
            self._pass_over(op, "is not found among what the model's outputs are made of")
            return
        if not all(map(op.steps.is_tensor, op.operands)):
            return  # one is a parameter, a mask or a table
        if op.kind == "attention":
            self._attach(op, "quant_attention", lambda d: QuantAttention(quant_desc_input=d),
                         "attention")  # fmt: skip
            return
        equation, _ = equation_and_operands(op.node.args)
        self._attach(op, "quant_matmul", lambda d: QuantMatmul(equation, quant_desc_input=d),
                     "product of activations")  # fmt: skip

    def _is_near_layers(self, op: FunctionalOp, operands: list[fx.Node]) -> bool:
        """Whether quantized layers make an operand or read the result; noted where none does."""
        assert op.node is not None
        outer, steps = self._around(op), op.steps
        readers = steps.readers(op.node, outer)
        feeders = [child for value in operands for child in steps.producers(value, outer)]
        near = any(is_quantized(m) for child in (*readers, *feeders) for m in child.modules())
        if not near:
            self._pass_over(op, "is neither fed nor read by a quantized layer")
        return near

    def _around(self, op: FunctionalOp) -> Call:
        """The call whose layers make and read the joined tensors; of a bare module its caller."""
        assert op.node is not None
        calls = [c for c in op.steps.calls(op.node) if c != op.call]
        calls = [c for c in calls if not is_bare(c.module)]
        return calls[-1] if self._bare and calls else op.call

    def _attach(
        self,
        op: FunctionalOp,
        base: str,
        make: Callable[[QuantDescriptor], nn.Module],
        was: str,
        operand: int | None = None,
    ) -> None:
        """Add the child that `make` gives for the input's descriptor, unless it is excluded."""
        names = (base if index == 0 else f"{base}_{index}" for index in count())
        name = next(name for name in names if not hasattr(self._module, name))
        path = self._full(name)
        pattern = self._config.excluded_by(path)
        if pattern is not None:
            self.skipped.append(SkippedModule(path, f"excluded by {pattern!r}"))
            return
        child = make(self._config.input_descriptor())
        attach_quantizer(self._module, name, child)
        writes = op.hidden and operand == 0
        self._targets[op.site, op.occurrence] = Target(name, operand, writes)
        self.done.append(QuantizedModule(path, type(child).__name__, was))

    def _pass_over(self, op: FunctionalOp, reason: str) -> None:
        kind = _IN_WORDS.get(op.kind, "addition")
        place = "" if op.node is None else op.steps.location(op.node)
        place = place or f"line {op.site[-1].line}"
        self.skipped.append(SkippedModule(self._path, f"{kind} ({place}) {reason}: left float"))

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


_IN_WORDS = {
    "cat": "concatenation", "sample": "sampling", "matmul": "product of activations",
    "attention": "attention",
}  # fmt: skip

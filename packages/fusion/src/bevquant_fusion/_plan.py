"""Decides for every batch norm of a model where it is folded: by the graph, or by module structure.

In a graph the search goes upstream from the input of a batch norm, through operators that keep
channels apart (`_channels`). All of these channels must come from one layer, and nothing else may
read them. Otherwise, if no ReLU is upstream, the search goes downstream from its output: all
consumers must be layers. The remaining batch norms may belong to parallel layers. With y = s·x + t
per channel and layers Wᵢuᵢ + bᵢ without other consumers:

- a norm of a concatenation: each layer takes s and t of its channels;
- a norm of a sum, s·Σ (±(Wᵢuᵢ + bᵢ)) + t: each layer takes s, one with a positive sign t;
- a norm in a sum or difference with convolutions of the same input, as in blocks that
  re-parameterization turns into one convolution (RepVGG, Ding et al. 2021, section 3.3): it is a
  depthwise 1×1 convolution with weight s and bias t, and becomes one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import Graph, op_spec

from ._channels import (
    channels_along,
    channels_into,
    distinct,
    is_float,
    keeps_channels,
    numbered,
    numbers_behind,
    source,
)
from ._fold import Fold, NormPaths, Part, Refused, layer_problem
from ._foldable import conv_problem, out_channels
from ._graph_reader import (
    BATCH_NORM,
    Reader,
    addends,
    concatenated,
    is_sum,
    only_reader,
    reads_values,
)
from ._products import plain_layers
from ._result import Skipped
from ._structure import from_structure


@dataclass(frozen=True)
class Plan:
    """Folded and skipped batch norms of a model; modules that were not followed; plain layers."""

    folds: tuple[Fold, ...]
    skipped: tuple[Skipped, ...]
    untraced: Mapping[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()


def plan_fusion(model: nn.Module, graph: Graph | None, failure: str = "") -> Plan:
    """Decide for every batch norm of ``model`` where it is folded.

    Without a graph, or in modules that are opaque in it, the structure of the modules decides.
    ``failure`` says why there is no graph although example inputs were given.
    """
    found: dict[str, Fold | Skipped] = {}
    untraced: dict[str, str] = {}
    plain: tuple[str, ...] = ()
    if graph is not None:
        plain = plain_layers(model, graph)
        found |= {p: f for p, f in from_graph(model, graph, plain).items() if p not in plain}
        untraced |= {
            path: entry.reason
            for path, entry in graph.opaque.items()
            if conv_problem(model.get_submodule(path)) is not None
        }
    roots = [""] if graph is None else list(untraced)
    by_structure, refused = from_structure(model, roots)
    if graph is None:
        untraced |= refused
        if failure:
            untraced[""] = failure
    called = {f.conv for f in found.values() if isinstance(f, Fold) and not f.ahead}
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or path in found:
            continue
        guess = by_structure.get(path)
        if isinstance(guess, Fold) and guess.conv in called:
            guess = Skipped(path, f"{guess.conv} is shared: another batch norm reads it, too")
        found[path] = guess or Skipped(path, _never_called(path, untraced, graph))
    return Plan(
        tuple(f for f in found.values() if isinstance(f, Fold)),
        tuple(f for f in found.values() if isinstance(f, Skipped)),
        untraced,
        plain,
    )


def _never_called(path: str, untraced: Mapping[str, str], graph: Graph | None) -> str:
    if path in untraced:
        return f"cannot be followed: {untraced[path]}"
    parts = path.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        parent = ".".join(parts[:depth])
        if parent in untraced:
            return (
                f"{parent or 'the model'} cannot be followed, and only chains of modules inside it "
                f"are folded: {untraced[parent]}"
            )
    if graph is None:
        return "is never called by the forward of the model, as far as it can be read"
    if path in graph.called:
        return "is called, but computes something else than F.batch_norm; give it torch's forward"
    return "is never called by the forward of the model in evaluation mode on the example inputs"


def from_graph(
    model: nn.Module, graph: Graph, plain: Collection[str] = (), *, alone: bool = False
) -> dict[str, Fold | Skipped]:
    """Decide for every batch norm that the graph computes, modules and functional ones.

    With ``alone``, a norm that no layer takes becomes a depthwise convolution.
    """
    planner = _Planner(model, graph, plain)
    found = planner.found
    for path in list(planner.norms):
        planner.plan(path)
    fold = planner.depthwise if alone else planner.fold_parallel
    for path in [path for path, item in found.items() if isinstance(item, Skipped)]:
        with suppress(Refused):
            norms = planner.norms[path]
            found[path] = planner.together(fold(path, norms), norms)
    return found


class _Planner(Reader):
    """Plans one batch norm after the other, each after those that it is folded over."""

    def __init__(self, model: nn.Module, graph: Graph, plain: Collection[str]) -> None:
        super().__init__(model, graph, plain)
        self.found: dict[str, Fold | Skipped] = {}

    def plan(self, path: str) -> Fold | Skipped:
        """Decide for the batch norm at ``path``, and first for one whose fold it depends on."""
        if path not in self.found:
            norms = self.norms[path]
            where = self.graph.location(norms[0])
            # Until it is planned, for a batch norm that reads its own output.
            self.found[path] = Skipped(path, "reads its own output", where)
            try:
                planned: Fold | Skipped = self.together(self.fold(path, norms), norms)
            except Refused as refusal:
                planned = Skipped(path, str(refusal), where)
            del self.found[path]  # folds are made in the order in which they are planned
            self.found[path] = planned
        return self.found[path]

    def together(self, fold: Fold, norms: list[fx.Node]) -> Fold:
        """The fold, of layers that run for each frame for which the batch norm runs."""
        layers = {fold.conv, *(part.layer for part in fold.parts)}
        calls = [node for layer in layers if layer for node in self.layers.get(layer, ())]
        place = self.graph.apart([*norms, *calls])
        if place:
            raise Refused(
                f"runs in another branch than {', '.join(sorted(layers))}: the forward decides by "
                f"values or sizes of the frame ({place})"
            )
        return fold

    def fold(self, path: str, norms: list[fx.Node]) -> Fold:
        """How the batch norm at ``path``, called at ``norms``, is folded."""
        numbers = self.numbers(path, norms)
        ends, inside = self.behind(norms)
        try:
            return self.fold_back(path, norms, numbers, ends, inside)
        except Refused:
            relu = any(op_spec(end.target).kind == "relu" for end in ends)
            ahead = None if relu else self.fold_ahead(path, norms, numbers)
            if ahead is None:
                raise
            return ahead

    def fold_back(
        self,
        path: str,
        norms: list[fx.Node],
        numbers: NormPaths,
        ends: list[fx.Node],
        inside: set[fx.Node],
    ) -> Fold:
        """The fold into the layer upstream that makes all inputs of the batch norm."""
        for node in ends:
            if self.layer(node) is None:
                if node.op == "placeholder":
                    raise Refused("normalises an input of the model")
                raise Refused(self.no_layer(node))
        layers = {self.layer(node) for node in ends}
        if len(layers) != 1:
            shared = f"is shared: it is called {len(norms)} times, and" if norms[1:] else "reads"
            raise Refused(f"{shared} the outputs of several layers: {', '.join(map(str, layers))}")
        conv = str(next(iter(layers)))
        own = all(self.applies_weights(conv, node) for node in ends)
        marks = {n: numbered(n, self.channel_axis(conv, n)) for n in ends}
        self.follow(conv, marks, inside)
        part = self.taken(conv, norms, marks)
        self.refuse_other_readers(part, norms, inside, marks)
        self.refuse_sharing(conv, ends)
        made = len(part.channels)
        problem = layer_problem(self.model, self.owners, conv, made, own_forward=own)
        if problem is not None:
            raise Refused(problem)
        self.refuse_hooks(ends[0], norms[0])
        caller = ["", *self.stack(norms[0])][-2]
        parent = path.rpartition(".")[0]
        indexed = any(outer != parent for outer in self.callers[parent])
        rest = self.rest(path, norms)
        parts = () if part.channels == tuple(range(made)) else (part,)
        return Fold(conv, path, numbers, caller, rest, indexed, parts)

    def no_layer(self, node: fx.Node) -> str:
        """Why a value that no layer made takes no batch norm."""
        if op_spec(node.target).product not in ("", "attention"):
            return (
                f"follows {self.describe(node)}, a product by a function; make it a layer "
                "(nn.Conv2d, nn.Linear) to fold into it"
            )
        return f"follows {self.describe(node)}, not a convolution or linear layer"

    def follow(self, conv: str, marks: dict[fx.Node, Tensor], inside: set[fx.Node]) -> None:
        """Number the values between a layer and a batch norm by the layer's channels."""
        for node in self.operations:
            if node in inside and node not in marks and keeps_channels(node) and is_float(node):
                found = numbers_behind(node, marks)
                if found is None or not distinct(found).all():
                    name = self.describe(source(node))
                    raise Refused(
                        f"follows {name}, which probably mixes channels, or adds values of its own "
                        f"as padding does: the channels of {conv} could not be followed through it"
                    )
                marks[node] = found

    def taken(self, conv: str, norms: list[fx.Node], marks: dict[fx.Node, Tensor]) -> Part:
        """Which channel of a batch norm each channel of a layer goes to."""
        read = [channels_into(marks[norm.all_input_nodes[0]], 1) for norm in norms]
        if read[0] is None or any(other != read[0] for other in read):
            raise Refused(f"normalises another axis than that of the channels {conv} makes")
        made = out_channels(self.modules[conv])
        return Part(conv, tuple(read[0].get(channel + 1, -1) for channel in range(made)))

    def fold_ahead(self, path: str, norms: list[fx.Node], numbers: NormPaths) -> Fold | None:
        """The fold into all that read the batch norm; None where that is more than dense layers."""
        marks = {norm: numbered(norm, 1) for norm in norms}
        ends: dict[str, list[fx.Node]] = defaultdict(list)
        takes: dict[str, set[Any]] = defaultdict(set)
        for node in self.operations[self.operations.index(norms[0]) :]:
            read = [v for v in source(node).all_input_nodes if v in marks]
            if node in marks or not any(reads_values(source(node), v) for v in read):
                continue
            layer = self.layer(node)
            found = None
            if layer is not None:
                if len(read) > 1 or not self.takes_norm(layer, node, read[0]):
                    return None
                ends[layer].append(node)
                takes[layer].add(channels_along(marks[read[0]], self.channel_axis(layer, read[0])))
                continue
            if node.target is BATCH_NORM and read == [node.args[0]]:
                below = self.plan(self.owner(node))
                found = marks[read[0]] if isinstance(below, Fold) and below.ahead else None
            elif keeps_channels(node):
                if not is_float(node):
                    continue  # a split, whose parts are read one by one
                found = numbers_behind(node, marks)
            if found is None:
                return None
            if distinct(found).any():
                marks[node] = found
        # A result of the model must stay normalised.
        if any(user.op == "output" for node in marks for user in node.users):
            return None
        parts = []
        try:
            for layer, nodes in ends.items():
                self.refuse_sharing(layer, nodes)
                self.refuse_hooks(norms[0], nodes[0])
                (channels,) = takes[layer] if len(takes[layer]) == 1 else (None,)
                made = out_channels(self.modules[layer])
                problem = layer_problem(self.model, self.owners, layer, made, own_forward=True)
                if channels is None or problem is not None:
                    return None
                # Numbers begin at 1; 0, no channel, becomes −1.
                parts.append(Part(layer, tuple(c - 1 for c in channels)))
        except Refused:
            return None
        if not parts:
            return None
        caller, rest = ["", *self.stack(norms[0])][-2], self.rest(path, norms)
        return Fold(parts[0].layer, path, numbers, caller, rest, parts=tuple(parts), ahead=True)

    # Sums and concatenations

    def fold_parallel(self, path: str, norms: list[fx.Node]) -> Fold:
        """The fold of a batch norm into several parallel layers."""
        numbers = self.numbers(path, norms)
        if len(norms) != 1:
            raise Refused
        norm = norms[0]
        caller, rest = ["", *self.stack(norm)][-2], self.rest(path, norms)
        try:
            parts = self.parallel(norm, int(self.constant(numbers.mean).shape[0]))
        except Refused:
            if rest is None or not self.is_branch(norm):
                raise
            # Not added to the parallel convolution: s on the diagonal of its weight makes the range
            # of a
            # quantized weight many times wider (timm's repvgg_a0: 21 dB of SQNR against 27).
            return Fold(path, path, numbers, caller, rest, axes=norm.meta["val"].dim() - 2)
        return Fold(parts[0].layer, path, numbers, caller, rest, parts=tuple(parts))

    def depthwise(self, path: str, norms: list[fx.Node]) -> Fold:
        """The depthwise convolution that a batch norm is which nothing takes."""
        numbers, rest = self.numbers(path, norms), self.rest(path, norms)
        axes = norms[0].meta["val"].dim() - 2
        given = [norm.all_input_nodes[0].op for norm in norms]
        if not path or rest is None or axes < 1 or "placeholder" in given:
            raise Refused
        return Fold(path, path, numbers, ["", *self.stack(norms[0])][-2], rest, axes=axes)

    def parallel(self, norm: fx.Node, channels: int) -> list[Part]:
        """Each layer's share of a norm of a sum or a concatenation of layers' outputs."""
        value: Any = norm.args[0]
        parts, first = [], 0
        for nodes in concatenated(value, norm):
            layers = [self.sole_layer(node) for node in nodes]
            made = 0 if layers[0] is None else out_channels(self.modules[layers[0]])
            for index, (node, layer) in enumerate(zip(nodes, layers, strict=True)):
                if layer is None or layer_problem(
                    self.model, self.owners, layer, made, own_forward=True
                ):
                    raise Refused
                self.refuse_hooks(node, norm)
                # One addend adds the shift.
                parts.append(Part(layer, tuple(range(first, first + made)), index == 0))
            first += made
        if first != channels:
            raise Refused
        return parts

    def is_branch(self, norm: fx.Node) -> bool:
        """Whether a norm reads the input of convolutions that it is added to, or such a sum."""
        value: Any = norm.args[0]
        top = norm
        while (above := only_reader(top)) is not None and is_sum(above):
            top = above
        given = value if top is not norm else None
        if given is None and is_sum(value) and only_reader(value) is norm:
            top = value
        nodes = [node for node in addends(top) if node is not norm]
        read = {self.unnormed(node).args[0] for node in nodes if self.sole_layer(node) is not None}
        others = [given] if given is not None else [n for n in nodes if self.sole_layer(n) is None]
        return norm.meta["val"].dim() > 2 and bool(read) and read.issuperset(others)

    def unnormed(self, node: fx.Node) -> Any:
        """What a layer made of it: the node, or what the batch norm reads that it is."""
        if node.op == "call_function" and op_spec(node.target).kind == "norm":
            fold = self.found.get(self.owner(node))
            if isinstance(fold, Fold) and not (fold.parts or fold.axes):
                return node.all_input_nodes[0]
        return node

    def sole_layer(self, node: fx.Node) -> str | None:
        """The layer that makes a value for one reader, with the batch norm that it takes."""
        made = self.unnormed(node)
        layer = None if made.op != "call_function" else self.layer(made)
        if layer is None or len(node.users) != 1 or not self.applies_weights(layer, made):
            return None
        self.refuse_sharing(layer, [made])
        return layer if self.channel_axis(layer, made) == 1 else None

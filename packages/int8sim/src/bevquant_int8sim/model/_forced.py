"""The fake-quantized model beside the integer one, layer by layer on the same inputs."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from bevquant_graph import OPAQUE, check_kind, op_spec, own_inputs, without_autocast
from bevquant_int8sim._sample import sampling_error
from bevquant_int8sim.model._choices import Choices
from bevquant_int8sim.model._float_sparse import OpaqueCall
from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Integers, RequiredType
from bevquant_int8sim.model._integer_model import IntegerModel, exhausted
from bevquant_int8sim.model._integer_steps import (
    Add,
    Matmul,
    MaxPool,
    Quantize,
    Requantize,
    Resize,
    Sample,
    WeightedSum,
)
from bevquant_int8sim.model._reference import GraphRun, Returned, spent_nodes, tensor_of
from bevquant_int8sim.model._rowwise import dequantized
from bevquant_int8sim.model._step import FloatCall, Ref, Step, names_in
from bevquant_int8sim.model._traced_source import Source
from bevquant_int8sim.model._weighted_steps import Weighted
from bevquant_qnn import matched
from bevquant_qnn.matched import Matched

_COMPUTES = (
    Quantize, Requantize, Weighted, Add, Matmul, MaxPool, WeightedSum, Resize, FloatCall,
)  # fmt: skip
_SELECTS = frozenset(
    "getitem select narrow index_select index gather take_along_dim masked_select take".split()
)


class ForcedRun:
    """Runs a batch through the integer model and, node by node, through float graphs beside it.

    The last graph is the fake-quantized model given the integer model's results (teacher forcing):
    there, each step starts from the very values that the integer step read. The other graphs take
    the integer model's choices (`Choices`), so rows behind them are of the same objects.

    Args:
        model: From `simulate`.

    Attributes:
        placed: Values of the program that are judged, in order.
        makers: The step that makes each value.
        operations: What each step of the last batch multiplied, as `Program.operations`.
        sampling: Error of each sampling step's positions and weights, in steps of its input; of
            products of two tensors the largest sum of magnitudes.
        choices: Choices of the graph.
        matched: Of each choice in the last batch, how many objects the first model chooses too.

    Raises:
        ValueError: An integer model that was loaded from a file.
    """

    def __init__(self, model: IntegerModel) -> None:
        check_kind(model, IntegerModel, "a calibrated model, or what simulate makes of one")
        if model.source is None:
            raise ValueError(
                "compare: an integer model that was loaded from a file has no fake-quantized model "
                "beside it; give the calibrated model instead"
            )
        source: Source = model.source
        self.model, self.source, self.graph = model, source, source.graph.graph
        self.makers = {step.outputs[0]: step for step in model.steps}
        self.operations: dict[str, int] = {}
        returned = set(names_in(model.program.result))
        known = {
            step.outputs[0]
            for step in model.steps
            if isinstance(step, _COMPUTES)
            or (step.called in _SELECTS and step.outputs[0] in returned)
        }
        self.values: dict[fx.Node, list[str]] = {}
        placed: set[str] = set()
        for node, forms in source.held.items():
            for required, value in forms.items():
                if not required.relu and value in known and value not in placed:
                    placed.add(value)
                    self.values.setdefault(node, []).append(value)
        self.placed = [step.outputs[0] for step in model.steps if step.outputs[0] in placed]
        # Interpolating does not commute with clamping: what a resize of integers reads, which its
        # operand may hold beside its accumulators, is what the forced one reads too. A result that
        # is held in floats beside is made of the floats.
        self._resized: dict[fx.Node, dict[str | None, list[str]]] = {}
        for node, values in self.values.items():
            reads: dict[str | None, list[str]] = {}
            spec = op_spec(node.target)  # or of a ReLU behind a resize; nearest ones do commute
            resizes = spec.kind == "resize" and not spec.values
            for value in values:
                step = self.makers[value]
                operand = step.args[0]
                integers = resizes and isinstance(step, Resize) and isinstance(operand, Ref)
                # A move of integers, as a stack of two maps, is no step that is compared.
                integers = integers and isinstance(
                    model.program.values[operand.name].form, Integers
                )
                reads.setdefault(operand.name if integers else None, []).append(value)
            self._resized[node] = reads
        self.choices, self.matched = Choices(self.graph), dict[fx.Node, Matched]()
        self._opaque: dict[str, matched.Choices] = {}  # the integer model's, inside of a module
        self._spent = spent_nodes(self.graph)
        self._nodes = list(_late_inputs(self.graph))
        # Of the integer model no more is held than what a node that is still to come reads.
        place_of = {step.outputs[0]: index for index, step in enumerate(model.steps, 1)}
        last: dict[str, fx.Node] = {}
        self._behind: dict[fx.Node, int] = {}
        for node in self._nodes:
            resized = [value for value in self._resized.get(node, ()) if value]
            read = [*self.values.get(node, ()), *self._forms(node), *resized]
            last |= dict.fromkeys(read, node)
            self._behind[node] = max((place_of.get(value, 0) for value in read), default=0)
        self._spent_values: dict[fx.Node, set[str]] = {}
        for value, at in last.items():
            self._spent_values.setdefault(at, set()).add(value)
        self._read = frozenset(last)
        self.sampling: dict[str, float] = {}

    def see(self, step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        """Called after each step of the integer model, with its inputs and outputs."""

    def judge(self, values: list[str], made: dict[str, Tensor], *runs: Any) -> None:
        """Called behind each node, with its values, the integer model's and the runs' results."""
        raise NotImplementedError

    @without_autocast()
    def follow(
        self, batch: Any, *models: nn.Module, returned: Sequence[Returned | None] = ()
    ) -> list[Any]:
        """Run the integer model, each of `models` free, and the forced graph.

        `returned` has for each of `models` a run of it that continues beside, see `GraphRun`.
        Returns the integer model's result, and the forced graph's as a list of its leaves.
        """
        made: dict[str, Any] = {}
        graph = self.source.graph
        # A result then has the members alone that the graph makes.
        batch = graph.members.required_inputs(graph.inputs_of(batch))
        # Each run has inputs of its own: a module that is one node may write to them.
        steps, self.operations, self.matched = self._steps(own_inputs(batch), made), {}, {}
        leaves = graph.leaves(batch)
        runs = [
            GraphRun(
                graph, model, own_inputs(leaves) if graph.opaque else leaves,
                channels_last=index == len(models), returned=beside,
                alone=self.choices.upstream,
            )
            for index, (model, beside) in enumerate(
                zip_longest((*models, graph.model), returned[: len(models)])
            )
        ]  # fmt: skip
        kept = {value: None for value in graph.outputs if isinstance(value, fx.Node)}
        own: dict[fx.Node, Any] = {}
        for node in self._nodes:
            while len(self.operations) < self._behind[node]:
                next(steps)
            for run, beside in zip(runs[:-1], (None, *runs), strict=False):
                if node.target is OPAQUE:
                    self._step_opaque(node, run, beside, count=run is runs[0])
                else:
                    run.step(node, beside)
                    self._choose(node, made, run, own if run is runs[0] else None)
            for read, values in (self._resized.get(node) or {None: []}).items():
                with self._reading(node, read, made, runs[-1]):
                    runs[-1].step(node, runs[-2] if models else None)
                self.judge(values, made, *(run.values[node] for run in runs))
            self._force(node, made, runs[-1])
            if node in kept:
                kept[node] = runs[-1].values[node]
            for spent in self._spent.get(node, ()):
                for run in runs:
                    run.values.pop(spent, None)
            for value in self._spent_values.get(node, ()):
                made.pop(value, None)
        return [exhausted(steps), [kept.get(value, value) for value in graph.outputs]]

    def _steps(self, batch: Any, made: dict[str, Any]) -> Generator[tuple[()], None, Any]:
        """The integer model step by step; inputs of a node are left in `made`."""
        walk, products = self.model.walk(batch), Products()
        while True:
            before, coming = products.count, self.model.steps[len(self.operations) :][:1]
            recorder: Any = nullcontext()
            if coming and isinstance(coming[0].target, OpaqueCall):
                recorder = self._opaque[coming[0].outputs[0]] = matched.Choices()
            try:
                with products, recorder:
                    step, given, outputs = next(walk)
            except StopIteration as ended:
                return ended.value
            own = products.count - before
            self.operations[step.outputs[0]] = step.cost(given, outputs, own)
            if isinstance(step, Matmul):
                self.sampling[step.outputs[0]] = float(step.magnitudes(given).max())
            if isinstance(step, Sample):
                error = sampling_error(step.op, given, step.kwargs.get("mode", ""))
                self.sampling[step.outputs[0]] = error
            if step.outputs[0] in self._read and isinstance(outputs[0], Tensor | tuple | list):
                made[step.outputs[0]] = outputs[0]
            self.see(step, given, outputs)
            yield ()

    def _step_opaque(
        self, node: fx.Node, run: GraphRun, beside: GraphRun | None, *, count: bool
    ) -> None:
        """Run a module that is one node with the choices that the integer model made inside."""
        recorded = (self._opaque.get(value) for value in self._forms(node))
        chosen = matched.Choices(next(recorded, None))
        with chosen:
            run.step(node, beside)
        if count and chosen.matched is not None:
            self.matched[node] = chosen.matched

    def _choose(
        self, node: fx.Node, made: dict[str, Any], run: GraphRun, own: dict[fx.Node, Any] | None
    ) -> None:
        """Give the integer model's choice to a float run.

        `own` are results of the run's own comparisons, to count what it would choose.
        """
        if own is not None and node in self.choices.own:
            own[node] = run.computed_from(node, own)
        value = next((value for value in self._forms(node) if value in made), None)
        if node not in self.choices.nodes or value is None:
            return
        if own is not None and node in self.choices.counted:
            chooses = own.pop(node, run.values[node])
            self.matched[node] = self.choices.matched(node, chooses, made[value])
        run.values[node] = self.choices.given(node, run.values, made[value])

    def _force(self, node: fx.Node, made: dict[str, Tensor], run: GraphRun) -> None:
        """Give the integer model's result to downstream nodes."""
        old = tensor_of(run.values[node])
        value = next((value for value in self._forms(node) if value in made), None)
        if value is not None and old is not None:
            run.values[node] = self.as_float(value, made[value]).to(old.dtype)

    def _forms(self, node: fx.Node) -> list[str]:
        """The integer model's values that can replace a node's, the preferred one first."""
        forms = self.source.held.get(node, {})
        # Preferred is the one closest to the accumulators. A tensor held in integers of several
        # scales keeps the value of the forced run: each reader starts from the accumulators
        # upstream.
        single = [required.form for required in forms] if len(forms) == 1 else []
        values = (forms.get(RequiredType(form)) for form in (FLOAT, ACCUMULATORS, *single))
        return [value for value in values if value]

    @contextmanager
    def _reading(
        self, node: fx.Node, value: str | None, made: dict[str, Tensor], run: GraphRun
    ) -> Iterator[None]:
        """Give the forced run of a resize the integers that the integer step read."""
        if value not in made:
            yield
            return
        operand: Any = node.args[0]
        kept = run.values[operand]
        run.values[operand] = self.as_float(value, made[value]).to(kept.dtype)
        yield
        run.values[operand] = kept

    def as_float(self, value: str, got: Tensor) -> Tensor:
        """The real number of a value of the program."""
        form = self.model.program.values[value].form
        if form == FLOAT:
            return got
        if isinstance(form, Integers):
            scale, axis = torch.tensor(form.scale, dtype=torch.float64), -1
        else:
            step = self.makers[value]
            assert isinstance(step, Weighted)
            scale, axis = step.unit, step.channel_axis
        return dequantized(got, scale, axis, relu=False)


def _late_inputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """All nodes that are read, inputs and parameters right before their first reader."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "placeholder":
            # They come about where the integer model makes their integers, not all ahead of it.
            inputs = [n for n in node.all_input_nodes if n.op == "placeholder" and n not in seen]
            seen.update(inputs)
            yield from (*inputs, node)


def place(step: Step) -> str:
    """How a table or a message names a step."""
    return step.path or f"<{step.label}>"


_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop, **flop_registry}


class Products(TorchDispatchMode):
    """Counts the multiplications of torch's own convolutions and matrix products.

    Attributes:
        count: Of all calls so far, by torch's own formulas.
    """

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, and count."""
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            # The formulas count a multiplication and its addition as two.
            self.count += formula(*args, **(kwargs or {}), out_val=out) // 2
        return out

"""Float, fake-quant and integer results side by side, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from bevquant_int8sim.model._execute import accumulators
from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Demand, Integers
from bevquant_int8sim.model._integer_model import IntegerModel
from bevquant_int8sim.model._layer_sums import LayerSums, blocks
from bevquant_int8sim.model._layer_table import LayerTable
from bevquant_int8sim.model._program import Step
from bevquant_int8sim.model._reference import (
    GraphRun,
    inputs_of,
    spent_nodes,
    tensor_of,
    with_tensor,
)
from bevquant_int8sim.model._rowwise import dequantized
from bevquant_int8sim.model._signature import copied
from bevquant_int8sim.model._simulate import simulate
from bevquant_int8sim.model._traced_source import Source

__all__ = ["LayerComparison", "compare"]

_COMPUTES = frozenset(
    "quantize requantize sparse_conv conv conv_transpose linear add max_pool avg_pool resize "
    "float".split()
)
_LAYERS = frozenset("sparse_conv conv conv_transpose linear".split())


def compare(
    float_model: nn.Module, model: nn.Module | IntegerModel, batches: Iterable[Any]
) -> LayerTable:
    """Compare three executions of one model on the same batches.

    The float model and the fake-quantized one run free, each on its own activations, and so does
    the integer model. A fourth run gives every fake-quantized layer the integer model's inputs
    (teacher forcing): there, an integer layer should differ by rounding alone, at most one step of
    its output.

    Args:
        float_model: The folded float model that was quantized, in evaluation mode.
        model: The calibrated model, or an integer model that `simulate` made of it.
        batches: Inputs; each a tuple of positional ones, a dict of named ones, or one input.

    Returns:
        A row per layer. `print` it; `LayerTable.first_departure` names the layer where the integer
        result leaves the fake-quantized one.

    Raises:
        ValueError: No batches, an integer model that was loaded from a file, or a float model that
            lacks a layer of the calibrated one.
    """
    all_batches = iter(batches)
    first = next(all_batches, None)
    if first is None:
        raise ValueError("compare: there are no batches; give at least one")
    if isinstance(model, nn.Module):
        model = simulate(model, first)
    comparison = LayerComparison(float_model, model)
    for batch in chain([first], all_batches):
        comparison.add(comparison.measure(batch))
    return comparison.table()


class LayerComparison:
    """`compare` batch by batch, for batches that several processes share.

    What one batch gives is a record: named arrays, which can be sent and kept. Records that are
    added in the order of their batches give the table of one process, bit for bit.

    Args:
        float_model: The folded float model that was quantized, in evaluation mode.
        model: The integer model that `simulate` made of the calibrated one.

    Raises:
        ValueError: An integer model that was loaded from a file, or a float model that lacks a
            layer of the calibrated one.

    Example:
        >>> import copy
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> image = torch.randn(1, 3, 8, 8)
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
        >>> quantized = quantize_model(copy.deepcopy(net), example_inputs=image).model
        >>> _ = calibrate(quantized, [image])
        >>> comparison = LayerComparison(net, simulate(quantized, image))
        >>> comparison.add(comparison.measure(image))
        >>> comparison.table().wrong
        ()
    """

    def __init__(self, float_model: nn.Module, model: IntegerModel) -> None:
        if model.source is None:
            raise ValueError(
                "compare: an integer model that was loaded from a file has no fake-quantized model "
                "beside it; give the calibrated model instead"
            )
        source: Source = model.source
        self.float_model, self.model, self.source = float_model, model, source
        self.graph = source.traced.graph
        self.spent = spent_nodes(self.graph)
        self.sums: dict[str, LayerSums] = {}  # of the batch that is run
        self._totals: dict[str, LayerSums] = {}
        known = {step.outputs[0]: step for step in model.steps if step.op in _COMPUTES}
        self._makers = {step.outputs[0]: step for step in model.steps}
        self.values: dict[str, list[str]] = {}
        placed: set[str] = set()
        for name, forms in source.held.items():
            for demand, value in forms.items():
                if not demand.relu and value in known and value not in placed:
                    placed.add(value)
                    self.values.setdefault(name, []).append(value)
        last = {
            value: node.name
            for node in self.graph.nodes
            for value in source.held.get(node.name, {}).values()
        }
        self._spent_values: dict[str, list[str]] = {}
        for value, at in last.items():
            self._spent_values.setdefault(at, []).append(value)
        for value, step in known.items():
            if value in placed:
                form = model.program.values[value].form
                kind = f"int{form.bits}" if isinstance(form, Integers) else str(form)
                self._totals[value] = LayerSums(_place(step), _op(step), kind, _why(step))

    @torch.no_grad()
    def measure(self, batch: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Run one batch; its record."""
        self.sums = {
            value: LayerSums(sums.path, sums.op, sums.form, sums.why)
            for value, sums in self._totals.items()
        }
        self._run(batch)
        numbers = [sums.numbers() for sums in self.sums.values()]
        return {
            "sums": np.array([sums for sums, _ in numbers], np.float64),
            "counts": np.array([counts for _, counts in numbers], np.int64),
        }

    def add(self, record: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Add the record of a batch.

        Raises:
            ValueError: It is of another model.
        """
        if len(record["sums"]) != len(self._totals):
            raise ValueError(
                f"compare: a record of {len(record['sums'])} steps, where this model has "
                f"{len(self._totals)}: add records of the same model"
            )
        for total, *numbers in zip(
            self._totals.values(), record["sums"], record["counts"], strict=True
        ):
            total.merge(*numbers)

    def table(self) -> LayerTable:
        """A row per layer, over the records added."""
        return LayerTable(tuple(sums.row() for sums in self._totals.values()))

    def _run(self, batch: Any) -> None:
        made: dict[str, Tensor] = {}

        def keep(step: Step, given: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
            if isinstance(outputs[0], Tensor):
                made[step.outputs[0]] = outputs[0]
            sums = self.sums.get(step.outputs[0])
            if sums is not None and step.op in _LAYERS:
                sums.add_peak(accumulators(step, given, self.model.backend))

        traced = self.source.traced
        # Each run has inputs of its own: a model may write to them.
        self.model.run(copied(batch), record=False, observe=keep)
        runs = [
            GraphRun(traced, model, inputs_of(traced, copied(batch)))
            for model in (self.float_model, traced.model, traced.model)
        ]
        for node in self.graph.nodes:
            for run in runs:
                run.step(node)
            self._judge(node, made, *(run.values[node] for run in runs))
            self._force(node, made, runs[2])
            for spent in self.spent.get(node, ()):
                for run in runs:
                    run.values.pop(spent, None)
            for value in self._spent_values.get(node.name, ()):
                made.pop(value, None)

    def _judge(
        self, node: fx.Node, made: dict[str, Tensor], wanted: Any, fake: Any, forced: Any
    ) -> None:
        for value in self.values.get(node.name, ()):
            tensors = [tensor_of(v) for v in (wanted, fake, forced)]
            if value not in made or any(t is None for t in tensors):
                continue
            reference, free, taught = (t for t in tensors if t is not None)
            sums, got = self.sums[value], made[value]
            form = self.model.program.values[value].form
            if not isinstance(form, Integers):
                sums.add_floats(reference, free, self._as_float(value, got))
            else:
                sums.add_integers(reference, free, taught, got, form)

    def _force(self, node: fx.Node, made: dict[str, Tensor], run: GraphRun) -> None:
        """Let what follows read the integer model's result."""
        old = tensor_of(run.values[node])
        forms = self.source.held.get(node.name, {})
        # What keeps most of the accumulators, where there are several forms.
        for form in (FLOAT, ACCUMULATORS, *(demand.form for demand in forms)):
            value = forms.get(Demand(form), "")
            if value in made and old is not None:
                tensor = self._as_float(value, made[value])
                run.values[node] = with_tensor(run.values[node], tensor.to(old.dtype))
                return

    def _as_float(self, value: str, got: Tensor) -> Tensor:
        form = self.model.program.values[value].form
        if isinstance(form, Integers):
            made = got.new_empty(got.shape, dtype=torch.float32)
            for integers, floats in blocks(got, made):
                floats.copy_(integers.double().mul_(form.scale))
            return made
        if form == FLOAT:
            return got.clone()  # what reads it in the forced run may write to it
        step = self._makers[value]
        axis = step.attributes.get("channel_axis", -1)
        return dequantized(got, step.tensors["scale"], axis, relu=False)


def _place(step: Step) -> str:
    return step.path or f"<{step.attributes.get('what', step.op)}>"


def _op(step: Step) -> str:
    name = str(step.attributes["what"]) if step.op == "float" else step.op
    return f"{name} + ReLU" if step.attributes.get("relu") and name != "relu" else name


def _why(step: Step) -> str:
    """What may part a layer from its fake-quantized form by more than one step."""
    if step.op == "resize" and step.kwargs.get("mode") == "bilinear":
        return "interpolates integers: rounded before and behind"
    multiplier = step.tensors.get("multiplier")
    if multiplier is None or step.tensors.get("bias") is None:
        return ""
    coarse = float(multiplier.max()) / 2
    return f"bias rounded to ±{coarse:.2g} steps" if coarse >= 0.5 else ""

"""Float, fake-quant and integer results side by side, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_graph import check_kind, checked_batches, reported_by
from bevquant_int8sim.model._float8 import ROUNDINGS, Float8Layer
from bevquant_int8sim.model._forced import ForcedRun, place
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._integer_model import IntegerModel
from bevquant_int8sim.model._layer_sums import LayerSums
from bevquant_int8sim.model._layer_table import LayerTable
from bevquant_int8sim.model._reference import Returned, layer_calls, tensor_of
from bevquant_int8sim.model._simulate import simulate
from bevquant_int8sim.model._step import FloatCall, LayoutCall, Step
from bevquant_int8sim.model._verify import StepBounds, check_results
from bevquant_int8sim.model._weighted_steps import Weighted
from bevquant_qnn import USELESS_DB, float_remedy
from bevquant_qnn.matched import fewest
from bevquant_quantizers import CalibrationReport


@reported_by("compare")
def compare(
    float_model: nn.Module,
    model: nn.Module | IntegerModel,
    batches: Iterable[Any],
    *,
    verify: bool = False,
    report: CalibrationReport | None = None,
) -> LayerTable:
    """Compare three executions of one model on the same batches, layer by layer.

    The float, the fake-quantized and the integer model each run on their own activations. A fourth
    run gives each fake-quantized layer the integer model's inputs (teacher forcing): there an
    integer layer may differ by rounding alone, at most one step of its output.

    Args:
        float_model: The folded float model that was quantized, in evaluation mode.
        model: The calibrated model, or the integer model that `simulate` made of it.
        batches: Inputs; each a tuple of positional inputs, a dict of named inputs, or one input.
        verify: Refuse on the first batch what `simulate` refuses, for an integer model that was
            made with ``verify=False``.
        report: Report of `calibrate`: channels that a range erases are named below the table.
            Below 15 dB `bevquant_qnn.float_remedy` adds its text: layers that in float would make
            the result usable.

    Returns:
        A row per layer, and per returned selection (slice, index, gather, topk). `print` shows it;
        `LayerTable.first_departure` is the layer where the integer result departs from the
        fake-quantized one.

    Raises:
        ValueError: No batches, an integer model that was loaded from a file, a float model that
            lacks a layer of the calibrated one, or with `verify` a step that differs from the
            fake-quantized model by more than rounding explains.
    """
    check_kind(float_model, nn.Module, "a torch module")
    all_batches = iter(checked_batches(batches))
    first = next(all_batches, None)
    if first is None:
        raise ValueError("compare: there are no batches; give at least one")
    if isinstance(model, nn.Module):
        model = simulate(model, first, verify=False)  # it is compared here
    comparison = LayerComparison(float_model, model, verify=verify)
    for batch in chain([first], all_batches):
        comparison.add(comparison.measure(batch))
    found = () if report is None else report.findings
    notes = [str(f) for f in found if f.kind == "channels"]
    table = comparison.table()
    if any((row.integer_sqnr_db or math.inf) < USELESS_DB for row in table.rows):
        remedy = float_remedy(comparison.source.graph.model, [first])
        notes += [str(remedy)] if remedy is not None else []
    return replace(table, notes=tuple(notes))


class LayerComparison(ForcedRun):
    """`compare` batch by batch, for batches that several processes share.

    `measure` returns a record of one batch: named arrays, which can be sent and stored. Records
    that are added in the order of their batches give the table of a single process, bit for bit.

    Args:
        float_model: The folded float model that was quantized, in evaluation mode.
        model: The integer model that `simulate` made of the calibrated one.
        verify: As in `compare`: the first call of `measure` verifies.

    Raises:
        ValueError: An integer model that was loaded from a file, or a float model that lacks a
            layer of the calibrated one.

    Attributes:
        batches: Number of batches whose records were added.

    Example:
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> image = torch.randn(1, 3, 8, 8)
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
        >>> quantized = quantize_model(net, example_inputs=image).model
        >>> _ = calibrate(quantized, [image])
        >>> comparison = LayerComparison(net, simulate(quantized, image))
        >>> comparison.add(comparison.measure(image))
        >>> comparison.table().wrong
        ()
    """

    def __init__(
        self, float_model: nn.Module, model: IntegerModel, *, verify: bool = False
    ) -> None:
        super().__init__(model)
        self.float_model = float_model
        self._bounds = StepBounds(self) if verify else None
        self.sums: dict[str, LayerSums] = {}  # of the batch that is run
        self._totals: dict[str, LayerSums] = {}
        self.batches = 0
        upstream = self.choices.upstream
        self._chosen_for = {v: upstream.get(n, ()) for n, held in self.values.items() for v in held}
        for value in self.placed:
            step, form = self.makers[value], model.program.values[value].form
            kind = step.args[2] if step.target in ROUNDINGS else str(form)
            kind = step.target.form if isinstance(step.target, Float8Layer) else kind
            self._totals[value] = LayerSums(place(step), _op(step), kind, _why(step))

    @property
    def layers(self) -> frozenset[str]:
        """Paths of the layers and quantizers whose results `measure` can be given."""
        graph = self.source.graph
        models = self.float_model, graph.model
        alone = self.choices.upstream
        return frozenset(path for m in models for path, _ in layer_calls(graph, m, alone).values())

    @torch.no_grad()
    def measure(
        self, batch: Any, returned: Sequence[Returned | None] = ()
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run one batch; its record.

        Args:
            batch: Inputs.
            returned: Of whoever runs the float model and the calibrated one on the batch for
                reasons of their own, step by step beside this: what a layer (its path, and which
                of its calls, from 0) returned there, None where it is not called. These layers,
                `layers` names them, are then not computed again.

        Raises:
            ValueError: Where it is to verify, what `simulate` raises.
        """
        self.sums = {
            value: LayerSums(sums.path, sums.op, sums.form, sums.why)
            for value, sums in self._totals.items()
        }
        calibrated = self.source.graph.model
        results = self.follow(batch, self.float_model, calibrated, returned=returned)
        if self._bounds is not None:
            check_results(self.model, batch, *results)
            self._bounds = None
        return {
            "sums": np.array([sums.numbers() for sums in self.sums.values()], np.float64),
            "operations": np.array(list(self.operations.values()), np.int64),
        }

    def add(self, record: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Add the record of a batch; the first one's operations become the model's.

        Raises:
            ValueError: It is of another model.
        """
        if len(record["sums"]) != len(self._totals):
            raise ValueError(
                f"compare: a record of {len(record['sums'])} steps, where this model has "
                f"{len(self._totals)}: add records of the same model"
            )
        if not self.batches:
            steps = (step.outputs[0] for step in self.model.steps)
            counts = (int(count) for count in record["operations"])
            self.model.program.operations.update(zip(steps, counts, strict=True))
        self.batches += 1
        for total, numbers in zip(self._totals.values(), record["sums"], strict=True):
            total.merge(numbers)

    def table(self) -> LayerTable:
        """A row per layer, over the records added."""
        return LayerTable(tuple(sums.row() for sums in self._totals.values()))

    def see(self, step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        """Note the largest accumulator of a layer."""
        sums = self.sums.get(step.outputs[0])
        if sums is not None and isinstance(step, Weighted):
            kept = step.keeps_accumulators
            sums.add_peak(made[0] if kept else step.accumulators(given, self.model.backend))

    def judge(self, values: list[str], made: dict[str, Tensor], *runs: Any) -> None:
        """Add up the outputs of the float model, the fake-quantized one and the forced one."""
        wanted, fake, forced = runs
        for value in values:
            tensors = [tensor_of(v) for v in (wanted, fake, forced)]
            if value not in made or any(t is None for t in tensors):
                continue
            reference, free, teacher_forced = (t for t in tensors if t is not None)
            sums, got = self.sums[value], made[value]
            chosen = [self.matched[c] for c in self._chosen_for[value] if c in self.matched]
            if chosen:  # the one with most other objects
                sums.add_matched(fewest(chosen))
            if self._bounds is not None:
                self._bounds.hold(value, got, teacher_forced)
            form = self.model.program.values[value].form
            if not isinstance(form, Integers):
                sums.add_floats(reference, free, self.as_float(value, got))
            else:
                sums.add_integers(reference, free, teacher_forced, got, form)


def _op(step: Step) -> str:
    name = step.name if isinstance(step, FloatCall | LayoutCall) else step.op
    return f"{name} + ReLU" if step.clamps[0] and name != "relu" else name


def _why(step: Step) -> str:
    """Possible causes of a difference of more than one step from the fake-quantized layer."""
    if not isinstance(step, Weighted) or step.multiplier is None or step.bias is None:
        return ""
    coarse = float(step.multiplier.max()) / 2
    return f"bias rounded to ±{coarse:.2g} steps" if coarse >= 0.5 else ""

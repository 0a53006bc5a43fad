"""Float against fake-quantized, layers, stages and quantizers, frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import nn

import bevquant_int8sim
from bevfusion.model import Batch
from bevfusion_quant.measure._stage_maps import StageMaps, stage_probes, whole_output
from bevquant_qnn import LayerComparison, LayerRow
from bevquant_quantizers import QuantizerValues, watching_quantizers
from bevquant_quantizers.ranks import Record

Pair = Callable[[int, Any, Any], None]


class Comparison(NamedTuple):
    """Rows of the layer table, the stages, and both models' output for the first batch.

    The outputs are None in a process that another one spared the first batch.
    """

    rows: list[LayerRow]
    stages: list[StageMaps]
    wanted: Any
    got: Any


def compare_layers(
    float_model: nn.Module,
    quantized_model: nn.Module,
    batches: Iterable[Batch],
    each: Pair | None = None,
) -> Comparison:
    """`bevquant_qnn.compare_layers` of a detector, with its stages.

    Args:
        float_model: The folded float model.
        quantized_model: The calibrated model made from it.
        batches: At least one; every batch is run through both models.
        each: Called with the batch's index and both models' output, batch after batch.

    Returns:
        Rows pooled over all batches. The row `output` is the bird's-eye view that the model
        answers, or the head's heatmap.
    """
    comparison = DetectorComparison(float_model, quantized_model)
    with comparison.watching():
        for index, batch in enumerate(batches):
            record, wanted, got = comparison.run(index, batch)
            comparison.add(record)
            if each is not None:
                each(index, wanted, got)
    return comparison.result()


class DetectorComparison:
    """`compare_layers` frame by frame: what one frame gave is a record, and records are added up.

    Args:
        float_model: The folded float model.
        quantized_model: The calibrated model made from it.
        integers: The comparison of both with the integer model, which then goes on beside them and
            reads what their layers return.

    Attributes:
        quantizers: What each quantizer was handed in the first batch; empty in a process that
            another one spared that.
    """

    def __init__(
        self,
        float_model: nn.Module,
        quantized_model: nn.Module,
        integers: bevquant_int8sim.LayerComparison | None = None,
    ) -> None:
        self.quantizers: list[QuantizerValues] = []
        self._quantized, self._stages = quantized_model, stage_probes(quantized_model)
        self._layers = LayerComparison(
            float_model,
            quantized_model,
            output=whole_output,
            watch={stage.path: stage.judge for stage in self._stages},
            beside=integers,
        )
        self.watching = self._layers.watching
        self._kind = ""
        self._first: tuple[Any, Any] = (None, None)

    def run(self, index: int, batch: Batch) -> tuple[dict[str, Any], Any, Any]:
        """Run both models on a batch; a record of arrays, and the two outputs."""
        first = index == 0
        for stage in self._stages:
            stage.start(draws=first)
        with ExitStack() as stack:
            if first:
                self.quantizers = stack.enter_context(watching_quantizers(self._quantized))
            record, wanted, got = self._layers.run(batch)
        if first:
            self._first = wanted, got
        record |= {
            "stages.sums": np.array([s.frame_sums.as_sums() for s in self._stages], np.float64),
            "stages.channels": np.array([s.channels for s in self._stages], np.int64),
            "heatmap": np.array(isinstance(wanted, dict)),
        }
        return record, wanted, got

    def add(self, record: Record) -> None:
        """Add a frame's record; frames come in their order."""
        self._layers.add(record)
        for stage, sums, channels in zip(
            self._stages, record["stages.sums"], record["stages.channels"], strict=True
        ):
            stage.add_sums(sums, int(channels))
        self._kind = "heatmap" if record["heatmap"] else "bird's-eye view"

    def result(self) -> Comparison:
        """Rows and stages over the frames added.

        Raises:
            ValueError: None were.
        """
        *rows, output = self._layers.rows()
        stages = [stage.result() for stage in self._stages]
        return Comparison([*rows, replace(output, kind=self._kind)], stages, *self._first)

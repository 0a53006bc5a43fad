"""A layer's row in the comparison of float and fake-quantized model, and the sums behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from bevquant_graph import check_kind
from bevquant_qnn._attention import QuantMultiheadAttention
from bevquant_qnn._input_channels import InputChannels
from bevquant_qnn._pair_sums import PairSums, count_beyond
from bevquant_qnn.matched import Matched
from bevquant_quantizers.documents import record_table

CHANNELS_LAST = (nn.Linear, QuantMultiheadAttention)


@dataclass(frozen=True)
class LayerRow:
    """Distance of the fake-quant model's output of one layer from the float model's.

    Attributes:
        sqnr_db: 10·log10(Σ float² / Σ (quant − float)²); None for equal outputs and an all-zero
            float output, minus infinity where `not_finite`.
        cosine: Cosine of the two outputs as vectors; None where one is zero.
        saturated: Share of the layer's input values beyond its range.
        rows: Mean number of active voxels (cells or pixels of dense maps) per batch.
        kept: Rows of the float and of the quantized output, where values decide which rows remain
            and the numbers differ, by code that torch does not run. Such batches are not compared.
            Else None.
        matched: Of a layer after a choice by value (``topk``, ``sort``, ``argmax``,
            ``x[score > 0.5]``): objects that both models choose, the number that the float model
            and that the quantized model chooses, where they have the fewest in common. The float
            output is then that of the quantized model's objects, in its order. None where both
            choose the same objects.
        not_finite: Number of values that are infinite or NaN in the quantized model alone.
    """

    layer: str
    kind: str
    channels: int
    rows: float
    sqnr_db: float | None
    cosine: float | None
    saturated: float | None
    input_amax: float | None
    kept: tuple[int, int] | None = None
    matched: tuple[int, int, int] | None = None
    not_finite: int = 0


def layer_table(rows: Sequence[object]) -> str:
    """Rows of `compare_layers` as text."""
    columns = {
        "layer": "{layer}",
        "channels": "{channels}",
        "rows": "{rows:,.0f}",
        "SQNR dB": "{sqnr_db:.1f}",
        "cosine": "{cosine:.6f}",
        "saturated %": "{saturated:100*.3f}",
        "input amax": "{input_amax:.4g}",
    }
    if any(getattr(row, "kept", None) for row in rows):
        columns["rows kept (float, quantized)"] = "{kept}"
    if any(getattr(row, "matched", None) for row in rows):
        columns["matched (both, float, quantized)"] = "{matched}"
    if any(getattr(row, "not_finite", 0) for row in rows):
        columns["not finite"] = "{not_finite:,}"
    return record_table(rows, columns)


@dataclass
class LayerSums(PairSums):
    """Sums of a row, of one batch or of all; counts are floats too, for one record of both."""

    channels: float = 0
    rows: float = 0
    batches: float = 0
    beyond: float = 0
    inputs: float = 0
    kept_float: float = 0
    kept: float = 0
    matched: float = 0
    chosen_float: float = 0
    chosen: float = 0

    def add_sums(self, sums: Sequence[float]) -> None:
        """Add the record of a batch; the channels are the same in each."""
        self.channels = 0
        super().add_sums(sums)


@dataclass(eq=False)
class LayerProbe:
    """Watches one layer in both models."""

    layer: str
    kind: str
    reader: nn.Module | None  # the quantized module whose input range this is
    output: Callable[[Any], Tensor]
    batch: LayerSums = field(default_factory=LayerSums)
    total: LayerSums = field(default_factory=LayerSums)

    def judge(
        self,
        wanted: Tensor,
        got: Tensor,
        matched: Matched | None = None,
        *,
        channels_last: bool = False,
    ) -> None:
        last, batch = channels_last or got.dim() < 2, self.batch
        channels = got.shape[-1 if last else 1] if got.dim() else 1
        rows = got.numel() // max(channels, 1)
        if wanted.shape == got.shape:
            batch.add(wanted, got)
        else:  # values decide which rows remain
            batch.kept_float += wanted.numel() // max(channels, 1)
            batch.kept += rows
        batch.channels = channels
        batch.rows += rows
        batch.batches += 1
        if matched is not None:
            batch.matched, batch.chosen_float, batch.chosen = matched

    def count(self, module: nn.Module, args: Any) -> None:
        amax = self.amax()
        if amax is None:
            return
        for value in args:
            x = self.output(value)
            if isinstance(self.reader, InputChannels):
                x = self.reader.times_factors(x)
            self.batch.inputs += x.numel()
            self.batch.beyond += count_beyond(x, amax)

    def amax(self) -> float | None:
        amax = getattr(getattr(self.reader, "_input_quantizer", None), "_amax", None)
        return float(amax.max()) if isinstance(amax, Tensor) else None

    def row(self) -> LayerRow:
        total = self.total
        kept = int(total.kept_float), int(total.kept)
        chosen = int(total.chosen_float), int(total.chosen)
        return LayerRow(
            layer=self.layer,
            kind=self.kind,
            channels=int(total.channels),
            rows=total.rows / max(total.batches, 1),
            sqnr_db=total.sqnr_db,
            cosine=total.cosine,
            saturated=total.beyond / total.inputs if total.inputs else None,
            input_amax=self.amax(),
            kept=kept if any(kept) else None,
            matched=(int(total.matched), *chosen) if {total.matched} != {*chosen} else None,
            not_finite=int(total.not_finite),
        )


def layer_probes(
    float_model: nn.Module, quantized_model: nn.Module, output: Callable[[Any], Tensor]
) -> list[LayerProbe]:
    """Layers with an input quantizer; an addition stands for the block whose last step it is."""
    for model in (float_model, quantized_model):
        check_kind(model, nn.Module, "a torch module")
    known = dict(float_model.named_modules())
    quantized_layers = dict(quantized_model.named_modules())
    probes: dict[str, LayerProbe] = {}
    for path, module in quantized_model.named_modules(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        if name.startswith(("residual_quantizer", "sample_quantizer")):
            # Other layers may hold the same quantizer, so what it counts is not this block's.
            layer, reader = owner, None
        elif getattr(module, "_input_quantizer", None) is not None:
            # What quantization added (QuantAdd, QuantConcat) exists in the quantized model alone,
            # and torch's attention reads the weight of its projections without calling them: these
            # are compared where their block ends.
            within = isinstance(quantized_layers.get(owner), QuantMultiheadAttention)
            layer, reader = owner if within or path not in known else path, module
        else:
            continue
        if layer in known and layer in quantized_layers and layer not in probes:
            kind = type(quantized_layers[layer]).__name__
            probes[layer] = LayerProbe(layer, kind, reader, output)
    return list(probes.values())

"""Float against fake-quant, layer by layer, on the same frames."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Comparison", "LayerRow", "compare_layers"]


class Batch(NamedTuple):
    """Voxels of one frame: float [voxels, channels], int32 [voxels, 4] (batch, x, y, z), frames."""

    features: Tensor
    coords: Tensor
    batch_size: int


@dataclass(frozen=True)
class LayerRow:
    """How far the fake-quant model's output of one layer is from the float model's.

    `sqnr_db` is 10·log10(Σ float² / Σ (quant − float)²), None where the two are equal or the float
    output is all zero; `cosine` the cosine of the two outputs seen as vectors, None where one is
    zero; `saturated` the share of the layer's input values beyond its range; `rows` the mean
    number of active voxels (cells, for the dense map) in a frame.
    """

    layer: str
    kind: str
    channels: int
    rows: float
    sqnr_db: float | None
    cosine: float | None
    saturated: float | None
    input_amax: float | None


class Comparison(NamedTuple):
    """Rows of the table, and both models' output for the first batch."""

    rows: list[LayerRow]
    wanted: Tensor
    got: Tensor


@dataclass
class _Sums:
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    energy: float = 0.0
    rows: int = 0
    frames: int = 0
    channels: int = 0
    beyond: int = 0
    inputs: int = 0

    def add(self, wanted: Tensor, got: Tensor) -> None:
        f, q = wanted.double().flatten(), got.double().flatten()
        self.signal += float(f @ f)
        self.energy += float(q @ q)
        self.dot += float(f @ q)
        q -= f
        self.noise += float(q @ q)
        self.frames += 1

    def row(self, layer: str, kind: str, amax: float | None) -> LayerRow:
        comparable = self.signal > 0 and self.noise > 0
        length = math.sqrt(self.signal) * math.sqrt(self.energy)
        return LayerRow(
            layer=layer,
            kind=kind,
            channels=self.channels,
            rows=self.rows / max(self.frames, 1),
            sqnr_db=10 * math.log10(self.signal / self.noise) if comparable else None,
            cosine=self.dot / length if length else None,
            saturated=self.beyond / self.inputs if self.inputs else None,
            input_amax=amax,
        )


@dataclass
class _Probe:
    """Watches one layer in both models."""

    layer: str
    kind: str
    reader: nn.Module | None  # the quantized module whose input range this is
    sums: _Sums = field(default_factory=_Sums)
    wanted: Tensor | None = None

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.wanted = _values(output)

    def judge(self, module: nn.Module, args: Any, output: Any) -> None:
        got = _values(output)
        assert self.wanted is not None
        self.sums.add(self.wanted, got)
        self.sums.channels = got.shape[1]
        self.sums.rows += got.numel() // got.shape[1]
        self.wanted = None

    def count(self, module: nn.Module, args: Any) -> None:
        amax = self.amax()
        if amax is None:
            return
        for value in args:
            x = _values(value)
            self.sums.beyond += int(torch.count_nonzero(x.abs() > amax))
            self.sums.inputs += x.numel()

    def amax(self) -> float | None:
        amax = getattr(getattr(self.reader, "_input_quantizer", None), "_amax", None)
        return float(amax.max()) if isinstance(amax, Tensor) else None


def compare_layers(
    float_model: nn.Module,
    quantized_model: nn.Module,
    batches: Iterable[Batch],
) -> Comparison:
    """One row per quantized layer in the order of execution, then one for the model's output.

    Args:
        float_model: The folded float model.
        quantized_model: The calibrated model made from it; layers correspond by path. Layers that
            the float model does not have (QuantAdd) are compared where their block ends.
        batches: At least one; every batch is run through both models.

    Returns:
        Rows pooled over all batches (sums of squares, not means of decibels).
    """
    probes = _probes(float_model, quantized_model)
    order: list[_Probe] = []
    whole = _Probe("output", "", None)
    first: tuple[Tensor, Tensor] | None = None
    with ExitStack() as stack, torch.no_grad():
        for probe in probes:
            reference = float_model.get_submodule(probe.layer)
            stack.callback(reference.register_forward_hook(probe.keep).remove)
            judged = quantized_model.get_submodule(probe.layer)
            stack.callback(judged.register_forward_hook(_noting(order, probe)).remove)
            assert probe.reader is not None
            stack.callback(probe.reader.register_forward_pre_hook(probe.count).remove)
        for batch in batches:
            whole.wanted = wanted = float_model(*batch)
            got = quantized_model(*batch)
            whole.judge(quantized_model, (), got)
            first = first or (wanted, got)
    if first is None:
        raise ValueError("there are no batches to compare on: give at least one")
    rows = [p.sums.row(p.layer, p.kind, p.amax()) for p in order]
    return Comparison([*rows, whole.sums.row("output", "bird's-eye view", None)], *first)


def _noting(order: list[_Probe], probe: _Probe) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if probe not in order:
            order.append(probe)
        probe.judge(module, args, output)

    return hook


def _probes(float_model: nn.Module, quantized_model: nn.Module) -> list[_Probe]:
    """Layers with an input quantizer; an addition stands for the block whose last step it is."""
    known = dict(float_model.named_modules())
    quantized_layers = dict(quantized_model.named_modules())
    probes = []
    for path, module in quantized_layers.items():
        if getattr(module, "_input_quantizer", None) is None:
            continue
        # QuantAdd exists in the quantized model alone: it is compared where its block ends.
        layer = path if path in known else path.rpartition(".")[0]
        if layer in known:
            probes.append(_Probe(layer, type(quantized_layers[layer]).__name__, module))
    return probes


def _values(value: Any) -> Tensor:
    """The numbers of a tensor or of a sparse tensor."""
    values: Tensor = value if isinstance(value, Tensor) else value.features
    return values

r"""Ranges by input channel: one for each channel of what a layer reads, folded into its weight.

Points in one tensor have metres to a pillar's centre (±0.4), places (70 m) and intensities (255).
One range gives the first three integers, or none. With factors f, powers of two,

.. math:: y_o = b_o + \sum_c x_c w_{o,c} = b_o + \sum_c (x_c f_c) (w_{o,c} / f_c)

is the same layer in float, to the last bit, and x·f has one range for all channels: x_c has the
range a / f_c. The quantizer holds f, the layer multiplies and divides (`bevquant_qnn`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._descriptor import QuantDescriptor
from ._findings import CalibrationFinding
from ._format import format_of
from ._select import NamedQuantizer
from .calib._calibrator import Calibrator
from .nn import TensorQuantizer

# Below this ratio of the largest channel's range to the smallest's, one range leaves eight
# magnitudes to each channel: no factors.
_RATIO = 16.0
# The product in front of the layer has to pay: half of the layer's noise.
_LESS_NOISE = 0.5
# Beyond, half precision could not hold a factor.
_LARGEST_EXPONENT = 15
# A histogram for each channel up to here; of more channels the largest values alone.
_MOST_HISTOGRAMS = 64
# A reader that keeps less than this of its input cannot be right, at 8 bits.
_POOR_DB = 20.0


@dataclass(eq=False)
class _Reader:
    """A layer that reads through a quantizer, and the largest value of each input channel."""

    path: str
    layer: Any
    quantizer: TensorQuantizer
    seen: NamedQuantizer

    def weight(self) -> Tensor:
        """Float64 [groups, out/groups, in/groups, kernel]."""
        weight: Tensor = self.layer.weight_by_channel().detach().double()
        return weight

    def noise(self, ranges: Tensor, factors: Tensor, step: float | None = None) -> float:
        r"""Noise of the layer's output over its power, with uniform values in each channel.

        A value below half a step is lost, all others are wrong by a step²/12:

        .. math:: \frac{\sum w'^2 \min(s_x^2/12, p) + [\text{with factors}] \sum p\,
                  \min(s_w^2/12, w'^2)}{\sum w'^2 p}, \quad p = (a f)^2/3, \; w' = w/f

        Args:
            ranges: a, the largest value of each channel, float64 [channels].
            factors: f of each.
            step: s_x, the input's step, to judge the input alone; None takes that of the largest
                a·f and counts the weight's noise too.
        """
        weight = self.weight()
        shape = (len(weight), 1, weight.shape[2], 1)
        reach, w = (ranges * factors).reshape(shape), weight / factors.reshape(shape)
        alone = step is not None
        step = float(reach.max()) / _top(self.quantizer) if step is None else step
        power = reach**2 / 3
        lost = torch.where(reach < step / 2, power, power.clamp(max=step**2 / 12))
        noise = float((w**2 * lost).sum())
        if not alone:
            top = _top(self.layer._modules["_weight_quantizer"])
            steps = w.abs().amax((2, 3), keepdim=True) / top
            noise += float((power * torch.minimum(steps**2 / 12, w**2)).sum())
        signal = float((w**2 * power).sum())
        return noise / signal if signal else 0.0


class InputChannels:
    """Watches the channels of every layer that could have ranges by channel, and decides.

    Such a layer has ``channels_of(input)``, its input as [rows, channels, places], and
    ``weight_by_channel()``. A module with ``hands_floats_on`` leaves quantizing to its readers.
    """

    def __init__(self, model: nn.Module, entries: Sequence[NamedQuantizer]) -> None:
        self._places = {entry.quantizer: i for i, entry in enumerate(entries)}
        self._readers: dict[TensorQuantizer, list[_Reader]] = {}
        self._others: dict[TensorQuantizer, list[str]] = {}
        for entry in entries:
            quantizer, layers = entry.quantizer, dict[Any, str]()
            for name in entry.names:
                path, _, child = name.rpartition(".")
                layer = model.get_submodule(path)
                if child == "_input_quantizer" and hasattr(layer, "channels_of"):
                    layers.setdefault(layer, path)
                elif "weight" not in child and not hasattr(layer, "hands_floats_on"):
                    self._others.setdefault(quantizer, []).append(path)
            # FP8 is as fine for small values: one range serves channels of several units.
            floats = not isinstance(quantizer.num_bits, int)
            if layers and quantizer.axis is None and not floats:
                few = self._foldable(quantizer) and all(
                    len(w) * w.shape[2] <= _MOST_HISTOGRAMS
                    for w in (layer.weight_by_channel() for layer in layers)
                )
                self._readers[quantizer] = [
                    _Reader(path, layer, quantizer, _watcher(path, quantizer, histogram=few))
                    for layer, path in layers.items()
                ]
        watching = [reader for readers in self._readers.values() for reader in readers]
        # Quantizers of its own, which only watch; they are calibrated as the model's are.
        self.entries = [reader.seen for reader in watching]
        self.calibrators = [_calibrator(reader) for reader in watching]
        self._findings: dict[TensorQuantizer, list[CalibrationFinding]] = {}
        self._ranges: dict[TensorQuantizer, Tensor] = {}

    def _foldable(self, quantizer: TensorQuantizer) -> bool:
        return quantizer.reads_float and quantizer not in self._others

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the model runs, without the factors that it had."""
        had = {quantizer: quantizer.channel_factors for quantizer in self._readers}
        handles = []
        try:
            for readers in self._readers.values():
                for reader in readers:
                    handles.append(_watch(reader))
            for quantizer in had:
                quantizer.channel_factors = None
            yield
        finally:
            for handle in handles:
                handle.remove()
            for quantizer, factors in had.items():
                quantizer.channel_factors = factors

    def settle(
        self,
        found: list[Tensor | None],
        seen: Sequence[Tensor | None],
        calibrators: Sequence[Calibrator],
        options: dict[str, Any],
    ) -> None:
        """Set the factors, and with them the ranges of inputs and weights; note the findings."""
        ranges = iter(seen)
        for quantizer, readers in self._readers.items():
            reached = [(r, next(ranges)) for r in readers]
            known = [(r, a.double().cpu().reshape(-1)) for r, a in reached if a is not None]
            amax = found[self._places[quantizer]]
            if not known or amax is None or not bool(amax.any()):
                continue
            quantizer.channel_factors = factors = self._factors(quantizer, known)
            if factors is None:
                for reader, a in known:
                    self._note(reader, a, float(amax))
                continue
            widest = torch.stack([a for _, a in known]).amax(0)
            self._ranges[quantizer] = (widest.max() / factors).to(amax)
            found[self._places[quantizer]] = widest.max().to(amax)
            self._note_folded(known[0][0], widest, factors)
            for reader in readers:
                place = self._places.get(reader.layer._modules["_weight_quantizer"])
                if place is not None:
                    calibrators[place].reset()
                    calibrators[place].collect(reader.layer.weight_to_quantize().detach())
                    found[place] = calibrators[place].compute_amax(**options)
            calibrator = quantizer._calibrator
            assert calibrator is not None
            calibrator.reset()  # its counts are of another tensor than is quantized now

    def shown(self, quantizer: TensorQuantizer) -> tuple[Calibrator, Tensor] | None:
        """Collected values by channel, and the ranges; None if one range serves all."""
        ranges = self._ranges.get(quantizer)
        return None if ranges is None else (_calibrator(self._readers[quantizer][0]), ranges)

    def findings(self, quantizer: TensorQuantizer) -> tuple[CalibrationFinding, ...]:
        """Findings about its channels."""
        return tuple(self._findings.get(quantizer, ()))

    def _factors(
        self, quantizer: TensorQuantizer, known: Sequence[tuple[_Reader, Tensor]]
    ) -> Tensor | None:
        """f, powers of two that make least noise; None where one range for all will do."""
        if not self._foldable(quantizer) or len({len(a) for _, a in known}) > 1:
            return None
        widest = torch.stack([a for _, a in known]).amax(0)
        if _spread(widest) <= _RATIO:
            return None
        apart = torch.log2(widest.max() / widest.clamp(min=1e-300))
        apart = apart.masked_fill(widest == 0, 0.0)
        choices = [
            (share * apart).floor().clamp(max=_LARGEST_EXPONENT).exp2() for share in (0, 0.5, 1)
        ]
        noises = [sum(reader.noise(a, f) for reader, a in known) for f in choices]
        best = min(range(len(choices)), key=noises.__getitem__)
        if noises[best] > _LESS_NOISE * noises[0]:
            return None
        return choices[best].to(known[0][0].layer.weight.device)

    def _note(self, reader: _Reader, ranges: Tensor, amax: float) -> None:
        """Name the channels that one range for all erases."""
        quantizer = reader.quantizer
        step = amax / _top(quantizer)
        erased = (ranges > 0) & (ranges < step / 2)
        noise = reader.noise(ranges, torch.ones_like(ranges), step)
        kept = -10 * math.log10(noise) if noise else math.inf
        usual = 20 * math.log10(2 * _top(quantizer))  # of channels that all reach the range
        poor = _spread(ranges) > _RATIO and kept < min(_POOR_DB, usual - 10)
        if not poor and not bool(erased.any()):
            return
        named = erased if bool(erased.any()) else (ranges > 0) & (ranges < ranges.max() / _RATIO)
        fate = "always 0" if bool(erased.any()) else "few integers"
        evidence = (
            f"{_listed(named.nonzero().flatten().tolist(), ranges)} of {len(ranges)}: {fate}, as "
            f"one range {amax:.4g} serves all with steps of {step:.3g}; {reader.path} keeps about "
            f"{kept:.0f} dB of its input"
        )
        self._add(reader, evidence, self._remedy(quantizer) if poor else "no need to act", poor)

    def _remedy(self, quantizer: TensorQuantizer) -> str:
        others = self._others.get(quantizer)
        if others:
            why = f"{', '.join(others[:3])} cannot take ranges by channel"
        elif quantizer.reads_float:
            why = "factors for the channels would not help"
        else:
            why = (
                "ranges by channel need a tensor that float operations make, seen by "
                "quantize_model(model, example_inputs=…)"
            )
        return (
            f"{why}: bring the channels to one unit, give each unit a layer of its own, or leave "
            "the layer float"
        )

    def _note_folded(self, reader: _Reader, ranges: Tensor, factors: Tensor) -> None:
        named = (factors > 1).nonzero().flatten().tolist()
        evidence = (
            f"{_listed(named, ranges)} of {len(ranges)}, the widest {float(ranges.max()):.4g}"
        )
        remedy = f"each has a range of its own, folded into the weight of {reader.path}"
        self._add(reader, evidence, remedy, poor=False)

    def _add(self, reader: _Reader, evidence: str, remedy: str, poor: bool) -> None:
        place = f"{reader.path}._input_quantizer"
        finding = CalibrationFinding(place, None, "channels", evidence, remedy, poor)
        self._findings.setdefault(reader.quantizer, []).append(finding)


def _watcher(path: str, quantizer: TensorQuantizer, *, histogram: bool) -> NamedQuantizer:
    """A quantizer that only watches, channel by channel."""
    descriptor = QuantDescriptor(
        num_bits=quantizer.num_bits, axis=1, unsigned=quantizer.unsigned,
        calib_method="histogram" if histogram else "max",
    )  # fmt: skip
    watcher = TensorQuantizer(descriptor, if_quant=False)
    return NamedQuantizer((f"{path} by channel",), watcher)


def _calibrator(reader: _Reader) -> Calibrator:
    calibrator = reader.seen.quantizer._calibrator
    assert calibrator is not None
    return calibrator


def _watch(reader: _Reader) -> Any:
    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        reader.seen.quantizer(layer.channels_of(args[0] if args else kwargs["input"]))

    # After the layer, whose own quantizer names what is not finite.
    return reader.layer.register_forward_hook(hook, with_kwargs=True)


def _top(quantizer: Any) -> int:
    return int(format_of(quantizer.num_bits, quantizer.unsigned).high)


def _spread(ranges: Tensor) -> float:
    """How many times the smallest range other than 0 the largest is."""
    reached = ranges[ranges > 0]
    return float(reached.max() / reached.min()) if len(reached) else 1.0


def _listed(channels: Sequence[int], ranges: Tensor) -> str:
    """Channels with their ranges, the first eight of them."""
    texts = [f"{c} ({float(ranges[c]):.3g})" for c in channels[:8]]
    more = f" and {len(channels) - 8} more" if len(channels) > 8 else ""
    return f"{'channel' if len(channels) == 1 else 'channels'} {', '.join(texts)}{more}"

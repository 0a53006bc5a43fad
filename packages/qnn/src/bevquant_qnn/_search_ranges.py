"""Ranges of activations by the error of the model's output, where calibration's are far off."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from bevquant_graph import Forward, HtmlTable, checked_batches, on_batch
from bevquant_qnn._precision import put
from bevquant_qnn._scores import score_of
from bevquant_qnn._sensitivity import Trial

_FACTORS = tuple(2.0 ** (j / 8) for j in range(-8, 9) if j)
_LEAST_GAIN = 1.0  # dB


@dataclass(frozen=True)
class SearchedRange:
    """A group of layers whose range was searched.

    Attributes:
        modules: Paths of the layers.
        factor: New range over the old one; 1.0 if no other was better by 1 dB.
        before_db: SQNR of the output with this group alone quantized.
        after_db: The same with the new range.
    """

    modules: tuple[str, ...]
    factor: float
    before_db: float
    after_db: float


@dataclass(frozen=True)
class RangeSearch(HtmlTable):
    """Result of `search_ranges`: the searched groups, the largest loss first."""

    rows: tuple[SearchedRange, ...]

    def __str__(self) -> str:
        lines = ["searched ranges: output with this group alone quantized"]
        lines += [
            f"  {', '.join(r.modules)}: {r.before_db:.1f} dB, {r.after_db:.1f} dB with the range "
            f"times {r.factor:.2f}"
            for r in self.rows
        ]
        return "\n".join(lines)


def search_ranges(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    outputs: Sequence[str] = (),
    share: float = 0.1,
    forward: Forward | None = None,
) -> RangeSearch:
    r"""Search the ranges of the groups that make most of the output's noise, in place.

    In a map of pillars most places hold one vector. Its rounding error is equal in all of them, and
    layers add it up with its sign: a few of the least squared errors of the tensor (`calibrate`)
    may be the worst of the output. For each group of layers alone, range a and output y,

    .. math:: \max_{f} 10 \log_{10} \frac{\sum y^2}{\sum (y - y_{f a})^2}, \quad
              f = 2^{j/8},\ j = -8 \ldots 8

    over all batches. The range is changed if it gains 1 dB or more. Groups are searched from the
    largest noise on, until the others together have less than `share` of the sum.

    Args:
        model: Calibrated, from `quantize_model`. Ranges of the searched activations are changed.
        batches: Two or three frames: the error of such a vector is that of every frame.
        outputs: As of `sensitivity`.
        share: Share of the noise that is left as it is, 0 … 1.
        forward: As of `sensitivity`.

    Returns:
        The searched groups.

    Raises:
        ValueError: As `sensitivity`, or a share beyond 0 … 1.

    Example:
        >>> import torch
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> images = torch.randn(2, 3, 8, 8)
        >>> net = quantize_model(net, example_inputs=images).model
        >>> report = calibrate(net, [images])
        >>> all(row.after_db >= row.before_db for row in search_ranges(net, [images]).rows)
        True
    """
    if not 0 <= share <= 1:
        raise ValueError(f"search_ranges: expected a share of 0 to 1, got {share}")
    score, run = score_of("sqnr", None), on_batch(forward)
    trial = Trial(model, ("int8",), score, tuple(outputs), without=False)
    trial.at = {  # each group as it is, at any number of bits
        (i, ""): {q: trial.on[q] for q in group.quantizers if q in trial.on}
        for i, group in enumerate(trial.groups)
    }
    frames = list(checked_batches(batches))
    if not frames:
        raise ValueError("search_ranges: there were no batches; give at least one")

    def on(batch: Any) -> Callable[[nn.Module], Any]:
        return lambda net: run(net, batch)

    def scored(keys: list[Any]) -> dict[Hashable, float]:
        found = [trial.measure(batch, on(batch), keys) for batch in frames]
        return {key: float(score.reduce([one[key] for one in found])) for key in keys}

    own = scored([*trial.at])
    noise = {key: 10 ** (-value / 10) for key, value in own.items()}
    worst: list[Any] = []
    # The fewest groups that make all of the noise but the share.
    for key in sorted(noise, key=lambda key: -noise[key]):
        if sum(noise.values()) - sum(noise[k] for k in worst) <= share * sum(noise.values()):
            break
        worst.append(key)
    changes = {key: _changes(trial, key) for key in worst}
    trial.at = {(key, f): made for key, by in changes.items() for f, made in by.items()}  # type: ignore[misc]
    after = scored([*trial.at])
    rows = []
    for key in worst:
        best = max(changes[key], key=lambda f: after[key, f], default=1.0)
        gained = best != 1.0 and after[key, best] >= own[key] + _LEAST_GAIN
        if gained:
            for quantizer, setting in changes[key][best].items():
                put(quantizer, replace(setting, disabled=quantizer._disabled))
        row = (best, own[key], after[key, best]) if gained else (1.0, own[key], own[key])
        rows.append(SearchedRange(trial.groups[key[0]].modules, *row))
    # In a smaller range a bias may have too many steps.
    for module in model.modules():
        settle = getattr(module, "settle_ranges", None)
        if callable(settle):
            settle()
    return RangeSearch(tuple(rows))


def _changes(trial: Trial, key: Any) -> dict[float, dict[Any, Any]]:
    """Settings of a group with its activations' ranges times each factor."""
    inputs = {q for q in trial.groups[key[0]].inputs if "_amax" in q._buffers}

    def scaled(amax: Tensor | None, factor: float) -> Tensor | None:
        return None if amax is None else amax * factor

    if not inputs:
        return {}
    return {
        factor: {
            q: replace(s, amax=scaled(s.amax, factor)) if q in inputs else s
            for q, s in trial.at[key].items()
        }
        for factor in _FACTORS
    }

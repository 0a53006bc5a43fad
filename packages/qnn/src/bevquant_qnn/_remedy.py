"""Layers that make an output useless: few of them in float, and the output is good again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import Forward, checked_batches, flatten, on_batch
from bevquant_qnn._pair_sums import PairSums
from bevquant_qnn._precision import own_setting, set_for_now
from bevquant_qnn._precision_groups import PrecisionGroup, precision_groups
from bevquant_qnn._replay import Watch, evaluation
from bevquant_qnn._sensitivity import count_operations
from bevquant_qnn._snapshots import UnknownValue, float_tensors
from bevquant_qnn.matched import Choices

USELESS_DB = 15.0
"""SQNR of an output below which a result is useless."""
_NAMED = 6  # a text lists no more layers


@dataclass(frozen=True)
class FloatRemedy:
    """Effect of leaving the layers with the worst rounding in float, on a useless result.

    Attributes:
        before_db: SQNR of the worst output against float [dB].
        after_db: The same with `layers` in float.
        layers: Paths of these layers. Whole groups (`precision_groups`), the worst rounding first.
        share: Their share of the quantized layers' multiplications, 0 … 1.
        helps: Whether the result is then usable. If not, `layers` are all that the share permits.
    """

    before_db: float
    after_db: float
    layers: tuple[str, ...]
    share: float
    helps: bool

    @property
    def finding(self) -> str:
        """The figures and the layers, as a text."""
        start = f"the worst output has {self.before_db:.1f} dB SQNR against float"
        if not self.helps:
            return f"{start}, and no layers with few multiplications are the cause"
        few = len(self.layers) <= _NAMED
        names = ", ".join(self.layers) if few else f"{len(self.layers)} layers"
        return (
            f"{start}, and {self.after_db:.1f} dB with {names} in float "
            f"({100 * self.share:.2g} % of the multiplications)"
        )

    def __str__(self) -> str:
        if not self.helps:
            return (
                f"{self.finding}: calibrate with more frames like those of use, or try another "
                "method or int16"
            )
        few = len(self.layers) <= _NAMED
        layers = list(self.layers) if few else "float_remedy(model, batches).layers"
        return (
            f"NOT usable: {self.finding}: apply_precision(model, "
            f'PrecisionPlan.by_hand(model, dict.fromkeys({layers}, "float")))'
        )


def float_remedy(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    useless_db: float = USELESS_DB,
    useful_db: float = 25.0,
    share: float = 0.05,
) -> FloatRemedy | None:
    """Find out whether few layers, left in float, make a useless result usable.

    Each group of layers is rounded alone, on the float model's activations: its SQNR is
    10·log₁₀(Σf²/Σ(f − q)²) over its own output. Groups are left in float in this order, the worst
    first, within `share` of the multiplications. If every output then reaches `useful_db`, the
    fewest of them that do are found by bisection. Outputs downstream of a choice by value (top-k, a
    mask) are compared on the quantized model's objects.

    Args:
        model: Calibrated, from `quantize_model`. It is not changed. Float means its quantizers off;
            layers that no calibration frame reached count as float.
        batches: One or a few.
        forward: Called as ``forward(model, batch)``; see `sensitivity`.
        useless_db: SQNR of the worst output below which a result is useless.
        useful_db: SQNR that every output must reach with the layers in float.
        share: Largest share of the quantized layers' multiplications that may stay in float.

    Returns:
        None for a result that is not useless, or whose outputs cannot be compared.

    Example:
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import PrecisionPlan, apply_precision, quantize_model
        >>> net = nn.Sequential(*(nn.Linear(a, b) for a, b in ((8, 8), (8, 8), (8, 64), (64, 64))))
        >>> with torch.no_grad():  # the second layer reads a channel that it does not use
        ...     _ = net[0].weight[0].mul_(3000), net[1].weight[:, 0].zero_()
        >>> x = torch.randn(64, 8)
        >>> net = quantize_model(net, example_inputs=x).model
        >>> report = calibrate(net, [x], method="max")
        >>> remedy = float_remedy(net, [x])
        >>> remedy.helps, remedy.layers
        (True, ('1',))
        >>> plan = PrecisionPlan.by_hand(net, dict.fromkeys(remedy.layers, "float"))
        >>> apply_precision(net, plan)
        ('1',)
    """
    trial = _Trial(model, list(checked_batches(batches)), on_batch(forward))
    before = trial.worst(())
    if before is None or before >= useless_db:
        return None
    order = trial.within(share)
    after = {len(order): trial.worst(order)}
    least, most = 0, len(order)
    if not _reaches(after[most], useful_db):
        least = most
    # By bisection, as if more layers in float were never worse.
    while most - least > 1:
        middle = (least + most) // 2
        after[middle] = trial.worst(order[:middle])
        least, most = (least, middle) if _reaches(after[middle], useful_db) else (middle, most)
    chosen, found = order[:most], after[most]
    return FloatRemedy(
        before,
        before if found is None else found,
        tuple(path for group in chosen for path in group.modules),
        trial.share(chosen),
        bool(chosen) and _reaches(found, useful_db),
    )


def _is_calibrated(group: PrecisionGroup) -> bool:
    """Whether a quantizer of the group is on, and none of its activations is without a range."""
    on = [q for q in group.quantizers if not q._disabled]
    return bool(on) and all(q.amax is not None for q in group.inputs if not q._disabled)


def _reaches(found: float | None, wanted: float) -> bool:
    return found is not None and found >= wanted


class _Trial:
    """Runs of the model on the batches with some of its groups in float."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], forward: Forward) -> None:
        self._model, self._batches, self._forward = model, batches, forward
        self._groups = [g for g in precision_groups(model) if _is_calibrated(g)]
        self._on = {
            group.name: {
                q: own_setting(q, disabled=False) for q in group.quantizers if not q._disabled
            }
            for group in self._groups
        }

    def worst(self, in_float: Sequence[PrecisionGroup]) -> float | None:
        """SQNR of the worst output; None where all are equal to float's or have other rows."""
        names = {group.name for group in in_float}
        settings = {
            q: s for name, held in self._on.items() if name not in names for q, s in held.items()
        }
        sums: dict[int, PairSums] = {}
        with evaluation(self._model):
            for batch in self._batches:
                ahead = Choices()
                with set_for_now(settings), ahead:
                    got = self._outputs(batch)
                # The same choices, so that rows are of the same objects.
                with Choices(ahead):
                    wanted = self._outputs(batch)
                for index, (f, q) in enumerate(zip(wanted, got, strict=False)):
                    if f.shape == q.shape:
                        sums.setdefault(index, PairSums()).add(f, q)
        return min((s.sqnr_db for s in sums.values() if s.sqnr_db is not None), default=None)

    def within(self, share: float) -> list[PrecisionGroup]:
        """Groups by the SQNR of their own rounding, the worst first, within a share of the work."""
        sums = self._roundings()
        known = [(s.sqnr_db, g) for g in self._groups if (s := sums.get(g.name)) is not None]
        ranked = sorted((p for p in known if p[0] is not None), key=lambda pair: pair[0] or 0.0)
        chosen: list[PrecisionGroup] = []
        for _, group in ranked:
            if self.share([*chosen, group]) <= share:
                chosen.append(group)
        return chosen

    def share(self, groups: Sequence[PrecisionGroup]) -> float:
        """Share of the groups in the multiplications of all."""
        return sum(self._work[g.name] for g in groups) / max(sum(self._work.values()), 1)

    def _roundings(self) -> dict[str, PairSums]:
        """Of each group alone, quantized on the float model's activations; notes operations too."""
        owners = {self._model.get_submodule(p): g.name for g in self._groups for p in g.modules}
        within: set[str] = set()
        sums: dict[str, PairSums] = {}

        def call(module: nn.Module, own: Forward, args: Any, kwargs: Any) -> Any:
            name = owners.get(module)
            if name is None or name in within:  # a quantizer that a layer of its group calls
                return own(*args, **kwargs)
            within.add(name)
            with set_for_now(self._on[name]):
                rounded = own(*args, **kwargs)
            output = own(*args, **kwargs)
            within.discard(name)
            try:
                pairs = zip(float_tensors(output), float_tensors(rounded), strict=True)
            except UnknownValue:
                return output
            for f, q in pairs:
                sums.setdefault(name, PairSums()).add(f, q)
            return output

        with evaluation(self._model):
            counts = count_operations(self._model, lambda m: self._forward(m, self._batches[0]))
            with Watch(self._model).seeing(call):
                for batch in self._batches:
                    self._forward(self._model, batch)
        self._work = {
            group.name: sum(counts.get(m, 0) for m, name in owners.items() if name == group.name)
            for group in self._groups
        }
        return sums

    def _outputs(self, batch: Any) -> list[Tensor]:
        leaves = flatten(self._forward(self._model, batch))[0]
        return [v for v in leaves if isinstance(v, Tensor) and torch.is_floating_point(v)]

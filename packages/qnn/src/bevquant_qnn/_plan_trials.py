"""Scores of whole plans, by running them: each batch is recorded once, then changed in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from bevquant_qnn._example import evaluation
from bevquant_qnn._plan_space import PlanSpace, Precisions
from bevquant_qnn._precision import Setting, set_for_now, setting_at
from bevquant_qnn._ranks import Kept, deal_out
from bevquant_qnn._replay import Replay
from bevquant_qnn._scores import Score
from bevquant_quantizers import TensorQuantizer

Settings = dict[TensorQuantizer, Setting]
Run = Callable[[nn.Module, Any], Any]


class PlanTrials:
    """Runs plans and remembers what they scored.

    A plan is run as a change of another one, the base: what comes before the first group that
    differs, and branches beside those that do, are answered from the base's recorded run. Results
    are those of full runs, bit for bit.

    Args:
        model: Calibrated; it is left as it was. Quantizers that are off stay off.
        space: The groups, and what each may be.
        batches: What `run` takes one by one; gone through once a `measure`.
        score: What an output is worth.
        outputs: Paths of modules whose outputs count; none for the model's own.
        run: ``run(model, batch)``.
        distributed: Whether processes share the batches; see `sensitivity`.
        kept: Has results from before an interruption, and takes new ones.

    Attributes:
        scores: Of every plan that was measured, by the precisions of the table's rows.
    """

    def __init__(
        self,
        model: nn.Module,
        space: PlanSpace,
        batches: Iterable[Any],
        score: Score,
        outputs: tuple[str, ...],
        run: Run,
        distributed: bool | None,
        kept: Kept | None = None,
    ) -> None:
        self._model, self._batches, self._score = model, batches, score
        self._outputs, self._run, self._distributed = outputs, run, distributed
        self._kept, self._times = kept, 0
        groups = {frozenset(group.modules): group for group in space.groups}
        self._at: list[dict[str, Settings]] = []
        for row, choices in zip(space.table, space.choices, strict=True):
            group = groups[frozenset(row.modules)]
            active = [q for q in group.quantizers if not q._disabled]
            self._at.append(
                {
                    choice.precision: {
                        q: setting_at(q, choice.precision, weight=q in group.weights)
                        for q in active
                    }
                    for choice in choices
                }
            )
        self.scores: dict[Precisions, float] = {}

    def measure(self, base: Precisions, others: Iterable[Precisions] = ()) -> None:
        """Run `base` and plans that differ from it, but for those that are known."""
        wanted = [p for p in dict.fromkeys((base, *others)) if p not in self.scores]
        if not wanted:
            return
        results = deal_out(
            self._batches,
            lambda batch: self._of_batch(batch, base, wanted),
            self._distributed,
            step=f"plans-{self._times}",
            kept=self._kept,
        )
        self._times += 1
        if not results:
            raise ValueError("refine_plan: there were no batches; give at least one")
        for precisions, of_batches in zip(wanted, zip(*results, strict=True), strict=True):
            self.scores[precisions] = float(self._score.reduce(of_batches))

    def _of_batch(self, batch: Any, base: Precisions, plans: Sequence[Precisions]) -> list[Any]:
        """What the score makes of one batch, for each plan."""

        def run(model: nn.Module) -> Any:
            return self._run(model, batch)

        found = []
        with evaluation(self._model):  # quantizers are off there
            reference = Replay(self._model, run, self._outputs).output
            with set_for_now(self._settings(base)):
                replay = Replay(self._model, run, self._outputs)
                for plan in plans:
                    changed = self._settings(plan, base)
                    with set_for_now(changed):
                        output = replay(changed)
                        found.append(self._score.of_batch(output, reference, batch))
        return found

    def _settings(self, plan: Precisions, base: Precisions | None = None) -> Settings:
        """Of all rows, or of those that differ from `base`."""
        parts = (
            at[name].items()
            for i, (at, name) in enumerate(zip(self._at, plan, strict=True))
            if base is None or name != base[i]
        )
        return dict(chain.from_iterable(parts))

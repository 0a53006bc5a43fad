"""All plans that a table of sensitivities knows: each group's precisions, with time and loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from bevquant_qnn._plan_front import Choice
from bevquant_qnn._precision import Precision, check_precisions
from bevquant_qnn._precision_groups import PrecisionGroup, precision_groups
from bevquant_qnn._precision_plan import PlannedGroup, PrecisionPlan
from bevquant_qnn._sensitivity_table import SensitivityTable

__all__ = ["PlanSpace", "Precisions", "plan_space"]

Precisions = tuple[Precision, ...]


@dataclass(frozen=True, eq=False)
class PlanSpace:
    """What each row of a table may be.

    Attributes:
        groups: Of the model, in its order; those that were off when the table was made too.
        table: What each loses alone.
        choices: For each row of the table. Costs are shares of the int8 model's time.
    """

    groups: tuple[PrecisionGroup, ...]
    table: SensitivityTable
    choices: tuple[tuple[Choice, ...], ...]

    def time(self, precisions: Sequence[Precision]) -> float:
        """Estimated time of a choice for every row, as a multiple of the int8 model's."""
        return sum(
            next(choice.cost for choice in choices if choice.precision == name)
            for choices, name in zip(self.choices, precisions, strict=True)
        )

    def plan(
        self, precisions: Sequence[Precision], time: float, score: float, *, measured: bool
    ) -> PrecisionPlan:
        """The plan of a choice for every row; groups that were switched off stay off."""
        rows = (frozenset(row.modules) for row in self.table)
        chosen = dict(zip(rows, precisions, strict=True))
        planned = (
            PlannedGroup(group.modules, chosen.get(frozenset(group.modules), "float"))
            for group in self.groups
        )
        return PrecisionPlan(tuple(planned), time, score, self.table.metric, measured)


def plan_space(
    model: nn.Module, table: SensitivityTable, costs: Mapping[Precision, float], where: str
) -> PlanSpace:
    """What `model`'s groups may be, by `table` and `costs`; errors begin with `where`.

    Raises:
        ValueError: The table is another model's, or a cost is missing or no positive number.
    """
    check_precisions(costs, f"{where}: costs")
    bad = [f"{name}={cost}" for name, cost in costs.items() if not 0 < cost < math.inf]
    if bad or "int8" not in costs:
        raise ValueError(
            f"{where}: costs must be positive numbers, with one for 'int8', got "
            f"{', '.join(bad) or dict(costs)}"
        )
    groups = precision_groups(model)
    own = {frozenset(group.modules): group for group in groups}
    others = [", ".join(sorted(row.modules)) for row in table if frozenset(row.modules) not in own]
    if others:
        raise ValueError(
            f"{where}: the table is another model's: no group of this one holds "
            f"{'; '.join(sorted(others))}. Measure this model"
        )
    whole = math.fsum(row.operations for row in table) * costs["int8"] or 1.0
    choices = tuple(
        tuple(
            Choice(name, row.operations * costs[name] / whole, table.loss(row, name))
            for name in costs
            if name == "float" or name in row.alone
            # Without weights, int4 is int8 by another name.
            if name != "int4" or own[frozenset(row.modules)].weights
        )
        for row in table
    )
    return PlanSpace(tuple(groups), table, choices)

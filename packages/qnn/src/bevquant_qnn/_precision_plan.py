"""The one list of who runs at which precision, for calibration, simulation and every exporter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Self

import msgspec
from torch import nn

from bevquant_graph import HtmlTable, check_kind, ordinary_tensors
from bevquant_qnn._precision import (
    REASONS,
    Precision,
    check_precisions,
    put,
    settings_at,
)
from bevquant_qnn._precision_groups import precision_groups
from bevquant_qnn._result import SkippedModule
from bevquant_quantizers.documents import DocumentError, Finite, JsonDocument, parse_json

_SCHEMA = "bevquant-precision/1"


@dataclass(frozen=True)
class PlannedGroup:
    """Layers that share quantizers, and the precision at which all of them run."""

    modules: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    precision: Precision


@dataclass(frozen=True)
class PrecisionPlan(HtmlTable, JsonDocument):
    """A precision for each group of a model's layers.

    Attributes:
        groups: All groups of the model, in model order.
        time: Estimated time as a multiple of the model's time with every group in int8; None
            without an estimate.
        score: Score in the metric of the table that the plan was made from.
        metric: Name of that metric.
        measured: Whether the score was measured with the whole plan applied, or is an estimate.
        size: Size of the quantized layers' weights as a multiple of their size in int8, float as
            float16; None where unknown.

    Example:
        >>> from torch import nn
        >>> from bevquant_qnn import quantize_model
        >>> net = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))).model
        >>> plan = PrecisionPlan.by_hand(net, {"0": "float"})
        >>> plan["0"], plan["1"]
        ('float', 'int8')
        >>> PrecisionPlan.from_json(plan.to_json()) == plan
        True
    """

    groups: tuple[PlannedGroup, ...]
    time: Finite | None = None
    score: Finite | None = None
    metric: str | None = None
    measured: bool = False
    size: Finite | None = None

    @classmethod
    def by_hand(
        cls, model: nn.Module, precisions: Mapping[str, Precision], default: Precision = "int8"
    ) -> Self:
        """Return a plan from precisions by layer.

        Args:
            model: From `quantize_model`.
            precisions: Precision by path of a layer; its whole group gets it.
            default: Precision of all other groups.

        Raises:
            ValueError: An unknown precision, a path that is in no group, or two precisions for one
                group.
        """
        check_precisions([*precisions.values(), default], "PrecisionPlan.by_hand")
        groups = precision_groups(model)
        known = {path for group in groups for path in group.modules}
        unknown = [path for path in precisions if path not in known]
        if unknown:
            raise ValueError(
                f"PrecisionPlan.by_hand: no quantized layer lies at {', '.join(unknown)}; paths "
                "are those of precision_groups(model)"
            )
        planned = []
        for group in groups:
            requested = {precisions[path] for path in group.modules if path in precisions}
            if len(requested) > 1:
                raise ValueError(
                    f"PrecisionPlan.by_hand: {', '.join(group.modules)} share a quantizer, so they "
                    f"have one precision, not {' and '.join(sorted(requested))}"
                )
            planned.append(PlannedGroup(group.modules, requested.pop() if requested else default))
        return cls(tuple(planned))

    def __iter__(self) -> Iterator[PlannedGroup]:
        return iter(self.groups)

    def __getitem__(self, path: str) -> Precision:
        """Return the precision of the layer at `path`."""
        for group in self.groups:
            if path in group.modules:
                return group.precision
        raise KeyError(f"the plan holds no layer {path!r}")

    def before_calibration(self) -> Self:
        """Return the plan under which ranges are searched: int8 in place of other formats.

        Layers of 8 bits then get the same range as without a plan. Wider ranges are searched in the
        same values later, when the plan itself is applied.
        """
        groups = (
            group if group.precision == "float" else replace(group, precision="int8")
            for group in self
        )
        return replace(self, groups=tuple(groups))

    def other_than_int8(self) -> tuple[SkippedModule, ...]:
        """Return the layers with another precision than int8, and that precision."""
        return tuple(
            SkippedModule(path, REASONS[group.precision])
            for group in self
            if group.precision != "int8"
            for path in group.modules
        )

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        document = {
            "schema": _SCHEMA,
            **{
                name: getattr(self, name)
                for name in ("time", "size", "score", "metric", "measured")
            },
            "groups": [
                {"precision": group.precision, "modules": list(group.modules)}
                for group in self.groups
            ],
        }
        return json.dumps(document, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` wrote.

        Raises:
            ValueError: Any other text.
        """
        plan: Self = parse_json(
            text,
            cls,
            what="plan that PrecisionPlan.to_json wrote",
            head={"schema": _SCHEMA},
            remedy="make the plan again",
        )
        counts = Counter(path for group in plan for path in group.modules)
        if twice := [path for path, count in counts.items() if count > 1]:
            raise DocumentError(
                f"not a plan that PrecisionPlan.to_json wrote: listed twice: {', '.join(twice[:5])}"
            )
        return plan

    def __str__(self) -> str:
        lines = [f"{len(self.groups)} groups of layers"]
        if self.time is not None:
            lines[0] += f", time {self.time:.3g} of int8"
        if self.size is not None:
            lines[0] += f", size {self.size:.3g} of int8"
        if self.score is not None:
            how = "measured" if self.measured else "estimated"
            lines[0] += f", {self.metric} {self.score:.4g} {how}"
        width = max((len(group.precision) for group in self.groups), default=0)
        lines += [f"  {g.precision:<{width}}  {', '.join(g.modules)}" for g in self.groups]
        return "\n".join(lines)


@ordinary_tensors()
def apply_precision(model: nn.Module, plan: PrecisionPlan) -> tuple[str, ...]:
    """Set every quantizer of the model as `plan` says, in place; all of them or, on error, none.

    ``"float"`` disables a group's quantizers. ``"int8"``, ``"int16"`` (activations of 16 bits,
    weights of 8), ``"int4"`` (activations of 8, weights of 4), ``"w4a4"`` (both of 4) and ``"fp8"``
    (E4M3) enable them with that format; ``"mxfp8"``, ``"mxfp4"`` and ``"nvfp4"`` those of linear
    layers and convolutions of 1×1, whose input channels form the blocks. Where it changes, a range
    is searched again in the calibrator's values (mse up to 8 bits, the largest value above and for
    blocks), so the model is the measured one. A model without calibration is calibrated by the plan
    later. `calibrate`, `freeze`, the integer simulation and the exporters follow the quantizers'
    states.

    Args:
        model: From `quantize_model`.
        plan: Plan of this model, or of one with the same layers.

    Returns:
        First paths of the groups whose settings changed.

    Raises:
        ValueError: The plan's groups are not the model's; every difference is listed. A block
            format for another layer.
    """
    check_kind(plan, PrecisionPlan, "a PrecisionPlan")
    groups = precision_groups(model)
    planned = {frozenset(group.modules): group.precision for group in plan}
    own = {frozenset(group.modules) for group in groups}
    problems = [f"{', '.join(sorted(m))}: not in the plan" for m in own if m not in planned]
    problems += [f"{', '.join(sorted(m))}: not in the model" for m in planned if m not in own]
    if problems:
        raise ValueError(
            f"apply_precision: the plan does not fit the model ({'; '.join(sorted(problems))}); "
            "nothing was changed. Make it from this model, quantized with the same example_inputs"
        )
    settings = [
        (group, settings_at(model, group, planned[frozenset(group.modules)], group.quantizers))
        for group in groups
    ]
    changed = []
    for group, chosen in settings:
        before = [(q._disabled, q.num_bits) for q in chosen]
        for quantizer, setting in chosen.items():
            put(quantizer, setting)
            # The calibrator's format too: the next calibration searches for it.
            quantizer.num_bits, quantizer.unsigned = setting.bits, setting.unsigned
        if before != [(q._disabled, q.num_bits) for q in chosen]:
            changed.append(group.name)
    return tuple(changed)

"""Setting a model's quantizers as a plan says."""

from __future__ import annotations

from torch import nn

from bevquant_qnn._precision import put, setting_at
from bevquant_qnn._precision_groups import precision_groups
from bevquant_qnn._precision_plan import PrecisionPlan

__all__ = ["apply_precision"]


def apply_precision(model: nn.Module, plan: PrecisionPlan) -> tuple[str, ...]:
    """Set every quantizer of the model as `plan` says, in place; all of them or, on error, none.

    ``"float"`` switches a group's quantizers off. ``"int8"``, ``"int16"`` (activations of 16 bits,
    weights of 8) and ``"int4"`` (activations of 8, weights of 4) switch them on with those bits;
    where bits change, a range is searched again in what the calibrator holds (mse up to 8 bits,
    the largest value above), so that the model is the one that was measured. A model that was not
    calibrated yet is calibrated by the plan afterwards. What reads the quantizers' states obeys:
    `calibrate`, `freeze`, the integer simulation, the exporters.

    Args:
        model: From `quantize_model`.
        plan: Made for this model, or for one of the same layers.

    Returns:
        First paths of the groups whose settings changed.

    Raises:
        ValueError: The plan's groups are not the model's; every difference is listed.
    """
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
        (
            group,
            {
                quantizer: setting_at(
                    quantizer,
                    planned[frozenset(group.modules)],
                    weight=quantizer in group.weights,
                )
                for quantizer in group.quantizers
            },
        )
        for group in groups
    ]
    changed = []
    for group, chosen in settings:
        before = [(q._disabled, q.num_bits) for q in chosen]
        for quantizer, setting in chosen.items():
            put(quantizer, setting)
            # The calibrator's bits too: the next calibration searches for them.
            quantizer.num_bits = setting.bits
        if before != [(q._disabled, q.num_bits) for q in chosen]:
            changed.append(group.name)
    return tuple(changed)

"""Which formats of FP8, and of blocks, a runtime takes."""

from __future__ import annotations

from bevquant_int8sim.program import FLOAT8, ROUNDINGS, BlockLayer, Float8Layer, Program, Step


def is_float8(step: Step) -> bool:
    """Whether a step makes an FP8 tensor, or multiplies FP8."""
    return step.target in ROUNDINGS or isinstance(step.target, Float8Layer)


def refuse_float8(program: Program, takes: tuple[str, ...], who: str, target: str) -> None:
    """Refuse formats of FP8 that a runtime, `target`, does not take."""
    for step in filter(is_float8, program.steps):
        for name in _formats(step):
            if name not in takes:
                raise ValueError(
                    f"{who}: {step.path or 'the model'} is {name}, and {target} takes "
                    f"{' and '.join(takes) or 'no FP8'}: quantize it with num_bits="
                    f"{'(4, 3)' if takes else '8'} (QuantConfig), or give it another precision in "
                    "the plan (PrecisionPlan)"
                )


def _formats(step: Step) -> list[str]:
    layer = step.target
    if not isinstance(layer, Float8Layer):
        return [step.args[2]]
    if isinstance(layer, BlockLayer):
        return [layer.form]
    weight = next(f.name for f in FLOAT8.values() if f.dtype == layer.weight.dtype)
    return [layer.form, weight]

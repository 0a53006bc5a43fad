"""Integers are joined before they become floats, where the floats are joined anyway."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._program import Program, Ref, Step, names_in, replaced

__all__ = ["dequantize_late"]


def dequantize_late(program: Program) -> Program:
    """Concatenate integers of one scale and dequantize the result, not the parts.

    A part that has other readers stays a float for these.
    """
    makers = {name: step for step in program.steps for name in step.outputs}
    values, steps = dict(program.values), list[Step]()
    for step in program.steps:
        parts = _parts(step, makers, program)
        if not parts:
            steps.append(step)
            continue
        integers = step.outputs[0] + ":integers"
        sources = {part.outputs[0]: part.args[0] for part in parts}
        args = replaced(step.args, lambda ref, known=sources: known[ref.name])
        steps.append(replace(step, args=args, outputs=(integers,)))
        steps.append(replace(parts[0], args=(Ref(integers),), outputs=step.outputs))
        values[integers] = values[parts[0].args[0].name]
    reads = Counter(name for step in steps for name in step.inputs)
    reads.update(names_in(program.result))
    kept = (s for s in steps if s.op != "dequantize" or reads[s.outputs[0]])
    return replace(program, steps=tuple(kept), values=values)


def _parts(step: Step, makers: dict[str, Step], program: Program) -> list[Step]:
    """The dequantizations of one scale whose results a step concatenates; none otherwise."""
    if step.op != "move" or step.attributes["what"] != "cat":
        return []
    found = [makers.get(name) for name in step.inputs]
    parts = [part for part in found if part is not None and part.op == "dequantize"]
    if len(parts) < len(found) or any(part.attributes["relu"] for part in parts):
        return []
    forms = [program.values[part.args[0].name].form for part in parts]
    same = all(isinstance(form, Integers) and form == forms[0] for form in forms)
    return parts if parts and same and parts[0].tensors["scale"].dim() == 0 else []

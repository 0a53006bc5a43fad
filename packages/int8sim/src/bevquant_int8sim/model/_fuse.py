"""The program that a plain call runs: the same results by fewer and faster steps.

Nothing of it can be seen from outside: whoever looks at intermediate values runs the plain program.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._program import Program, Ref, Step, names_in, replaced


def fuse_residuals(program: Program) -> Program:
    """Let convolutions add what is added to their output, where that is exact.

    Only the addition may read what the convolution makes. A sparse convolution stores int8 of the
    other operand's scale, and that operand must exist before; a dense one would keep int32
    accumulators, and runs where the addition stood.
    """
    reads = Counter(name for step in program.steps for name in step.inputs)
    reads.update(names_in(program.result))
    makers = {name: i for i, step in enumerate(program.steps) for name in step.outputs}
    steps: list[Step | None] = list(program.steps)
    for number, step in enumerate(program.steps):
        if step.op != "add" or step.attributes["out"] != "int8" or "ceiling" in step.attributes:
            continue
        if step.rounding:  # of the sum, and not of what is added
            continue
        for mine, other in (step.args, step.args[::-1]):
            at = makers.get(mine.name, -1)
            before = makers.get(other.name, -1) < at
            conv = steps[at] if at >= 0 and reads[mine.name] == 1 else None
            if conv is not None and before and _fits(conv, step, program, mine, other):
                # The sum is now made where the convolution stood, before everything that reads it.
                steps[at] = _joined(conv, step, program, mine, other)
                steps[number] = None
                break
            if conv is not None and _fits_dense(conv, step, program, mine, other):
                steps[at], steps[number] = None, _joined_dense(conv, step, mine, other)
                break
    return replace(program, steps=tuple(step for step in steps if step is not None))


def _fits(conv: Step, add: Step, program: Program, mine: Ref, other: Ref) -> bool:
    forms: list[Any] = [program.values[ref.name].form for ref in (mine, other)]
    bounds = ("relu", "ceiling", "residual")
    return (
        conv.op == "sparse_conv"
        and len(conv.args) == 2
        and conv.attributes["out"] == "int8"
        and not any(conv.attributes.get(name) for name in bounds)
        and all(isinstance(form, Integers) and form.bits == 8 for form in forms)
        and forms[0].scale == forms[1].scale
        and conv.attributes["narrow"] == add.attributes["narrow"]
        and add.attributes["bits"] == 8
    )


def _joined(conv: Step, add: Step, program: Program, mine: Ref, other: Ref) -> Step:
    form: Any = program.values[mine.name].form
    attributes = {
        **conv.attributes,
        "relu": add.attributes["relu"],
        "sum_multiplier": form.scale / add.attributes["scale"],
    }
    outputs = (add.outputs[0], *conv.outputs[1:])
    return replace(conv, args=(*conv.args, other), outputs=outputs, attributes=attributes)


def _fits_dense(conv: Step, add: Step, program: Program, mine: Ref, other: Ref) -> bool:
    form = program.values[other.name].form
    own, added = (add.tensors[f"scale{add.args.index(ref)}"] for ref in (mine, other))
    return (
        conv.op == "conv"
        and len(conv.args) == 1
        and conv.attributes["out"] == "int32"
        and not any(conv.attributes.get(name) for name in ("relu", "ceiling"))
        and isinstance(form, Integers)
        and form.bits <= 8
        and add.attributes["bits"] == 8
        and add.attributes["axis"] == conv.attributes["channel_axis"]
        and own.dim() == 1  # else the addition rounds another product
        and added.dim() == 0
    )


def _joined_dense(conv: Step, add: Step, mine: Ref, other: Ref) -> Step:
    own, added = (
        add.tensors[f"scale{add.args.index(ref)}"] / add.attributes["scale"]
        for ref in (mine, other)
    )
    settings = {name: add.attributes[name] for name in ("out", "relu", "narrow")}
    return replace(
        conv,
        args=(*conv.args, other),
        outputs=add.outputs,
        attributes={**conv.attributes, **settings, "addend_multiplier": float(added)},
        tensors={**conv.tensors, "multiplier": own},
    )


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

"""A program as text."""

from __future__ import annotations

from bevquant_int8sim.model._form import Form, Integers
from bevquant_int8sim.model._program import Program, Step

__all__ = ["program_table"]


def program_table(program: Program) -> str:
    """One line per step that computes: operation, module, result, why it is in float."""
    rows = [("op", "module", "result", "note")]
    rows += [_row(step, program) for step in program.steps if step.op not in ("host", "constant")]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    islands = program.islands
    title = f"IntegerModel: {len(rows) - 1} steps, {len(islands)} float island"
    title += "s" * (len(islands) != 1)
    if islands and program.operations:
        share = sum(island.share or 0 for island in islands)
        title += f" with {100 * share:.2g} % of the operations"
    return "\n".join([title, *("  " + line for line in lines)])


def _row(step: Step, program: Program) -> tuple[str, str, str, str]:
    op = step.op if step.op not in ("float", "move") else f"{step.op} {step.attributes['what']}"
    op = step.operator if step.op == "operator" else op
    if step.attributes.get("relu"):
        op += " + ReLU"
    return op, step.path, _result(program.values[step.outputs[0]].form), step.reason


def _result(form: Form) -> str:
    if isinstance(form, Integers):
        return f"int{form.bits} × {form.scale:.4g}"
    return str(form)

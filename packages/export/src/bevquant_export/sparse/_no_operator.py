"""Message for a step without an operator in a file, with its location."""

from __future__ import annotations

from typing import Any

from bevquant_int8sim.model import Step

REMEDY = (
    "export_qdq_onnx(profile='onnxruntime') writes the model as it is; or export it up to there, "
    "or replace that"
)
_NORM = (
    "bevquant_fusion.fuse_model folds a norm that alone reads a convolution, and says in `skipped` "
    "why another is left; a BatchNorm1d on voxels is written as it is, one on a dense grid has no "
    "form here. "
)
_CHOICE = (
    "A file is one fixed graph: what branches on values in Python, or counts with them, has no "
    "form in any dialect, nor for ONNX Runtime. Choose by comparing (x[score > t], which "
    "dialect='portable' has), or export the parts before and behind it, each a module of its own, "
    "and run it between them, as bevquant_int8sim.simulate does"
)
_NORMS = {"BatchNorm1d": _NORM, "batch_norm": _NORM}


BEHIND_DENSE = (
    "export_detector writes the model as two files: this one's part up to dense(), and all behind "
    "it for another engine"
)


def no_operator(step: Step, where: str, *, reads_map: bool = False) -> ValueError:
    """The error for a step without an operator.

    Args:
        step: The step.
        where: Operation, module, file and line.
        reads_map: Whether it reads a result of ``dense()``.
    """
    if is_unfollowed(step):
        return ValueError(f"export_sparse_onnx: {where}: {step.reason}. {_CHOICE}")
    remedy = _NORMS.get(str(step.attributes.get("what", "")), "")
    remedy += BEHIND_DENSE if reads_map else REMEDY
    return ValueError(
        f"export_sparse_onnx: {where} has no operator in the dialect libspconv, which has sparse "
        "convolutions and linear layers on voxels, additions, concatenations and choices of "
        "channels, ReLU, dense(), permute and reshape. For ONNX Runtime dialect='portable' has "
        f"pooling, and what a model computes on voxels between its layers; {remedy}"
    )


def is_unfollowed(step: Step) -> bool:
    """Whether a step is a module that could not be captured."""
    return step.reason.startswith("not followed")


def location(source: Any, step: Step) -> str:
    """File and line of the forward."""
    if source is None:
        return ""
    nodes = (n for n, forms in source.held.items() if step.outputs[0] in forms.values())
    location = next(map(source.graph.location, nodes), "")
    return f" ({location})" if location else ""

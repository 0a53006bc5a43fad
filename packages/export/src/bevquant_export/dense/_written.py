"""What an export made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bevquant_export.dense._compare import TensorDifference
    from bevquant_int8sim import IntegerModel

__all__ = ["QdqFile"]


@dataclass(frozen=True)
class QdqFile:
    """A QDQ file, and what its reader should know.

    Attributes:
        path: The file.
        profile: Runtime that it was written for.
        opset: Its operator set.
        inputs: Name to shape; a name in the place of a size is free.
        outputs: Likewise.
        integers: Value of the model's program to the tensor that holds its integers, plus the
            profile's zero point.
        floats: Operations that run in float, as ``path: what: why``.
        notes: What is other than one might expect, by module.
        settings: hb_mapper's YAML next to the file; ``None`` for other profiles.
        run_on_cpu: Nodes that hb_mapper must leave in float.
        sum_ranges: Ranges of what sums read in eight bits of its own, by tensor: what
            ``simulate(integer_sums=…)`` takes to compute the same integers.
        verified: What ran the file on the example inputs before it got its name, as in its
            metadata; ``"no"`` where nothing did.
        differences: What was found, tensor by tensor, as from `compare_qdq_onnx`.
        integer_model: What it was written from and held against; None where another package read
            its own model.
    """

    path: Path
    profile: str
    opset: int
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    integers: dict[str, str]
    floats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Path | None = None
    run_on_cpu: tuple[str, ...] = ()
    sum_ranges: Mapping[str, float] = field(default_factory=dict)
    verified: str = "no"
    differences: tuple[TensorDifference, ...] = ()
    integer_model: IntegerModel | None = field(default=None, repr=False, compare=False)

"""Result of an export, and its differences from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevquant_export._differences import TensorDifference, verdict
from bevquant_export._figures import Figures
from bevquant_graph import HtmlTable

if TYPE_CHECKING:
    from bevquant_int8sim import IntegerModel


@dataclass(frozen=True)
class QdqFile(HtmlTable):
    """Result of `export_qdq_onnx`.

    Attributes:
        path: The file.
        profile: Runtime that the file was written for.
        opset: Its operator set.
        inputs: Input names and shapes; a name in place of a size is a free size.
        outputs: Output names and shapes.
        integers: For each value of the program, the tensor with its integers (plus the profile's
            zero point).
        float8: For each FP8 value of the program, the tensor with its values, the output of a
            DequantizeLinear.
        floats: Operations that run in float, as ``path: operation: reason``.
        notes: Deviations from the default, by module.
        settings: YAML file for hb_mapper; None for other profiles.
        run_on_cpu: Nodes that hb_mapper must leave in float.
        sum_ranges: Ranges of tensors that a sum reads in eight bits of their own;
            ``simulate(integer_sums=…)`` takes them to compute the same integers.
        verified: Runtime that ran the file on the example before it got its name, as in the
            metadata; ``"no"`` with ``verify=False``.
        differences: Result of that run per tensor, as from `compare_qdq_onnx`.
        integer_model: Integer model that the file was written from and compared with; None where
            another package reads the model.
        signature: Positional and named arguments of a call, with `Ref` names of `inputs` in place
            of tensors. The tensors of a frame are bound by these keys and positions.
        result: Return value of a call, with names of `outputs` in place of tensors.
        figures: Size of the file, CPUs where it is exact, and the time with ``measure=True``.
        returned: Result of `integer_model` for the example from the verification; None without
            verification and for inputs rounded to half precision.
    """

    path: Path
    profile: str
    opset: int
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    integers: dict[str, str]
    float8: Mapping[str, str] = field(default_factory=dict)
    floats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Path | None = None
    run_on_cpu: tuple[str, ...] = ()
    sum_ranges: Mapping[str, float] = field(default_factory=dict)
    verified: str = "no"
    differences: tuple[TensorDifference, ...] = ()
    integer_model: IntegerModel | None = field(default=None, repr=False, compare=False)
    returned: Any = field(default=None, repr=False, compare=False)
    signature: Any = field(default=((), {}), repr=False)
    result: Any = field(default=None, repr=False)
    figures: Figures | None = None

    def __str__(self) -> str:
        count = len(self.integers) + len(self.float8)
        lines = [
            f"{self.path} for {self.profile}, operator set {self.opset}: {count} quantized tensors",
            *(f"in float: {what}" for what in self.floats),
            *self.notes,
            *([str(self.figures)] if self.figures else []),
        ]
        return "\n".join((*lines, verdict(self.verified, self.differences)))

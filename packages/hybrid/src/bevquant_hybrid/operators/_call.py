"""One call of one operator, as plain data: what the table, the estimate and the plan are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Scalar = int | float | str | bool | None
Value = Scalar | tuple[Scalar, ...]

DTYPES = ("qint8", "qint16", "qint32", "qbool", "float32", "constant")


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, with everything that decides whether a march can run it.

    Attributes:
        path: Where it stands: the module's path, or the graph node's name.
        operator: The name of its row, e.g. ``"torch.nn.Conv2d"``, or one of the row's aliases.
        attributes: What the row's limits ask for, e.g. ``{"kernel_size": (3, 3)}``. A number
            stands for every axis.
        input_shapes: One per tensor that it reads; a weight is no input.
        input_dtypes: One per input shape: ``qint8``, ``qint16``, ``qint32``, ``qbool``,
            ``float32``, or ``constant`` for a tensor that no input of the model reaches.
        output_shape: Of the first output.
        output_dtype: Of the first output.
        is_model_output: Whether its result leaves the model, directly or through a dequantize
            stub.
        weight_count: Weights that it holds.
        bias_count: Bias values that it holds.
        inputs: Paths of the calls whose results it reads, ``""`` for an input of the model.
    """

    path: str
    operator: str
    attributes: Mapping[str, Value] = field(default_factory=dict)
    input_shapes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_shape: tuple[int, ...] = ()
    output_dtype: str = "qint8"
    is_model_output: bool = False
    weight_count: int = 0
    bias_count: int = 0
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse records that contradict themselves."""
        if len(self.input_dtypes) != len(self.input_shapes):
            raise ValueError(
                f"{self.path}: {len(self.input_shapes)} input shapes but "
                f"{len(self.input_dtypes)} input dtypes; give one dtype for each shape"
            )
        for dtype in (*self.input_dtypes, self.output_dtype):
            if dtype not in DTYPES:
                raise ValueError(f"{self.path}: dtype {dtype!r}; expected one of {DTYPES}")
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))

"""Settings of quantization: one frozen value that goes to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_args

from bevquant_qnn._descriptors import Axis
from bevquant_quantizers import NumBits, QuantDescriptor, format_of
from bevquant_quantizers.documents import as_form, parse_json

Calibrator = Literal["histogram", "max"]

_SCHEMA = 1


@dataclass(frozen=True)
class QuantConfig:
    """Settings of `quantize_model`.

    Attributes:
        num_bits: Bits of every quantizer, 2 to 16, or (4, 3) and (5, 2) for FP8 E4M3 and E5M2.
        weight_bits: Bits of weights where they are others, such as 4; None for `num_bits`.
        output_weight_bits: Bits of the weights of output layers, such as 8 with 4 for the others;
            None for `weight_bits`. From an output layer the graph leads to an output of the model
            without another layer with a weight, as from a head's last convolutions. Needs example
            inputs.
        input_calibrator: `"histogram"` (any of mse, entropy, percentile afterwards) or `"max"`,
            for everything that is not a weight.
        weight_calibrator: The same for weights; per-channel weights want `"max"`.
        weight_per_channel: One range per output channel; False: one per weight tensor.
        narrow_range: Clamp to −127…127 at 8 bit; False clamps to −128…127 as upstream does. The
            two differ only for values below −amax, which a `"max"` range does not have.
        unsigned: Tensors that are never negative by the graph (behind ReLU, sigmoid, softmax) have
            the integers 0…255 at 8 bit, with half the step. For the simulator and files for ONNX
            Runtime and OpenVINO; TensorRT and BPUs have signed integers alone. Sparse tensors and
            sampled maps stay signed. Needs example inputs.
        exclude: Modules to leave float: exact paths or globs (`camera.*.conv1`), each standing
            for the module and everything below it. `conv1` never means `conv10`.
        quantize_add: Quantize residual additions.
        quantize_concat: Quantize concatenations of feature maps.
        quantize_sample: Quantize what `grid_sample` and deformable attention sample.
        quantize_matmul: Quantize both operands of products of two activations: `matmul`, `bmm`,
            `einsum`, `scaled_dot_product_attention` and torch's multi-head attention. Off, as
            attention in float16 is one kernel of TensorRT, too, and loses nothing. Needs example
            inputs.
        quantize_pool: Replace max, average and adaptive average pooling.
        quantize_linear: Replace fully connected layers.
        quantize_first_layer: False leaves the first convolution or linear layer float, in the
            order of registration.
        quantize_last_layer: The same for the last one.

    Raises:
        ValueError: For a setting outside its range, named.

    Example:
        >>> config = QuantConfig(exclude=("head.*",))
        >>> QuantConfig.from_json(config.to_json()) == config
        True
    """

    num_bits: NumBits = 8
    weight_bits: NumBits | None = None
    output_weight_bits: NumBits | None = None
    input_calibrator: Calibrator = "histogram"
    weight_calibrator: Calibrator = "max"
    weight_per_channel: bool = True
    narrow_range: bool = False
    unsigned: bool = False
    exclude: tuple[str, ...] = ()
    quantize_add: bool = True
    quantize_concat: bool = True
    quantize_sample: bool = True
    quantize_matmul: bool = False
    quantize_pool: bool = True
    quantize_linear: bool = True
    quantize_first_layer: bool = True
    quantize_last_layer: bool = True

    def __post_init__(self) -> None:
        for name in ("num_bits", "weight_bits", "output_weight_bits"):
            bits = getattr(self, name)
            if bits is None and name != "num_bits":
                continue
            if isinstance(bits, tuple):
                format_of(bits)  # refuses pairs that are no FP8
            elif not isinstance(bits, int) or not 2 <= bits <= 16:
                msg = (
                    f"QuantConfig.{name} must be a whole number from 2 to 16, or (4, 3) or (5, 2) "
                    f"for FP8, got {bits!r}. Formats with block scales are for single layers: "
                    "apply_precision with a PrecisionPlan sets them"
                )
                raise ValueError(msg)
        for name in ("input_calibrator", "weight_calibrator"):
            if getattr(self, name) not in get_args(Calibrator):
                msg = f"QuantConfig.{name} must be 'histogram' or 'max', got {getattr(self, name)}."
                raise ValueError(msg)
        if isinstance(self.exclude, str):
            msg = f"QuantConfig.exclude must be a tuple of paths; write ({self.exclude!r},)."
            raise ValueError(msg)
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def input_descriptor(self) -> QuantDescriptor:
        """Return the descriptor of every quantizer that reads an activation."""
        return QuantDescriptor(
            num_bits=self.num_bits,
            calib_method=self.input_calibrator,
            narrow_range=self.narrow_range,
        )

    def weight_descriptor(self, axis: Axis) -> QuantDescriptor:
        """Return the descriptor of a weight quantizer whose output channels lie along `axis`."""
        return QuantDescriptor(
            num_bits=self.weight_bits or self.num_bits,
            calib_method=self.weight_calibrator,
            axis=axis if self.weight_per_channel else None,
            narrow_range=self.narrow_range,
        )

    def excluded_by(self, path: str) -> str | None:
        """Return the pattern that leaves the module at `path` float, or None.

        Example:
            >>> QuantConfig(exclude=("conv1",)).excluded_by("conv1.0")
            'conv1'
            >>> QuantConfig(exclude=("conv1",)).excluded_by("conv10") is None
            True
        """
        parts = path.split(".")
        ancestors = [".".join(parts[: stop + 1]) for stop in range(len(parts))]
        for pattern in self.exclude:
            if any(fnmatchcase(ancestor, pattern) for ancestor in ancestors):
                return pattern
        return None

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Return the exclude patterns that match none of `paths`, probably typing errors."""
        known = list(paths)
        return [
            pattern
            for pattern in self.exclude
            if not any(fnmatchcase(path, pattern) for path in known)
        ]

    def to_json(self) -> str:
        """Return the settings as JSON text."""
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` wrote.

        Raises:
            ValueError: Text that is not such JSON, another schema version, or an unknown setting.
        """
        data = parse_json(
            text,
            dict[str, Any],
            what="configuration that QuantConfig.to_json wrote",
            head={"schema": _SCHEMA},
        )
        unknown = set(data) - {field.name for field in fields(cls)} - {"schema"}
        if unknown:
            msg = f"QuantConfig.from_json does not know the settings {sorted(unknown)}."
            raise ValueError(msg)
        made: Self = as_form(data, cls, where="it", what="QuantConfig")
        return made

"""What decides the result of a run, and which of it goes together."""

from __future__ import annotations

from dataclasses import dataclass

from bev_data.cameras import CAMERA_NAMES
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import Branch, Method, PtqOptions, Rounding, unknown_name

__all__ = ["PtqConfig", "check_weights"]


@dataclass(frozen=True)
class PtqConfig(PtqOptions):
    """Everything that decides the result of a run, its frames apart; see `PtqOptions`.

    Args:
        branch: What to quantize; see `TargetOptions`.
        method: How activation ranges are chosen.
        cameras: Names of the cameras to use, in this order.
    """

    branch: Branch = "lidar"
    method: Method = "mse"
    cameras: tuple[str, ...] = CAMERA_NAMES

    @property
    def changes_weights(self) -> bool:
        """Whether the quantized model's weights or biases are other than the float model's."""
        return self.rounding != "nearest" or self.bias_correction


def check_weights(config: PtqConfig, *, needs_folding: str = "") -> None:
    """Refuse settings of the weights that do not go together.

    Args:
        config: The settings.
        needs_folding: What else the run is to do that an unfolded model cannot, such as "files".

    Raises:
        InputError: Naming the options.
    """
    if not 4 <= config.weight_bits <= 8:
        raise InputError(f"--weight-bits {config.weight_bits}: weights have 4 to 8 bits")
    if config.plan is not None and config.weight_bits != 8:
        raise InputError(
            f"--weight-bits {config.weight_bits} with --plan {config.plan}: the plan says the bits "
            "of each layer; leave one of the two out"
        )
    unknown = unknown_name(Rounding, config.rounding)
    if unknown:
        raise InputError(f"--rounding {unknown}")
    if config.fold:
        return
    if config.changes_weights:
        raise InputError(
            "--no-fold with --rounding gptq or --bias-correction: weights are rounded as they are "
            "deployed, batch norms folded, and convolutions before a batch norm have no bias to "
            "correct; leave --no-fold out"
        )
    if needs_folding:
        raise InputError(
            f"--no-fold: {needs_folding} need batch norms folded into the convolutions; leave it "
            "out"
        )

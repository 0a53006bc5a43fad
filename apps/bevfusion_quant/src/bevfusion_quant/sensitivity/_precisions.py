"""At which precisions the groups of a run are measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from bevfusion_quant.run import RunSettings

__all__ = ["precisions_of"]

# Of activations of 8 bits, by the bits of weights.
_OWN = {8: "int8", 4: "int4"}


def precisions_of(settings: RunSettings, asked: Sequence[str], run: str | Path) -> tuple[str, ...]:
    """Those asked for, or the run's own: "int8", or of a run with weights of 4 bits "int4".

    Args:
        settings: Of the run.
        asked: At which to measure; empty for the run's own.
        run: Where it lies, for the message.

    Raises:
        InputError: The run's weights have bits that are no precision of a plan, or were rounded so
            that its layers cannot be put back into float.
    """
    if settings.rounding != "nearest" or settings.bias_correction:
        raise InputError(
            f"{run}: its weights were rounded or its biases corrected (ptq --rounding gptq, "
            "--bias-correction), so no layer can be put back into float: measure a run without, "
            "and give its plan to ptq --plan together with these options"
        )
    bits = settings.weight_bits
    if bits not in _OWN:
        raise InputError(
            f"{run}: weights of {bits} bits are none of the precisions of a plan, which are int4, "
            "int8 and int16: measure a run of 8 or 4 bits"
        )
    return tuple(asked) or (_OWN[bits],)

"""The command that would measure what is missing."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from bevfusion.model import trained_weights

if TYPE_CHECKING:
    from bevfusion_quant.review._evidence import Evidence
    from bevfusion_quant.review._gather import Measured

__all__ = ["command_for"]

# Options that say where frames come from, with how many values each takes; 0 for any number.
_SOURCE = {"--points": 0, "--dataset": 1, "--data": 0, "--split": 1, "--data-version": 1}


def command_for(what: str, measured: Measured) -> str:
    """The command that measures it, with the frames' source as the run's own command names it.

    Args:
        what: A sub-command, or "bpu" for `ptq --target bpu`.
        measured: The run, and what is there.

    Examples:
        `bevfusion-quant simulate --run runs/ptq --dataset street --first 100 --count 200`
    """
    run = measured.run
    source = _options(run, _SOURCE)
    if not source and run.frames and all(name.startswith("street_") for name in run.frames):
        source = ["--dataset", "street"]  # of a demo, which makes its own
    if what == "bpu":
        words = ["bevfusion-quant", "ptq", "--target", "bpu", "--config", run.settings.config]
        return shlex.join([*words, *_weights(run), *source])
    words = ["bevfusion-quant", what, "--run", str(run.folder)]
    if what in ("simulate", "sensitivity"):
        words += source
        if "street" in source:
            # Streets that no run's ranges come from, unless somebody asks for them.
            words += ["--first", "100", "--count", "200" if what == "simulate" else "8"]
    if what == "qat":
        words += source
    return shlex.join(words)


def _weights(run: Evidence) -> list[str]:
    weights = run.settings.weights
    if weights is None:
        return []
    known = trained_weights(run.settings.config)
    return ["--weights", "trained" if str(weights) == str(known) else str(weights)]


def _options(run: Evidence, wanted: dict[str, int]) -> list[str]:
    """Those of the run's command, each with its values."""
    found: list[str] = []
    words = iter(shlex.split(run.command))
    taking, left = False, 0
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--"):
            taking = name in wanted and not equals
            left = wanted.get(name, 0) or -1
            if name in wanted:
                found.append(word)
        elif taking and left:
            found.append(word)
            left -= 1
    return found

"""What comparing runs gave."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from bevfusion_quant.options import PtqOptions, TargetOptions

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy
    from bevfusion_quant.run import RunSettings

__all__ = ["ComparedRun", "Comparison"]

# Of a run's settings, what tells it from another run of the same float model.
_TOLD = {
    "method": "ranges",
    "weight_bits": "weight bits",
    "rounding": "weights rounded",
    "bias_correction": "biases corrected",
    "fold": "batch norms folded",
    "branch": "branch",
    "quantize_head": "head",
    "quantize_first_layer": "first layer",
    "exclude": "left float",
    "plan": "plan",
}
# What else `ptq` can be told beyond any target's options, under its own name.
_SHARED = {option.name for option in fields(TargetOptions)}
_OTHERS = {
    option.name: option.default
    for option in fields(PtqOptions)
    if option.name not in _SHARED | _TOLD.keys()
}


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs.

    Attributes:
        name: Its name in the tables.
        folder: Where it lies.
        settings: What its config.json says.
        integers: Whether it was run in integers too.
        why_not: Why it was not, where that was asked for.
    """

    name: str
    folder: str
    settings: RunSettings
    integers: bool
    why_not: str = ""

    @property
    def models(self) -> dict[str, str]:
        """Names of its models in the tables, by form: "quantized", "integers"."""
        forms = ("quantized", "integers") if self.integers else ("quantized",)
        return {form: f"{self.name} {form}" for form in forms}

    def told(self) -> dict[str, Any]:
        """The settings that runs of one model can differ in, under the names of tables."""
        told = {title: getattr(self.settings, name) for name, title in _TOLD.items()}
        for name, default in _OTHERS.items():
            told[name.replace("_", " ")] = self.settings.written.get(name, default)
        return {**told, "trained by qat": self.settings.qat is not None}

    def summary(self) -> dict[str, Any]:
        """For summary.json and config.json: where it lies, digests, settings."""
        apart = ("format", "version", "sizes")
        written = self.settings.written
        settings = {key: value for key, value in written.items() if key not in apart}
        return {"run": self.folder, "name": self.name, **settings}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: In the order given.
        accuracy: Of float, then of each run's models.
    """

    runs: tuple[ComparedRun, ...]
    accuracy: Accuracy

    def differing(self) -> list[str]:
        """Titles of the settings in which the runs differ; of a single run "ranges"."""
        told = [run.told() for run in self.runs]
        differ = [title for title in told[0] if any(t[title] != told[0][title] for t in told)]
        return differ or ["ranges"]

    def left_out(self) -> list[str]:
        """Which runs were not run in integers though that was asked for; a sentence a reason."""
        reasons = dict.fromkeys(run.why_not for run in self.runs if run.why_not)
        return [self._left_for(reason) for reason in reasons]

    def _left_for(self, reason: str) -> str:
        names = [run.name for run in self.runs if run.why_not == reason]
        are = "is" if len(names) == 1 else "are"
        return f"{', '.join(names)} {are} not among the integers: {reason}."

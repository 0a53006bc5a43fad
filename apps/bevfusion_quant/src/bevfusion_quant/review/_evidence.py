"""One finished folder: what it is, what it says, and its digests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion_quant._errors import InputError
from bevfusion_quant.report import PAGE_DATA, read_sections
from bevfusion_quant.run import (
    CONFIG_FILE,
    DIGESTS_FILE,
    SUMMARY_FILE,
    RunSettings,
    RunSummary,
    read_digests,
    read_settings,
    read_summary,
    refuse_version,
    sha256,
)
from bevquant_quantizers.documents import DocumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bevfusion_quant.report import Section

PAGE_FILE = "report.html"
_FOUND = ("qat", "bpu", "sensitivity", "export")  # kinds whose summary has a field of that name


@dataclass(frozen=True, eq=False)
class Evidence:
    """One finished folder.

    Attributes:
        folder: Where it lies.
        kind: `RunSettings.kind`; "simulation" where an evaluation ran integers.
        settings: What decided it.
        summary: What it found.
        sections: Those of its page, by key, from their data.
        digests: sha256 of config.json, summary.json and page.json, as they were read.
    """

    folder: Path
    kind: str
    settings: RunSettings
    summary: RunSummary
    sections: Mapping[str, Section]
    digests: Mapping[str, str]

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        return self.summary.command

    @property
    def frames(self) -> tuple[str, ...]:
        """Names of the frames it was made with."""
        return self.summary.frame_names

    @property
    def model_digests(self) -> Mapping[str, str]:
        """sha256 of the model's files, of a run that holds one."""
        return self.settings.sha256 or {}


def read_config(folder: Path) -> RunSettings | None:
    """The settings of a folder that this program wrote; None for any other folder."""
    try:
        return read_settings(folder)
    except DocumentError:
        return None


def read_evidence(folder: Path) -> Evidence:
    """Read a finished folder's settings, summary and the data of its page.

    Raises:
        InputError: It is no such folder, damaged, or of another version.
    """
    config = read_config(folder)
    if config is None:
        raise InputError(
            f"{folder} is no run of bevfusion-quant (no {CONFIG_FILE} of ours in it): give a "
            "folder that one of its commands has written"
        )
    try:
        refuse_version(f"{CONFIG_FILE} is of", config.version)
        summary = read_summary(folder)
        kind = config.kind
        if kind in _FOUND and getattr(summary, kind) is None:
            raise ValueError(f"{SUMMARY_FILE} lacks what a folder of kind {kind} found, {kind!r}")
        digests = _checked(folder)
        sections = read_sections(folder / PAGE_DATA)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} cannot be put on a page: {error}: run its command again, or take the folder "
            "out of --runs"
        ) from error
    if kind == "evaluation" and (summary.integers is not None or config.for_bpu):
        kind = "simulation"
    return Evidence(folder, kind, config, summary, sections, digests)


def _checked(folder: Path) -> dict[str, str]:
    """The digests of what a page is made of, which must be those that the run wrote down."""
    known = read_digests(folder)
    if known is None:
        raise ValueError(
            f"it has no {DIGESTS_FILE}, so nothing tells whether its figures are as they were "
            "measured; it is from an earlier version"
        )
    found = {}
    for name in (CONFIG_FILE, SUMMARY_FILE, PAGE_DATA):
        found[name] = sha256(folder / name)
        if known.get(name) != found[name]:
            raise ValueError(f"{name} is not the file that the run wrote: it was changed")
    return found


def frames_text(frames: Sequence[str]) -> str:
    """How many frames, and which.

    Examples:
        >>> frames_text(["street_100", "street_101", "street_102"])
        '3 frames, street_100 … street_102'
        >>> frames_text(["a"])
        '1 frame, a'
    """
    if not frames:
        return "no frames"
    ends = frames[0] if len(frames) == 1 else f"{frames[0]} … {frames[-1]}"
    return f"{len(frames):,} frame{'s' * (len(frames) != 1)}, {ends}"

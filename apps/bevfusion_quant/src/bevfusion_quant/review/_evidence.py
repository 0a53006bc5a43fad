"""One finished folder: what it is, what it says, and its digests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bevfusion_quant._errors import InputError
from bevfusion_quant.report import PAGE_DATA, read_page_data
from bevfusion_quant.run import (
    CONFIG_FILE,
    DIGESTS_FILE,
    RUN_FORMAT,
    RUN_VERSIONS,
    SUMMARY_FILE,
    read_digests,
    sha256,
)
from bevquant_quantizers.documents import DocumentError, as_form, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bevfusion_quant.report import Section

__all__ = ["PAGE_FILE", "Evidence", "kind_of", "read_config", "read_evidence"]

PAGE_FILE = "report.html"
# What the settings of a folder name, and what the folder is then; the first that fits.
_KINDS = {
    "reviews": "report",
    "compares": "comparison",
    "measures": "sensitivity",
    "exports": "export",
    "evaluates": "evaluation",
}


@dataclass(frozen=True, eq=False)
class Evidence:
    """One finished folder.

    Attributes:
        folder: Where it lies.
        kind: "ptq", "qat", "bpu" of runs that hold a model; "evaluation", "simulation",
            "sensitivity", "export", "comparison" of what was measured of one.
        config: Its settings.
        summary: What it found.
        sections: Those of its page, by key, from their data.
        digests: sha256 of config.json, summary.json and page.json, as they were read.
    """

    folder: Path
    kind: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    sections: Mapping[str, Section]
    digests: Mapping[str, str]

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        return str(self.summary.get("command", ""))

    @property
    def frames(self) -> tuple[str, ...]:
        """Names of the frames it was made with."""
        frames = self.summary.get("frames", ())
        return tuple(f["name"] if isinstance(f, dict) else f for f in frames)

    @property
    def model_digests(self) -> Mapping[str, str]:
        """sha256 of the model's files, of a run that holds one."""
        found: Mapping[str, str] = self.config.get("sha256") or {}
        return found


def read_config(folder: Path) -> dict[str, Any] | None:
    """The settings of a folder that this program wrote; None for any other folder."""
    try:
        config: dict[str, Any] = read_json(
            folder / CONFIG_FILE, dict[str, Any], head={"format": RUN_FORMAT}
        )
        as_form(config, _Known, where=CONFIG_FILE, what="run's settings")
    except DocumentError:
        return None
    return config


class _Known(msgspec.Struct):
    sha256: dict[str, str] | None = None
    run_sha256: dict[str, str] | None = None
    compares: list[dict[str, Any]] = []


class _FrameData(msgspec.Struct):
    name: str


class _SummaryData(msgspec.Struct):
    """What every command's summary says in one form."""

    command: str = ""
    frames: list[str | _FrameData] = []
    versions: dict[str, str] = {}


def kind_of(config: Mapping[str, Any]) -> str:
    """What a folder is by its settings; "evaluation" also of what `simulate` wrote."""
    for key, kind in _KINDS.items():
        if key in config:
            return kind
    return "bpu" if config.get("target") == "bpu" else "qat" if "qat" in config else "ptq"


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
    kind = kind_of(config)
    try:
        for name, content in (CONFIG_FILE, config), (SUMMARY_FILE, _summary(folder)):
            if content.get("version", 1) not in RUN_VERSIONS:
                raise ValueError(
                    f"{name} is of version {content['version']!r}, this program reads "
                    f"{RUN_VERSIONS[0]} to {RUN_VERSIONS[-1]}"
                )
        summary = _summary(folder)
        digests = _checked(folder)
        sections = read_page_data(folder / PAGE_DATA)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder} cannot be put on a page: {error}: run its command again, or take the folder "
            "out of --runs"
        ) from error
    if kind == "evaluation" and ("integers" in summary or config.get("target") == "bpu"):
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


def _summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(
        folder / SUMMARY_FILE, dict[str, Any], what="summary", head={"format": RUN_FORMAT}
    )
    as_form(content, _SummaryData, where=SUMMARY_FILE, what="summary")
    return content

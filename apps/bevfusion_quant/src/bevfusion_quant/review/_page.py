"""One page from the sections of many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bevfusion_quant.report import Section, write_page
from bevfusion_quant.report._html import Html, join, tag
from bevfusion_quant.review._evidence import frames_text
from bevfusion_quant.review._headline import run_title
from bevfusion_quant.review._trail import sign_section, trail_section
from bevfusion_quant.review._verdict import verdict_section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bevfusion_quant.review._checks import Check
    from bevfusion_quant.review._evidence import Evidence
    from bevfusion_quant.review._gather import Gathered
    from bevfusion_quant.review._headline import HeadlineGroup

__all__ = ["write_review"]


def write_review(
    path: Path,
    gathered: Gathered,
    groups: Sequence[HeadlineGroup],
    checks: Sequence[Check],
    *,
    title: str,
    command: str,
    versions: Mapping[str, str],
) -> Path:
    """Write the page to sign.

    Args:
        path: The file.
        gathered: What it is made of.
        groups: The headline table.
        checks: Questions and answers.
        title: Its name.
        command: The command line that makes it again.
        versions: Of the packages that make it.
    """
    sections = [
        verdict_section(groups, checks),
        *_borrowed(gathered),
        trail_section(gathered, versions, command),
        sign_section(),
    ]
    return write_page(path, title, _head(gathered, title, checks), sections)


def _head(gathered: Gathered, title: str, checks: Sequence[Check]) -> Html:
    run = gathered.main.run
    states = [check.state for check in checks]
    told = (
        f"{len(checks)} questions: {states.count('good')} answered, {states.count('look')} to look "
        f"at closely, {states.count('missing')} unanswered"
    )
    words = [run_title(run.settings), f"config {run.settings.config}"]
    words += [f"branch {run.settings.branch}", _made_from(run)]
    return join(
        tag("p", "A quantized model, to be reviewed and signed", class_="kicker"),
        tag("h1", title),
        tag("p", "Run ", tag("code", str(run.folder)), " · ", " · ".join(words), class_="lead"),
        tag("p", told, class_="lead strong"),
    )  # fmt: skip


def _made_from(run: Evidence) -> str:
    told = run.summary.qat
    if told is not None:
        return f"from {told.run}, trained on {told.training_frames}"
    return f"quantized on {frames_text(run.frames)}"


def _borrowed(gathered: Gathered) -> Iterator[Section]:
    """Sections of the runs' own pages; each says where it is from."""
    main, chip = gathered.main, gathered.bpu
    judged = (main.evaluation, main.run)
    sources: dict[str, tuple[Evidence | None, ...]] = {
        "comparison": (gathered.comparison,),
        "accuracy": judged,
        "scene": judged,
        "layers": judged,
        "sensitivity": (main.sensitivity,),
        "quantizers": judged,
        "integers": judged,
        "export": (main.export, main.run),
        "bpu": (*judged, *((chip.evaluation, chip.run) if chip is not None else ())),
        "decisions": (main.run,),
    }
    for key, evidences in sources.items():
        for evidence in evidences:
            if evidence is not None and key in evidence.sections:
                yield _from(evidence, evidence.sections[key])
                break


def _from(evidence: Evidence, section: Section) -> Section:
    source = tag(
        "p", "From ", tag("code", str(evidence.folder)), f": {frames_text(evidence.frames)}.",
        class_="note source",
    )  # fmt: skip
    return section._replace(html=join(source, section.html))

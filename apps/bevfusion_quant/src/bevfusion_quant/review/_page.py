"""One page to sign: the verdict, the sections of many runs' pages, where each is from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bevfusion_quant.report import Section, write_page
from bevfusion_quant.results import CellParts, Table, plain_table
from bevfusion_quant.review._checks import exported_files
from bevfusion_quant.review._evidence import frames_text
from bevfusion_quant.review._headline import run_title

if TYPE_CHECKING:
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
        Section("verdict", "Verdict", _verdict(groups, checks)),
        *_borrowed(gathered),
        Section("trail", "Reproduce", _trail(gathered, versions, command)),
        Section("sign", "Sign", None),
    ]
    return write_page(path, title, _head(gathered, title, checks), sections)


def _head(gathered: Gathered, title: str, checks: Sequence[Check]) -> Section:
    run = gathered.main.run
    states = [check.state for check in checks]
    words = [run_title(run.settings), f"config {run.settings.config}"]
    words += [f"branch {run.settings.branch}", _made_from(run)]
    data: dict[str, Any] = {"title": title, "folder": str(run.folder), "words": words}
    data |= {state: states.count(state) for state in ("good", "look", "missing")}
    return Section("head_review", title, data)


def _made_from(run: Evidence) -> str:
    told = run.summary.qat
    if told is not None:
        return f"from {told.run}, trained on {told.training_frames}"
    return f"quantized on {frames_text(run.frames)}"


def _verdict(groups: Sequence[HeadlineGroup], checks: Sequence[Check]) -> dict[str, Any]:
    """Headline table and questions."""
    shown = [
        {
            "frames": frames_text(group.frames),
            "labels": group.labels,
            "stage": group.stage,
            "source": group.source,
            "table": group.table(),
        }
        for group in groups
    ]
    without = list(dict.fromkeys(name for group in groups for name in group.missing))
    return {"groups": shown, "without": without, "checks": checks}


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
                source = (str(evidence.folder), frames_text(evidence.frames))
                yield replace(evidence.sections[key], source=source)
                break


def _trail(gathered: Gathered, own: Mapping[str, str], command: str) -> dict[str, Any]:
    """Folders with their commands and digests, versions of the packages."""
    return {
        "notes": gathered.notes,
        "folders": list(map(_folder, gathered.all)),
        "command": command,
        "versions": _versions(gathered.all, own),
    }


def _folder(evidence: Evidence) -> dict[str, Any]:
    digests = {**evidence.model_digests, **evidence.digests}
    if evidence.summary.export is not None:
        digests |= {f"onnx/{name}": digest for name, digest, _ in exported_files(evidence)}
    rows = [(name, CellParts(text=digest, code=True)) for name, digest in digests.items()]
    title = f"sha256 of files in {evidence.folder}"
    table = plain_table(title, ("", ""), rows, "digests")
    return {
        "kind": evidence.kind,
        "folder": str(evidence.folder),
        "frames": frames_text(evidence.frames),
        "command": evidence.command,
        "digests": replace(table, hidden=True),
    }


def _versions(found: Sequence[Evidence], own: Mapping[str, str]) -> Table:
    """One column where every folder was made with the same versions, else one for each set."""
    sets: dict[tuple[tuple[str, str], ...], list[str]] = {}
    said = [(evidence.folder.name, evidence.summary.versions) for evidence in found]
    for name, versions in [*said, ("this page", own)]:
        sets.setdefault(tuple(sorted(versions.items())), []).append(name)
    merged: list[tuple[dict[str, str], list[str]]] = []
    for pairs, names in sets.items():
        versions = dict(pairs)
        for there, of in merged:
            if all(there.get(key, value) == value for key, value in versions.items()):
                there |= versions
                of += names
                break
        else:
            merged.append((versions, names))
    packages = sorted({package for versions, _ in merged for package in versions})
    heads = ["Package", *("Version" if len(merged) == 1 else ", ".join(of) for _, of in merged)]
    rows = [
        (package, *(versions.get(package, "–") for versions, _ in merged)) for package in packages
    ]
    return plain_table("Versions", heads, rows, "")

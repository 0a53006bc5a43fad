"""A page to sign, made of many runs, in a run folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from bev_data.tables import CellParts, Table, plain_table
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import Place
from bevfusion_quant.pages import Section, sizes_title, write_page
from bevfusion_quant.report._checks import Check, checks, exported_files
from bevfusion_quant.report._gather import Evidence, Gathered, frames_text, gather
from bevfusion_quant.report._headline import HeadlineGroup, headline, run_title
from bevfusion_quant.run import PAGE_FILE, new_run, versions

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 300

# Time of the page's own clock that may pass until every chart is drawn; it does not wait for it.
DRAWN_MS = 10_000
MARKS = {"good": "ok", "look": "LOOK", "missing": "missing"}


def find_browser(named: Path | None = None) -> Path:
    """Path of the named browser, or else of the first Chromium or Chrome on the path.

    Raises:
        InputError: No browser was found.
    """
    for name in [str(named)] if named is not None else NAMES:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    found_text = f"--browser {named} is no program" if named is not None else (
        f"--pdf needs Chromium or Chrome, and none of {', '.join(NAMES)} is on the path"
    )  # fmt: skip
    raise InputError(
        f"{found_text}: name one with --browser, or leave out --pdf and print report.html from any "
        "browser"
    )


def print_pdf(page: Path, pdf: Path, browser: Path) -> Path:
    """Print a page to PDF with the browser's print command, without header and footer.

    Raises:
        InputError: The browser did not print it.
    """
    with tempfile.TemporaryDirectory(prefix="bevfusion-quant-") as profile:
        words = [
            str(browser), "--headless", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--no-first-run", f"--user-data-dir={profile}",
            f"--virtual-time-budget={DRAWN_MS}", "--no-pdf-header-footer",
            f"--print-to-pdf={pdf.absolute()}", page.absolute().as_uri(),
        ]  # fmt: skip
        if os.geteuid() == 0:  # Chromium's sandbox refuses root
            words.insert(1, "--no-sandbox")
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            found_text = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        except (OSError, subprocess.TimeoutExpired) as error:
            found_text = [str(error)]
    if not pdf.is_file() or not pdf.read_bytes().startswith(b"%PDF"):
        raise InputError(
            f"--pdf: {browser} did not print the page ({found_text[0]}): name another with "
            "--browser, or "
            "leave out --pdf and print report.html from any browser"
        )
    return pdf


PDF_FILE = "report.pdf"
_PACKAGES = ("bevquant-export", "bevquant-hybrid")


@dataclass(frozen=True, eq=False)
class ReportResult:
    """Path of the page, its sources, and its headline."""

    folder: Path
    gathered: Gathered
    headline: tuple[HeadlineGroup, ...]
    checks: tuple[Check, ...]


def run_report(
    run: str | Path,
    *,
    qat: Path | None = None,
    bpu: Path | None = None,
    take: Sequence[Path] = (),
    pdf: bool = False,
    browser: Path | None = None,
    **place: Unpack[Place],
) -> ReportResult:
    """Put a run and its measurements on one page to sign, and write `runs/name`.

    Nothing is measured again and no source folder is changed. The page takes the sections of the
    runs' own pages. For each missing measurement it names the command.

    Args:
        run: A folder of `run_ptq`, `run_qat` or `bpu.run_bpu`.
        qat: A run of `qat` from the same float model, shown beside.
        bpu: A run for a BPU of the same float model, shown beside.
        take: Folders to take instead of the newest of their kind in `runs`.
        pdf: Print the page to report.pdf.
        browser: Chromium or Chrome. Default: the first on the path.
        **place: Where the page is written; see `Place`.

    Raises:
        InputError: A folder is no run, damaged, of another version or of other weights, or there is
            no browser to print with. Nothing is written.
    """
    if browser is not None and not pdf:
        raise InputError(f"--browser {browser} goes with --pdf: add that, or leave it out")
    printer = find_browser(browser) if pdf else None
    with new_run("report", None, _PACKAGES, keep=run, **place) as record:
        folder = record.folder
        gathered = gather(Path(run), record.path.parent, qat=qat, bpu=bpu, take=take)
        groups = headline(gathered)
        found = checks(gathered, groups)
        title = gathered.main.run.folder.resolve().name
        sections = [
            Section("verdict", "Verdict", _verdict(groups, found)),
            *_borrowed(gathered),
            Section("trail", "Reproduce", _trail(gathered, versions(*_PACKAGES), record.command)),
            Section("sign", "Sign", None),
        ]
        page = write_page(folder / PAGE_FILE, title, _head(gathered, title, found), sections)
        if printer is not None:
            print_pdf(page, folder / PDF_FILE, printer)
        read = {"evaluates": str(run), "run_sha256": gathered.main.run.model_digests}
        record.write_settings({"reviews": str(run), **read})
        record.write_summary(
            {
                "reviews": str(run),
                "sources": [
                    {"folder": str(e.folder), "kind": e.kind, "command": e.command, **e.digests}
                    for e in gathered.all
                ],
                "headline": [asdict(group) for group in groups],
                "checks": [asdict(check) for check in found],
                "notes": gathered.notes,
            }
        )
    return ReportResult(record.path, gathered, groups, found)


def report_text(result: ReportResult) -> tuple[str, ...]:
    """Headline tables, then each question with its answer or the command that answers it."""
    tables = [group.table() for group in result.headline]
    parts = [f"{table.title}\n\n{table.text()}" for table in tables]
    return (*parts, "\n".join(_lines(result.checks)), *result.gathered.notes)


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        yield f"{MARKS[check.state]:>7}  {check.question} {check.answer}"
        if check.command:
            yield f"{'':9}{check.command}"


def _head(gathered: Gathered, title: str, checks: Sequence[Check]) -> Section:
    run = gathered.main.run
    states = [check.state for check in checks]
    words = [run_title(run.settings), sizes_title(run.settings.sizes_name)]
    words += [f"branch {run.settings.branch}", _made_from(run)]
    data: dict[str, Any] = {"title": title, "folder": str(run.folder), "words": words}
    data |= {state: states.count(state) for state in ("good", "look", "missing")}
    return Section("head_review", title, data)


def _made_from(run: Evidence) -> str:
    found_text = run.summary.qat
    if found_text is not None:
        return f"from {found_text.run}, trained on {found_text.training_frames}"
    return f"quantized on {frames_text(run.frames)}"


def _verdict(groups: Sequence[HeadlineGroup], checks: Sequence[Check]) -> dict[str, Any]:
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
    """Sections of the runs' own pages; each names its source."""
    main, chip = gathered.main, gathered.bpu
    evaluated = (main.evaluation, main.run)
    sources: dict[str, tuple[Evidence | None, ...]] = {
        "comparison": (gathered.comparison,),
        "accuracy": evaluated,
        "scene": evaluated,
        "layers": evaluated,
        "sensitivity": (main.sensitivity,),
        "quantizers": evaluated,
        "integers": evaluated,
        "export": (main.export, main.run),
        "bpu": (*evaluated, *((chip.evaluation, chip.run) if chip is not None else ())),
        "decisions": (main.run,),
    }
    for key, evidences in sources.items():
        for evidence in evidences:
            if evidence is not None and key in evidence.sections:
                source = (str(evidence.folder), frames_text(evidence.frames))
                yield replace(evidence.sections[key], source=source)
                break


def _trail(gathered: Gathered, own: Mapping[str, str], command: str) -> dict[str, Any]:
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
    """One column if all folders have the same versions, else one per set of versions."""
    sets: dict[tuple[tuple[str, str], ...], list[str]] = {}
    said = [(evidence.folder.name, evidence.summary.versions) for evidence in found]
    for name, there in [*said, ("this page", own)]:
        sets.setdefault(tuple(sorted(there.items())), []).append(name)
    merged: list[tuple[dict[str, str], list[str]]] = []
    for pairs, names in sets.items():
        more = dict(pairs)
        for found_text, of in merged:
            if all(found_text.get(key, value) == value for key, value in more.items()):
                found_text |= more
                of += names
                break
        else:
            merged.append((more, names))
    packages = sorted({package for found_text, _ in merged for package in found_text})
    heads = ["Package", *("Version" if len(merged) == 1 else ", ".join(of) for _, of in merged)]
    rows = [
        (package, *(found_text.get(package, "–") for found_text, _ in merged))
        for package in packages
    ]
    return plain_table("Versions", heads, rows, "")

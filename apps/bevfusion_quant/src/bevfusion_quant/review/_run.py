"""A page to sign, in a run folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.review._checks import Check, checks
from bevfusion_quant.review._evidence import PAGE_FILE
from bevfusion_quant.review._gather import Gathered, gather
from bevfusion_quant.review._headline import HeadlineGroup, headline
from bevfusion_quant.review._page import write_review
from bevfusion_quant.review._print import find_browser, print_pdf
from bevfusion_quant.run import (
    RunRecord,
    run_folder,
    versions,
)

__all__ = ["PDF_FILE", "ReviewResult", "run_review"]

PDF_FILE = "report.pdf"
_PACKAGES = ("bevquant-export", "bevquant-hybrid")


@dataclass(frozen=True, eq=False)
class ReviewResult:
    """Where the page lies, what it is made of, and what it says first."""

    folder: Path
    gathered: Gathered
    headline: tuple[HeadlineGroup, ...]
    checks: tuple[Check, ...]


def run_review(
    run: str | Path,
    *,
    qat: Path | None = None,
    bpu: Path | None = None,
    take: Sequence[Path] = (),
    pdf: bool = False,
    browser: Path | None = None,
    runs: Path = Path("runs"),
    name: str = "report",
    overwrite: bool = False,
    command: str = "",
) -> ReviewResult:
    """Put a run and what was measured of it on one page to sign, and write `runs/name`.

    Nothing is measured anew and no folder is changed. The page borrows the sections of the runs'
    own pages; what nobody measured it names, with the command that would.

    Args:
        run: A folder that `run_ptq`, `run_qat` or `bpu.run_bpu` wrote.
        qat: A run of `qat` from the same float model, to stand beside.
        bpu: A run for a BPU of the same float model, to stand beside.
        take: Folders to take instead of the newest of their kind in `runs`.
        pdf: Print the page to report.pdf.
        browser: Chromium or Chrome; by default the first on the path.
        runs: Folder of all runs.
        name: The page's folder in it.
        overwrite: Replace an earlier page of that name.
        command: The command line that repeats it, for the page.

    Raises:
        InputError: A folder that is no run, damaged, of another version or of other weights; no
            browser to print with. Nothing is written then.
    """
    if browser is not None and not pdf:
        raise InputError(f"--browser {browser} goes with --pdf: add that, or leave it out")
    printer = find_browser(browser) if pdf else None
    with run_folder(runs, name, overwrite=overwrite, keep=Path(run)) as folder:
        gathered = gather(Path(run), runs, qat=qat, bpu=bpu, take=take)
        groups = headline(gathered)
        found = checks(gathered, groups)
        page = write_review(
            folder / PAGE_FILE,
            gathered,
            groups,
            found,
            title=gathered.main.run.folder.resolve().name,
            command=command,
            versions=versions(*_PACKAGES),
        )
        if printer is not None:
            print_pdf(page, folder / PDF_FILE, printer)
        record = RunRecord(folder, command, None, _PACKAGES)
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
    return ReviewResult(runs / name, gathered, groups, found)

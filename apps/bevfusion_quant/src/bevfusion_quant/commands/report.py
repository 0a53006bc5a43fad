"""`bevfusion-quant report`: a run and what was measured of it, on one page to sign."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bevfusion_quant.commands._text import joined, shown
from bevfusion_quant.options import RunOptions

__all__ = ["Report"]


@dataclass(frozen=True, kw_only=True)
class Report(RunOptions):
    """Put a run and what was measured of it on one page to sign; nothing is measured anew.

    Of the finished folders in --runs those are taken that were made with the run's weights, of each
    kind the newest. What nobody measured is named, with the command that would.

    Args:
        runs: Folder of all runs; the page gets one of its own.
        name: Its folder in it; by default report, report-2, …
        overwrite: Replace an earlier page of that name.
        run: The folder of a run that demo, ptq or qat wrote.
        qat: A run of qat from the same float model, to stand beside.
        bpu: A run of ptq --target bpu of the same float model, to stand beside.
        take: Folders of evaluate, simulate, sensitivity, export or compare to take instead of the
            newest.
        pdf: Print the page to report.pdf, with Chromium or Chrome.
        browser: The browser to print with; by default the first on the path.
    """

    run: Path
    qat: Path | None = None
    bpu: Path | None = None
    take: tuple[Path, ...] = ()
    pdf: bool = False
    browser: Path | None = None

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.ptq import written_text
        from bevfusion_quant.report import report_text, run_report

        result = run_report(
            self.run,
            qat=self.qat,
            bpu=self.bpu,
            take=self.take,
            pdf=self.pdf,
            browser=self.browser,
            **self.place(command),
        )
        if self.quiet or self.json:
            return shown(result.folder, self, "")
        return joined([*report_text(result), *written_text(result.folder)])

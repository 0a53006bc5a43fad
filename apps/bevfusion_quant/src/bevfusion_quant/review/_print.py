"""The page on paper: Chromium prints it to a PDF."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from bevfusion_quant._errors import InputError

__all__ = ["find_browser", "print_pdf"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 300
# Time of the page's own clock that may pass until every chart is drawn; it does not wait for it.
DRAWN_MS = 10_000


def find_browser(named: Path | None = None) -> Path:
    """Where Chromium or Chrome lies.

    Args:
        named: The browser to take; by default the first on the path.

    Raises:
        InputError: There is none.
    """
    for name in [str(named)] if named is not None else NAMES:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    told = f"--browser {named} is no program" if named is not None else (
        f"--pdf needs Chromium or Chrome, and none of {', '.join(NAMES)} is on the path"
    )  # fmt: skip
    raise InputError(
        f"{told}: name one with --browser, or leave out --pdf and print report.html from any "
        "browser"
    )


def print_pdf(page: Path, pdf: Path, browser: Path) -> Path:
    """Print a page as a browser's print command does, without its header and footer.

    Args:
        page: The page.
        pdf: The file to write.
        browser: From `find_browser`.

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
            told = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        except (OSError, subprocess.TimeoutExpired) as error:
            told = [str(error)]
    if not pdf.is_file() or not pdf.read_bytes().startswith(b"%PDF"):
        raise InputError(
            f"--pdf: {browser} did not print the page ({told[0]}): name another with --browser, or "
            "leave out --pdf and print report.html from any browser"
        )
    return pdf

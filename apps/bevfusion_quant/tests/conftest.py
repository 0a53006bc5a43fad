"""What several files of tests share: streets, runs, and a browser where one is at hand."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bev_scenes import street_frame

# Modules beside the tests, which several of them share.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _streets_once() -> Iterator[None]:
    """A street that several commands look at is rendered once a process: most of a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bev_scenes._frame.street_frame", cache(street_frame))
        yield


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """Runs of a test write their page and no pictures, which take up to two seconds."""
    from without_pictures import without_pictures

    with without_pictures(page=True):
        yield


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of a session keep the runs that they share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made_runs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium, which is asked for nothing on the network and keeps its logs."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.skip("Chromium and chromedriver are not both installed")
    os.environ["SE_OFFLINE"] = "true"  # selenium finds nothing on the network, and asks nothing
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage",
                 "disable-background-networking", f"user-data-dir={profile}"):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver_path)) as driver:
        driver.set_script_timeout(300)
        yield driver


@pytest.fixture
def show(browser: Any) -> Callable[..., Any]:
    """`show(page, width=1280, scheme="light")` opens a page as if for the first time."""

    def opened(page: Path, width: int = 1280, scheme: str = "light") -> Any:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # a scroll is over at once
        ]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get("about:blank")
        browser.get(page.as_uri())
        browser.execute_script("localStorage.clear()")
        return browser

    return opened

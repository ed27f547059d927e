"""Starts the service and a browser that opens its console."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.common import server
from loadtest.errors import LoadtestError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BUNDLES = tuple(Path("bundles", name) for name in ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2-linear", "python-gated-delta"))
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_FLAGS += ["--disable-component-update", "--disable-sync"]


@contextmanager
def service(bundles: Sequence[Path]) -> Iterator[server.MeasuredServer]:
    """Start `attnserve serve --lean` with these bundles, and with states in memory."""
    if missing := [bundle for bundle in bundles if not (bundle / "manifest.json").exists()]:
        raise LoadtestError(f"{missing[0]} is not a bundle: make {missing[0]}/manifest.json")
    flags = [part for bundle in bundles[1:] for part in ("--bundle", str(bundle))]
    with server.attnserve(bundles[0], bundles[0].name, lean=True, flags=[*flags, "--set", "states=memory"]) as running:
        yield running


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Start chromium, headless, with a new profile. Raises LoadtestError if it is missing."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise LoadtestError("chromium is needed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()

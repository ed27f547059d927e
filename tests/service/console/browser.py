"""A page in Debian's chromium that remembers everything it should not have done."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

from tests.service.fakes import PATIENCE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "chromium is not here (apt-get install chromium)"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
SOURCE = Path(__file__).parents[3] / "service" / "console" / "source"
AXE = SOURCE / "node_modules" / "axe-core" / "axe.min.js"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, headless, with a new profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page of the service at `url`. `elsewhere`: requests to other origins. `complaints`: errors and warnings of the browser's console,
    such as those of the content security policy, and errors that no script caught."""

    page: Page
    url: str
    elsewhere: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _asked(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.url:
            self.elsewhere.append(address)

    def go(self, name: str) -> None:
        self.page.goto(f"{self.url}/#/{name}")

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def press_during(self, name: str, tokens: int) -> None:
        """Press a button as soon as a stream has brought so many tokens. The page does it by itself: a driver would come too late."""
        self.page.evaluate(
            """async ([name, tokens, patience_s]) => {
              const named = (each) => each.textContent.trim() === name && !each.disabled;
              const button = () => [...document.querySelectorAll('button')].find(named);
              const end = performance.now() + 1000 * patience_s;
              while (document.querySelectorAll('[data-at]').length < tokens || !button()) {
                if (performance.now() > end) throw new Error(`there is no button ${name}`);
                await new Promise((done) => requestAnimationFrame(done));
              }
              button().click();
            }""",
            [name, tokens, PATIENCE_S],
        )

    def wait(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own way needs `eval`, which the content security policy forbids."""
        end = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(20)

    def barriers(self) -> list[str]:
        """What axe-core calls serious or critical for people who use a keyboard, a screen reader or other colours."""
        if not self.page.evaluate("typeof axe === 'object'"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = self.page.evaluate("axe.run(document).then((found) => found.violations)")
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        return [f"{each['id']}: {node['html'][:160]}" for each in serious for node in each["nodes"]]

    def too_wide(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def stored(self) -> list[Any]:
        """All that the page has left in the browser."""
        kept: list[Any] = self.page.evaluate("[...Object.entries(localStorage), ...Object.entries(sessionStorage)]")
        return [*kept, *self.page.context.cookies()]


@contextmanager
def watched(browser: Browser, url: str, *, width: int = 1280, dark: bool = False) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    try:
        context.set_default_timeout(1000 * PATIENCE_S)
        yield Watched(context.new_page(), url)
    finally:
        context.close()

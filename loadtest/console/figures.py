"""Measures the console: `python -m loadtest.console.figures`.

Time to the first useful paint, what the overview costs a service under load, frames per second while drawings are panned, and the size
of the files.
"""

import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Annotated
from urllib.request import Request, urlopen

import psutil
import typer
from playwright.sync_api import Browser, Page

from loadtest.common.terminal import interruptible, run
from loadtest.console.browser import BUNDLES, chromium, service
from service.terminal import command_app

app = command_app()
_STATIC = Path(__file__).parents[2] / "service" / "console" / "static"
_SAMPLES = 200  # requests for /metrics, of which the overview sends one a second
_LOAD_PER_S = 20  # requests a second of the load beside which they are sent
_BASE_S = 15  # seconds for which the CPU time of the load alone is measured
_PAN_S = 3
# The page is useful when the first model is in its table and has been painted.
_USEFUL = """
new MutationObserver((_, observer) => {
  if (!document.querySelector('tbody b')) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.useful = performance.now(); }));
}).observe(document, { childList: true, subtree: true });
"""
# Moves the pointer by some pixels before each frame, so that each frame draws anew, and counts frames.
_PAN = """
async ([selector, seconds]) => {
  const canvas = document.querySelector(selector);
  canvas.scrollIntoView({ block: 'center' });
  const box = canvas.getBoundingClientRect();
  const at = (x, y) => ({ clientX: box.left + x, clientY: box.top + y, pointerId: 1, bubbles: true });
  const send = (type, x, y) => canvas.dispatchEvent(new PointerEvent(type, at(x, y)));
  canvas.setPointerCapture = () => {};
  canvas.focus();
  for (let at = 0; at < 3; at++) canvas.dispatchEvent(new KeyboardEvent('keydown', { key: '+', bubbles: true }));
  send('pointerdown', 150, 150);
  const began = performance.now();
  let frames = 0;
  while (performance.now() - began < seconds * 1000) {
    send('pointermove', 150 + 60 * Math.sin(frames / 9), 150 + 60 * Math.cos(frames / 9));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    frames++;
  }
  send('pointerup', 150, 150);
  return (frames * 1000) / (performance.now() - began);
}
"""


def first_paint_ms(browser: Browser, address: str, times: int) -> list[float]:
    """Return the milliseconds from the start of the navigation until the overview has painted its table of models, each time in a new
    profile without cached files."""
    found = []
    for _ in range(times):
        context = browser.new_context()
        page = context.new_page()
        page.add_init_script(_USEFUL)
        page.goto(address)
        while not page.evaluate("window.useful"):  # `wait_for_function` needs `eval`, which the content security policy forbids
            page.wait_for_timeout(10)
        found.append(float(page.evaluate("window.useful")))
        context.close()
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants."""
    parent = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:2]) for process in (parent, *parent.children(recursive=True)))


def share_of_a_core(pid: int, address: str) -> float:
    """Return the CPU time of the service for one request to `/metrics` beside a load. At one a second, it is a share of one core."""
    with _load(address):
        base = _share(pid, lambda: time.sleep(_BASE_S))
        started = time.monotonic()
        asked = _share(pid, lambda: _ask(f"{address}/metrics"))
        return (asked - base) * (time.monotonic() - started) / _SAMPLES


def _share(pid: int, work: Callable[[], object]) -> float:
    """Return the cores that the service uses while `work` runs."""
    started, before = time.monotonic(), cpu_s(pid)
    work()
    return (cpu_s(pid) - before) / (time.monotonic() - started)


@contextmanager
def _load(address: str) -> Iterator[None]:
    """Send `_LOAD_PER_S` requests a second to the models in turn, as long as the block runs."""
    encoders, decoder = BUNDLES[:2], BUNDLES[2]
    bodies: list[tuple[str, object]] = [
        ("/v1/embeddings", {"model": each.name, "input": ["Attention is all you need"]}) for each in encoders
    ]
    bodies.append(("/v1/completions", {"model": decoder.name, "prompt": "def mean(values):", "max_tokens": 4}))
    ended = Event()

    def send() -> None:
        begin = time.monotonic()
        for number in count():
            path, body = bodies[number % len(bodies)]
            _send(f"{address}{path}", body)
            if ended.wait(max(0.0, begin + (number + 1) / _LOAD_PER_S - time.monotonic())):
                return

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        try:
            yield
        finally:
            ended.set()
            sending.result()


def _ask(url: str) -> None:
    for _ in range(_SAMPLES):
        _send(url)


def _send(url: str, body: object | None = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"content-type": "application/json"})) as answer:
        answer.read()


def frames(page: Page, address: str, lines: int) -> tuple[float, float | None]:
    """Return the frames per second while the points of `lines` texts are panned, and while their matrix of cosines is, if it is shown."""
    page.goto(f"{address}/#/embed?models={BUNDLES[0].name}")
    page.get_by_label("Texts, one a line").fill("\n".join(f"line {at} of {lines}" for at in range(lines)))
    page.get_by_role("button", name="Embed", exact=True).click()
    page.get_by_text("Two principal components").wait_for(timeout=120_000)
    points = float(page.evaluate(_PAN, ["canvas[aria-label^='Principal']", _PAN_S]))
    matrix = float(page.evaluate(_PAN, ["canvas[aria-label^='Cosines']", _PAN_S])) if page.locator("canvas").count() > 1 else None
    return points, matrix


@app.command()
def figures(times: Annotated[int, typer.Option(min=1, help="Navigations whose median is told.")] = 10) -> None:
    """Measure the console in chromium without a GPU, and print its figures with their bars."""
    size = sum(len(gzip.compress(file.read_bytes(), 9)) for file in _STATIC.iterdir())
    print(f"files, gzip: {size / 1000:.1f} kB (bar: 300 kB)")
    with interruptible(), service(BUNDLES) as running, chromium() as browser:
        first_paint_ms(browser, running.address, 2)
        paints = first_paint_ms(browser, running.address, times)
        print(f"first useful paint: median {statistics.median(paints):.0f} ms, most {max(paints):.0f} ms of {times} (bar: 300 ms)")
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        points, _ = frames(page, running.address, 2000)
        print(f"2,000 points, panned: {points:.0f} frames/s (bar: 30)")
        page.goto("about:blank")
        _, matrix = frames(page, running.address, 512)
        print(f"a map of 512 x 512, panned: {matrix:.0f} frames/s (bar: 30)")
        page.goto("about:blank")
        print(f"overview: {share_of_a_core(running.pid, running.address):.2%} of a core (bar: 1 %)")


if __name__ == "__main__":
    run(app, "figures")

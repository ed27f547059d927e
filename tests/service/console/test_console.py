"""Every page of the console in chromium, against the real service: that it works, asks no other origin, and is usable by everybody.

The pictures of all pages at two widths are left in out/console/.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser

from tests.decoders import tiny_decoder_bundle
from tests.service.console.browser import AXE, CHROMIUM, NO_CHROMIUM, Watched, chromium, watched
from tests.service.fakes import fake_app, fake_bundle, serve_in_thread
from tests.service.http.test_edge import KEY
from tests.service.live import LiveService, live

pytestmark = [pytest.mark.live, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]
PICTURES = Path(__file__).parents[3] / "out" / "console"
# The address of a text that cannot end early. The end token of the tiny decoders is "+", which strings may have and integers not.
TOKENS = 1000  # a few seconds of text, during which a test presses a button
LONG = urlencode({"max_tokens": TOKENS, "schema": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": TOKENS})})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def service(
    encoder_with_maps: Path,
    reranker_bundle: Path,
    classifier_bundle: Path,
    image_bundle: Path,
    encoder_decoder_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveService]:
    """A model of each kind, in development mode, with states on disk, so that streams survive the process. The decoder is large enough
    that a text lasts for seconds, during which tests press buttons."""
    folder = tmp_path_factory.mktemp("console")
    env = {"ATTNSERVE_STATES": str(folder / "states")}
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    shape = {"d_model": 192, "n_layers": 10, "layers": "gated_delta", "positions": "none"}
    decoder = folder / "decoder"
    tiny_decoder_bundle(decoder, chat_template=template, **shape)
    bundles = [encoder_with_maps, reranker_bundle, classifier_bundle, decoder, image_bundle, encoder_decoder_bundle]
    with live(bundles, "--lean", "--development", "--alias", "short=tiny-encoder", env=env) as running:
        yield running


@pytest.fixture
def at(browser: Browser, service: LiveService) -> Iterator[Watched]:
    with watched(browser, service.url) as page:
        yield page
        assert page.elsewhere == []
        assert page.complaints == []


# What a visitor does on each page, and what it then shows.


def _overview(at: Watched) -> None:
    at.page.get_by_role("button", name="Use tiny-encoder").click()
    at.wait("6 served")
    at.wait("curl -s")
    at.until("document.querySelector('.tile dd').textContent !== '–/s'")


def _embed(at: Watched) -> None:
    at.page.get_by_label("Texts, one a line").fill("the cat sat\nthe dog sat\na red tree\na fish in water")
    at.press("Embed")
    at.wait("48 dimensions")
    at.page.get_by_label("Search these lines").fill("cat")
    at.press("Search")
    at.wait("Nearest to “cat”")
    first = at.page.locator(".ranked li").first.inner_text()
    assert re.match(r"-?\d\.\d+", first)


def _rank(at: Watched) -> None:
    at.press("Rank")
    at.wait("Sorted by score")
    scores = [float(each.split()[0]) for each in at.page.locator(".ranked li").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 5
    at.press("Classify")
    at.wait("neutral")


def _generate(at: Watched) -> None:
    at.page.get_by_label("Tokens", exact=True).fill("24")
    at.press("Generate")
    at.wait("complete (length) · 24 tokens")
    at.page.get_by_label("Generated text").focus()
    at.page.keyboard.press("ArrowRight")
    at.wait("log-probability")
    assert at.page.locator(".line").count() >= 5


def _chat(at: Watched) -> None:
    at.page.get_by_label("Tokens", exact=True).fill("12")
    for said in ("first", "second"):
        at.page.get_by_label("Message", exact=True).fill(said)
        at.press("Send")
        at.page.get_by_role("button", name="Send").wait_for()
        at.until(f"document.querySelectorAll('.talk a').length === {1 if said == 'first' else 2}")
    at.press("Branch here")
    at.page.get_by_label("Message", exact=True).fill("third")
    at.press("Send")
    at.wait("Forked: one row")
    at.wait("2 of 2")
    at.press("Previous branch")
    at.wait("second")


def _states(at: Watched) -> None:
    at.press("New state")
    at.page.get_by_label("Name, if any").fill("page")
    at.press("Read it and keep the state")
    at.wait("a key-value cache")
    at.press("Fork")
    at.until("document.querySelectorAll('.node').length >= 2")
    at.page.get_by_label("Filter").fill("PAGE")
    at.until("document.querySelectorAll('.node').length === 1")
    at.page.get_by_label("Filter").fill("")
    assert at.page.locator(".tree").evaluate("(tree) => getComputedStyle(tree).overflowY") == "scroll"
    at.page.get_by_label("Continue with").fill("x")
    at.page.get_by_label("Tokens", exact=True).fill("5")
    at.press("Continue")
    at.until("document.querySelectorAll('.node').length >= 3")
    at.wait("continuation")
    at.press("Pin")
    at.wait("pinned")
    with at.page.expect_download() as download:
        at.press("Download")
    at.page.get_by_label("Upload").set_input_files(download.value.path())
    at.until("document.querySelectorAll('.node').length >= 4")
    at.press("Delete")
    at.wait("Choose a state")


def _attention(at: Watched) -> None:
    at.page.get_by_label("Text", exact=True).fill("the cat sat")
    at.press("Show attention")
    at.wait("Layers and heads")
    at.page.get_by_role("button", name=re.compile("Layer 1, head 1, entropy")).first.click()
    at.wait("layer 1, head 1")


def _traffic(at: Watched) -> None:
    at.press("Send requests for 10 s")
    at.until("parseInt(document.querySelector('[role=status]').textContent) > 0")
    at.until("[...document.querySelectorAll('.legend b')].some((each) => parseFloat(each.textContent) > 0)")


def _sequences(at: Watched) -> None:
    at.press("Draw")
    at.wait("complete: 48 of 48 pixels")
    at.press("Write")
    at.wait("Attention of each written token")


PAGES: dict[str, Callable[[Watched], None]] = {
    "overview": _overview,
    "embed": _embed,
    "rank": _rank,
    "generate": _generate,
    "chat": _chat,
    "states": _states,
    "attention": _attention,
    "traffic": _traffic,
    "sequences": _sequences,
}


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not here (npm ci in service/console/source)")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_works_wide_and_narrow_light_and_dark_and_for_everybody(at: Watched, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    at.go(name)
    at.page.locator("h1").wait_for()
    empty = at.barriers()
    PAGES[name](at)
    at.page.get_by_text("How this was asked").click()
    at.page.screenshot(path=PICTURES / f"{name}-1280.png", full_page=True)
    wide = at.barriers()
    at.page.set_viewport_size({"width": 360, "height": 800})
    at.page.emulate_media(color_scheme="dark")
    at.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    at.page.screenshot(path=PICTURES / f"{name}-360.png", full_page=True)
    assert (empty, wide, at.barriers()) == ([], [], [])
    assert at.too_wide() <= 0


def test_a_stream_that_is_dropped_goes_on_and_is_the_undisturbed_text(at: Watched) -> None:
    at.go(f"generate?{LONG}")
    at.press("Generate")
    at.press_during("Drop the connection", 1)
    at.wait("Cut once")
    at.wait("the same text, character by character")
    assert at.page.locator(".mark").count() == 1


def test_a_view_has_a_link(at: Watched) -> None:
    at.go("rank")
    at.page.get_by_label("Query").fill("cat & dog?")
    at.press("Rank")
    at.wait("Sorted by score")
    link = at.page.url
    at.page.goto("about:blank")
    at.page.goto(link)
    assert at.page.get_by_label("Query").input_value() == "cat & dog?"


def test_a_failure_is_said_in_words_with_the_next_step(browser: Browser, service: LiveService) -> None:
    with watched(browser, service.url) as at:
        at.go(f"generate?{urlencode({'schema': json.dumps({'type': 3})})}")
        at.press("Generate")
        at.wait("Change the request as the message says")
        at.page.route("**/v1/completions", lambda route: route.abort())
        at.press("Generate")
        at.wait("the service does not answer")


def test_all_pages_are_reached_by_keyboard(at: Watched) -> None:
    at.go("overview")
    at.page.locator("h1").wait_for()
    seen = set()
    for _ in range(14):
        at.page.keyboard.press("Tab")
        seen.add(at.page.evaluate("document.activeElement.getAttribute('href')"))
    assert {f"#/{name}" for name in PAGES} <= seen


def test_a_stream_goes_on_after_its_process_was_killed(browser: Browser, service: LiveService) -> None:
    with watched(browser, service.url) as at:
        at.go(f"generate?{LONG}")
        at.press("Generate")
        at.press_during("Kill the process", 1)
        at.wait("Killed process")
        at.wait("the same text, character by character")
        assert at.page.locator(".mark").count() == 1


# Keys ------------------------------------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_in_memory_alone(browser: Browser, tmp_path: Path) -> None:
    app = fake_app(fake_bundle(tmp_path / "m", name="mini"), api_keys=(KEY,))
    with serve_in_thread(app) as url, watched(browser, url) as at:
        at.go("overview")
        at.wait("This service needs an API key")
        at.page.get_by_label("Key", exact=True).fill("wrong-key-of-mine")
        at.press("Use it")
        at.wait("The service does not accept this key")
        at.page.get_by_label("Key", exact=True).fill(KEY)
        at.press("Use it")
        at.wait("mini")
        assert at.stored() == []
        assert KEY not in at.page.url
        at.page.reload()
        at.wait("This service needs an API key")
        assert at.elsewhere == []


def test_docs_send_the_key_of_the_authorize_button_and_do_not_store_it(browser: Browser, tmp_path: Path) -> None:
    app = fake_app(fake_bundle(tmp_path / "m", name="mini"), api_keys=(KEY,))
    with serve_in_thread(app) as url, watched(browser, url) as at:
        at.page.goto(f"{url}/docs")
        at.page.get_by_role("button", name="Authorize").first.click()
        at.page.locator(".modal-ux input").fill(KEY)
        at.page.locator(".modal-ux button[type=submit]").click()
        at.page.locator(".modal-ux button.close-modal, .modal-ux button.btn-done").first.click()
        at.page.locator("#operations-OpenAI-models_v1_models_get .opblock-summary-control").click()
        with at.page.expect_response("**/v1/models") as answer:
            at.page.locator("#operations-OpenAI-models_v1_models_get .execute").click()
        assert answer.value.status == 200
        assert at.stored() == []
        at.page.goto(f"{url}/redoc")
        at.wait("/v1/chat/completions")
        assert at.elsewhere == []

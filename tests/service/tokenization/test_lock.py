"""Long texts are tokenized without the interpreter's lock: with it, the event loop would stand until a text is done."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.generation.chat.prompt import ChatPrompts
from service.generation.chat.template import ChatTemplate
from service.tokenization.texts import Cut, TextEncoder
from service.tokenization.tokenizer_file import open_tokenizer, text_of, token_ids

TEXT = "the cat of france and two rivers " * 5_000
_TRIES = 3  # a busy machine may keep a thread waiting


def longest_share(work: Callable[[], object]) -> float:
    """The longest time for which another thread could not run, of the time that the work takes."""
    ended, longest_s = threading.Event(), 0.0
    ready = threading.Event()

    def run() -> None:
        nonlocal longest_s
        last = time.perf_counter()
        while not ended.is_set():
            ready.set()
            time.sleep(0.001)
            now = time.perf_counter()
            longest_s, last = max(longest_s, now - last), now

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    began = time.perf_counter()
    work()
    took_s = time.perf_counter() - began
    ended.set()
    thread.join()
    return longest_s / took_s


@pytest.fixture(scope="module")
def file(decoder_bundle: Path) -> Path:
    return decoder_bundle / "tokenizer.json"


@pytest.mark.parametrize("what", ["ids of a text", "text of ids", "a conversation", "a pair that is cut"])
def test_other_threads_run_meanwhile(what: str, file: Path) -> None:
    tokenizer = open_tokenizer(file, 1_000_000)
    ids = token_ids(tokenizer, TEXT)
    chats = ChatPrompts(ChatTemplate("{{ messages[0].content }}"), tokenizer, open_tokenizer(file, 1_000_000, allow_special_tokens=True))
    pairs = TextEncoder(file, max_tokens=16, vocab_size=1_000_000, pair_types=False, prompts={}, default_prompt=None)
    work: Callable[[], object] = {
        "ids of a text": lambda: token_ids(tokenizer, TEXT),
        "text of ids": lambda: text_of(tokenizer, ids),
        "a conversation": lambda: chats.encode(TEXT),
        "a pair that is cut": lambda: pairs.encode([(TEXT, "a")], cut=Cut()),
    }[what]
    assert min(longest_share(work) for _ in range(_TRIES)) < 0.5

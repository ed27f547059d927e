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
_TURNS = 10  # a thread has two, before and after, beside work that keeps the lock, and 30 or more beside other work


def turns_during(work: Callable[[], object]) -> int:
    """How often another thread runs while the work is done."""
    ready, ended, turns = threading.Event(), threading.Event(), 0

    def run() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            ready.set()
            time.sleep(0.0002)

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    before = turns
    work()
    after = turns
    ended.set()
    thread.join()
    return after - before


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
    assert max(turns_during(work) for _ in range(_TRIES)) > _TURNS

"""How much a body may hold, by what it costs to read it: what requests are allowed elsewhere is read, and nothing stops the event loop."""

import json
import time
from contextlib import suppress

import pytest

from service.dialects.openai.embeddings import EmbeddingRequest
from service.errors import BodyTooLarge, InvalidRequest
from service.http.routing import _check_cost, read
from service.settings import Settings

LIMITS = Settings()
MOST_S = 0.15  # of CPU time; 0.08 on an idle machine; another process on the core can double it
_TRIES = 3


def body(items: str) -> bytes:
    return f'{{"input": [{items}]}}'.encode()


def test_as_many_token_ids_are_read_as_a_queue_takes() -> None:
    rows = LIMITS.max_client_batch
    ids = [[30_521] * (LIMITS.max_queue_tokens // rows)] * rows
    assert read(EmbeddingRequest, json.dumps({"input": ids}).encode()).input == ids


@pytest.mark.parametrize("text", ["f(a, b)[0] = {'c': [1, 2]}, ", 'say("\\\\", "[,,,]")\n', "α, [β]: "])
def test_what_stands_in_texts_costs_nothing(text: str) -> None:
    texts = [text * 100] * LIMITS.max_client_batch
    assert read(EmbeddingRequest, json.dumps({"input": texts}).encode()).input == texts


@pytest.mark.parametrize(
    ("items", "numbers"),
    [
        (",".join(["[1]"] * 200_000), "200001 lists"),
        (",".join(["[]"] * 200_000), "200001 lists"),
        (",".join(["1"] * 1_000_000), "999999 values"),
        (",".join(['""'] * 600_000), "599999 values"),
        (",".join(['{"a":1}'] * 200_000), "200001 keys"),
        ('"' + "a" * 1000 + '\\\\",' + ",".join(["[1]"] * 200_000), "200001 lists"),  # a string that ends with a backslash
        ('"\\"", ' + ",".join(["[1]"] * 200_000), "200001 lists"),
        (",".join(["9" * 4000] * 3000), "11520000 digits of very long numbers"),
    ],
    ids=["rows of one", "empty rows", "ids", "strings", "objects", "backslash", "quotation mark", "long numbers"],
)
def test_what_would_take_too_long_to_read_is_refused_with_its_numbers(items: str, numbers: str) -> None:
    with pytest.raises(BodyTooLarge, match=numbers):
        read(EmbeddingRequest, body(items))


@pytest.mark.slow
@pytest.mark.parametrize("item", ["[1]", "[]", "1", '"a"', '"\\u00e4"', '"a",[1]', '{"a":1}'])
def test_the_largest_list_that_is_read_takes_no_longer_than_a_turn_of_the_event_loop(item: str) -> None:
    low, high = 1, 1_000_000
    while high - low > 5_000:
        count = (low + high) // 2
        low, high = (count, high) if fits(body(",".join([item] * count))) else (low, count)
    content = body(",".join([item] * low))
    assert min(cpu_s(content) for _ in range(_TRIES)) < MOST_S


def fits(content: bytes) -> bool:
    try:
        _check_cost(content)
    except BodyTooLarge:
        return False
    return True


def cpu_s(content: bytes) -> float:
    """Of reading it, also where what it holds is then refused."""
    began = time.thread_time()
    with suppress(InvalidRequest):
        read(EmbeddingRequest, content)
    return time.thread_time() - began

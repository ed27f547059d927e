"""How much a body may hold, by what it costs to read it: what requests are allowed elsewhere is read, and nothing stops the event loop.

Also where FastAPI calls the dependencies of routes.
"""

import inspect
import json
from contextlib import suppress

import pytest

from service.dialects.openai.embeddings import EmbeddingRequest
from service.dialects.routers import ROUTERS
from service.errors import BodyTooLarge, InvalidRequest
from service.http.routing import JsonRoute, read
from service.settings import Settings

LIMITS = Settings()


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


@pytest.mark.parametrize(
    ("item", "most"),
    [
        ("[1]", 82_000),
        ("[]", 84_000),
        ("1", 630_000),
        ('"a"', 320_000),
        ('"\\u00e4"', 320_000),
        ('"a",[1]', 66_000),
        ('{"a":1}', 70_000),
    ],
)
def test_the_largest_list_that_is_read_has_a_bounded_number_of_items(item: str, most: int) -> None:
    """Reading so many items takes 0.08 s of a core of 2026, which no other request need wait for longer. The bound is near what is read."""
    with suppress(InvalidRequest):  # of items that are no input
        read(EmbeddingRequest, body(",".join([item] * (most * 9 // 10))))
    with pytest.raises(BodyTooLarge):
        read(EmbeddingRequest, body(",".join([item] * most)))


def test_no_dependency_of_a_route_is_called_on_a_thread() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, JsonRoute)]
    called = {each.call for route in routes for each in route.dependant.dependencies}
    assert called
    assert [call for call in called if not inspect.iscoroutinefunction(call)] == []

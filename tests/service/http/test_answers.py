"""Large answers in pieces: the same JSON, and nothing held for long."""

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest

from service.http.answers import Elements, PiecesResponse, Text, json_answer, pieces, whole

RANDOM = np.random.default_rng(0)
FLAT = RANDOM.standard_normal(30_000).astype(np.float32)
CUBE = RANDOM.standard_normal((3, 90, 200)).astype(np.float32)


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        "text",
        {"a": [], "b": {}, "c": None},
        [[], [1], "x", None, {"a": []}],
        {"data": [{"embedding": FLAT, "index": 1}, {"embedding": FLAT[:3], "index": 2}], "usage": {"n": 1}},
        [FLAT[:10], None, CUBE[0], FLAT[:10]],
        CUBE,
        CUBE[:, ::2, ::2],
        {"layers": [{"weights": CUBE}, {"weights": CUBE[:0]}]},
        [{"id": n, "text": "é" * (n % 50)} for n in range(20_000)],
        list(range(100_000)),
        {"text": "a" * 300_000, "rows": [["b" * 70_000], "c"]},
    ],
    ids=range(13),
)
def test_the_pieces_are_the_json(content: Any) -> None:
    def whole(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.ascontiguousarray(value)
        return [whole(each) for each in value] if isinstance(value, list) else value

    assert b"".join(pieces(content)) == orjson.dumps(whole(content), option=orjson.OPT_SERIALIZE_NUMPY)


def test_an_iterator_is_a_list_that_is_made_as_it_is_taken() -> None:
    assert b"".join(pieces([iter([]), iter([1, "a"])])) == b'[[],[1,"a"]]'
    made: list[int] = []

    def counting() -> Any:
        for n in range(100_000):
            made.append(n)
            yield n

    taking = pieces(counting())
    next(taking)
    assert len(made) < 20_000


def test_no_piece_of_many_rows_is_large() -> None:
    content = {"data": [{"embedding": FLAT[n : n + 384], "index": n} for n in range(2048)], "tokens": [CUBE] * 5}
    sizes = [len(piece) for piece in pieces(content)]
    assert sum(sizes) > 10_000_000
    assert max(sizes) < 400_000


async def test_a_piece_is_made_when_the_one_before_was_taken() -> None:
    sent: list[Any] = []
    taken = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        await taken.wait()
        taken.clear()

    answer = asyncio.create_task(PiecesResponse(pieces([FLAT] * 3), {})({"type": "http"}, asyncio.Queue().get, send))
    for count in range(1, 5):
        while len(sent) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(sent) == count
        taken.set()
    answer.cancel()
    assert b"content-length" not in dict(sent[0]["headers"])


@pytest.mark.parametrize("repeats", [1, 20_000])
def test_what_was_written_before_is_a_value_like_others(repeats: int) -> None:
    text, entries, both = Text(), Elements(), Elements()
    for at in range(repeats):
        text.add('a"é')
        entries.add(b'{"at":%d},null' % at)
    both.add_all(entries)
    both.add_all(entries)
    listed = [each for at in range(repeats) for each in ({"at": at}, None)]
    content = {"choices": [{"message": {"text": text}, "at": [1, {"in": [entries]}]}, {"both": both, "none": Elements()}]}
    expected = {"choices": [{"message": {"text": 'a"é' * repeats}, "at": [1, {"in": [listed]}]}, {"both": listed * 2, "none": []}]}
    made = list(pieces(content))
    assert b"".join(made) == orjson.dumps(expected)
    assert whole(content) == orjson.dumps(expected)
    assert max(map(len, made)) < 200_000


def test_an_answer_of_one_piece_has_its_length() -> None:
    assert json_answer({"a": FLAT[:10]}, {}).headers["content-length"]
    assert "content-length" not in json_answer({"a": FLAT}, {}).headers

"""Clients of `attnserve bench-gpu` in a process of their own, because one interpreter cannot ask as fast as several processes answer.

Each connection sends its next request as soon as it has the answer to the last one. Requests have token ids in and base64 out, and no two
of the `BODIES` of a connection have equal texts. Prints the answered and refused requests a second as JSON.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from random import Random

from loadtest.errors import LoadtestError

BODIES = 8  # requests of a connection that are made before the time counts, and sent in turns


def bodies(seed: int, model: str, texts: int, tokens: int, vocab_size: int) -> list[str]:
    """Return requests with `texts` texts of `tokens` token ids each."""
    random = Random(seed)
    rows = [[[random.randrange(vocab_size) for _ in range(tokens)] for _ in range(texts)] for _ in range(BODIES)]
    return [json.dumps({"model": model, "input": each, "encoding_format": "base64"}) for each in rows]


def send(made: list[str], *, port: int, path: str, seconds: float) -> tuple[int, int]:
    """Send the requests one after the other for so many seconds. Return the number of answered ones, and of refused ones."""
    answered = refused = 0
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not answered + refused:
            connection.request("POST", path, made[answered % BODIES], {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                refused += 1
                time.sleep(float(answer.headers["Retry-After"]))
                continue
            if answer.status != HTTPStatus.OK:
                raise LoadtestError(f"the service answered {answer.status}: {content[:300].decode(errors='replace')}")
            answered += 1
    return answered, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("port", "seed", "connections", "texts", "tokens", "vocab-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.connections)
    made = [bodies(seed, given.model, given.texts, given.tokens, given.vocab_size) for seed in seeds]
    started = time.perf_counter()
    with ThreadPoolExecutor(given.connections) as pool:
        counts = list(pool.map(partial(send, port=given.port, path=given.path, seconds=given.seconds), made))
    elapsed = time.perf_counter() - started
    answered, refused = (sum(column) for column in zip(*counts, strict=True))
    print(json.dumps({"answered_per_s": answered / elapsed, "refused": refused}))


if __name__ == "__main__":
    main()

"""A hostile client: its requests are invalid, too large or cut off, or it reads the answers too slowly. Other clients must not notice.

A request is successful if the service answers it with the expected error, in JSON. If the client closes the connection, no answer is
expected.
"""

import json
from collections.abc import Callable

import gevent

from loadtest.users.client import Answer, Client
from loadtest.users.wire import connect, connect_slowly, head, long_answer

_HUGE_BYTES = 1 << 40
_SLOW_READS, _SLOW_S = 20, 0.1


class Hostile(Client):
    """Sends attacks in random order."""

    kind = "hostile"

    def ask(self, answer: Answer) -> None:
        self.draw.choice(ATTACKS)(self, answer)

    def expect(self, path: str, body: bytes, answer: Answer, *statuses: int) -> None:
        """Send a request. The service must answer in JSON, with one of these statuses or 429."""
        response = self.http.request("POST", path, body=body, headers=self.shared.headers)
        content = bytes(response.read())
        answer.status, answer.size_bytes = response.status_code, len(content)
        if answer.status not in (*statuses, 429):
            answer.problem = f"{path} answered {answer.status} instead of {statuses}: {content[:200].decode(errors='replace')}"
        else:
            json.loads(content)


def wrong(path: str, body: bytes, *statuses: int) -> Callable[[Hostile, Answer], None]:
    """Return an attack that sends a wrong request. The service must answer it with one of `statuses` or with 429."""
    return lambda client, answer: client.expect(path, body, answer, *statuses)


def huge(client: Hostile, answer: Answer) -> None:
    """Announce a body of 1 TiB and send 32 KiB of it, more than a proxy buffers. The service must answer 413 at once. A connection that is
    closed without an answer is accepted too, because some proxies do this."""
    with connect(client.shared) as connection:
        connection.sendall(head(client.shared, "/v1/embeddings", _HUGE_BYTES) + b"{" * 32_768)
        first = connection.recv(65536)
    answer.status = int(first.split()[1]) if first else 413
    if answer.status != 413:
        answer.problem = f"a body of {_HUGE_BYTES} bytes was answered with {answer.status}"


def half_a_body(client: Hostile, answer: Answer) -> None:
    """Close the connection in the middle of the request."""
    with connect(client.shared) as connection:
        connection.sendall(head(client.shared, "/v1/embeddings", 1000) + b'{"input": "')
        gevent.sleep(0.05)
    answer.status = 499


def leaves(client: Hostile, answer: Answer) -> None:
    """Request a stream and close the connection in the middle of it."""
    with connect(client.shared) as connection:
        connection.sendall(long_answer(client.shared))
        connection.recv(200)
    answer.status = 499


def reads_slowly(client: Hostile, answer: Answer) -> None:
    """Request a stream, read a few bytes at a time for some seconds, then close the connection."""
    with connect_slowly(client.shared) as connection:
        for _ in range(_SLOW_READS):
            connection.recv(16)
            gevent.sleep(_SLOW_S)
    answer.status = 499


ATTACKS: tuple[Callable[[Hostile, Answer], None], ...] = (
    wrong("/v1/embeddings", b'{"input": "a', 400),
    wrong("/v1/embeddings", b'{"input": {"a": 1}}', 400),
    wrong("/v1/embeddings", b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    wrong("/v1/embeddings", b'{"model": "no such model", "input": "a"}', 404),
    wrong("/v1/embeddings", b'{"input": []}', 400),
    wrong("/v1/completions", b'{"prompt": [2147483647], "max_tokens": -1}', 400, 404),
    huge,
    half_a_body,
    leaves,
    reads_slowly,
)

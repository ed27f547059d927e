"""Bare sockets, for requests that an HTTP client would not send."""

import json
from urllib.parse import urlsplit

from gevent import socket, ssl

from loadtest.users.asking import Asking

LONG = 2000  # tokens of a stream that is not read to its end


def connect(asking: Asking) -> socket.socket:
    parts = urlsplit(asking.url)
    secure = parts.scheme == "https"
    connection = socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), timeout=asking.timeout_s)
    return ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname) if secure else connection


def connect_slowly(asking: Asking, tokens: int = LONG) -> socket.socket:
    """A connection with a small receive buffer, and a request for a stream on it: the service cannot send all that it generates."""
    connection = connect(asking)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.sendall(long_answer(asking, tokens))
    return connection


def head(asking: Asking, path: str, length: int) -> bytes:
    """The head of a POST with this content-length."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(asking.url).netloc}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in asking.headers.items()), "", ""]).encode()


def long_answer(asking: Asking, tokens: int = LONG) -> bytes:
    """A request for a stream of so many tokens; without a decoder, for a tenth as many vectors."""
    if model := asking.models.get("complete"):
        path, asked = "/v1/completions", {"model": model, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    else:
        path, asked = "/v1/embeddings", {"input": [f"text {n}" for n in range(tokens // 10)]}
    body = json.dumps(asked).encode()
    return head(asking, path, len(body)) + body

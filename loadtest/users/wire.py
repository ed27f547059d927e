"""Requests over plain sockets that an HTTP client would not send."""

import json
from urllib.parse import urlsplit

from gevent import socket, ssl

from loadtest.users.asking import Asking

LONG = 2000  # tokens to request when the stream is not read to its end


def connect(asking: Asking) -> socket.socket:
    parts = urlsplit(asking.url)
    secure = parts.scheme == "https"
    connection = socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), timeout=asking.timeout_s)
    return ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname) if secure else connection


def connect_slowly(asking: Asking, tokens: int = LONG) -> socket.socket:
    """Open a connection with a small receive buffer and request a stream, so that the service cannot send all that it generates."""
    connection = connect(asking)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.sendall(long_answer(asking, tokens))
    return connection


def head(asking: Asking, path: str, length: int) -> bytes:
    """Return the head of a POST request with this content-length."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(asking.url).netloc}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in asking.headers.items()), "", ""]).encode()


def long_answer(asking: Asking, tokens: int = LONG) -> bytes:
    """Return a request for a stream of `tokens` tokens. If no decoder is served, it requests a tenth as many embeddings instead."""
    if model := asking.models.get("complete"):
        path, asked = "/v1/completions", {"model": model, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    else:
        path, asked = "/v1/embeddings", {"input": [f"text {n}" for n in range(tokens // 10)]}
    body = json.dumps(asked).encode()
    return head(asking, path, len(body)) + body

"""Requests over plain sockets that an HTTP client would not send."""

import json
from urllib.parse import urlsplit

from gevent import socket, ssl

from loadtest.users.request_settings import RequestSettings

LONG = 2000  # number of tokens to request in a stream that the client does not read to its end


def connect(settings: RequestSettings) -> socket.socket:
    parts = urlsplit(settings.url)
    secure = parts.scheme == "https"
    connection = socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), timeout=settings.timeout_s)
    return ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname) if secure else connection


def connect_slowly(settings: RequestSettings, tokens: int = LONG) -> socket.socket:
    """Open a connection with a small receive buffer and request a stream, so that the service cannot send all that it generates."""
    connection = connect(settings)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.sendall(long_answer(settings, tokens))
    return connection


def head(settings: RequestSettings, path: str, length: int) -> bytes:
    """Return request line and headers of a POST request, with the content-length `length`."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(settings.url).netloc}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in settings.headers.items()), "", ""]).encode()


def long_answer(settings: RequestSettings, tokens: int = LONG) -> bytes:
    """Return the bytes of a request for a stream of `tokens` tokens. If the service has no decoder, the request is for the embeddings of a
    tenth as many texts."""
    if model := settings.models.get("complete"):
        path, asked = "/v1/completions", {"model": model, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    else:
        path, asked = "/v1/embeddings", {"input": [f"text {n}" for n in range(tokens // 10)]}
    body = json.dumps(asked).encode()
    return head(settings, path, len(body)) + body

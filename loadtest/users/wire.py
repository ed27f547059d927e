"""Bare connections, for what no HTTP client would do."""

import json
from urllib.parse import urlsplit

from gevent import socket, ssl

from loadtest.load.plan import Plan
from loadtest.users.client import headers

LONG = 2000  # tokens of a stream that nobody reads to its end


def connect(plan: Plan) -> socket.socket:
    parts = urlsplit(plan.url)
    secure = parts.scheme == "https"
    connection = socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), timeout=plan.timeout_s)
    return ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname) if secure else connection


def connect_slowly(plan: Plan, tokens: int = LONG) -> socket.socket:
    """A connection that has room for little, and a stream asked for on it: the service cannot get rid of what it draws."""
    connection = connect(plan)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.sendall(long_answer(plan, tokens))
    return connection


def head(plan: Plan, path: str, length: int) -> bytes:
    """The head of a POST that announces so many bytes."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(plan.url).netloc}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers().items()), "", ""]).encode()


def long_answer(plan: Plan, tokens: int = LONG) -> bytes:
    """A request for a stream of so many tokens, or where there is no decoder for a tenth as many vectors."""
    if model := plan.models.get("complete"):
        path, asked = "/v1/completions", {"model": model, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    else:
        path, asked = "/v1/embeddings", {"input": [f"text {n}" for n in range(tokens // 10)]}
    body = json.dumps(asked).encode()
    return head(plan, path, len(body)) + body

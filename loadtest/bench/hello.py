"""An ASGI application that answers every request with the same vector. `overhead.py` measures it for scale: what an HTTP server costs."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_VECTOR = [0.05103103630798288] * 384
_ANSWER = json.dumps({"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": _VECTOR}], "model": "hello"}).encode()
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_ANSWER))]

Message = MutableMapping[str, Any]


async def app(scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
    """Read the body, and answer."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _ANSWER})

"""Finds a running service's models by `/v1/models`, and the tasks of each model by one request per task."""

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from loadtest.errors import LoadtestError

# Task -> path and the smallest request that a model for this task answers.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("/v1/embeddings", {"input": "a"}),
    "complete": ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
}


def names(url: str, key: str = "") -> list[str]:
    """Return the models that the service at `url` lists, aliases included. Raises LoadtestError if no service answers there."""
    status, content = _ask(f"{url}/v1/models", None, key)
    if status != 200:
        raise LoadtestError(f"{url}/v1/models answered {status}: {content[:200]}; if the service needs a key, set LOADTEST_API_KEY")
    return [str(model["id"]) for model in json.loads(content)["data"]]


def tasks(url: str, models: list[str], key: str = "") -> dict[str, str]:
    """Return, for each task, the first of these models that answers it. A task without a model is left out."""
    found = {}
    for task, (path, body) in TASKS.items():
        for model in models:
            if _ask(url + path, {"model": model, **body}, key)[0] == 200:
                found[task] = model
                break
    if not found:
        raise LoadtestError(f"none of {', '.join(models) or 'no models'} at {url} answers {', '.join(path for path, _ in TASKS.values())}")
    return found


def _ask(url: str, body: object, key: str) -> tuple[int, str]:
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = Request(url, headers=headers, data=None if body is None else json.dumps(body).encode())
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise LoadtestError(
            f"{url} does not answer ({error}): start the service first (`make serve`), or name another with --url (of `locust`: --host)"
        ) from error
